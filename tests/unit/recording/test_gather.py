"""`brayx.recording.gather`: the arrays that ticks have in common, and what is left out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from brayx.recording.columns import Forwarded
from brayx.recording.group import PACK_TICKS
from brayx.types import Step
from tests.recorded import Tick, columns_of


def tick(number: int, *forwards: Forwarded, **attributes: Any) -> Tick:
    return Tick(number, 0.0, 0.0, b"", b"", attributes, forwards=forwards)


def test_outputs_of_several_forwards_have_their_models_names() -> None:
    forwards = [
        (model, {"value": np.float32(number), "state": np.ones(2)}, number, 0.0) for number, model in enumerate("ab")
    ]
    columns = columns_of([tick(number, *forwards) for number in range(PACK_TICKS)])
    assert {name: array[0] for name, array in columns.arrays.items()} == {
        "a/value": 0.0, "a/policy_version": 0, "b/value": 1.0, "b/policy_version": 1,
    }  # fmt: skip


def test_outputs_that_not_every_tick_has_are_left_out() -> None:
    columns = columns_of([tick(0, ("a", np.ones(2), 1, 0.0), x=1), tick(1, x=2)])
    assert list(columns.arrays) == ["x"]
    assert columns.left_out == dict.fromkeys(("output", "policy_version"), "not every tick has it")


@pytest.mark.parametrize("odd", [{"x": 1.5}, {"y": {"b": 1}}, {"y": [1]}, {}])
def test_ticks_that_are_nested_in_another_way_keep_what_they_share(odd: dict[str, Any]) -> None:
    usual = {"x": 1.5, "y": {"a": np.ones(2), "b": 1}}
    columns = columns_of([tick(0, z=0, **usual), tick(1, z=1, **odd)])
    assert columns.arrays["z"].tolist() == [0, 1]
    assert "y/a" in columns.left_out
    assert ("x" in columns.arrays) == ("x" in odd)


def test_a_name_that_no_file_can_have_costs_no_other_array() -> None:
    columns = columns_of([tick(number, x=1.5, of={"\ud800": 1.0}) for number in range(2)])
    assert list(columns.arrays) == ["x"]
    assert columns.left_out == {"of/\\ud800": "its name is not Unicode text"}


@pytest.mark.parametrize(("rows", "is_kept"), [((2, 2), True), ((2, 3), False)])
def test_steps_of_several_agents_are_kept_if_they_are_as_many_at_each_tick(
    rows: tuple[int, ...], is_kept: bool
) -> None:
    ticks = []
    for number, count in enumerate(rows):
        log_prob = np.full(count, number, np.float32)
        step = Step(np.ones((count, 4)), np.zeros((count, 2)), log_prob, np.ones(count, np.int64))
        ticks.append(tick(number, step=step, z=number))
    columns = columns_of(ticks)
    assert columns.arrays["z"].tolist() == [0, 1]
    assert ("log_prob" in columns.arrays) is is_kept
    if is_kept:
        assert columns.arrays["log_prob"].tolist() == [[0, 0], [1, 1]]
    else:
        assert "its shape varies" in columns.left_out["log_prob"]
