"""`brayx.league.matchmaking`: PFSP against a slow oracle, and the shares that are drawn."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from brayx.league.config import Weighting
from brayx.league.matchmaking import Matchmaker, pfsp
from brayx.league.member import Member
from brayx.league.payoff import Payoff
from tests.unit.league.play import league_config

DRAWS = 4000
WEIGHTINGS: list[Weighting] = ["squared", "linear", "variance"]


def slow_pfsp(win_rates: list[float], weighting: Weighting) -> list[float]:
    """As in the paper: f(P[A beats B]) / sum over C of f(P[A beats C])."""
    weights = [
        {"squared": (1 - p) * (1 - p), "linear": 1 - p, "variance": p * (1 - p)}[weighting] for p in win_rates
    ]  # fmt: skip
    total = sum(weights)
    return [weight / total if total else 1 / len(weights) for weight in weights]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30), st.sampled_from(WEIGHTINGS))
def test_pfsp_equals_the_oracle(win_rates: list[float], weighting: Weighting) -> None:
    probabilities = pfsp(win_rates, weighting)
    np.testing.assert_allclose(probabilities, slow_pfsp(win_rates, weighting), rtol=1e-9, atol=1e-12)
    assert probabilities.sum() == pytest.approx(1.0)


@given(st.permutations(range(6)), st.lists(st.floats(0, 1), min_size=6, max_size=6), st.sampled_from(WEIGHTINGS))
def test_relabelling_opponents_relabels_their_probabilities(
    order: list[int], win_rates: list[float], weighting: Weighting
) -> None:
    shuffled = pfsp([win_rates[place] for place in order], weighting)
    np.testing.assert_allclose(shuffled, pfsp(win_rates, weighting)[order])


@pytest.mark.parametrize(
    ("win_rates", "weighting", "expected"),
    [
        ([], "squared", []),
        ([0.3], "squared", [1.0]),
        ([1.0], "squared", [1.0]),
        ([0.5, 0.5, 0.5], "variance", [1 / 3, 1 / 3, 1 / 3]),
        ([1.0, 1.0], "linear", [0.5, 0.5]),
        ([0.0, 0.0], "variance", [0.5, 0.5]),
        ([0.0, 1.0], "squared", [1.0, 0.0]),
        ([0.0, 0.5], "squared", [0.8, 0.2]),
        ([0.0, 0.5], "linear", [2 / 3, 1 / 3]),
        ([0.0, 0.5, 0.9], "variance", [0.0, 0.25 / 0.34, 0.09 / 0.34]),
    ],
)
def test_pfsp_of_known_cases(win_rates: list[float], weighting: Weighting, expected: list[float]) -> None:
    np.testing.assert_allclose(pfsp(win_rates, weighting), expected)


@pytest.mark.parametrize("win_rates", [[0.5, float("nan")], [1.1], [-0.1], 0.5, [[0.5]]])
def test_what_are_no_win_rates_is_refused(win_rates: Any) -> None:
    with pytest.raises(ValueError, match="from 0 to 1"):
        pfsp(win_rates, "linear")


def drawn(matchmaker: Matchmaker, learner: str = "main") -> dict[Member, float]:
    """Share of draws by opponent."""
    rng = random.Random(1)
    counts = Counter(matchmaker.draw(learner, rng) for _ in range(DRAWS))
    return {member: count / DRAWS for member, count in counts.items()}


def near(shares: dict[Member, float], expected: dict[Member, float]) -> bool:
    """Whether shares are within four deviations of what is expected, and nobody else was drawn."""
    return shares.keys() <= expected.keys() and all(
        abs(shares.get(member, 0.0) - share) <= 4 * np.sqrt(share * (1 - share) / DRAWS)
        for member, share in expected.items()
    )


MAIN = Member("main")
FIRST, SECOND = Member("main", 1), Member("main", 2)
THEIRS = Member("exploiter", 3)
RANDOM = Member("random")


def a_matchmaker(payoff: Payoff | None = None, main: dict[str, Any] | None = None, **players: Any) -> Matchmaker:
    """With a main player, its exploiter, a script, and three snapshots."""
    config = league_config(
        {
            "main": {"role": "main", **(main or {})},
            "exploiter": {"role": "exploiter", "of": "main"},
            "random": {"role": "script", "script": "bots.random"},
            **players,
        }
    )
    matchmaker = Matchmaker(config.players, payoff or Payoff())
    matchmaker.fill([FIRST, SECOND, THEIRS], None)
    return matchmaker


@pytest.mark.parametrize(
    ("against", "expected"),
    [
        ({"latest": 1.0}, {MAIN: 1.0}),
        ({"uniform": 3.0}, {RANDOM: 0.25, FIRST: 0.25, SECOND: 0.25, THEIRS: 0.25}),
        ({"past": 1.0}, {FIRST: 1 / 3, SECOND: 1 / 3, THEIRS: 1 / 3}),
        ({"exploiter": 1.0, "random": 3.0}, {Member("exploiter"): 0.25, RANDOM: 0.75}),
        ({"champion": 1.0, "latest": 1.0}, {MAIN: 1.0}),
        ({"champion": 1.0}, {MAIN: 1.0}),
        ({"main": 1.0, "random": 0.0}, {MAIN: 1.0}),
    ],
)
def test_shares_are_kept(against: dict[str, float], expected: dict[Member, float]) -> None:
    assert near(drawn(a_matchmaker(main={"against": against})), expected)


def test_the_champion_is_drawn_once_there_is_one() -> None:
    matchmaker = a_matchmaker(main={"against": {"champion": 1.0}})
    matchmaker.fill([FIRST, SECOND], SECOND)
    assert drawn(matchmaker) == {SECOND: 1.0}


def test_a_lonely_main_plays_itself() -> None:
    matchmaker = Matchmaker(league_config({"main": {"role": "main"}}).players, Payoff())
    assert drawn(matchmaker) == {MAIN: 1.0}
    assert matchmaker.opponents("main") == []


def test_a_main_that_beats_everyone_draws_uniformly() -> None:
    payoff = Payoff()
    for other in (RANDOM, FIRST, SECOND, THEIRS):
        payoff.add(MAIN, other, 1.0)
    shares = drawn(a_matchmaker(payoff, {"against": {"pfsp": 1.0}}))
    assert near(shares, dict.fromkeys((RANDOM, FIRST, SECOND, THEIRS), 0.25))


def test_results_after_the_first_draw_change_the_next_ones() -> None:
    payoff = Payoff(recency=1.0)
    matchmaker = a_matchmaker(payoff, {"against": {"pfsp": 1.0}})
    assert near(drawn(matchmaker), dict.fromkeys((RANDOM, FIRST, SECOND, THEIRS), 0.25))
    for a, b, score in ((MAIN, RANDOM, 1.0), (FIRST, MAIN, 1.0), (MAIN, SECOND, 0.5)):
        payoff.add(a, b, score)
        matchmaker.played(a, b)
    total = 1.0 + 0.25 + 0.25
    assert near(drawn(matchmaker), {RANDOM: 0.0, FIRST: 1 / total, SECOND: 0.25 / total, THEIRS: 0.25 / total})


def test_the_cache_equals_a_matchmaker_without_one() -> None:
    rng = np.random.default_rng(3)
    payoff = Payoff()
    cached = a_matchmaker(payoff)
    opponents = [RANDOM, FIRST, SECOND, THEIRS, Member("exploiter")]
    for game in range(300):
        a, b = MAIN, opponents[rng.integers(len(opponents))]
        payoff.add(a, b, float(rng.integers(3)) / 2)
        cached.played(b, a)
        fresh = a_matchmaker(payoff)
        for learner in ("main", "exploiter"):
            assert cached.draw(learner, random.Random(game)) == fresh.draw(learner, random.Random(game))


def test_an_exploiter_that_wins_too_little_meets_the_past() -> None:
    payoff = Payoff(recency=1.0)
    matchmaker = a_matchmaker(payoff)
    exploiter = Member("exploiter")
    for _ in range(19):
        payoff.add(exploiter, MAIN, 0.0)
    assert drawn(matchmaker, "exploiter") == {MAIN: 1.0}, "too few games to say so"
    payoff.add(exploiter, MAIN, 0.0)
    assert near(drawn(matchmaker, "exploiter"), {MAIN: 0.1, FIRST: 0.45, SECOND: 0.45})
    matchmaker.fill([], None)
    assert drawn(matchmaker, "exploiter") == {MAIN: 1.0}, "there is no past"
    matchmaker.fill([FIRST], None)
    for _ in range(3):
        payoff.add(exploiter, MAIN, 1.0)
    assert drawn(matchmaker, "exploiter") == {MAIN: 1.0}, "it has caught up: 3 of 23"


def test_the_opponents_of_a_learner_are_all_that_it_can_draw() -> None:
    matchmaker = a_matchmaker(old={"role": "past", "version": 8})
    everyone = [Member("exploiter", 3), FIRST, SECOND, Member("old", 8), RANDOM]
    assert matchmaker.opponents("main") == everyone
    assert matchmaker.opponents("exploiter") == [MAIN]
    assert set(drawn(matchmaker)) == {*everyone, MAIN}
