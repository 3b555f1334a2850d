"""`brayx.replay.table`: samples equal the inserted columns; ids, lag and rate."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brayx.replay.config import BufferConfig
from brayx.replay.limiter import RateLimiter
from brayx.replay.table import Table


def columns(numbers, version=0, **more):
    """Columns of one transition each, whose rewards are ``numbers``."""
    numbers = np.asarray(numbers, np.float32)
    pairs = np.stack([numbers, numbers + 0.5], axis=1)
    mask = np.zeros(pairs.shape, np.float32)
    mask[:, 0] = 1
    return {
        "obs": np.repeat(pairs[..., None], 3, axis=2),
        "reward": pairs,
        "mask": mask,
        "policy_version": np.full(pairs.shape, version, np.int64),
        **{key: np.stack([np.asarray(value, np.float32)] * 2, axis=1) for key, value in more.items()},
    }


def stored(table):
    return sorted(table._arrays["reward"][table._alive, 0].tolist())


@settings(max_examples=100)
@given(counts=st.lists(st.integers(1, 9), min_size=1, max_size=10), capacity=st.integers(1, 6))
def test_samples_are_among_the_newest_columns(counts, capacity):
    table, number = Table.uniform(capacity, 5, seed=0), 0
    for count in counts:
        table.insert(columns(range(number, number + count)))
        number += count
        batch = table.sample()
        assert batch["obs"].shape == (5, 2, 3)
        assert (batch["obs"] == batch["reward"][..., None]).all()
        assert (batch["reward"][:, 1] == batch["reward"][:, 0] + 0.5).all()
        assert batch["reward"][:, 0].min() >= number - capacity
        assert stored(table) == list(range(max(0, number - capacity), number))
    assert table.replaced + len(table) + sum(max(0, count - capacity) for count in counts) == number


def test_a_sample_is_a_copy():
    table = Table.uniform(2, 1, seed=0)
    table.insert(columns([1]))
    table.sample()["reward"][:] = 7
    assert table.sample()["reward"][0, 0] == 1


def test_priorities_are_set_by_index_and_stale_ones_are_ignored():
    table = Table.prioritised(4, 400, exponent=1.0, seed=0)
    table.insert(columns(range(4)))
    batch = table.sample()
    assert batch["weight"].shape == batch["index"].shape == (400,)
    assert table.update_priorities(batch["index"], np.where(batch["reward"][:, 0] == 2, 1.0, 0.0)) == 400
    again = table.sample()
    assert (again["reward"][:, 0] == 2).all()
    table.insert(columns([10, 11, 12]))  # in place of 0, 1 and 2
    assert table.update_priorities(again["index"], np.full(400, 1e9)) == 0
    assert table.stale == 400
    assert table.sample()["reward"][:, 0].max() == 12, "columns that took the same slots are unchanged"


def test_indices_of_another_table_are_ignored(monkeypatch):
    chance = iter([7, 7, 8])
    monkeypatch.setattr("brayx.replay.table.secrets.randbits", lambda bits: next(chance))
    ours, *others = (Table.prioritised(4, 4, seed=0, shard=shard) for shard in (126, 127, 126))
    for table in (ours, *others):
        table.insert(columns(range(4)))
    for other in others:
        index = other.sample()["index"]
        assert (index >= 0).all()
        assert ours.update_priorities(index, np.ones(4)) == 0
        assert other.update_priorities(index, np.ones(4)) == 4
    assert ours.stale == 0


@pytest.mark.parametrize("priority", [np.nan, -1.0, np.inf])
def test_an_invalid_priority_is_refused(priority):
    table = Table.prioritised(4, 4, seed=0)
    table.insert(columns(range(4)))
    with pytest.raises(ValueError, match="priority"):
        table.update_priorities(table.sample()["index"], np.array([1, 1, 1, priority]))


def test_a_pushed_priority_is_kept():
    table = Table.prioritised(4, 1000, exponent=1.0, seed=0)
    table.insert(columns(range(2), priority=[1.0, 3.0]))
    counts = np.bincount(table.sample()["reward"][:, 0].astype(int))
    assert counts.tolist() == pytest.approx([250, 750], abs=1)


@pytest.mark.parametrize("remover", ["oldest", "lowest_priority", "reservoir"])
@pytest.mark.parametrize("sampler", ["uniform", "prioritised"])
def test_old_columns_are_dropped_and_counted_for_every_sampler_and_remover(sampler, remover):
    config = BufferConfig(size=2, batch_size=4, sampler=sampler, remover=remover)
    table = Table.of(config, seed=0)
    for version in range(8):
        table.insert(columns([version], version))
    assert set(table.sample(least_version=5)["reward"][:, 0].tolist()) <= {5, 6, 7}
    assert table.dropped == {"policy_lag": 5}
    assert stored(table) == [5, 6, 7]
    table.insert(columns([2], 2))
    assert 2 not in table.sample(least_version=5)["reward"][:, 0], "a late column"
    assert table.sample(least_version=9) is None
    table.insert(columns(range(20, 28), 9))
    assert len(table) == 8, "their slots are free again"
    assert set(table.sample(least_version=9)["reward"][:, 0].tolist()) <= set(range(20, 28))


def test_masked_steps_do_not_count_for_the_age():
    table = Table.uniform(4, 4, seed=0)
    masked = columns([1], 5)
    masked["policy_version"][:, 1] = 0
    table.insert(masked)
    assert table.sample(least_version=5) is not None


def test_the_rate_is_enforced_and_drops_are_counted():
    table = Table.uniform(100, 4, RateLimiter(2.0, min_size=4, samples=6))
    assert table.sample() is None
    assert table.insert(columns(range(20))) == 8
    assert table.dropped == {"rate_limited": 12}
    samples = 0
    while table.sample() is not None:
        samples += 4
    assert samples == 16
    assert table.room == 8
