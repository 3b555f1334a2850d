"""The recorded sessions of one agent, whose ticks become columns together.

Converting many ticks at once is cheap, but a tick should not wait for long: after a thousand others it has left the
processor's cache. So a pack has few ticks of each session, however many sessions there are.
Knows nothing of threads, processes or files.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from brayx.actor.agent import STATE_OWN
from brayx.logs import limited
from brayx.recording.bodies import Joined
from brayx.recording.columns import ERROR, columns_by_field
from brayx.recording.process import Pack
from brayx.recording.session import Kept, RecordedSession

if TYPE_CHECKING:
    from brayx.recording.recorder import SessionRecorder

logger = limited(__name__)

PACK = 128
"""Ticks that are handed over at once."""
PACK_BYTES = 2**18
"""Size of the ticks at which they are handed over early."""
FRAMES_BYTES = 2**21
"""As `PACK_BYTES`, with frames, which are large."""
_MANY = 16
"""Sessions beyond which packs grow with their number, since each session of a pack has a part in it."""

_Taken = tuple[RecordedSession, list[Kept], tuple[Any, ...], str]
"""Ticks of a session, their part, and why it has ended; empty: it has not."""


class TickGroup:
    """Collects the waiting ticks of sessions. Belongs to their event loop.

    Args:
        of: the recorder.
    """

    def __init__(self, of: SessionRecorder) -> None:
        self._of = of
        self._sessions = 0
        self._waiting: list[RecordedSession] = []  # one entry for each tick
        self._most_ticks, self._most_bytes = PACK, of.pack_bytes
        self._most_taken = of.taken + of.pack_bytes
        self._until = -math.inf  # the first tick starts the clock

    def join(self) -> None:
        """Counts a session that was opened."""
        self._resize(1)

    def leave(self) -> None:
        """Counts a session that has ended."""
        self._resize(-1)

    def _resize(self, sessions: int) -> None:
        self._sessions += sessions
        scale = max(1.0, self._sessions / _MANY)
        self._most_ticks, self._most_bytes = round(PACK * scale), round(self._of.pack_bytes * scale)

    def add(self, session: RecordedSession, now: float) -> None:
        """Counts a tick that a session keeps from ``now`` on; hands over what waits if it is enough."""
        waiting = self._waiting
        waiting.append(session)
        if len(waiting) > self._most_ticks or self._of.taken > self._most_taken or now > self._until:
            self._hand_over_waiting()
            self._most_taken, self._until = self._of.taken + self._most_bytes, now + self._of.config.flush_s

    def hand_over_last(self, session: RecordedSession, end: str, result: float | None) -> None:
        """Hands over the ticks of a session that has ended."""
        self._waiting = [each for each in self._waiting if each is not session]
        if ticks := session.take(last=True):
            self._hand_over([(session, ticks, session.part(ticks, end, result), end)])

    def _hand_over_waiting(self) -> None:
        waiting, self._waiting = dict.fromkeys(self._waiting), []
        taken = [(session, ticks, session.part(ticks), "") for session in waiting if (ticks := session.take())]
        if taken:
            self._hand_over(taken)

    def _hand_over(self, taken: Sequence[_Taken]) -> None:
        kept = [tick for _, ticks, *_ in taken for tick in ticks]
        size = sum([tick[-1] for tick in kept])
        try:
            pack = self._pack(taken, kept)
        except Exception:  # agents may set anything; one bad tick must not cost others, nor end the session
            if len(taken) > 1:
                for each in taken:
                    self._hand_over([each])
                return
            logger.exception("ticks of session %s cannot be recorded", kept[0][0].session)
            self._of.lose(len(kept), "error")
            self._of.taken -= size
            return
        states = []
        if self._of.drawing is not None:  # a failed tick's state may be incomplete
            states = [None if ERROR in tick[6] else tick[0] for tick in kept]
        self._of.hand_over(pack, states, size)

    def _pack(self, taken: Sequence[_Taken], kept: Sequence[Kept]) -> Pack:
        states, inputs, outputs, arrived, begun, ended, events, forwards, _ = zip(*kept, strict=True)
        since = np.repeat([session.began for session, *_ in taken], [len(ticks) for _, ticks, *_ in taken])
        stops = [b""] * len(kept)
        (last, *_, end) = taken[-1]
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
            frames=self._of.frames,
            alike=len(taken) > 1,
        )
        return Pack([part for *_, part, _ in taken], columns, Joined.of(inputs), Joined.of(outputs), b"")
