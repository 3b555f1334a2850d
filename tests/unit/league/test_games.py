"""`brayx.league.games`: what is a result, and what results say together."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from brayx.errors import BadResult
from brayx.league.games import Game, checked, ranks
from brayx.league.member import Member


@pytest.mark.parametrize(
    ("value", "expected"),
    [("win", "win"), ("draw", "draw"), ("loss", "loss"), (3, 3.0), (-0.5, -0.5), (np.float64(2.0), 2.0)],
)
def test_results_are_words_or_scores(value: Any, expected: str | float) -> None:
    assert checked(value) == expected
    assert type(checked(value)) is type(expected) or isinstance(value, np.float64)


@pytest.mark.parametrize(
    "value",
    ["", "Win", "won", "1", math.nan, math.inf, -math.inf, 10**400, True, False, None, b"win", ["win"], {}, 1j],
)
def test_what_is_no_result_is_refused(value: Any) -> None:
    with pytest.raises(BadResult) as refused:
        checked(value)
    assert refused.value.details.keys() == {"got"}


@pytest.mark.parametrize(
    ("teams", "places"),
    [
        ([["win"], ["loss"]], (0, 1)),
        ([["loss"], ["win"]], (1, 0)),
        ([["draw"], ["draw"]], (0, 0)),
        ([["loss"], ["win"], ["loss"]], (1, 0, 1)),
        ([["draw"], ["loss"], ["draw"]], (0, 2, 0)),
        ([["win", "win"], ["loss", "loss"]], (0, 1)),
        ([[3.0], [2.0]], (0, 1)),
        ([[2.0], [2.0]], (0, 0)),
        ([[1.0], [5.0], [1.0], [3.0]], (2, 0, 2, 1)),
        ([[1.0, 3.0], [2.0]], (0, 0)),
    ],
)
def test_results_give_places(teams: list[list[str | float]], places: tuple[int, ...]) -> None:
    assert ranks(teams) == places


@pytest.mark.parametrize(
    "teams",
    [
        [["win"], ["win"]],
        [["loss"], ["loss"]],
        [["win"], ["draw"]],
        [["draw"], ["loss"]],
        [["draw"], ["draw"], ["win"]],
        [["win"], [1.0]],
        [["win", "loss"], ["loss", "loss"]],
    ],
)
def test_contradictions_are_refused(teams: list[list[str | float]]) -> None:
    with pytest.raises(BadResult, match="expected"):
        ranks(teams)


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=6))
def test_places_of_scores_count_who_is_better(scores: list[float]) -> None:
    array = np.array(scores)
    expected = (array[None, :] > array[:, None]).sum(1)
    assert ranks([[score] for score in scores]) == tuple(expected)


def test_what_is_missing_is_named() -> None:
    game = Game("g", "main", [Member("main")] * 2)
    game.sessions["g-agent-0"] = 0
    assert game.missing == "1 of 2 sessions started"
    game.sessions["g-agent-1"] = 1
    game.results[0] = "win"
    game.ended = {0: "stop", 1: "idle"}
    assert game.missing == "1 of 2 sessions reported no result; 'g-agent-1' ended with reason 'idle'"
    game.results[1] = "loss"
    assert game.missing == ""
