"""`brayx.replay.samplers` and `removers`: frequencies by a chi-square bound, oracles for the kept columns."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brayx.replay.removers import LowestPriority, Oldest, Reservoir
from brayx.replay.samplers import Importance, Prioritised, Uniform


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def bound(degrees: int) -> float:
    """The chi-square value exceeded once in a million draws (Wilson and Hilferty's approximation, z = 4.75)."""
    return degrees * (1 - 2 / (9 * degrees) + 4.75 * (2 / (9 * degrees)) ** 0.5) ** 3


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


@settings(max_examples=200, deadline=None)
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


@settings(max_examples=100, deadline=None)
@given(counts=st.lists(st.integers(1, 12), min_size=1, max_size=10), capacity=st.integers(1, 8))
def test_the_oldest_is_replaced(counts, capacity):
    remover, rng, stored, number = Oldest(capacity), np.random.default_rng(0), {}, 0
    for count in counts:
        slots = remover.place(count, None, rng)
        assert len(set(slots[slots >= 0].tolist())) == (slots >= 0).sum()
        for slot in slots:
            if slot >= 0:
                stored[int(slot)] = number
            number += 1
        assert sorted(stored.values()) == list(range(max(0, number - capacity), number))


PRIORITIES = st.lists(st.floats(0.01, 100), min_size=1, max_size=12)


@settings(max_examples=200, deadline=None)
@given(pushes=st.lists(PRIORITIES, min_size=1, max_size=8), capacity=st.integers(1, 8))
def test_the_lowest_priority_is_replaced(pushes, capacity):
    remover, rng, stored = LowestPriority(capacity), np.random.default_rng(0), {}
    for push in pushes:
        before = sorted(stored.values())
        slots = remover.place(len(push), np.array(push), rng)
        for slot, priority in zip(slots, push, strict=True):
            if slot >= 0:
                stored[int(slot)] = priority
        new = sorted(push)[-capacity:]
        assert sorted(stored.values()) == sorted(before[max(0, len(before) + len(new) - capacity) :] + new)


@settings(max_examples=100, deadline=None)
@given(pushes=st.lists(st.integers(1, 12), min_size=1, max_size=8), capacity=st.integers(1, 8))
def test_a_reservoir_keeps_the_highest_keys_for_any_order_of_arrival(pushes, capacity):
    remover, stored, keys = Reservoir(capacity), {}, []
    for number, count in enumerate(pushes):
        slots = remover.place(count, None, np.random.default_rng(number))
        drawn = np.log1p(-np.random.default_rng(number).random(count))
        keys += drawn.tolist()
        for slot, key in zip(slots, drawn, strict=True):
            if slot >= 0:
                stored[int(slot)] = float(key)
    assert sorted(stored.values()) == sorted(keys)[-capacity:]


def test_a_reservoir_is_a_weighted_sample_of_the_stream():
    """With one slot, column ``i`` of the stream remains with probability ``w_i / sum w``."""
    weights, counts, rng = np.array([1.0, 2.0, 3.0, 4.0, 0.0]), np.zeros(5), np.random.default_rng(3)
    for _ in range(4000):
        remover, stored = Reservoir(1), -1
        for number, weight in enumerate(weights):
            if remover.place(1, np.array([weight]), rng)[0] >= 0:
                stored = number
        counts[stored] += 1
    assert counts[4] == 0
    assert chi_square(counts[:4], 400 * weights[:4]) < bound(3)


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
