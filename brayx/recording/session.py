"""A recorded session, which holds its ticks until its group takes them. Knows nothing of threads or files."""

from __future__ import annotations

import time
import uuid
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

import brayx.clock as clock
from brayx.actor.agent import State
from brayx.actor.logs import SessionLog
from brayx.recording.columns import ERROR, REFUSED, Forwarded
from brayx.recording.gather import value_at, without_image
from brayx.types import Forward

if TYPE_CHECKING:
    from brayx.recording.group import TickGroup
    from brayx.recording.recorder import SessionRecorder

_ATTRIBUTES_BYTES = 512
"""Estimated size of the values that agents set on a tick."""

Kept = tuple[State, bytes, bytes, float, float, float, str, "tuple[Forwarded, ...]", int]
"""A tick in memory: state, body, reply, arrival, begin, end, event, forwards, size. A plain tuple, which is created
quickly."""


class RecordedSession(SessionLog):
    """The ticks of one session. Belongs to the session's event loop.

    Args:
        recorder: the recorder, which counts memory and losses.
        group: sends its ticks.
        session, start, player, alias: as in `brayx.recording.index.SessionPart`.
        why: why the session is recorded; empty: undecided.
        reply: reply to the session's start.

    Attributes:
        began: when the session started, by `brayx.clock`.
        stop_body: body of the session's stop.
    """

    __slots__ = (
        "_alias", "_began_at", "_episode", "_event", "_forwards", "_group", "_limit", "_lost", "_outcome", "_player",
        "_recorder", "_reported", "_sent", "_session", "_start", "_start_reply", "_ticks", "began", "is_taking",
        "stop_body", "why",
    )  # fmt: skip

    def __init__(
        self,
        recorder: SessionRecorder,
        group: TickGroup,
        session: str,
        start: bytes,
        player: str,
        why: str,
        reply: bytes,
        alias: str,
    ) -> None:
        self.why = why
        self._group = group
        group.join()
        self.is_taking = bool(why) or recorder.config.before > 0
        self._recorder = recorder
        self._session = session
        self._start = start.decode(errors="surrogateescape")
        self._start_reply = reply.decode(errors="surrogateescape")
        self._player, self._alias = player, alias
        self._episode = uuid.uuid4().hex
        self.began = clock.now()
        self._began_at = time.time()
        self._ticks: deque[Kept] = deque()
        self._limit = recorder.memory_bytes if why else recorder.memory_bytes // 2
        self._sent = 0
        self._lost = 0
        self._event = ""
        self._forwards: tuple[Forwarded, ...] = ()
        self._reported = self._outcome = ""
        self.stop_body = b""

    def tick(self, state: State, body: bytes, reply: bytes, began: float, arrived: float) -> None:
        """See `brayx.actor.logs.SessionLog.tick`."""
        recorder, ticks, now = self._recorder, self._ticks, clock.now()
        size = len(body) + len(reply) + _ATTRIBUTES_BYTES
        if recorder.frames:
            state, size = self._with_room(state, size)
        if recorder.taken - recorder.freed + size > self._limit and not self._make_room(size):
            return
        recorder.taken += size
        ticks.append((state, body, reply, arrived, began or now, now, self._event, self._forwards, size))
        self._event, self._forwards = "", ()
        if self.why:
            self._group.add(self, now)
        elif len(ticks) > (recorder.config.before or 1):  # with `before: 0` only failed ticks come
            self._drop()

    def _with_room(self, state: State, size: int) -> tuple[State, int]:
        """A state and its size, with its frame; without it if the memory for frames is in use."""
        recorder = self._recorder
        image = value_at(vars(state), recorder.frames)
        image_bytes = image.nbytes if isinstance(image, np.ndarray) else 0
        bytes_held = recorder.taken - recorder.freed
        if not image_bytes or not self.why or bytes_held + size + image_bytes <= recorder.frame_memory_bytes:
            return state, size + image_bytes
        recorder.lose_frames(1, "memory")
        slim = State.__new__(State)  # a copy, since the agent may still hold the state
        vars(slim).update(without_image(vars(state), recorder.frames))
        return slim, size

    def _make_room(self, size: int) -> bool:
        """Drops the oldest ticks of an undecided session; returns whether a tick of this size fits now."""
        recorder = self._recorder
        while recorder.taken - recorder.freed + size > self._limit:
            self._lost += 1
            if self.why or not self._ticks:
                return False
            self._drop()  # the newest ticks explain an error, so drop the oldest
        return True

    def _drop(self) -> None:
        self._recorder.taken -= self._ticks.popleft()[-1]

    def forward(self, model: str, result: Forward, seconds: float) -> None:
        """See `brayx.actor.logs.SessionLog.forward`."""
        outputs, policy_version = result
        self._forwards += ((model, outputs, policy_version, seconds),)

    def event(self, what: str, *, last: bool = False) -> None:
        """See `brayx.actor.logs.SessionLog.event`."""
        if last and self._ticks:
            *tick, event, forwards, size = self._ticks[-1]
            self._ticks[-1] = (*tick, f"{event}, {what}" if event else what, forwards, size)  # type: ignore[assignment]
        else:
            self._event = f"{self._event}, {what}" if self._event else what

    def stop(self, body: bytes, outcome: str) -> None:
        """See `brayx.actor.logs.SessionLog.stop`."""
        self._outcome = outcome
        if not self._ticks:
            return
        if self._recorder.taken - self._recorder.freed + len(body) > self._limit:
            self._lost += 1
            return
        *tick, size = self._ticks[-1]
        self._ticks[-1] = (*tick, size + len(body))  # type: ignore[assignment]
        self._recorder.taken += len(body)
        self.stop_body = body

    def keep(self, why: str) -> None:
        """Decides to record the session, including its ticks in memory."""
        self.why, self._limit, self.is_taking = self.why or why, self._recorder.memory_bytes, True

    def reported(self, result: str | float) -> None:
        """See `brayx.actor.logs.SessionLog.reported`."""
        self._reported = str(result)

    def end(self, reason: str, result: float | None) -> None:
        """Ends the session; an undecided one is dropped."""
        event = self._ticks[-1][6] if self._ticks else ""
        has_failed = ERROR in event or REFUSED in event
        if self._recorder.config.errors and (reason == "error" or has_failed):
            self.keep("error")
        self._group.leave()
        if self.why:
            if reason == "stop" and self._outcome:
                reason = self._outcome
            elif has_failed and reason in ("disconnect", "idle", "stop"):  # its game has left because of that
                reason = REFUSED
            self._group.send_last(self, reason, result)
            self._recorder.metrics.add("recordings", 1.0, label=self.why)
        else:
            self._recorder.taken -= sum(tick[-1] for tick in self._ticks)
        self._ticks.clear()

    def take(self, *, last: bool = False) -> list[Kept]:
        """Removes and returns the session's ticks. Without ``last`` it keeps the newest tick, which may still get an
        event or the body of the stop."""
        return [self._ticks.popleft() for _ in range(len(self._ticks) - (not last))]

    def part(self, ticks: list[Kept], end: str = "", result: float | None = None) -> tuple[Any, ...]:
        """The part for taken ticks, at least one, as a row of `brayx.recording.index.FIELDS`; ``end``: why the session
        ended, if they are its last ones."""
        lost, first = self._lost, self._sent
        if lost:
            self._recorder.lose(lost, "memory")
        self._sent, self._lost = first + len(ticks), 0
        return (
            self._episode,
            self._session,
            self._began_at,
            first,
            len(ticks),
            self._start,
            self.why,
            self._player,
            end,
            result,
            sum([tick[6] != "" for tick in ticks]),
            lost,
            {},
            0,
            self._reported,
            0,
            self._start_reply,
            self._alias,
        )
