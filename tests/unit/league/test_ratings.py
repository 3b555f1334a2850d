"""`brayx.league.ratings`: openskill's published numbers, Elo's formula, and predictions that come true."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brayx.league.member import Member
from brayx.league.ratings import FIRST_POINTS, POINTS_PER_MU, Rating, Ratings

A, B, C, D, E, F = (Member(name) for name in "abcdef")


def skills(ratings: Ratings, *members: Member) -> list[tuple[float, float]]:
    return [(ratings[member].mu, ratings[member].sigma) for member in members]


def about(expected: list[tuple[float, float]]) -> list[object]:
    return [pytest.approx(value, abs=1e-9) for value in expected]


# The parity vectors of openskill.py 6.2.0, as its sister openskill.js publishes them (parity-plackett-luce.test.ts).
DOUBLES = {A: Rating(29.182, 4.782), B: Rating(27.174, 4.922), C: Rating(16.672, 6.217), D: Rating(25.0, 25 / 3)}
FIXTURES = dict.fromkeys((A, B, C, D, E, F), Rating(20.35125162611535, 8.33148112355601))


@pytest.mark.parametrize(
    ("before", "teams", "ranks", "after"),
    [
        (
            DOUBLES, [[A, B], [C, D]], [1, 2],
            {
                A: (29.607340941337068, 4.755311788972862), B: (27.624602782532037, 4.892807828777459),
                C: (15.953170429143093, 6.125902065139878), D: (23.70858117648013, 8.111707446126035),
            },
        ),
        (
            DOUBLES, [[A], [B], [C], [D]], [0, 1, 2, 3],
            {
                A: (30.210227447000438, 4.765617924939384), B: (27.644725221915632, 4.883479590134575),
                C: (17.4036218889969, 6.101259408259549), D: (19.21460876538932, 7.854669920480409),
            },
        ),
        (
            FIXTURES, [[A], [B, C], [D], [E, F]], [2, 1, 4, 3],
            {
                A: (22.35555943890167, 8.265434830225024), B: (22.373451456616035, 8.258479912445537),
                C: (22.373451456616035, 8.258479912445537), D: (18.311159777900297, 8.219170401234347),
                E: (18.364835831043397, 8.112716571808326), F: (18.364835831043397, 8.112716571808326),
            },
        ),
        (
            FIXTURES, [[A], [B, C], [D, E, F]], [1, 2, 1],
            {
                A: (21.63766806988004, 8.310709773172306), B: (19.53956360838512, 8.268148437657915),
                D: (19.87652320008089, 8.237522411103104),
            },
        ),
    ],
    ids=["two teams", "a match of four", "teams of different sizes", "a draw"],
)  # fmt: skip
def test_a_match_has_openskills_numbers(
    before: dict[Member, Rating], teams: list[list[Member]], ranks: list[int], after: dict[Member, tuple[float, float]]
) -> None:
    ratings = Ratings(before)
    ratings.rate(teams, ranks)
    assert skills(ratings, *after) == about([*after.values()])


def test_elo_moves_by_its_formula() -> None:
    ratings = Ratings({A: Rating(elo=1400.0), B: Rating(elo=1000.0)})
    ratings.rate([[A], [B]], [1, 0])
    assert ratings[A].elo == pytest.approx(1400 - 16 * 10 / 11), "it was expected to win 10 of 11"
    assert ratings[B].elo == pytest.approx(1000 + 16 * 10 / 11)


def test_elo_of_three_is_the_mean_of_their_pairs() -> None:
    ratings = Ratings({C: Rating(elo=1600.0)})
    ratings.rate([[A], [B], [C]], [0, 0, 2])
    against_c = 16 * (1 - 1 / 11)
    assert [ratings[member].elo for member in (A, B)] == [pytest.approx(1200 + against_c / 2)] * 2
    assert ratings[C].elo == pytest.approx(1600 - against_c)


games = st.lists(
    st.tuples(st.permutations([A, B, C, D, E]).map(lambda order: order[:2]), st.sampled_from([(0, 1), (1, 0), (0, 0)])),
    max_size=25,
)


@given(games)
def test_elo_is_neither_made_nor_lost(played: list[tuple[list[Member], tuple[int, int]]]) -> None:
    ratings = Ratings()
    for (a, b), ranks in played:
        ratings.rate([[a], [b]], ranks)
    assert sum(ratings[member].elo for member in (A, B, C, D, E)) == pytest.approx(5 * FIRST_POINTS)


@given(games, st.permutations([A, B, C, D, E]))
def test_relabelling_players_relabels_their_ratings(
    played: list[tuple[list[Member], tuple[int, int]]], others: list[Member]
) -> None:
    renamed = dict(zip((A, B, C, D, E), others, strict=True))
    before, after = Ratings(), Ratings()
    for (a, b), ranks in played:
        before.rate([[a], [b]], ranks)
        after.rate([[renamed[a]], [renamed[b]]], ranks)
    assert after.state() == {renamed[member]: rating for member, rating in before.state().items()}


@given(games)
def test_the_order_of_teams_in_a_game_changes_nothing(played: list[tuple[list[Member], tuple[int, int]]]) -> None:
    ratings, other = Ratings(), Ratings()
    for (a, b), ranks in played:
        ratings.rate([[a], [b]], ranks)
        other.rate([[b], [a]], ranks[::-1])
    for member in (A, B, C, D, E):
        assert ratings[member] == pytest.approx(other[member], rel=1e-9)


def test_the_order_of_games_without_a_common_member_changes_nothing() -> None:
    results = [([[A], [B]], [0, 1]), ([[C], [D]], [0, 0]), ([[E], [Member("f")]], [1, 0])]
    states = []
    for order in itertools.permutations(results):
        ratings = Ratings()
        for teams, ranks in order:
            ratings.rate(teams, ranks)
        states.append(ratings.state())
    assert all(state == states[0] for state in states)


def test_a_member_against_itself_keeps_its_rating() -> None:
    ratings = Ratings()
    ratings.rate([[A], [A]], [0, 1])
    assert ratings.state() == {}
    ratings.rate([[A, B], [A, C]], [0, 1])
    assert ratings[A] == Rating()
    assert ratings[B].mu > Rating().mu > ratings[C].mu


def test_a_member_with_all_seats_of_a_team_is_rated_once() -> None:
    ratings = Ratings()
    ratings.rate([[A, A], [B, B]], [0, 1])
    assert ratings[A].games == ratings[B].games == 1


@pytest.mark.parametrize(("teams", "ranks"), [([[A]], [0]), ([[A], []], [0, 1]), ([[A], [B]], [0])])
def test_what_is_no_game_is_refused(teams: list[list[Member]], ranks: list[float]) -> None:
    with pytest.raises(ValueError, match=f"{len(teams)} teams and {len(ranks)} ranks"):
        Ratings().rate(teams, ranks)


def test_points_agree_with_predictions_of_known_skills() -> None:
    """As Elo reads them: 400 points are 10 to 1."""
    for difference in (-900.0, -400.0, -25.0, 0.0, 130.0, 400.0):
        mu = Rating().mu + difference / POINTS_PER_MU
        ratings = Ratings({A: Rating(mu=mu, sigma=0.0), B: Rating(sigma=0.0)})
        assert ratings.points(A) - ratings.points(B) == pytest.approx(difference)
        assert ratings.predict(A, B) == pytest.approx(1 / (1 + 10 ** (-difference / 400)))
        assert ratings.predict(A, B) + ratings.predict(B, A) == pytest.approx(1.0)


def test_predictions_never_overflow() -> None:
    ratings = Ratings({A: Rating(mu=1e6, sigma=0.0)})
    assert (ratings.predict(A, B), ratings.predict(B, A)) == (1.0, 0.0)


@pytest.mark.parametrize(("wins", "draws"), [(0.5, 0.0), (0.65, 0.0), (0.8, 0.0), (0.9, 0.0), (0.5, 0.4), (0.7, 0.2)])
def test_predicted_win_rates_come_true(wins: float, draws: float) -> None:
    """Mean prediction over games whose results have known odds: within the 5 points that a league must reach."""
    rng = random.Random(5)
    ratings = Ratings()
    predicted = []
    for game in range(3000):
        point = rng.random()
        ratings.rate([[A], [B]], (0, 1) if point < wins else (0, 0) if point < wins + draws else (1, 0))
        if game >= 500:
            predicted.append(ratings.predict(A, B))
    assert math.fsum(predicted) / len(predicted) == pytest.approx(wins + draws / 2, abs=0.05)


def test_an_interval_narrows_around_the_points() -> None:
    ratings = Ratings()
    low, high = ratings.interval(A)
    assert (low + high) / 2 == pytest.approx(FIRST_POINTS)
    assert high - FIRST_POINTS == pytest.approx(1.959964 * 25 / 3 * POINTS_PER_MU)
    for _ in range(10):
        ratings.rate([[A], [B]], [0, 1])
    narrower, narrow = ratings.interval(A)
    assert narrow - narrower < high - low
    assert narrower < ratings.points(A) < narrow


def test_a_snapshot_inherits_and_a_forgotten_member_is_new() -> None:
    ratings = Ratings()
    ratings.rate([[A], [B]], [0, 1])
    snapshot = Member("a", 1)
    ratings.inherit(snapshot, A)
    assert ratings[snapshot] == ratings[A]._replace(games=0)
    ratings.forget(A)
    assert ratings[A] == Rating()
    assert Ratings(ratings.state()).state() == ratings.state()
