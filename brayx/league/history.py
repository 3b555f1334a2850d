"""Curves of ratings over env steps. Pure; the ledger keeps them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from brayx.league.member import Member
from brayx.league.ratings import Ratings

MAX_POINTS = 500
"""Points of a curve at most."""

_MOVED = 2.0
"""Points by which a rating or an end of its interval moves before its curve gets another point."""


class Point(NamedTuple):
    """A point of a curve.

    Attributes:
        env_steps: env steps of the player.
        points: its rating then, see `brayx.league.ratings.Rating.points`.
        low, high: ends of the 95 % interval.
    """

    env_steps: int
    points: float
    low: float
    high: float


def point_of(ratings: Ratings, member: Member, env_steps: int) -> Point:
    """The point of a member as it is rated now."""
    return Point(env_steps, ratings.points(member), *ratings.interval(member))


def changed(curve: Sequence[Point], point: Point) -> bool:
    """Whether a point belongs on a curve: it has later steps than the curve's last one, and another rating."""
    if not curve:
        return True
    last = curve[-1]
    moved = max(abs(now - before) for now, before in zip(point[1:], last[1:], strict=True))
    return point.env_steps > last.env_steps and moved >= _MOVED


def thinned(curve: Sequence[Point], most: int) -> list[Point]:
    """Thins a curve: keeps every second point from the newest on, repeatedly, until at most ``most`` are left. The
    first one stays.

    Args:
        most: 2 or more.
    """
    kept = list(curve)
    while len(kept) > most:
        kept = [kept[0], *kept[:0:-2][::-1]]
    return kept
