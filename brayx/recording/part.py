"""A part: one entry in a chunk's index of sessions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Part:
    """Consecutive ticks of a session in one chunk.

    Attributes:
        episode: unique id of the recorded session; a session's own id may be used again.
        session: the session's id.
        began: when the session started, in seconds since 1970.
        first: number of recorded ticks before these.
        ticks: number of ticks in this part.
        start: body of the session's start; bytes that are not UTF-8 are surrogates.
        why: why the session was recorded.
        player: the session's player in a league; empty: no league.
        end: why the session ended; empty: these are not its last ticks.
        result: the game's return, in the session's last part, if an agent recorded one.
        events: number of ticks with an event.
        lost: number of ticks lost since the part before.
        left_out: attributes that agents set and that were left out, with the reason.
        row: the part's first row in the chunk.
        reported: result of the session's seat in a league: ``win``, ``draw``, ``loss`` or a score; empty: none yet.
    """

    episode: str
    session: str
    began: float
    first: int
    ticks: int
    start: str = ""
    why: str = ""
    player: str = ""
    end: str = ""
    result: float | None = None
    events: int = 0
    lost: int = 0
    left_out: dict[str, str] = field(default_factory=dict)
    row: int = 0
    reported: str = ""

    def after(self, before: Sequence[Part]) -> Part:
        """Joins this part to the parts before it."""
        parts = [*before, self]
        return dataclasses.replace(
            before[0],
            why=self.why,
            end=self.end,
            result=self.result,
            reported=self.reported,
            ticks=sum(part.ticks for part in parts),
            events=sum(part.events for part in parts),
            lost=sum(part.lost for part in parts),
            left_out={name: why for part in parts for name, why in part.left_out.items()},
        )
