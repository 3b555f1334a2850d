"""`brayx.replay.samplers`: frequencies by a chi-square bound, and sums against a running sum over all weights."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brayx.replay.samplers import Importance, Prioritised, SumTree, Uniform
from tests.unit.replay.frequencies import bound, chi_square


def test_uniform_draws_all_equally_often_after_removals():
    sampler = Uniform(32)
    sampler.insert(np.arange(32), None)
    sampler.remove(np.array([0, 5, 30, 31]))
    sampler.insert(np.array([5]), None)
    stored = sorted({*range(1, 30)})
    slots, weights = sampler.draw(29_000, np.random.default_rng(1))
    assert weights is None
    counts = np.bincount(slots, minlength=32)
    assert counts[[0, 30, 31]].sum() == 0
    assert chi_square(counts[stored], np.full(len(stored), 1000.0)) < bound(len(stored) - 1)


@settings(max_examples=200)
@given(st.lists(st.sets(st.integers(0, 19)), min_size=1, max_size=12))
def test_uniform_draws_stored_columns_only(changes):
    sampler, stored = Uniform(20), set()
    for change in changes:
        removed, new = change & stored, change - stored
        sampler.remove(np.array(sorted(removed), np.int64))
        sampler.insert(np.array(sorted(new), np.int64), None)
        stored = (stored - removed) | new
        assert set(sampler._slots[: sampler._count].tolist()) == stored


def test_prioritised_draws_by_powers_of_priorities_with_importance_weights():
    sampler = Prioritised(10, exponent=0.5)
    priorities = np.array([1.0, 4.0, 9.0, 0.0, 16.0])
    sampler.insert(np.arange(5), priorities)
    rng, counts = np.random.default_rng(2), np.zeros(5)
    for _ in range(500):
        slots, weights = sampler.draw(20, rng)
        counts += np.bincount(slots, minlength=5)
    shares = np.sqrt(priorities + 1e-6) / np.sqrt(priorities + 1e-6).sum()
    common = priorities > 0
    assert chi_square(counts[common], 10_000 * shares[common]) < bound(3)
    unbiased = 1 / (5 * shares[slots])
    assert weights == pytest.approx(unbiased / unbiased.max(), rel=1e-5)
    assert weights.dtype == np.float32


def test_an_exponent_of_0_is_uniform():
    sampler = Prioritised(4, exponent=0.0)
    sampler.insert(np.arange(4), np.array([1.0, 100.0, 0.0, 5.0]))
    slots, weights = sampler.draw(4000, np.random.default_rng(0))
    assert (np.bincount(slots) == 1000).all(), "draws are stratified"
    assert (weights == 1).all()


def test_a_new_column_has_the_highest_priority_so_far():
    sampler = Prioritised(4, exponent=1.0)
    sampler.insert(np.array([0]), np.array([7.0]))
    sampler.insert(np.array([1]), None)
    assert sampler._tree[np.array([1])] == pytest.approx(7.0)


@pytest.mark.parametrize(("start", "batches", "before", "beta"), [
    (0.4, None, 0, 0.4), (0.4, None, 10**9, 0.4), (0.4, 10, 0, 0.4), (0.4, 10, 5, 0.7), (0.4, 10, 10, 1.0),
    (0.4, 10, 99, 1.0), (0.0, 4, 1, 0.25), (1.0, 10, 3, 1.0),
])  # fmt: skip
def test_weights_match_the_paper(start, batches, before, beta):
    priorities, alpha = np.array([1.0, 4.0, 9.0, 0.25, 16.0]), 0.6
    sampler = Prioritised(8, alpha)
    sampler.insert(np.arange(5), priorities)
    slots, full = sampler.draw(7, np.random.default_rng(0))
    unweighted = {"reward": np.zeros(7), "weight": full}
    batch = Importance(start, batches).weigh(unweighted, before)
    p = priorities**alpha / (priorities**alpha).sum()
    paper = (5 * p[slots]) ** -beta
    np.testing.assert_allclose(batch["weight"], paper / paper.max(), rtol=1e-5)
    assert batch["weight"].dtype == np.float32
    assert batch["reward"] is unweighted["reward"]
    assert unweighted["weight"] is full, "a buffer may return the same batch again"


def test_a_batch_without_weights_is_unchanged():
    batch = {"reward": np.zeros(2)}
    assert Importance().weigh(batch, 5) is batch


WEIGHTS = st.one_of(st.just(0.0), st.floats(1e-3, 1e3))


@settings(max_examples=200)
@given(
    capacity=st.integers(1, 40),
    writes=st.lists(st.lists(st.tuples(st.integers(0, 39), WEIGHTS), max_size=20), max_size=6),
    places=st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=20),
)
def test_a_sum_tree_equals_a_running_sum(capacity, writes, places):
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


def test_a_position_on_a_border_of_a_sum_tree_maps_to_the_next_index_and_past_the_end_to_the_last():
    tree = SumTree(5)
    tree[np.array([1, 3])] = np.array([2.0, 1.0])
    assert tree.find(np.array([0.0, 1.999, 2.0, 2.999, 3.0, 4.0])).tolist() == [1, 1, 3, 3, 3, 3]


@pytest.mark.parametrize(("index", "weight"), [(5, 1.0), (-1, 1.0), (0, -1.0), (0, np.nan), (0, np.inf)])
def test_invalid_weights_of_a_sum_tree_are_refused_and_change_nothing(index, weight):
    tree = SumTree(5)
    with pytest.raises(ValueError):
        tree[np.array([1, index])] = np.array([1.0, weight])
    assert tree.total == 0
