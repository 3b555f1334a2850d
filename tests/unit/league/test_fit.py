"""Points of players that do not change: closed forms, simulated truth, and openskill on the same games."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from brayx.league.fit import expected, fit
from brayx.league.member import Member
from brayx.league.ratings import FIRST_POINTS, Ratings

TRUTH = [800.0, 1000.0, 1100.0, 1400.0]

Results = dict[tuple[int, int], tuple[int, int, int]]


def simulated(games: int, seed: int = 0) -> tuple[Results, list[tuple[int, int, int]]]:
    """Results of a round robin, and its games in order: the players, and 0 if the first one won."""
    rng = random.Random(seed)
    order = [pair for pair in itertools.combinations(range(len(TRUTH)), 2) for _ in range(games)]
    rng.shuffle(order)
    played = [(a, b, int(rng.random() >= expected(TRUTH[a], TRUTH[b]))) for a, b in order]
    results = dict.fromkeys(itertools.combinations(range(len(TRUTH)), 2), (0, 0, 0))
    for a, b, lost in played:
        wins, draws, losses = results[a, b]
        results[a, b] = (wins + 1 - lost, draws, losses + lost)
    return results, played


@pytest.mark.parametrize(("wins", "draws", "losses"), [(3000, 0, 1000), (2000, 2000, 0), (1000, 0, 1000), (0, 0, 0)])
def test_two_players_are_as_far_apart_as_their_win_rate_says(wins: int, draws: int, losses: int) -> None:
    first, second = fit(2, {(0, 1): (wins, draws, losses)})
    games = wins + draws + losses
    rate = (wins + draws / 2) / games if games else 0.5
    assert first.points - second.points == pytest.approx(400 * math.log10(rate / (1 - rate)), abs=1.0)
    assert first.points + second.points == pytest.approx(2 * FIRST_POINTS)
    assert first.games == second.games == games


def test_the_truth_is_within_the_intervals_and_known_points_fix_the_scale() -> None:
    inside = 0
    for seed in range(20):
        results, _ = simulated(100, seed)
        strengths = fit(4, results, {0: TRUTH[0], 3: TRUTH[3]})
        assert strengths[0].points + strengths[3].points == pytest.approx(TRUTH[0] + TRUTH[3])
        inside += sum(strength.low <= truth <= strength.high for strength, truth in zip(strengths, TRUTH, strict=True))
        assert [strength.points for strength in strengths] == pytest.approx(TRUTH, abs=90)
    assert inside >= 70, "of 80 intervals of 95 %"


def test_openskill_comes_to_the_same_points_from_the_same_games() -> None:
    results, played = simulated(2000)
    members = [Member("p", version) for version in range(1, 5)]
    ratings = Ratings()
    for a, b, lost in played:
        ratings.rate([[members[a]], [members[b]]], [lost, 1 - lost])
    mean = sum(map(ratings.points, members)) / 4
    for member, strength in zip(members, fit(4, results, dict.fromkeys(range(4), mean)), strict=True):
        assert strength.points == pytest.approx(ratings.points(member), abs=100)


def test_neither_order_nor_names_matter_and_winning_all_is_finite() -> None:
    results, _ = simulated(50)
    swapped = {(b, a): (losses, draws, wins) for (a, b), (wins, draws, losses) in reversed(results.items())}
    for strength, other in zip(fit(4, results), fit(4, swapped), strict=True):
        assert strength == pytest.approx(other)
    best, worst = fit(2, {(0, 1): (500, 0, 0)})
    assert 400 < best.points - worst.points < 3000
    assert best.low < best.points < best.high


def test_more_games_make_the_interval_narrower() -> None:
    widths = []
    for games in (10, 100, 1000):
        first, _ = fit(2, {(0, 1): (games, 0, games)})
        widths.append(first.high - first.low)
    assert widths[0] > 2 * widths[1] > 4 * widths[2]
