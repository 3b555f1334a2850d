"""Fields of a body: valid ones become numbers; the error for any other names the field and the index."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from brayx.components import load
from brayx.errors import BadBody
from brayx.gamecore.fields import array_field, index_field, number_field
from brayx.jobs.shipped import TEMPLATES


def test_numbers_become_an_array() -> None:
    body = {"obs": [[1, 2.5], [1, -3]], "one": 4, "image": [[0, 255]], "mask": [True, False]}
    assert array_field(body, "obs").tolist() == [[1.0, 2.5], [1.0, -3.0]]
    assert array_field(body, "obs").dtype == np.float32
    assert array_field(body, "obs", np.float64, (4,)).tolist() == [1.0, 2.5, 1.0, -3.0]
    assert array_field(body, "one").shape == ()
    assert array_field(body, "image", np.uint8).tolist() == [[0, 255]]
    assert array_field(body, "mask", np.int8).tolist() == [1, 0]
    assert array_field(body, "mask", np.bool_).tolist() == [True, False]
    assert array_field({"obs": [2**64, 0]}, "obs", np.float64).tolist() == [2.0**64, 0.0]
    assert number_field(body, "one") == 4.0
    assert index_field(body, "one", 5) == 4


@pytest.mark.parametrize(
    ("value", "dtype", "says"),
    [
        ([1, None], np.float32, r"x\[1\] is null, expected a finite number"),
        ([[1, 2], [3, float("inf")]], np.float32, r"x\[1, 1\] is inf, expected a finite number"),
        ([1, 1e40], np.float32, r"x\[1\] is 1e\+40, expected a finite number"),
        ([1, 300], np.uint8, r"x\[1\] is 300, expected a whole number that uint8 can hold"),
        ([1, 0.5], np.int8, r"x\[1\] is 0\.5, expected a whole number that int8 can hold"),
        ([1, "1"], np.float32, r"x\[1\] is '1', expected a finite number"),
        ([1, "1"], np.int8, r"x\[1\] is '1', expected a whole number"),
        ([[1, 2], [True, 2.5]], np.float32, r"x\[1, 0\] is true, expected a finite number"),
        ([[1, 2], [True, 2.5]], np.float64, r"x\[1, 0\] is true, expected a finite number"),
        ("1", np.float32, "x is '1', expected a finite number"),
        (True, np.float32, "x is true, expected a finite number"),
        ([1, 2], np.bool_, r"x\[0\] is 1, expected a whole number that bool can hold"),
        ([0, 10**400], np.float32, r"x\[1\] is 10+\.\.\.0+, expected a finite number"),
        ([0, 10**400], np.float64, r"x\[1\] is 10+\.\.\.0+, expected a finite number"),
        ([0, 10**39], np.float32, r"x\[1\] is 10{39}, expected a finite number"),
        ("words", np.float32, "x is 'words', expected a finite number"),
        ({"y": 1}, np.float32, "x is {'y': 1}, expected a finite number"),
        ([[1], [1, 2]], np.float32, "x is lists of different lengths, expected numbers"),
    ],
)
@pytest.mark.filterwarnings("error")  # it would be on the service's terminal
def test_the_error_for_a_bad_value_names_its_place(value: Any, dtype: Any, says: str) -> None:
    with pytest.raises(BadBody, match=says) as refused:
        array_field({"x": value}, "x", dtype)
    assert refused.value.details["field"].startswith("x")
    assert len(refused.value.message) < 200


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), 1e39, 10**400, "1", [1]])
def test_a_number_is_finite(value: Any) -> None:
    with pytest.raises(BadBody, match="r is ") as refused:
        number_field({"r": value}, "r")
    assert refused.value.details == {"field": "r"}


def test_ranges_and_shapes_are_checked() -> None:
    with pytest.raises(BadBody, match=r"r is 2, .*0 to 1") as refused:
        number_field({"r": 2}, "r", 0, 1)
    assert refused.value.details == {"field": "r"}
    for value in (-1, 3, 1.0, True, None):
        with pytest.raises(BadBody, match=r"i is .*0 to 2"):
            index_field({"i": value}, "i", 3)
    with pytest.raises(BadBody, match=r"x .*\[2\].*\[3\]"):
        array_field({"x": [1, 2]}, "x", shape=(3,))
    for body in (None, [], {"y": 1}, "x"):
        with pytest.raises(BadBody, match="'x'") as missing:
            number_field(body, "x")
        assert missing.value.details == {"field": "x"}
    with pytest.raises(BadBody, match="'obs': it has 'observation'; rename 'observation' to 'obs'"):
        array_field({"observation": [1]}, "obs")


@pytest.mark.parametrize(
    ("folder", "module", "body", "says"),
    [
        ("catch", "catch_features", {"row": -1, "column": 0, "paddle": 0}, "row is -1, expected a whole number"),
        ("catch", "catch_features", {"row": 0, "column": None, "paddle": 0}, "column is null"),
        ("league", "four_agent", {"board": [0] * 41 + [None], "legal": [1] * 7}, r"board\[41\] is null"),
        ("league", "four_agent", {"board": [0] * 42, "legal": [1] * 6}, r"legal is shape \[6\]"),
    ],
)
def test_shipped_agents_refuse_what_they_cannot_use(folder: str, module: str, body: Any, says: str) -> None:
    encode = load(module, "encode", str(TEMPLATES / folder))
    with pytest.raises(BadBody, match=says):
        encode(body)
