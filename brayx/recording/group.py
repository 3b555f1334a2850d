"""Converts the ticks of one agent's recorded sessions to columns together.

Converting many ticks at once is cheap, but a tick should not wait for long: after a thousand others it has left the
processor's cache. So a pack has few ticks of each session, however many sessions there are. Knows nothing of threads,
processes or files.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from brayx.actor.agent import STATE_OWN
from brayx.logs import limited
from brayx.recording.bodies import BodyBuffer
from brayx.recording.columns import ERROR, columns_by_field
from brayx.recording.process import Pack
from brayx.recording.session import Kept, RecordedSession

if TYPE_CHECKING:
    from brayx.recording.recorder import SessionRecorder

logger = limited(__name__)

PACK_TICKS = 128
"""Ticks of a pack."""
PACK_BYTES = 2**18
"""Size in bytes at which a pack is sent early."""
FRAMES_BYTES = 2**21
"""As `PACK_BYTES`, for ticks with frames, which are large."""
_SMALL_GROUP = 16
"""Maximum sessions for packs of `PACK_TICKS`. Beyond it packs grow, since each session in a pack costs a part."""

_Taken = tuple[RecordedSession, list[Kept], tuple[Any, ...], str]
"""A session, its ticks, their part, and why the session ended; empty: it runs."""


class TickGroup:
    """Collects ticks of sessions until they make a pack. Belongs to the sessions' event loop.

    Args:
        recorder: gets the packs.
    """

    def __init__(self, recorder: SessionRecorder) -> None:
        self._recorder = recorder
        self._sessions = 0
        self._waiting: list[RecordedSession] = []  # one entry for each tick
        self._max_ticks, self._max_bytes = PACK_TICKS, recorder.pack_bytes
        self._max_taken = recorder.taken + recorder.pack_bytes
        self._due_at = -math.inf  # the first tick starts the clock

    def join(self) -> None:
        """Adds a session, which was just opened."""
        self._resize(1)

    def leave(self) -> None:
        """Removes a session, which has ended."""
        self._resize(-1)

    def _resize(self, sessions: int) -> None:
        self._sessions += sessions
        scale = max(1.0, self._sessions / _SMALL_GROUP)
        self._max_ticks, self._max_bytes = round(PACK_TICKS * scale), round(self._recorder.pack_bytes * scale)

    def add(self, session: RecordedSession, now: float) -> None:
        """Notes a tick that a session holds since ``now``; sends a pack if enough ticks wait."""
        waiting = self._waiting
        waiting.append(session)
        if len(waiting) > self._max_ticks or self._recorder.taken > self._max_taken or now > self._due_at:
            self._send_waiting()
            self._max_taken, self._due_at = self._recorder.taken + self._max_bytes, now + self._recorder.config.flush_s

    def send_last(self, session: RecordedSession, end: str, result: float | None) -> None:
        """Sends the last ticks of a session that has ended."""
        self._waiting = [waiting for waiting in self._waiting if waiting is not session]
        if ticks := session.take(last=True):
            self._send([(session, ticks, session.part(ticks, end, result), end)])

    def _send_waiting(self) -> None:
        waiting, self._waiting = dict.fromkeys(self._waiting), []
        batch = [(session, ticks, session.part(ticks), "") for session in waiting if (ticks := session.take())]
        if batch:
            self._send(batch)

    def _send(self, batch: Sequence[_Taken]) -> None:
        all_ticks = [tick for _, ticks, *_ in batch for tick in ticks]
        size = sum([tick[-1] for tick in all_ticks])
        try:
            pack = self._pack(batch, all_ticks)
        except Exception:  # agents may set anything; one bad tick must not cost others, nor end the session
            if len(batch) > 1:
                for entry in batch:
                    self._send([entry])
                return
            logger.exception("ticks of session %s cannot be recorded", all_ticks[0][0].session)
            self._recorder.lose(len(all_ticks), "error")
            self._recorder.taken -= size
            return
        states = []
        if self._recorder.drawing is not None:  # a failed tick's state may be incomplete
            states = [None if ERROR in tick[6] else tick[0] for tick in all_ticks]
        self._recorder.send(pack, states, size)

    def _pack(self, batch: Sequence[_Taken], all_ticks: Sequence[Kept]) -> Pack:
        states, inputs, outputs, arrived, begun, ended, events, forwards, _ = zip(*all_ticks, strict=True)
        since = np.repeat([session.began for session, *_ in batch], [len(ticks) for _, ticks, *_ in batch])
        stops = [b""] * len(all_ticks)
        (last, *_, end) = batch[-1]
        if end:
            stops[-1] = last.stop_body
        began = np.array(begun)
        columns = columns_by_field(
            [state.tick for state in states],
            began - since,
            np.array(ended) - began,
            (),
            (),
            [vars(state) for state in states],
            events,
            stops,
            began - np.array(arrived),
            forwards,
            without=STATE_OWN,
            frames=self._recorder.frames,
            strict=len(batch) > 1,
        )
        return Pack([part for *_, part, _ in batch], columns, BodyBuffer.join(inputs), BodyBuffer.join(outputs), b"")
