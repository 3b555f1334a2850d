"""Opponents by strength: expected points, limits, ties and draws, against a brute-force oracle."""

from __future__ import annotations

import math
import random

import pytest

from brayx.league.member import Member, Rated
from brayx.league.requested import OpponentMix, draw, mix_of

POOL = [Rated(Member("main", version), points) for version, points in ((1, 900.0), (2, 1100.0), (3, 1500.0))]


def oracle(pool: list[Rated], rating: float) -> set[tuple[float, float, float]]:
    """Points of both neighbours and the share of the upper: of all pairs around the rating, the closest together."""
    pairs = [(a.points, b.points) for a in pool for b in pool if a.points <= rating <= b.points]
    narrowest = min((b - a for a, b in pairs), default=0.0)
    return {(a, b, (rating - a) / (b - a) if b > a else 0.0) for a, b in pairs if b - a == narrowest}


def test_expected_points_are_the_rating_and_the_neighbours_are_the_nearest() -> None:
    rng = random.Random(1)
    for _ in range(300):
        pool = [Rated(Member("p", v + 1), float(rng.randrange(800, 1400, 20))) for v in range(rng.randrange(1, 12))]
        low, high = min(rated.points for rated in pool), max(rated.points for rated in pool)
        rating = rng.uniform(low, high)
        mix = mix_of(pool, rating)
        assert mix.limit == ""
        assert (1 - mix.share) * mix.lower.points + mix.share * mix.upper.points == pytest.approx(rating)
        expected = oracle(pool, rating)
        assert (mix.lower.points, mix.upper.points) in {(a, b) for a, b, _ in expected}
        assert any(mix.share == pytest.approx(share) for *_, share in expected)


@pytest.mark.parametrize(
    ("rating", "expected"),
    [
        (899.9, OpponentMix(POOL[0], POOL[0], 0.0, "weakest")),
        (900.0, OpponentMix(POOL[0], POOL[0], 0.0, "")),
        (1000.0, OpponentMix(POOL[0], POOL[1], 0.5, "")),
        (1100.0, OpponentMix(POOL[1], POOL[1], 0.0, "")),
        (1200.0, OpponentMix(POOL[1], POOL[2], 0.25, "")),
        (1500.0, OpponentMix(POOL[2], POOL[2], 0.0, "")),
        (1e9, OpponentMix(POOL[2], POOL[2], 0.0, "strongest")),
    ],
)
def test_neighbours_and_limits(rating: float, expected: OpponentMix) -> None:
    assert mix_of(POOL, rating) == expected
    assert mix_of(POOL[::-1], rating) == expected


def test_of_equal_points_the_newest_version_plays() -> None:
    pool = [Rated(Member("main", version), 1200.0) for version in (3, 12, 7)]
    for rating in (1000.0, 1200.0, 1400.0):
        mix = mix_of(pool, rating)
        assert mix.lower == mix.upper == pool[1]


GAMES = [f"game-{i}" for i in range(4000)]


@pytest.mark.parametrize("rating", [901.0, 925.0, 1000.0, 1099.0, 1150.0, 1200.0, 1300.0, 1480.0])
def test_games_are_drawn_by_their_id_in_the_shares_of_the_mix(rating: float) -> None:
    mix = mix_of(POOL, rating)
    drawn = [draw(mix, game) for game in GAMES]
    assert drawn == [draw(mix, game) for game in GAMES]
    assert set(drawn) == {mix.lower, mix.upper}
    deviation = math.sqrt(mix.share * (1 - mix.share) / len(GAMES))
    assert abs(drawn.count(mix.upper) / len(GAMES) - mix.share) < 5 * deviation
    half = len(GAMES) // 2  # whose ids do not resemble those of the others
    assert abs(drawn[:half].count(mix.upper) - drawn[half:].count(mix.upper)) / half < 10 * deviation


@pytest.mark.parametrize("rating", [900.0, 1100.0, 1500.0, 100.0, 9999.0])
def test_a_rating_that_a_member_has_and_one_beyond_all_is_one_member_in_every_game(rating: float) -> None:
    mix = mix_of(POOL, rating)
    assert {draw(mix, game) for game in GAMES} == {mix.lower}


def test_a_stronger_rating_never_draws_a_weaker_member_for_the_same_game() -> None:
    for game in GAMES[:200]:
        points = [draw(mix_of(POOL, rating), game).points for rating in range(900, 1501, 25)]
        assert points == sorted(points)
