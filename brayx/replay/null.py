"""A replay buffer of sessions that nobody learns from."""

from __future__ import annotations

from brayx.types import Columns, Fragment


class NullBuffer:
    """A buffer that drops everything: a served job does not learn, nor does an opponent."""

    def push(self, *replays: Fragment | Columns) -> None:
        """Takes fragments and columns."""

    def offer(self, *replays: Fragment | Columns, timeout_s: float) -> list[Fragment | Columns]:
        """Takes all of them."""
        return []
