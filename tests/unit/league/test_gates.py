"""`brayx.league.gates`: the interval against its definition and published numbers; verdicts name their number."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from brayx.league.config import GateConfig
from brayx.league.gates import PATIENCE, at_every_look, judge, wilson
from brayx.league.member import Member
from brayx.league.payoff import Pair, Payoff

NEW, OLD, PAST, SCRIPT = Member("main", 9), Member("main", 5), Member("main", 2), Member("random")


def payoff(**results: tuple[int, int, int]) -> Payoff:
    """Wins, draws and losses of the candidate, by rival."""
    rivals = {"old": OLD, "past": PAST, "script": SCRIPT}
    book = Payoff()
    for name, counts in results.items():
        for count, score in zip(counts, (1.0, 0.5, 0.0), strict=True):
            for _ in range(count):
                book.add(NEW, rivals[name], score)
    return book


@pytest.mark.parametrize(
    ("wins", "draws", "losses", "low", "high"),
    [
        (0, 0, 0, 0.0, 1.0),
        (10, 0, 0, 0.7225, 1.0),
        (0, 10, 0, 0.2366, 0.7634),
        (5, 0, 5, 0.2366, 0.7634),
        # Newcombe 1998, "Two-sided confidence intervals for the single proportion", table I, method 3:
        (81, 0, 182, 0.2553, 0.3662),
        (15, 0, 133, 0.0624, 0.1605),
        (0, 0, 20, 0.0, 0.1611),
        (1, 0, 28, 0.0061, 0.1718),
    ],
)
def test_the_interval_has_its_published_numbers(wins: int, draws: int, losses: int, low: float, high: float) -> None:
    assert wilson(wins, draws, losses) == pytest.approx((low, high), abs=5.1e-5)


@given(st.integers(0, 60), st.integers(0, 60), st.integers(0, 60), st.sampled_from([0.5, 0.9, 0.95, 0.999]))
def test_the_interval_holds_the_rates_that_the_games_do_not_reject(
    wins: int, draws: int, losses: int, confidence: float
) -> None:
    """Wilson's definition: p is inside if ``|rate - p| <= z sqrt(p (1 - p) / n)``."""
    z = {0.5: 0.6744898, 0.9: 1.6448536, 0.95: 1.9599640, 0.999: 3.2905267}[confidence]
    low, high = wilson(wins, draws, losses, confidence)
    n = wins + draws + losses
    p = np.linspace(0, 1, 2001)
    rate = (wins + draws / 2) / n if n else 0.5
    inside = np.abs(rate - p) <= z * np.sqrt(p * (1 - p) / n) + 1e-9 if n else np.ones_like(p, bool)
    assert low == pytest.approx(p[inside][0], abs=1e-3)
    assert high == pytest.approx(p[inside][-1], abs=1e-3)


@pytest.mark.parametrize(
    ("book", "passed", "reason"),
    [
        (payoff(), False, "main:9 played 0 games against main:5, expected 100 or more"),
        (payoff(old=(99, 0, 0)), False, "main:9 played 99 games against main:5, expected 100 or more"),
        (payoff(old=(100, 0, 0)), True, "its win rate against main:5 is 0.946 to 1.000 (95% confidence, 100 games)"),
        (payoff(old=(0, 0, 100)), False, "is 0.000 to 0.054 (95% confidence, 100 games), expected a lower bound above"),
        (payoff(old=(0, 100, 0)), False, "is 0.384 to 0.616 (95% confidence, 100 games), expected a lower bound above"),
        (payoff(old=(61, 0, 39)), False, "is 0.490 to 0.718"),
        (payoff(old=(62, 0, 38)), True, "is 0.500 to 0.727"),
        (payoff(old=(80, 0, 20), past=(40, 0, 60)), False, "main:2 beats main:9, whose win rate is 0.309 to 0.498"),
        (payoff(old=(80, 0, 20), past=(41, 0, 59)), True, "none of 2 past players beats it"),
        (payoff(old=(80, 0, 20), script=(0, 0, 9)), False, "random beats main:9, whose win rate is 0.000 to 0.299"),
    ],
)
def test_a_verdict_names_the_number_that_decided_it(book: Payoff, passed: bool, reason: str) -> None:
    verdict = judge(NEW, OLD, book, [NEW, OLD, PAST, SCRIPT], GateConfig())
    assert verdict.passed is passed
    assert reason in verdict.reason


def test_the_first_champion_needs_only_that_no_past_player_beats_it() -> None:
    passed = judge(NEW, None, payoff(), [PAST], GateConfig())
    assert passed == (True, "there is no champion yet, and none of 1 past players beats it")
    assert not judge(NEW, None, payoff(past=(0, 0, 20)), [PAST], GateConfig()).passed


def test_the_champion_does_not_follow_itself() -> None:
    assert judge(OLD, OLD, payoff(), [], GateConfig()) == (False, "main:5 is the champion already")


@given(st.integers(0, 300), st.integers(0, 300), st.integers(0, 300), st.integers(1, 300))
def test_a_gate_opens_exactly_where_the_rule_says(wins: int, draws: int, losses: int, min_games: int) -> None:
    pair = Pair(wins, draws, losses, 0.0, 1.0)
    key = (OLD, NEW)
    book = Payoff(pairs={key: pair.reversed()})
    n = wins + draws + losses
    p = (wins + draws / 2) / max(n, 1)
    z = 2.394930013
    beats = (
        n >= min_games and p > 0.5 and (p - 0.5) ** 2 > z * z * 0.25 / n
    )  # the test of p = 0.5, which Wilson inverts
    assert judge(NEW, OLD, book, [], GateConfig(min_games=min_games)).passed is beats


@pytest.mark.parametrize(
    ("confidence", "min_games", "draws"), [(0.95, 100, 0.0), (0.95, 20, 0.0), (0.95, 100, 0.3), (0.9, 50, 0.0)]
)
def test_a_candidate_as_strong_as_the_champion_rarely_passes(confidence: float, min_games: int, draws: float) -> None:
    """However often it is looked at, in games until it has won or has no more."""
    passes = passed(0.5, draws, confidence, min_games)
    assert passes <= 1 - confidence
    assert passes >= 0.5 * (1 - confidence) or draws, "no stricter than it needs to be"


def test_a_stronger_candidate_passes() -> None:
    assert passed(0.6, 0.0, 0.95, 100) > 0.95


def passed(win_rate: float, draws: float, confidence: float, min_games: int) -> float:
    """Share of 20,000 candidates that the lower bound lets pass after any game; some games are drawn."""
    rng = np.random.default_rng(0)
    games = np.arange(1, PATIENCE * min_games + 1)
    won = rng.random((20_000, len(games))) < win_rate
    scores = np.where(rng.random(won.shape) < draws, 0.5, won).cumsum(1)
    # The bound rises with the score: find the lowest score that passes at each number of games.
    level = at_every_look(confidence)
    needed = [
        next((half for half in range(n, 2 * n + 1) if lower(half, n, level) > 0.5), 2 * n + 1) for n in games.tolist()
    ]
    beats = 2 * scores >= np.array(needed)
    return float(beats[:, min_games - 1 :].any(1).mean())


def lower(half_points: int, games: int, confidence: float) -> float:
    """Lower bound of a win rate from its points, two for a win."""
    return wilson(half_points // 2, half_points % 2, games - half_points // 2 - half_points % 2, confidence)[0]
