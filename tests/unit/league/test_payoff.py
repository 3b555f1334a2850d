"""`brayx.league.payoff`: books of pairs against a slow count."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from brayx.league.member import Member
from brayx.league.payoff import Pair, Payoff, pair_results

A, B, C, D = (Member(name) for name in "abcd")
MEMBERS = [A, B, C, D, Member("a", 1), Member("a", 2)]

Scores = list[tuple[Member, Member, float]]

some_scores = st.lists(
    st.tuples(st.sampled_from(MEMBERS), st.sampled_from(MEMBERS), st.sampled_from([0.0, 0.5, 1.0])).filter(
        lambda game: game[0] != game[1]
    ),
    max_size=40,
)


def counted(scores: Scores, recency: float = 0.9) -> Payoff:
    payoff = Payoff(recency)
    for a, b, score in scores:
        payoff.add(a, b, score)
    return payoff


def slow(scores: Scores, a: Member, b: Member, recency: float) -> tuple[int, float, float]:
    """Games, win rate and recent win rate of ``a`` against ``b``, from the list of its scores."""
    results = np.array([s if (x, y) == (a, b) else 1 - s for x, y, s in scores if {x, y} == {a, b}])
    if not len(results):
        return 0, 0.5, 0.5
    weights = recency ** np.arange(len(results))[::-1]
    return len(results), float(results.mean()), float((results * weights).sum() / weights.sum())


@given(some_scores)
def test_numbers_equal_a_slow_count(scores: Scores) -> None:
    payoff = counted(scores)
    for a in MEMBERS:
        for b in MEMBERS:
            numbers = payoff.games(a, b), payoff.win_rate(a, b), payoff.recent(a, b)
            assert numbers == pytest.approx(slow(scores, a, b, 0.9), abs=1e-12)


@given(some_scores)
def test_the_table_is_the_win_rates_and_what_one_wins_the_other_loses(scores: Scores) -> None:
    payoff = counted(scores)
    table = payoff.table(MEMBERS)
    assert table.shape == (6, 6)
    np.testing.assert_allclose(table + table.T, 1.0)
    assert table[0, 1] == payoff.win_rate(A, B)


@given(some_scores, st.permutations(MEMBERS))
def test_relabelling_players_changes_nothing(scores: Scores, others: list[Member]) -> None:
    renamed = dict(zip(MEMBERS, others, strict=True))
    before = counted(scores)
    after = counted([(renamed[a], renamed[b], score) for a, b, score in scores])
    np.testing.assert_array_equal(after.table(others), before.table(MEMBERS))


@given(some_scores)
def test_the_order_of_results_of_different_pairs_changes_nothing(scores: Scores) -> None:
    shuffled = sorted(scores, key=lambda game: sorted(game[:2]))  # stable: each pair's own order stays
    assert counted(shuffled).state() == counted(scores).state()


@given(some_scores)
def test_a_payoff_continues_from_its_state(scores: Scores) -> None:
    half = len(scores) // 2
    continued = Payoff(0.9, counted(scores[:half]).state())
    for a, b, score in scores[half:]:
        continued.add(a, b, score)
    assert continued.state() == counted(scores).state()


def test_a_removed_member_has_no_games() -> None:
    payoff = counted([(A, B, 1.0), (B, C, 1.0), (A, C, 0.5)])
    payoff.remove(B)
    assert payoff.state() == {(A, C): Pair(0, 1, 0, 0.5, 1.0)}


def test_no_member_and_one_member_have_a_table() -> None:
    assert Payoff().table([]).shape == (0, 0)
    assert Payoff().table([A]).tolist() == [[0.5]]


@pytest.mark.parametrize(("a", "b", "score"), [(A, A, 1.0), (A, B, 0.7), (A, B, float("nan"))])
def test_what_is_no_result_is_refused(a: Member, b: Member, score: float) -> None:
    with pytest.raises(ValueError, match=f"{a.label} .*{b.label} .*{score}"):
        Payoff().add(a, b, score)


@pytest.mark.parametrize(
    ("teams", "ranks", "expected"),
    [
        ([[A], [B]], [0, 1], [(A, B, 1.0)]),
        ([[A], [B]], [0, 0], [(A, B, 0.5)]),
        ([[A], [A]], [0, 1], []),
        ([[A], [B], [C]], [1, 0, 1], [(A, B, 0.0), (A, C, 0.5), (B, C, 1.0)]),
        ([[A, A], [B, B]], [1, 0], [(A, B, 0.0)]),
        ([[A, B], [C, D]], [0, 1], [(A, C, 1.0), (A, D, 1.0), (B, C, 1.0), (B, D, 1.0)]),
        ([[A, B], [B, C]], [0, 1], [(A, B, 1.0), (A, C, 1.0), (B, C, 1.0)]),
    ],
)
def test_a_game_has_a_result_for_each_pair_of_different_teams(
    teams: list[list[Member]], ranks: list[float], expected: Scores
) -> None:
    assert list(pair_results(teams, ranks)) == expected
