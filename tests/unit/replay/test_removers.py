"""`brayx.replay.removers`: oracles for the kept columns, and a reservoir's frequencies."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from brayx.replay.removers import LowestPriority, Oldest, Reservoir
from tests.unit.replay.frequencies import bound, chi_square


@settings(max_examples=100)
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


@settings(max_examples=200)
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


@settings(max_examples=100)
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
