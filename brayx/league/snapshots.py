"""Snapshots: when one is frozen, and which leave the pool. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from brayx.league.config import PlayerConfig
from brayx.league.member import Member

_LEAST_STEPS = 50_000
"""Minimum env steps between two snapshots of a player without ``snapshot_every``."""


class Snapshot(NamedTuple):
    """Frozen weights of a player.

    Attributes:
        member: the player, and the version under which the weights are registered.
        digest: hash of the weights.
        parent: the snapshot before it; None: it was trained from the player's first weights.
        env_steps: the player's env steps when it was frozen.
        time_s: when that was, in seconds since 1970.
        dropped: whether it has left the pool.
    """

    member: Member
    digest: str
    parent: Member | None
    env_steps: int
    time_s: float
    dropped: bool = False


def _least_steps(player: PlayerConfig) -> int:
    """Minimum env steps between two snapshots: a quarter of ``snapshot_every``."""
    return _LEAST_STEPS if player.snapshot_every is None else max(1, player.snapshot_every // 4)


def due(player: PlayerConfig, steps: int, win_rates: Sequence[float]) -> str:
    """Why a snapshot of a learner is due now; empty: it is not.

    Args:
        player: the learner.
        steps: env steps since its last snapshot, or since its start.
        win_rates: against each member that it can be matched with, 0.5 where there were no games. If there are none,
            `PlayerConfig.snapshot_at` counts as reached: otherwise an empty pool would stay empty.
    """
    if player.snapshot_every is not None and steps >= player.snapshot_every:
        return f"{steps} env steps since the last snapshot, snapshot_every is {player.snapshot_every}"
    if player.snapshot_at is None or steps < _least_steps(player):
        return ""
    if not win_rates:
        return f"{steps} env steps, and no opponent to play against"
    mean = sum(win_rates) / len(win_rates)
    if mean < player.snapshot_at:
        return ""
    return f"win rate {mean:.3f} over {len(win_rates)} opponents, snapshot_at is {player.snapshot_at:g}"


def to_drop(
    pool: Sequence[Member], points: Callable[[Member], float], champion: Member | None, pool_size: int
) -> list[Member]:
    """Snapshots that leave the pool: the weakest beyond its size, of two equally strong ones the older.

    The champion, the strongest and each player's newest stay, even if these are more than ``pool_size``.

    Args:
        pool: snapshots, the oldest first.
        points: rating of a member.
        champion: the champion, if there is one.
        pool_size: snapshots that may stay.
    """
    if len(pool) <= pool_size:
        return []
    newest = {member.player: member for member in pool}
    stay = {*newest.values(), max(pool, key=points), champion}
    rest = sorted((member for member in pool if member not in stay), key=points)  # stable: the older of equals first
    return rest[: len(pool) - pool_size]
