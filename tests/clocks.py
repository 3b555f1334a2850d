"""A clock for tests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Clock:
    """Stands still until the test moves it, so that a paused process misses no deadline."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now
