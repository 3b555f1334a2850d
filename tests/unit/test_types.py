"""Nested arrays and the records sent between processes."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from brayx.types import Fragment, Step, flatten, stack, unflatten

SCALARS = st.floats(-1e3, 1e3, width=32)
TREES: st.SearchStrategy[Any] = st.recursive(
    SCALARS.map(lambda value: np.full((2, 3), value, np.float32)),
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3)
        | st.dictionaries(st.text("abc", min_size=1, max_size=3), inner, min_size=1, max_size=3)
        | st.tuples(inner, inner)
    ),
    max_leaves=6,
)


def test_flatten_names_leaves_by_path() -> None:
    a, b, c = np.zeros(1), np.ones(2), np.full(3, 2.0)
    flat = flatten({"image": a, "unit": [b, {"hp": c}]}, "obs")
    assert {path: leaf.tolist() for path, leaf in flat.items()} == {
        "obs/image": [0.0],
        "obs/unit/0": [1.0, 1.0],
        "obs/unit/1/hp": [2.0, 2.0, 2.0],
    }


def test_flatten_of_a_bare_array_keeps_the_prefix() -> None:
    assert list(flatten(np.zeros(3), "obs")) == ["obs"]


def test_unflatten_nests_the_leaves_under_a_prefix() -> None:
    leaves = {"obs": 0, "obs/a": 1, "obs/b/c": 2, "obs/b/d": 3, "observed/a": 4}
    assert unflatten(leaves, "obs") == {"a": 1, "b": {"c": 2, "d": 3}}
    assert unflatten({"a": 1, "b/c": 2}) == {"a": 1, "b": {"c": 2}}
    assert unflatten(leaves, "state") == {}


@given(TREES)
def test_stacked_trees_are_recovered_by_index(tree: Any) -> None:
    stacked = stack([tree, tree, tree])
    for index in range(3):
        for path, leaf in flatten(stacked).items():
            np.testing.assert_array_equal(leaf[index], flatten(tree)[path])


def test_trees_of_different_structure_do_not_stack() -> None:
    with pytest.raises(ValueError, match="key"):
        stack([{"a": np.zeros(1)}, {"b": np.zeros(1)}])


def steps(count: int) -> list[Step]:
    return [Step({"x": np.full(2, t, np.float32)}, np.asarray(t % 2), -0.5 * t, 3 + t) for t in range(count)]


def test_fragment_from_steps() -> None:
    fragment = Fragment.from_steps(
        steps(3), [1.0, 2.0, 3.0], {"x": np.full(2, 9, np.float32)}, terminated=False, truncated=True
    )
    assert len(fragment) == 3
    np.testing.assert_array_equal(fragment.obs["x"][:, 0], [0, 1, 2, 9])
    np.testing.assert_array_equal(fragment.action, [0, 1, 0])
    np.testing.assert_array_equal(fragment.log_prob, np.asarray([0, -0.5, -1.0], np.float32))
    np.testing.assert_array_equal(fragment.policy_version, [3, 4, 5])
    arrays = (fragment.reward, fragment.log_prob, fragment.policy_version)
    assert [array.dtype.name for array in arrays] == ["float32", "float32", "int64"]
    assert (fragment.terminated, fragment.truncated) == (False, True)
    assert fragment.extras == {}


def test_records_are_frozen_and_pickle() -> None:
    fragment = Fragment.from_steps(steps(2), [1.0, 1.0], steps(1)[0].obs, terminated=True, truncated=False)
    with pytest.raises(dataclasses.FrozenInstanceError):
        fragment.terminated = False  # type: ignore[misc]
    again = pickle.loads(pickle.dumps(fragment))
    np.testing.assert_array_equal(again.obs["x"], fragment.obs["x"])
    assert again.terminated
