"""`brayx.replay.buffer`: its batches, its drops, and their counts."""

from __future__ import annotations

import dataclasses

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brayx.errors import BadFragment
from brayx.replay.buffer import ReplayBuffer
from brayx.types import Columns
from tests.memory import MIB
from tests.unit.replay.made import CONFIG, WHOLE, changed, columns, fragment


def test_batches_are_first_in_first_out_and_given_once():
    buffer = ReplayBuffer(CONFIG)
    for number in range(3):
        buffer.push(fragment(WHOLE, number))
    assert [buffer.pop()["reward"][0, 0] for _ in range(3)] == [0, 1, 2]
    assert buffer.pop() is None


def test_the_oldest_is_dropped_and_counted():
    buffer = ReplayBuffer(CONFIG)
    for number in range(5):
        buffer.push(fragment(WHOLE, number))
    assert len(buffer) == 3
    assert buffer.pop()["reward"][0, 0] == 2
    assert buffer.stats() == {"pushed": 40, "waiting": 0, "batches": 2, "reused": 0, "dropped.full": 16}


def test_a_bad_fragment_is_counted_and_the_next_is_accepted():
    buffer = ReplayBuffer(CONFIG)
    with pytest.raises(BadFragment, match="NaN"):
        buffer.push(fragment(WHOLE, float("nan")))
    buffer.push(fragment(WHOLE))
    assert buffer.stats()["dropped.bad_fragment"] == WHOLE
    assert len(buffer) == 1


def test_flush_completes_the_unfinished_batch():
    buffer = ReplayBuffer(CONFIG)
    buffer.push(fragment(3, 1))
    assert buffer.pop() is None
    buffer.flush()
    assert buffer.pop()["mask"].tolist() == [[1, 1, 1, 0, 0], [0, 0, 0, 0, 0]]
    buffer.flush()
    assert buffer.pop() is None


def test_a_fifo_drops_batches_that_are_too_old_on_pop():
    buffer = ReplayBuffer(changed(max_policy_lag=1))
    buffer.push(columns(2, 1, version=1))
    buffer.push(columns(1, 2, version=1))
    buffer.push(columns(1, 3, version=2))
    buffer.published(3)
    batch = buffer.pop()
    assert batch["mask"].sum(axis=1).tolist() == [0, 4]
    assert batch["reward"][:, 0].tolist() == [2, 3]
    assert buffer.dropped == {"policy_lag": 12}
    assert buffer.pop() is None


def test_without_announcements_the_newest_version_is_the_newest_pushed():
    buffer = ReplayBuffer(changed(max_policy_lag=1))
    buffer.push(columns(2, version=1))
    buffer.push(columns(2, version=3))
    assert buffer.pop()["policy_version"].min() == 3
    assert buffer.dropped == {"policy_lag": 8}


@pytest.mark.parametrize("sampler", ["fifo", "uniform"])
def test_a_policy_version_that_was_never_published_is_refused(sampler):
    buffer = ReplayBuffer(changed(sampler=sampler))
    buffer.push(columns(2, version=9))
    buffer.published(4)
    buffer.push(columns(2, version=4))
    for replay in (columns(2, version=5), dataclasses.replace(fragment(3), policy_version=np.full(3, 5, np.int64))):
        with pytest.raises(BadFragment, match=r"policy_version: 5 .* 4"):
            buffer.push(replay)
    assert buffer.dropped == {"bad_fragment": 11}
    unlearned = columns(2, version=4)
    unlearned.arrays["policy_version"][:, -1] = 99  # of a step that only bootstraps
    buffer.push(unlearned)


def test_the_last_batch_is_reused_while_no_other_is_ready():
    buffer = ReplayBuffer(changed(max_reuse=2))
    assert buffer.pop() is None
    buffer.push(columns(2, 1))
    first = buffer.pop()
    assert buffer.pop(reuse=False) is None
    assert buffer.pop() is first
    buffer.push(columns(2, 2))
    assert buffer.pop()["reward"][0, 0] == 2
    assert [buffer.pop() is not None for _ in range(3)] == [True, True, False]
    assert buffer.stats()["reused"] == 3


def test_a_batch_that_is_too_old_is_not_reused():
    buffer = ReplayBuffer(changed(max_reuse=2, max_policy_lag=0))
    buffer.push(columns(2, version=1))
    assert buffer.pop() is not None
    buffer.published(2)
    assert buffer.pop() is None


@settings(max_examples=100)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9)), min_size=1, max_size=12))
def test_push_what_fits_never_drops(pushes):
    buffer, accepted = ReplayBuffer(CONFIG), 0
    for is_columns, size in pushes:
        replay = columns(size) if is_columns else fragment(size)
        rest = buffer.push_what_fits(replay)
        accepted += len(replay) - (0 if rest is None else len(rest))
        assert not buffer.dropped
        assert buffer.pushed == accepted
        assert len(buffer) <= CONFIG.size
    if len(buffer) < CONFIG.size:
        assert buffer.push_what_fits(columns(1)) is None


def test_waiting_for_the_rate_counts_as_waiting_for_room():
    buffer = ReplayBuffer(changed(sampler="uniform", samples_per_insert=1.0, min_columns=2))
    rest = buffer.push_what_fits(columns(10))
    assert len(rest) == 5 * 4
    assert buffer.stats()["columns"] == 5
    assert buffer.pop() is not None
    assert len(buffer.push_what_fits(rest)) == 3 * 4
    assert not buffer.dropped


@pytest.mark.parametrize("options", [{"sampler": "uniform", "samples_per_insert": 2.0}, {}])
def test_a_fragment_longer_than_the_buffer_is_pushed_in_pieces(options):
    buffer, numbers = ReplayBuffer(changed(**options), seed=0), np.arange(101, dtype=np.float32)
    rest = dataclasses.replace(fragment(100), obs=np.stack([numbers, numbers], 1), reward=numbers[:-1])
    seen, batch = set(), None
    for _ in range(200):
        if rest is not None:
            rest = buffer.push_what_fits(rest)
        batch = buffer.pop()
        seen |= set() if batch is None else set(batch["reward"][batch["mask"] > 0].tolist())
    assert rest is None
    assert buffer.pushed == 100
    assert not buffer.dropped
    if not options:
        assert seen == set(range(100 - 100 % WHOLE))


def test_a_bad_fragment_is_refused_before_any_of_it_is_stored():
    buffer, numbers = ReplayBuffer(changed(sampler="uniform", samples_per_insert=2.0)), np.zeros(100, np.float32)
    numbers[-1] = np.inf
    with pytest.raises(BadFragment, match=r"reward: .*NaN"):
        buffer.push_what_fits(dataclasses.replace(fragment(100), reward=numbers))
    assert buffer.dropped == {"bad_fragment": 100}
    assert (buffer.pushed, buffer.stats()["columns"]) == (0, 0)


def test_a_sampled_buffer_treats_fragments_and_columns_alike():
    buffer = ReplayBuffer(changed(sampler="uniform", batch_size=64), seed=0)
    buffer.push(fragment(6, 1))
    buffer.flush()
    buffer.push(columns(2, 2))
    batch = buffer.pop()
    assert batch["obs"].shape == (64, 5, 2)
    assert set(batch["reward"][batch["mask"] > 0].tolist()) == {1.0, 2.0}
    assert buffer.stats()["columns"] == 4
    assert "weight" not in batch


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("weight", 1.0, "reserved"),
        ("index", 1.0, "reserved"),
        ("priority", -1.0, "negative"),
    ],
)
def test_reserved_names_of_a_sampled_buffer_are_refused(name, value, message):
    buffer = ReplayBuffer(changed(sampler="prioritised"))
    arrays = columns(2).arrays
    with pytest.raises(BadFragment, match=message):
        buffer.push(Columns({**arrays, name: np.full(arrays["reward"].shape, value, np.float32)}))
    with pytest.raises(BadFragment, match=message):
        buffer.push(dataclasses.replace(fragment(3), extras={name: np.full(3, value, np.float32)}))


@pytest.mark.parametrize("sampler", ["fifo", "uniform", "prioritised"])
@pytest.mark.parametrize("reads", [True, False])
def test_memory_does_not_grow_with_time(sampler, reads):
    buffer = ReplayBuffer(changed(sampler=sampler), seed=0)

    def bytes_held() -> int:
        arrays = [a for batch in buffer._batches for a in batch.values()]
        if buffer.table is not None:
            table = buffer.table
            values_held = [v for part in (table, table._sampler, table._remover) for v in vars(part).values()]
            arrays += [*table._arrays.values(), *(v for v in values_held if isinstance(v, np.ndarray))]
        return sum(array.nbytes for array in arrays)

    for _ in range(20):
        buffer.push(columns(2))
    full = bytes_held()
    for number in range(2000):
        buffer.push(columns(1 + number % 5))
        buffer.push(fragment(1 + number % 7))
        if reads:
            buffer.pop()
    assert bytes_held() <= full
    stats = buffer.stats()
    columns_held = stats.get("columns", stats["batches"] * 2) * 4
    assert columns_held <= CONFIG.size * WHOLE
    assert stats["pushed"] == sum(4 * (1 + n % 5) + 1 + n % 7 for n in range(2000)) + 20 * WHOLE


def test_an_expired_unfinished_batch_does_not_mix_with_new_columns():
    """Otherwise every later batch would be half of one version and half of the next."""
    buffer = ReplayBuffer(changed(max_policy_lag=0, batch_size=4))
    buffer.push(columns(2, 1, version=1))
    for version in (2, 3):
        buffer.expire(version)
        buffer.push(columns(4, version, version=version))
        assert set(buffer.pop()["reward"].flat) == {version}
    assert buffer.dropped == {"policy_lag": 2 * 4}
    assert buffer.stats()["waiting"] == 0


def test_late_columns_do_not_delay_new_ones():
    """Otherwise a worker slower than an update would make half of every later batch old."""
    buffer = ReplayBuffer(changed(max_policy_lag=0, batch_size=4))
    buffer.expire(2)
    buffer.push(columns(2, 1, version=1))
    buffer.push(columns(4, 2, version=2))
    assert set(buffer.pop()["reward"].flat) == {2}
    assert buffer.dropped == {"policy_lag": 2 * 4}
    assert buffer.stats()["waiting"] == 0


def test_expired_batches_free_their_room_at_once():
    buffer = ReplayBuffer(changed(max_policy_lag=0, size=2))
    buffer.push(columns(2, 1, version=1))
    buffer.push(columns(2, 1, version=1))
    assert not buffer.has_room
    buffer.expire(2)
    assert (buffer.has_room, len(buffer)) == (True, 0)
    assert buffer.dropped == {"policy_lag": 16}


def test_current_columns_move_up_together_with_the_unfinished_one():
    buffer = ReplayBuffer(changed(max_policy_lag=1, batch_size=4))
    buffer.push(columns(1, 1, version=1))
    buffer.push(columns(1, 2, version=2))
    buffer.push(dataclasses.replace(fragment(2, 3), policy_version=np.full(2, 2)))
    buffer.expire(3)
    assert buffer.stats()["waiting"] == 4 + 2
    buffer.push(dataclasses.replace(fragment(2, 4), policy_version=np.full(2, 3)))
    buffer.push(columns(2, 5, version=3))
    batch = buffer.pop()
    assert batch["reward"][:, 0].tolist() == [2, 3, 5, 5]
    assert batch["reward"][1].tolist() == [3, 3, 4, 4, 0]
    assert batch["terminated"][1].tolist() == [False, True, False, True, False]
    assert batch["mask"].sum() == 4 * 4
    assert buffer.dropped == {"policy_lag": 4}


ROWS = 64

PUSHES = 4_000
"""Of so many columns each."""

ROUNDS = 4


def used() -> int:
    return psutil.Process().memory_full_info().uss


@pytest.mark.parametrize(
    "options",
    [
        {"sampler": "fifo", "max_policy_lag": 0},
        {"sampler": "uniform"},
        {"sampler": "prioritised", "remover": "lowest_priority"},
        {"sampler": "uniform", "remover": "reservoir", "samples_per_insert": 1.0},
    ],
    ids=["fifo", "uniform", "prioritised", "reservoir"],
)
def test_memory_is_freed_after_data_has_passed_through(options):
    buffer = ReplayBuffer(changed(size=64, **options), seed=0)
    many, single, bad = columns(ROWS), fragment(5), columns(1, float("nan"))

    def work(pushes):
        for number in range(pushes):
            buffer.push(many)
            if number % 8 == 0:
                buffer.push(single)
                with pytest.raises(BadFragment):
                    buffer.push(bad)
            batch = buffer.pop()
            if batch is not None and "index" in batch:
                buffer.update_priorities(batch["index"], batch["index"] % 7 + 1.0)

    work(PUSHES // 4)  # until the buffer is full and the allocator has settled
    grown = []
    for _ in range(ROUNDS):
        before = used()
        work(PUSHES // ROUNDS)
        grown.append(used() - before)
    stats = buffer.stats()
    removed = sum(value for name, value in stats.items() if name.startswith("dropped.")) / 4 + stats.get("replaced", 0)
    assert removed > 200_000
    assert min(grown) < MIB / 4, "memory grew each time; a single growth may come from earlier tests"
