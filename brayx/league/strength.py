"""Chooses an opponent by rating: one of the two nearest, drawn for each game. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Literal, NamedTuple

from brayx.league.member import Member

Limit = Literal["", "weakest", "strongest"]


class Rated(NamedTuple):
    """A member and its points, see `brayx.league.ratings.Rating.points`."""

    member: Member
    points: float


class Mix(NamedTuple):
    """The two opponents that stand for a rating.

    Attributes:
        lower, upper: neighbours in rating; the same one if it has exactly the rating, or if there is a limit.
        share: share of the games that ``upper`` plays, from 0 to 1.
        limit: the rating is below the ``weakest`` member or above the ``strongest``, which plays; empty: it is neither.
    """

    lower: Rated
    upper: Rated
    share: float
    limit: Limit


def mix_of(pool: Iterable[Rated], rating: float) -> Mix:
    """The mix whose expected points are ``rating``: ``(1 - share) * lower + share * upper``.

    Of members with equal points, the one of the newest version is taken.

    Args:
        pool: members to choose from; at least one.
        rating: finite points.
    """
    ranked = sorted(pool, key=lambda each: (each.points, each.member.version, each.member.player))
    newest = {each.points: each for each in ranked}  # of equal points the last one
    points = sorted(newest)
    weakest, strongest = newest[points[0]], newest[points[-1]]
    if rating < weakest.points:
        return Mix(weakest, weakest, 0.0, "weakest")
    if rating > strongest.points:
        return Mix(strongest, strongest, 0.0, "strongest")
    lower = newest[max(each for each in points if each <= rating)]
    upper = newest[min(each for each in points if each >= rating)]
    gap = upper.points - lower.points
    return Mix(lower, upper, (rating - lower.points) / gap if gap else 0.0, "")


def draw(mix: Mix, game: str) -> Rated:
    """The opponent of a game, drawn by the game's id."""
    digest = hashlib.blake2b(game.encode(), digest_size=8, person=b"strength").digest()
    return mix.upper if int.from_bytes(digest, "big") < mix.share * 2**64 else mix.lower
