"""One session: its requests in order of arrival, each numbered tick applied once.

`Session.take` puts a request into the inbox. The session's own task takes requests out, one after the other, and calls
the actor, so two calls of an actor never overlap. Pure asyncio. Knows nothing of doors or of other sessions; the table
(`brayx.actor.table`) creates sessions and frees their ids.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextvars import Context
from dataclasses import dataclass
from typing import TypeVar

import brayx.clock as clock
from brayx.actor.actor import Actor, is_cancelled
from brayx.actor.config import SessionConfig
from brayx.actor.ends import Ends, over
from brayx.actor.ownership import Holders, Ownership, Park, Position, SessionSnapshot
from brayx.actor.service import Reply
from brayx.actor.tick_times import TickTimes
from brayx.errors import (
    AgentError,
    BadBody,
    BrayxError,
    DeadlineExceeded,
    OutOfSequence,
    Overloaded,
    QueueFull,
    SessionLost,
    SessionResumed,
    SessionUnknown,
)
from brayx.faults import report
from brayx.gamecore.protocol import MAX_SEQ, StepKind, StepRequest
from brayx.logs import limited
from brayx.metrics import Recorder

logger = limited(__name__)

_NOT_OPEN = Actor()
_TICK, _START = StepKind.TICK, StepKind.START
_now = clock.now

T = TypeVar("T")


@dataclass(slots=True)
class SessionServices:
    """Everything that the sessions of a table share.

    Attributes:
        config: the actor's options.
        max_waiting: requests that may wait in one inbox.
        recorder: counts sessions.
        times: records tick times.
        ownership: ownership of sessions.
        holders: the connections that may hold one.
        on_end: called once with each session that ends.
        free_id: frees the id of a session that ended for a reason.
    """

    config: SessionConfig
    max_waiting: int
    recorder: Recorder
    times: TickTimes
    ownership: Ownership
    holders: Holders
    on_end: Callable[[Session], None]
    free_id: Callable[[str, str], Awaitable[None]]


Waiting = tuple[StepRequest, Reply, float, Position | None]
"""A request in an inbox, its reply, its arrival by `brayx.clock`, and if the fallback has answered it, the session's
position then. A plain tuple, because one is made for every tick.
"""


class Session:
    """One session. Its table makes it, opens it with an actor, and runs `serve`; doors never see it.

    All calls of its actor come from one task. `brayx.actor.deadlines.TimedSession` is one with a tick deadline.

    Args:
        session: id of the session.
        services: what the table's sessions use.
        context: context of its task and its timers.
        announced: its client's start said that it numbers its ticks.
        holder: name of the connection that holds it; empty: none. None: unknown, the first connection with a request
            becomes it.

    Attributes:
        actor: answers its requests, once the session is open.
        inbox: waiting requests.
        began: when the actor's running call began, by `brayx.clock`; 0: none is running.
        timed_out: the running call was cancelled because it took too long.
        unanswered: the running request has no reply yet, so none behind it may get one.
        last_seen: when the last call of the actor ended.
        left_at: when the holder's connection broke; 0: it has not.
        ended: why it ended; empty: it runs.
        ticks: number of ticks answered.
        is_held: its start waits for admission, and it is not idle.
        seq: number of the next numbered tick.
        kept: reply to the previous numbered tick; a repeat gets it.
        skipped: number of ticks dropped from the inbox that the actor does not know of yet.
    """

    def __init__(
        self,
        session: str,
        services: SessionServices,
        context: Context,
        *,
        announced: bool = False,
        holder: str | None = "",
    ) -> None:
        self.id = session
        self.services = services
        self.context = context
        self.actor = _NOT_OPEN
        self.announced = announced
        self.holder = holder
        self.inbox: deque[Waiting] = deque()
        self.began = 0.0
        self.timed_out = False
        self.unanswered = True
        self.last_seen = _now()
        self.left_at = 0.0
        self.ended = ""
        self.is_held = False
        self.ticks = 0
        self.seq = 0
        self.kept: bytes | None = None
        self.skipped = 0
        self.lease = services.ownership.lease
        self._max_waiting = services.max_waiting
        self._times = services.times
        self._snapshot_every = services.config.snapshot_every if services.ownership.shared else 0
        self._park: Park | None = None
        self._wake: asyncio.Future[None] | None = None

    @property
    def is_open(self) -> bool:
        """Whether its actor has started, here or in the process that the session comes from."""
        return self.actor is not _NOT_OPEN

    @property
    def numbered(self) -> bool:
        """Whether its client numbers its ticks, and so can reconnect."""
        return self.seq > 0 or self.announced

    def take(self, request: StepRequest, reply: Reply) -> None:
        """Puts a tick or stop into the inbox, or refuses it: another connection's, out of sequence, or no room."""
        if request.holder != self.holder and (refusal := self.take_over(request)) is not None:
            reply(refusal)
        elif len(self.inbox) < self._max_waiting or self.make_room():
            self.inbox.append((request, reply, _now(), None))
            wake = self._wake
            if wake is not None:  # as `rouse`
                self._wake = None
                if not wake.done():
                    wake.set_result(None)
        else:
            reply(self._queue_full())

    def take_over(self, request: StepRequest) -> BrayxError | None:
        """Checks a request of a connection that is not the holder; returns the error that refuses it, or None.

        The newest connection becomes the holder. A numbered tick without a connection leaves the session without a
        holder: its client has changed to a door whose connections hold no sessions. A tick that will be refused does
        not change the holder.
        """
        if request.attached and self.holder is not None:
            message = f"this connection no longer holds session {self.id!r}: it was taken over"
            return SessionLost(message, reason="taken")
        if request.seq is None and request.holder and request.kind is _TICK:
            message = "a tick without a number came over a connection that has no session"
            return SessionUnknown(f"{message}: send a start first, or the tick's number")
        if self._in_sequence(request.seq) if request.seq is not None else request.holder:
            if len(self.inbox) >= self._max_waiting and not self.make_room():
                return self._queue_full()
            holder, self.holder = self.holder, request.holder
            self.services.holders.notify(holder, "taken")
        return None

    def _in_sequence(self, seq: int) -> bool:
        """Whether a tick of that number is a repeat, or may follow the running and waiting ones."""
        following = self.seq + (self.began > 0)
        for request, *_ in self.inbox:
            following += request.seq == following
        return self.seq - 1 <= seq <= following

    def turn_away(self, ends: Ends) -> None:
        """Refuses the requests that still wait when the session is over."""
        while self.inbox:
            request, reply, _, answered = self.inbox.popleft()
            if answered is not None:
                continue
            if self.ended == "lost":
                self.services.ownership.hand_on(request, reply)
            else:
                ends.given(request, self.ended)
                reply(over(self.id, request.kind.value, self.ended))

    def make_room(self) -> bool:
        """Drops a waiting tick that the fallback has answered, to make room in the inbox; False: there is none."""
        return False

    def _queue_full(self) -> QueueFull:
        waiting = f"{len(self.inbox)} requests waiting, at most {self._max_waiting}"
        return QueueFull(f"session {self.id!r} has {waiting}")

    def move(self, park: Park) -> bool:
        """Begins to hand the session over to another process; False: it is busy, or already being handed over."""
        if self.inbox or self.began or self._park is not None:
            return False
        self._park = park
        self.rouse()
        return True

    def rouse(self) -> None:
        """Wakes the session's task."""
        wake, self._wake = self._wake, None
        if wake is not None and not wake.done():
            wake.set_result(None)

    def end(self, reason: str) -> None:
        """Ends the session once; its task notifies the actor after the running request."""
        if not self.ended:
            self.ended = reason
            self.services.on_end(self)
            self.rouse()

    async def serve(self) -> None:
        """Answers requests, one after the other, until the session has ended."""
        inbox, loop = self.inbox, asyncio.get_running_loop()
        self.unanswered = False
        tried = False
        while not self.ended:
            if inbox:
                if self.skipped:
                    await self.skip()
                    continue
                request, reply, arrived, answered = inbox.popleft()
                self.actor.arrived = arrived
                if request.traceparent:
                    self.actor.trace(request.traceparent)
                if answered is not None:
                    await self.run_answered(request, answered)
                elif request.kind is _TICK:
                    await self._tick(request, reply, arrived)
                else:
                    self.unanswered = True
                    await self._stop(request, reply)
                    self.unanswered = False
            elif self._park is not None and not tried:
                tried = self.unanswered = True
                await self._hand_over(self._park)
                self.unanswered = False
            else:
                self._wake = wake = loop.create_future()
                await wake

    async def _tick(self, request: StepRequest, reply: Reply, arrived: float) -> None:
        seq = request.seq
        if seq is not None and seq != self.seq:
            if not self.lease.is_over or await self.may_answer(request, reply):
                self.out_of_turn(seq, reply)
            return
        began = _now()
        if self.is_timed:
            in_time = await self.run_in_time(request, reply, arrived)
            if in_time is None:
                return
            answer = in_time
        else:
            # Inlines `run`: another coroutine for each tick costs measurable throughput.
            self.began = began
            try:
                answer = await self.actor.tick(request.body)
            except BaseException as error:
                self.failed(self._typed(error, "tick"), reply)
                return
            finally:
                self._done()
        self.advance(seq, answer)
        ended = self.last_seen
        self._times.add(arrived, began, ended)
        if self.lease.is_over and not await self.may_answer(request, reply):
            return
        reply(answer)
        if self._snapshot_every and self.ticks % self._snapshot_every == 0:
            position = self.position
            self.overdue()
            await self.keep_snapshot(position)

    def advance(self, seq: int | None, answer: bytes) -> None:
        """Counts an answered tick, and keeps the reply to a numbered one."""
        self.ticks += 1
        if seq is not None:
            self.seq, self.kept = seq + 1, answer

    @property
    def position(self) -> Position:
        """The client's progress."""
        return Position(self.ticks, self.seq, self.kept)

    async def keep_snapshot(self, position: Position, ticks: int = 1) -> None:
        """Keeps a snapshot if one is due in the last ``ticks`` ticks before ``position``; a failure is counted.

        Args:
            position: progress of the actor.
        """
        if not self._snapshot_every or position.tick % self._snapshot_every >= ticks:
            return
        try:
            data = await self.guard(self.actor.snapshot(), "snapshot")
        except BrayxError as error:
            self.services.recorder.add("snapshots_failed", 1.0)
            logger.warning("session %s: no snapshot: %s", self.id, error)
            return
        if data is not None:
            self.services.ownership.keep(self.id, SessionSnapshot(*position, data, announced=self.announced))

    async def _hand_over(self, park: Park) -> None:
        """Parks the session between two requests and ends it as ``moved``; if parking fails it continues here."""
        try:
            data = await self.guard(self.actor.snapshot(), "snapshot")
            if data is None or self.ended:
                return
            snapshot = SessionSnapshot(*self.position, data, exact=True, announced=self.announced, holder=self.holder)
            await park(self.id, snapshot)
        except BrayxError as error:
            logger.warning("session %s: it could not be moved: %s", self.id, error)
            return
        self.end("moved")

    def after_resume(self, snapshot: SessionSnapshot, request: StepRequest, reply: Reply) -> None:
        """Handles the request that resumed the session; it gets `SessionResumed` if ticks may be lost.

        The next number is then above the request's. Otherwise the client would use a number for a second tick, and a
        copy of the first that is still on its way, as through a broken link, could be applied as the second.
        """
        if snapshot.exact or (snapshot.kept is not None and request.seq == snapshot.seq - 1):
            # Nothing is lost: at most the client lacks the reply to the snapshot's last tick, and sends it again.
            self.inbox.appendleft((request, reply, _now(), None))
        else:
            if request.seq is not None and request.seq >= self.seq:
                self.seq, self.kept = min(request.seq + 1, MAX_SEQ), None
            following = self.seq or self.ticks
            message = f"session {self.id!r} was resumed from a snapshot of {self.ticks} ticks: {following} comes next"
            reply(SessionResumed(message, tick=following, restored=self.ticks))

    async def may_answer(self, request: StepRequest, reply: Reply) -> bool:
        """Waits for the lease's renewal; False: another process has the session, or the lease was not renewed.

        If False, the request is already answered: by the process that has the session, or by an error.
        """
        unanswered, self.unanswered = self.unanswered, True
        try:
            async with asyncio.timeout(self.services.config.tick_timeout_s):
                await self.lease.held()
        except TimeoutError:
            message = f"session {self.id!r}: this replica's lease has not been renewed"
            message += "; the request may have been applied; try again"
            reply(Overloaded(message, layer="directory", maybe_applied=True))
            return False
        except asyncio.CancelledError as error:
            self.failed(error, reply)
        finally:
            self.unanswered = unanswered
        if self.ended != "lost":
            return True
        if request.kind is _START:
            reply(over(self.id, request.kind.value, self.ended))
        else:
            self.services.ownership.hand_on(request, reply)
        return False

    def out_of_turn(self, seq: int, reply: Reply) -> None:
        """Answers a numbered tick that is not the next one: a repeat of the last one gets that one's reply."""
        if seq == self.seq - 1 and self.kept is not None:
            self.last_seen = _now()
            self.services.recorder.add("ticks_repeated", 1.0)
            reply(self.kept)
        else:
            message = f"tick {seq} of session {self.id!r} is out of sequence, expected {self.seq}"
            reply(OutOfSequence(message, expected=self.seq, got=seq))

    async def _stop(self, request: StepRequest, reply: Reply) -> None:
        answer = await self.run(self.actor.stop(request.body), "stop", reply)
        if answer is None:
            return
        if self.lease.is_over and not await self.may_answer(request, reply):
            self.end("error")  # its agents have had the stop already
            return
        self.end("stop")
        await self.services.free_id(self.id, "stop")
        reply(answer)

    # What `brayx.actor.deadlines.TimedSession` overrides

    is_timed = False

    async def run_in_time(self, request: StepRequest, reply: Reply, arrived: float) -> bytes | None:
        """The actor's reply to a tick; None: the call failed, or the fallback was faster."""
        raise NotImplementedError

    async def run_answered(self, request: StepRequest, answered: Position) -> None:
        """Runs a tick that the fallback answered while it waited."""
        raise NotImplementedError

    async def skip(self) -> None:
        """Tells the actor how many ticks were dropped."""
        raise NotImplementedError

    def overdue(self) -> None:
        """Answers the waiting ticks whose deadline has passed."""

    async def run(self, work: Awaitable[bytes], kind: str, reply: Reply) -> bytes | None:
        """Runs one call of the actor; None: it failed, and ``reply`` has the error.

        The session ends unless only the body was bad, since the agents' state is uncertain.
        """
        try:
            return await self.guard(work, kind)
        except (BrayxError, asyncio.CancelledError) as error:
            self.failed(error, reply)
            return None

    async def guard(self, work: Awaitable[T], kind: str) -> T:
        """Runs one call of the actor.

        Raises:
            BrayxError: the actor's exception as a typed error; `DeadlineExceeded` if the sweeper cancelled it.
        """
        self.began = _now()
        try:
            return await work
        except BaseException as error:
            raise self._typed(error, kind) from error.__cause__
        finally:
            self._done()

    def _done(self) -> None:
        """The call of the actor is over."""
        self.last_seen = _now()
        self.began = 0.0
        if self.timed_out:
            self.timed_out = False
            if (task := asyncio.current_task()) is not None:
                task.uncancel()

    def failed(self, error: BaseException, reply: Reply) -> None:
        """Answers a request whose call of the actor failed, and ends the session; a cancelled task stays cancelled."""
        if not isinstance(error, BrayxError):
            reply(SessionLost(f"session {self.id!r} was ended here: drained", reason="drained"))
            raise error
        if isinstance(error, BadBody):
            error.add_note(f"session {self.id}")
        else:
            self.end("error")
        reply(error)

    def _typed(self, error: BaseException, kind: str) -> BaseException:
        """The actor's exception as a typed error; a cancellation of the session's task is unchanged."""
        if isinstance(error, asyncio.CancelledError):
            if self.timed_out:
                timeout_s = self.services.config.tick_timeout_s
                message = f"the actor took longer than {timeout_s} s for {kind} of session {self.id!r}"
                return DeadlineExceeded(message, layer="actor")
            return error if is_cancelled() else AgentError(f"the actor raised in {kind}: CancelledError")
        return self.client_error(error, f"the actor raised in {kind}")

    def client_error(self, error: BaseException, what: str) -> BrayxError:
        """The error that a client gets for an exception in its session; ``what`` says what failed."""
        return report(error, what, f"session {self.id}", show_text=bool(self.services.config.show_errors))
