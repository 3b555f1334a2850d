"""The batcher's queue: callers take turns, keys and sorted rows, and who is refused when it is full."""

from __future__ import annotations

import asyncio

import pytest

from brayx.errors import DeadlineExceeded, ModelError, QueueFull
from tests.unit.model.calls import Engine, block_engine, let_loop_run


async def test_a_caller_with_many_rows_does_not_delay_another_callers_row(make, engine):
    batcher = make(max_batch_size=4)
    first = await block_engine(engine, batcher)
    many = asyncio.create_task(batcher.submit_many(list(range(100, 112))))
    await let_loop_run()
    others = [asyncio.create_task(batcher.submit(row)) for row in (1, 2)]
    await let_loop_run()
    engine.gate.set()
    await asyncio.gather(first, many, *others)
    assert engine.batches[1] == [100, 1, 2, 101], "one row of each caller before any caller's second"
    assert [row for batch in engine.batches[1:] for row in batch if row >= 100] == list(range(100, 112))


async def test_named_callers_take_turns_in_every_batch(make, engine):
    batcher = make(max_batch_size=2)
    first = await block_engine(engine, batcher)
    greedy = [asyncio.create_task(batcher.submit(f"g{i}", caller="greedy")) for i in range(4)]
    await let_loop_run()
    modest = [asyncio.create_task(batcher.submit(f"m{i}", caller="modest")) for i in range(2)]
    await let_loop_run()
    engine.gate.set()
    await asyncio.gather(first, *greedy, *modest)
    assert engine.batches[1:] == [["g0", "m0"], ["g1", "m1"], ["g2", "g3"]]


async def test_a_late_caller_is_served_before_a_long_queue_is_empty(make, engine):
    batcher = make(max_batch_size=2)
    first = await block_engine(engine, batcher)
    many = asyncio.create_task(batcher.submit_many(list(range(100, 120))))
    await let_loop_run()
    engine.entered.clear()
    engine.gate.set()
    assert await first == 0
    engine.gate.clear()
    late = asyncio.create_task(batcher.submit(1))
    await let_loop_run()
    engine.gate.set()
    assert await late == 2
    assert not many.done()
    await many


class KeyedEngine(Engine):
    """Also records each batch's key."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: list[object] = []

    def __call__(self, rows, key=None):
        self.keys.append(key)
        return super().__call__(rows)


async def test_a_batch_has_rows_of_one_key(make):
    engine = KeyedEngine()
    batcher = make(engine, max_batch_size=3)
    rows = [(i, i % 3 or None) for i in range(12)]
    assert await asyncio.gather(*[batcher.submit(row, key=key) for row, key in rows]) == [2 * row for row, _ in rows]
    assert len(engine.batches) == 6
    for batch, key in zip(engine.batches, engine.keys, strict=True):
        assert {row % 3 or None for row in batch} == {key}


async def test_keys_do_not_starve_each_other(make):
    engine = KeyedEngine()
    batcher = make(engine, max_batch_size=2)
    first = await block_engine(engine, batcher)
    many = [asyncio.create_task(batcher.submit(i, key="often")) for i in range(6)]
    await let_loop_run()
    few = asyncio.create_task(batcher.submit(100, key="seldom"))
    await let_loop_run()
    engine.gate.set()
    await asyncio.gather(first, few, *many)
    assert engine.keys == [None, "often", "seldom", "often", "often"]


async def test_negative_size_is_fixed_and_padded(make, engine):
    batcher = make(max_batch_size=-4)
    assert await asyncio.gather(*[batcher.submit(i) for i in range(6)]) == [0, 2, 4, 6, 8, 10]
    assert engine.batches == [[0, 1, 2, 3], [4, 5, 5, 5]]


async def test_sorted_rows_keep_their_deadlines_the_bound_and_their_order(make, clock):
    batches, gates = [], {row: asyncio.Event() for row in range(8)}

    async def run(rows):
        batches.append(rows)
        await gates[rows[0]].wait()
        return [row * 2 for row in rows]

    batcher = make(run, max_batch_size=1, max_queue=4, deadline_s=100)
    first = asyncio.create_task(batcher.submit(0))
    await let_loop_run()
    rows = [asyncio.create_task(batcher.submit(row, deadline_s=s)) for row, s in ((1, 50), (2, 5), (3, 50), (4, 50))]
    await let_loop_run()
    gates[0].set()
    assert await first == 0
    await let_loop_run()
    assert len(batcher) == 3, "one row runs, the others are sorted and wait"
    rows.append(asyncio.create_task(batcher.submit(5)))
    await let_loop_run()
    with pytest.raises(QueueFull):
        await batcher.submit(6)
    await clock.move(6)
    assert isinstance(rows[1].exception(), DeadlineExceeded)
    rows.append(asyncio.create_task(batcher.submit(7)))  # takes the slot of the expired row
    await let_loop_run()
    assert not rows[-1].done()
    rows[2].cancel()
    for gate in gates.values():
        gate.set()
    assert await rows[0] == 2
    assert await asyncio.gather(rows[3], rows[4], rows[5]) == [8, 10, 14]
    assert batches == [[0], [1], [4], [5], [7]]


async def full(make, callers):
    """A batcher with a hanging call and a full queue, one row for each caller; and the rows' tasks."""
    gate = asyncio.Event()

    async def run(rows):
        await gate.wait()
        return list(rows)

    batcher = make(run, max_batch_size=2, max_queue=len(callers))
    running = asyncio.create_task(batcher.submit("running"))
    await let_loop_run()
    rows = [asyncio.create_task(batcher.submit(i, caller=caller)) for i, caller in enumerate(callers)]
    await let_loop_run()
    assert len(batcher) == len(callers)
    return batcher, gate, [running, *rows]


async def test_a_full_queue_drops_rows_of_the_caller_with_the_most(make):
    batcher, gate, rows = await full(make, ["hog"] * 6)
    quiet = [asyncio.create_task(batcher.submit(f"q{i}", caller=caller)) for i, caller in enumerate("ab")]
    alone = asyncio.create_task(batcher.submit("alone"))
    await let_loop_run()
    refused = [i for i, row in enumerate(rows) if row.done()]
    assert refused == [4, 5, 6], "the caller's newest rows"
    assert all(isinstance(rows[i].exception(), QueueFull) for i in refused)
    with pytest.raises(QueueFull):
        await batcher.submit("more", caller="hog")
    gate.set()
    assert await asyncio.gather(*quiet, alone) == ["q0", "q1", "alone"]
    assert await asyncio.gather(*rows[:4]) == ["running", 0, 1, 2]
    assert not batcher._queue._held
    await batcher.submit("again", caller="hog")


async def test_a_full_queue_of_equal_callers_refuses_the_last(make):
    batcher, gate, rows = await full(make, ["a", "b", "c", None])
    for caller in ("a", "d", None):
        with pytest.raises(QueueFull):
            await batcher.submit("late", caller=caller)
    gate.set()
    assert await asyncio.gather(*rows) == ["running", 0, 1, 2, 3]


async def test_dropped_and_cancelled_rows_no_longer_count_for_their_caller(make):
    batcher, gate, rows = await full(make, ["hog"] * 3 + ["other"])
    for row in rows[1:4]:
        row.cancel()
    await let_loop_run()
    # Cancelled rows must not remain in their caller's count.
    more = [asyncio.create_task(batcher.submit(f"m{i}", caller="other")) for i in range(3)]
    await let_loop_run()
    assert batcher._queue._held == {"other": 4}
    late = asyncio.create_task(batcher.submit("late", caller="hog"))
    await let_loop_run()
    assert isinstance(more[-1].exception(), QueueFull)
    gate.set()
    assert await asyncio.gather(rows[4], more[0], more[1], late) == [3, "m0", "m1", "late"]


async def sorted_queue(make, callers, keys):
    """A batcher with calls of one row, the first of which hangs; the others are sorted, and one slot is free."""
    gate = asyncio.Event()

    async def run(rows, key):
        await gate.wait()
        return list(rows)

    batcher = make(run, max_batch_size=1, max_queue=len(callers))
    pairs = zip(callers, keys, strict=True)
    rows = [asyncio.create_task(batcher.submit(i, key=key, caller=caller)) for i, (caller, key) in enumerate(pairs)]
    await let_loop_run()
    assert batcher._queue._in_lanes == len(batcher) == len(callers) - 1
    return batcher, gate, rows


async def test_refused_rows_do_not_re_sort_the_queue(make):
    """Re-sorting would cost time for all waiting rows at each refusal."""
    batcher, gate, rows = await sorted_queue(make, "abcabca", [0] * 7)
    rows.append(asyncio.create_task(batcher.submit(7, key=0, caller="a")))
    await let_loop_run()
    for caller in "abc":
        with pytest.raises(QueueFull):
            await batcher.submit("late", key=0, caller=caller)
    with pytest.raises(QueueFull):
        await batcher.submit_many(["late"] * 2, key=0)
    assert (batcher._queue._in_lanes, len(batcher)) == (6, 7)
    rows[4].cancel()
    await let_loop_run()
    rows.append(asyncio.create_task(batcher.submit(8, key=0, caller="b")))
    await let_loop_run()
    gate.set()
    results = await asyncio.gather(*rows, return_exceptions=True)
    assert isinstance(results.pop(4), asyncio.CancelledError)
    assert results == [0, 1, 2, 3, 5, 6, 7, 8]


async def test_the_newest_of_the_sorted_rows_is_dropped(make):
    batcher, gate, rows = await sorted_queue(make, ["hog"] * 7, [0, 1] * 3 + [0])
    others = [batcher.enqueue("v", key=0, caller="v")]
    rows[6].cancel()
    others.append(batcher.enqueue("w", key=0, caller="w"))
    await let_loop_run()
    assert not any(row.done() for row in rows[:6]), "the cancelled row freed its slot"
    for name, refused in (("x", 5), ("y", 4), ("z", 3), ("u", 2)):
        others.append(batcher.enqueue(name, key=0, caller=name))
        await let_loop_run()
        assert [row.done() for row in rows[:6]] == [i >= refused for i in range(6)]
        assert isinstance(rows[refused].exception(), QueueFull)
    with pytest.raises(QueueFull):
        batcher.enqueue("t", key=0, caller="t")
    gate.set()
    assert await asyncio.gather(*rows[:2], *others) == [0, 1, *"vwxyzu"]
    assert len(batcher) == 0
    assert not batcher._queue._held


async def test_a_refused_row_of_submit_many_releases_the_others(make):
    batcher, gate, rows = await full(make, ["a"])
    batcher._queue.max_rows = 5
    many = asyncio.create_task(batcher.submit_many([1, 2, 3, 4]))
    await let_loop_run()
    single = asyncio.create_task(batcher.submit("one", caller="b"))
    await let_loop_run()
    assert isinstance(many.exception(), QueueFull)
    gate.set()
    assert await asyncio.gather(*rows, single) == ["running", 0, "one"]


async def test_close_fails_sorted_rows(make, engine):
    batcher = make(max_batch_size=1, inline_below_s=0)
    many = asyncio.create_task(batcher.submit_many([1, 2, 3]))
    engine.gate.clear()
    await engine.wait_entered()
    closing = asyncio.create_task(batcher.close())
    with pytest.raises(ModelError, match="closed"):
        await many
    engine.gate.set()
    await closing
