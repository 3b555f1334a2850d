"""`RestartTimes`: whether and when a process that ends by itself starts again. Knows nothing of processes."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

_FIRST_S = 0.5
LAST_S = 15.0
"""The longest pause."""
_LIVED_S = 30.0


@dataclass(frozen=True)
class RestartLimits:
    """How often one process may start again after it has ended by itself.

    Attributes:
        restarts: most restarts within ``restarts_within_s``; None: no limit.
        restarts_within_s: time for which a restart counts towards ``restarts``.
        lifetime_restarts: most restarts in all; None: no limit.
    """

    restarts: int | None = None
    restarts_within_s: float = 60.0
    lifetime_restarts: int | None = None


@dataclass(slots=True)
class RestartTimes:
    """Times of one process, on the monotonic clock.

    One that ran for half a minute starts again at once, as if it had never ended; one that keeps ending sooner waits
    longer each time.

    Attributes:
        limits: how often it may start again.
        started_at: its last start.
        restart_at: its next start, once it has ended.
        pause_s: seconds between its last end and that start.
        ends: how often it has ended.
    """

    limits: RestartLimits = field(default_factory=RestartLimits)
    started_at: float = 0.0
    restart_at: float = 0.0
    pause_s: float = _FIRST_S
    ends: int = 0
    _counting: deque[float] = field(default_factory=deque)

    def started(self) -> None:
        """Call when it has started."""
        self.started_at = time.monotonic()

    def ended(self, now: float) -> float:
        """Call when it has ended; returns the seconds that it ran."""
        lived_s = now - self.started_at
        self.pause_s = _FIRST_S if lived_s > _LIVED_S else min(LAST_S, 2 * self.pause_s)
        self.restart_at = now + self.pause_s
        return lived_s

    def too_often(self, now: float) -> tuple[str, str] | None:
        """Counts its end. Call it after `ended`.

        Returns:
            None if it may start again; else how often it has ended, and the name of the limit that this exceeds.
        """
        limits, ends = self.limits, self._counting
        self.ends += 1
        while ends and now - ends[0] >= limits.restarts_within_s:
            ends.popleft()
        ends.append(now)
        if limits.restarts is not None and len(ends) > limits.restarts:
            return f"{times(len(ends))} within {limits.restarts_within_s:g} s", "restarts"
        if limits.lifetime_restarts is not None and self.ends > limits.lifetime_restarts:
            return times(self.ends), "lifetime_restarts"
        return None

    def not_started(self, now: float) -> None:
        """Call when it could not be started: the next try is after the longest pause."""
        self.restart_at = now + LAST_S


def times(count: int) -> str:
    """How often something happened, in words."""
    return "once" if count == 1 else f"{count} times"
