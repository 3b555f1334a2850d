"""`RestartTimes`: when a process that ends by itself starts again. Knows nothing of processes."""

from __future__ import annotations

import time
from dataclasses import dataclass

_FIRST_S = 0.5
LAST_S = 15.0
"""The longest pause."""
_LIVED_S = 30.0


@dataclass(slots=True)
class RestartTimes:
    """Times of one process, on the monotonic clock.

    One that ran for half a minute starts again at once, as if it had never ended; one that keeps ending sooner waits
    longer each time.

    Attributes:
        started_at: its last start.
        restart_at: its next start, once it has ended.
        pause_s: seconds between its last end and that start.
    """

    started_at: float = 0.0
    restart_at: float = 0.0
    pause_s: float = _FIRST_S

    def started(self) -> None:
        """Call when it has started."""
        self.started_at = time.monotonic()

    def ended(self, now: float) -> float:
        """Call when it has ended; returns the seconds that it ran."""
        lived_s = now - self.started_at
        self.pause_s = _FIRST_S if lived_s > _LIVED_S else min(LAST_S, 2 * self.pause_s)
        self.restart_at = now + self.pause_s
        return lived_s

    def not_started(self, now: float) -> None:
        """Call when it could not be started: the next try is after the longest pause."""
        self.restart_at = now + LAST_S
