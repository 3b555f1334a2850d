"""Limits of observation spaces, and the first value or row that does not keep them."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest

from brayx.spaces import by_path, limits_of, outside, row_without_action

SPACES = gymnasium.spaces


def test_only_whole_numbers_have_limits_by_the_path_in_the_observation() -> None:
    space = SPACES.Dict(
        {
            "box": SPACES.Box(0.0, 1.0, (2,)),
            "kind": SPACES.Discrete(3, start=5),
            "parts": SPACES.Tuple([SPACES.MultiDiscrete([2, 4], start=[0, 10]), SPACES.Box(0.0, 1.0)]),
        }
    )
    limits = by_path(limits_of(space), "obs")
    assert {path: (leaf.low.tolist(), leaf.high.tolist()) for path, leaf in limits.items()} == {
        "obs/kind": (5, 7),
        "obs/parts/0": ([0, 10], [1, 13]),
    }


@pytest.mark.parametrize(
    ("values", "low", "high", "refusal"),
    [
        ([5, 7], 5, 7, ""),
        (9, 5, 7, "9, expected 5 to 7"),
        ([[5, 6], [7, 9]], 5, 7, "9 at [1, 1], expected 5 to 7"),
        ([[0, 10], [0, 9]], [0, 10], [1, 13], "9 at [1, 1], expected 10 to 13"),
        ([1.0, float("nan")], 0.0, 2.0, "nan at [1], expected 0 to 2"),
    ],
)
def test_the_first_value_out_of_bounds_is_named(values: object, low: object, high: object, refusal: str) -> None:
    assert outside(np.asarray(values), low, high) == refusal


@pytest.mark.parametrize(
    ("mask", "place"),
    [
        ([1, 0, 1, 0, 0], None),
        ([0, 0, 1, 0, 0], ((), 0)),
        ([[1, 0, 1, 0, 0], [1, 0, 0, 0, 0]], ((1,), 1)),
    ],
)
def test_a_row_whose_head_allows_no_action_is_found(mask: object, place: object) -> None:
    assert row_without_action(np.asarray(mask), [2, 3]) == place
