"""`brayx.replay.samplers` against a running sum over all weights."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brayx.replay.samplers import SumTree

WEIGHTS = st.one_of(st.just(0.0), st.floats(1e-3, 1e3))


@settings(max_examples=200, deadline=None)
@given(
    capacity=st.integers(1, 40),
    writes=st.lists(st.lists(st.tuples(st.integers(0, 39), WEIGHTS), max_size=20), max_size=6),
    places=st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=20),
)
def test_it_equals_a_running_sum(capacity, writes, places):
    tree, naive = SumTree(capacity), np.zeros(capacity)
    for write in writes:
        indices = np.array([index % capacity for index, _ in write], np.int64)
        weights = np.array([weight for _, weight in write])
        tree[indices] = weights
        for index, weight in zip(indices, weights, strict=True):
            naive[index] = weight
    assert tree[np.arange(capacity)].tolist() == naive.tolist()
    assert tree.total == pytest.approx(naive.sum())
    if naive.sum() == 0:
        with pytest.raises(ValueError, match="all weights are 0"):
            tree.find(np.zeros(1))
        return
    places_of_total = np.array(places) * tree.total
    ends = np.cumsum(naive)
    for place, leaf in zip(places_of_total, tree.find(places_of_total), strict=True):
        assert naive[leaf] > 0
        assert ends[leaf] - naive[leaf] - 1e-6 <= place <= ends[leaf] + 1e-6


def test_a_position_on_a_border_maps_to_the_next_index_and_past_the_end_to_the_last():
    tree = SumTree(5)
    tree[np.array([1, 3])] = np.array([2.0, 1.0])
    assert tree.find(np.array([0.0, 1.999, 2.0, 2.999, 3.0, 4.0])).tolist() == [1, 1, 3, 3, 3, 3]


@pytest.mark.parametrize(("index", "weight"), [(5, 1.0), (-1, 1.0), (0, -1.0), (0, np.nan), (0, np.inf)])
def test_invalid_weights_are_refused_and_change_nothing(index, weight):
    tree = SumTree(5)
    with pytest.raises(ValueError):
        tree[np.array([1, index])] = np.array([1.0, weight])
    assert tree.total == 0
