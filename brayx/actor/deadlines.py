"""Deadlines: a late tick is answered by the fallback, a call of the actor that takes too long is cancelled, an idle
session ends.

A tick that the fallback has answered is done for its client. The actor still runs it when its turn comes, because the
agents' memory of the game needs the input. Pure asyncio.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from contextvars import Context
from typing import Any

import brayx.clock as clock
from brayx.actor.config import SessionConfig
from brayx.actor.ends import Ends
from brayx.actor.ownership import Position
from brayx.actor.service import Reply
from brayx.actor.session import Session, SessionServices, Waiting
from brayx.errors import BadBody, BrayxError
from brayx.gamecore.protocol import StepKind, StepRequest
from brayx.logs import limited

logger = limited(__name__)

_LEAST_SWEEP_S = 0.01
_MAX_SWEEP_S = 0.25
_LEASE_CHECK_S = 0.05
_SILENT = 0.25
"""Share of ``idle_timeout_s`` after which a session without a request counts as silent."""
_MANY_SILENT = 0.5
"""Share of ``actors_per_worker`` from which silent sessions cause a warning: they will fill the service."""
_now = clock.now


class TimedSession(Session):
    """A session whose ticks have a deadline; arguments as for `Session`."""

    is_timed = True

    def __init__(
        self,
        session: str,
        services: SessionServices,
        context: Context,
        **options: Any,
    ) -> None:
        super().__init__(session, services, context, **options)
        assert services.config.tick_deadline_ms is not None
        self._deadline_s = services.config.tick_deadline_ms / 1000
        self._fallback = services.config.fallback
        self._skipped_to = Position(0, 0, None)
        self._last_reply: bytes | None = None
        self._timer: asyncio.TimerHandle | None = None

    def take(self, request: StepRequest, reply: Reply) -> None:
        """See `Session.take`; schedules the request's deadline."""
        super().take(request, reply)
        if self.inbox and self._timer is None:
            self._look_again(self._deadline_s)

    def turn_away(self, ends: Ends) -> None:
        """See `Session.turn_away`."""
        self._stop_watching()
        super().turn_away(ends)

    def _stop_watching(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_again(self, after_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(after_s, self.overdue, context=self.context)

    def make_room(self) -> bool:
        """Drops the oldest waiting tick if the fallback has answered it: the actor skips it. False: it has not."""
        answered = self.inbox[0][-1]
        if answered is None:  # fallback replies go out in order
            return False
        self.inbox.popleft()
        self.skipped += 1
        self._skipped_to = answered
        self.services.recorder.add("ticks_skipped", 1.0)
        return True

    async def skip(self) -> None:
        """Tells the actor how many ticks were dropped; they were the next ones."""
        skipped, self.skipped = self.skipped, 0
        await self.guard(self.actor.skipped(skipped), "skipped")
        await self.keep_snapshot(self._skipped_to, skipped)

    async def run_in_time(self, request: StepRequest, reply: Reply, arrived: float) -> bytes | None:
        """The actor's reply to a tick; None: the call failed, or the fallback was faster."""
        loop = asyncio.get_running_loop()
        answered: Position | None = None
        timer: asyncio.TimerHandle

        def fall_back() -> None:
            nonlocal answered, timer
            left_s = _LEASE_CHECK_S if self.lease.is_over else arrived + self._deadline_s - _now()
            if left_s > 0:
                timer = loop.call_later(left_s, fall_back)
                return
            with contextlib.suppress(BadBody):
                answer = self._choose(request.body)
                if answer is not None:
                    answered = self._count(request.seq, arrived, answer)
                    self.unanswered = False
                    reply(answer)
                    self.overdue()

        def reply_once(result: bytes | BrayxError) -> None:
            if answered is None:
                reply(result)

        timer = loop.call_later(max(0.0, self._deadline_s - (_now() - arrived)), fall_back)
        self.unanswered = True
        try:
            answer = await self.run(self.actor.tick(request.body), "tick", reply_once)
        finally:
            timer.cancel()
            self.unanswered = False
        if answered is not None:
            await self._after(answer, answered)
            return None
        if answer is not None:
            self._last_reply = answer
        return answer

    async def run_answered(self, request: StepRequest, answered: Position) -> None:
        """Runs a tick that the fallback answered while it waited."""
        answer = await self.run(self.actor.tick(request.body), "tick", _drop)
        await self._after(answer, answered)

    async def _after(self, answer: bytes | None, answered: Position) -> None:
        """Tells the actor that its reply to a tick was not used, because the fallback was faster."""
        if self.ended and answer is None:
            return
        if answer is not None:
            await self.guard(self.actor.missed(), "missed")
        else:  # the actor refused the body, but the client has a reply
            await self.guard(self.actor.skipped(1), "skipped")
        await self.keep_snapshot(answered)

    def overdue(self) -> None:
        """Answers the waiting ticks whose deadline has passed: in their order, and none before the one under way."""
        self._stop_watching()
        if self.ended or self.unanswered or not self.inbox:
            return
        if self.lease.is_over:
            self._look_again(_LEASE_CHECK_S)
            return
        for entry in list(self.inbox):
            request, _, arrived, answered = entry
            if answered is not None:
                continue
            if request.kind is not StepKind.TICK:
                return
            left_s = arrived + self._deadline_s - _now()
            if left_s > 0:
                self._look_again(left_s)
                return
            if not self._answer(entry):
                return

    def _answer(self, entry: Waiting) -> bool:
        """Answers a tick that waits in the inbox; False: there is no fallback, and it keeps waiting."""
        request, reply, arrived, _ = entry
        if request.seq is not None and request.seq != self.seq:
            self.inbox.remove(entry)
            self.out_of_turn(request.seq, reply)
            return True
        try:
            answer = self._choose(request.body)
        except BadBody as error:
            self.inbox.remove(entry)
            reply(error)
            return True
        if answer is None:
            return False
        answered = self._count(request.seq, arrived, answer)
        self.inbox[self.inbox.index(entry)] = (request, reply, arrived, answered)
        reply(answer)
        return True

    def _count(self, seq: int | None, arrived: float, answer: bytes) -> Position:
        """Counts a tick that the fallback answered: for its client the tick is done."""
        self.advance(seq, answer)
        recorder = self.services.recorder
        recorder.add("ticks_fallen_back", 1.0, label=self._fallback)
        recorder.add("ticks", 1.0)
        recorder.add("tick_seconds", _now() - arrived)
        return self.position

    def _choose(self, body: bytes) -> bytes | None:
        """The fallback's reply to the next tick; None: there is none, and the tick waits.

        Raises:
            BadBody: the actor cannot read the body.
        """
        if self._fallback == "default":
            return self.services.config.fallback_body.encode()
        if self._fallback == "last":
            return self._last_reply
        try:
            return self.actor.fallback(self.ticks, body)
        except BadBody:
            raise
        except Exception:
            logger.exception("session %s: the actor's fallback raised", self.id)
            return None


def _drop(result: bytes | BrayxError) -> None:
    """The reply to a tick that is answered already."""


class Sweeper:
    """Ends actor calls that take too long, idle sessions, and sessions whose clients left.

    Args:
        living: the sessions and their tasks; the table changes this mapping.
        services: what the table's sessions use.

    Attributes:
        silence: how many sessions are silent, and why that may be; empty if none is.
    """

    def __init__(self, living: Mapping[Session, asyncio.Task[None]], services: SessionServices) -> None:
        self._living = living
        self._services = services
        self._has_warned = False
        self.silence = ""

    async def run(self) -> None:
        """Sweeps until cancelled, often enough to be late by a quarter of the shortest limit at most."""
        config = self._services.config
        shortest_s = min(config.tick_timeout_s, config.idle_timeout_s, config.reconnect_timeout_s or _MAX_SWEEP_S * 4)
        every_s = min(max(_LEAST_SWEEP_S, shortest_s / 4), _MAX_SWEEP_S)
        while True:
            due = _now() + every_s
            await asyncio.sleep(every_s)
            self._services.times.flush()
            now = _now()
            if now - due > every_s:
                self._forgive(now - due, now)
            self._sweep(now, self._services.config)

    def _sweep(self, now: float, config: SessionConfig) -> None:
        silent, silent_s = 0, config.idle_timeout_s * _SILENT
        for session, task in list(self._living.items()):
            if session.began:
                if session.began < now - config.tick_timeout_s and not session.timed_out:
                    session.timed_out = True
                    task.cancel()
            elif session.inbox or session.ended or session.is_held:
                continue
            elif (
                session.left_at
                and session.left_at < now - config.reconnect_timeout_s
                and session.last_seen <= session.left_at
            ):
                session.end("disconnect")
            elif session.last_seen < now - config.idle_timeout_s:
                session.end("idle")
            elif session.last_seen < now - silent_s:
                silent += 1
        self._tell(silent, silent_s, config)

    def _tell(self, silent: int, silent_s: float, config: SessionConfig) -> None:
        """Notes how many sessions are silent, and warns once when they fill half of the service."""
        self.silence = ""
        if silent:
            self.silence = (
                f"{silent} of {len(self._living)} sessions have sent nothing for {silent_s:g} s: does your game send "
                "stop at the end of each game? Without it a session ends after "
                f"actor.idle_timeout_s ({config.idle_timeout_s:g} s)"
            )
        are_many = silent >= _MANY_SILENT * config.actors_per_worker
        if are_many and not self._has_warned:
            logger.warning("%s", self.silence)
        self._has_warned = are_many

    def _forgive(self, away_s: float, now: float) -> None:
        """Adds the time of a suspended process to all limits: it heard no client, and no actor could answer."""
        for session in self._living:
            session.began = session.began and min(session.began + away_s, now)
            session.last_seen = min(session.last_seen + away_s, now)
            session.left_at = session.left_at and min(session.left_at + away_s, now)
