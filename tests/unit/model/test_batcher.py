"""The batcher with plain functions as its engine: composition, bounds, deadlines, cancellation, errors, closing."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest

from brayx.errors import DeadlineExceeded, ModelError, QueueFull
from brayx.model import batcher as batcher_module
from brayx.model.batcher import Batcher
from tests.unit.model.calls import block_engine, let_loop_run


async def test_rows_of_one_loop_iteration_share_a_batch_and_get_their_own_results(make, engine):
    batcher = make()
    assert await asyncio.gather(*[batcher.submit(i) for i in range(5)]) == [0, 2, 4, 6, 8]
    assert engine.batches == [[0, 1, 2, 3, 4]]


async def test_batches_are_cut_at_max_size_in_order_of_arrival(make, engine):
    batcher = make(max_batch_size=4)
    await asyncio.gather(*[batcher.submit(i) for i in range(10)])
    assert engine.batches == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


async def test_rows_gather_while_a_call_runs(make, engine):
    batcher = make()
    first = await block_engine(engine, batcher)
    others = []
    for i in range(1, 4):
        others.append(asyncio.create_task(batcher.submit(i)))
        await let_loop_run()
    assert engine.batches == [[0]], "one call at a time"
    engine.gate.set()
    assert await asyncio.gather(first, *others) == [0, 2, 4, 6]
    assert engine.batches == [[0], [1, 2, 3]]


async def test_max_wait_delays_an_incomplete_batch_for_more_rows(make, engine, clock):
    batcher = make(max_batch_size=8, max_wait_s=5)
    first = asyncio.create_task(batcher.submit(1))
    await clock.move(4.5)
    second = asyncio.create_task(batcher.submit(2))
    await clock.move(0.4)
    assert engine.batches == []
    await clock.move(0.2)
    assert await asyncio.gather(first, second) == [2, 4]
    assert engine.batches == [[1, 2]]


async def test_max_wait_ends_when_the_batch_is_full(make, engine):
    batcher = make(max_batch_size=2, max_wait_s=30)
    async with asyncio.timeout(60):
        await asyncio.gather(batcher.submit(1), batcher.submit(2))
    assert engine.batches == [[1, 2]]


async def test_a_row_that_is_a_whole_call_does_not_wait_for_others(make, engine):
    batches = []

    def run(rows, key=None):
        batches.append(rows)
        return list(rows)

    batcher = make(run, max_batch_size=8, max_wait_s=30)
    async with asyncio.timeout(60):
        assert await batcher.submit("alone", key=1, whole=True) == "alone"
        waiting = asyncio.create_task(batcher.submit("first"))
        await let_loop_run()
        assert await asyncio.gather(*[batcher.submit(i, key=i, whole=True) for i in range(2, 4)]) == [2, 3]
    assert batches == [["alone"], ["first"], [2], [3]]
    await waiting


async def test_max_wait_counts_from_arrival_not_from_the_end_of_the_previous_call(make, engine, clock):
    batcher = make(max_wait_s=5, deadline_s=100)
    engine.gate.clear()
    first = asyncio.create_task(batcher.submit(0))
    await clock.move(5)
    await engine.wait_entered()
    second = asyncio.create_task(batcher.submit(1))
    await clock.move(5)
    engine.gate.set()
    assert await first == 0
    await engine.wait_entered()  # at once: the clock has not moved
    assert await second == 2


async def test_the_queue_is_bounded_and_frees_up(make, engine):
    batcher = make(max_queue=2)
    first = await block_engine(engine, batcher)
    waiting = [asyncio.create_task(batcher.submit(i)) for i in (1, 2)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull, match="2 forwards wait"):
        await batcher.submit(3)
    waiting[0].cancel()
    await asyncio.sleep(0)
    late = asyncio.create_task(batcher.submit(4))
    await asyncio.sleep(0)
    engine.gate.set()
    assert await asyncio.gather(first, waiting[1], late) == [0, 4, 8]
    assert engine.batches == [[0], [2, 4]]


async def test_a_row_whose_deadline_passes_in_the_queue_joins_no_batch(make, engine):
    batcher = make()
    first = await block_engine(engine, batcher)
    other = asyncio.create_task(batcher.submit(2))
    with pytest.raises(DeadlineExceeded, match="for its batch"):
        await batcher.submit(1, deadline_s=0.02)
    engine.gate.set()
    assert await asyncio.gather(first, other) == [0, 4]
    assert engine.batches == [[0], [2]]


async def test_a_deadline_ends_a_wait_for_a_hanging_engine(make, engine):
    batcher = make(deadline_s=0.03)
    engine.gate.clear()
    with pytest.raises(DeadlineExceeded, match="in its call"):
        await batcher.submit(1)
    with pytest.raises(DeadlineExceeded, match="for its batch"):
        await batcher.submit(2)
    engine.gate.set()
    await asyncio.wait(batcher._calls)
    assert await batcher.submit(3, deadline_s=10) == 6


async def test_each_row_has_its_own_deadline(make, engine, clock):
    batcher = make(deadline_s=100)
    first = await block_engine(engine, batcher)
    order = []

    async def wait(name, deadline_s):
        with pytest.raises(DeadlineExceeded):
            await batcher.submit(name, deadline_s=deadline_s)
        order.append(name)

    waiting = asyncio.gather(wait(1, 9), wait(2, 3), wait(3, 6))
    for expected in ([], [2], [2, 3], [2, 3, 1]):
        assert order == expected
        await clock.move(3)
    await waiting
    engine.gate.set()
    await first


async def test_a_cancelled_caller_does_not_affect_the_others(make, engine):
    batcher = make()
    first = await block_engine(engine, batcher)
    tasks = [asyncio.create_task(batcher.submit(i)) for i in (1, 2, 3)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    first.cancel()  # the call with this row is running
    await asyncio.sleep(0)
    engine.gate.set()
    assert await asyncio.gather(tasks[0], tasks[2]) == [2, 6]
    assert engine.batches == [[0], [1, 3]]


async def test_an_engine_error_reaches_every_caller_of_that_batch_and_no_other(make, engine):
    batcher = make(max_batch_size=2)
    rows = [1, "bad", 3, 4]
    results = await asyncio.gather(*[batcher.submit(row) for row in rows], return_exceptions=True)
    assert [str(result) for result in results] == ["engine broke", "engine broke", "6", "8"]
    assert await batcher.submit(5) == 10


async def test_an_engine_error_on_the_loop_is_handled_the_same(make, engine):
    batcher = make(inline_below_s=10)
    assert await batcher.submit(1) == 2
    with pytest.raises(RuntimeError, match="engine broke"):
        await batcher.submit("bad")
    assert await batcher.submit(2) == 4


async def test_an_engine_that_loses_rows_is_an_error(make):
    batcher = make(lambda rows: rows[:-1])
    with pytest.raises(ModelError, match="2 rows came back as 1 results"):
        await asyncio.gather(batcher.submit(1), batcher.submit(2))


async def test_fast_calls_run_on_the_loop_and_slow_ones_in_the_thread(make, engine):
    loop_thread = threading.current_thread().name
    fast = make(inline_below_s=10)
    for i in range(3):
        await fast.submit(i)
    assert engine.threads[0].startswith("brayx-batcher")
    assert engine.threads[1:] == [loop_thread] * 2
    engine.threads.clear()
    slow = make(inline_below_s=0)
    for i in range(3):
        await slow.submit(i)
    assert all(name.startswith("brayx-batcher") for name in engine.threads)


async def test_a_whole_call_runs_at_once_if_it_is_short_and_nothing_waits(make, engine):
    batcher = make(inline_below_s=10)
    assert batcher.at_once(1) is None, "nobody knows yet how long it takes"
    await batcher.submit(1)
    await let_loop_run()
    assert batcher.at_once(2) == 4
    waiting = asyncio.create_task(batcher.submit(3))
    await asyncio.sleep(0)
    assert batcher.at_once(4) is None
    assert await waiting == 6
    assert engine.batches == [[1], [2], [3]]
    slow = make(inline_below_s=0)
    await slow.submit(1)
    await let_loop_run()
    assert slow.at_once(1) is None


@pytest.mark.parametrize("waits_s", [0.0, 5e-3], ids=["an idle machine", "a busy one"])
async def test_calls_that_compute_shortly_run_on_the_loop(make, monkeypatch, waits_s):
    """One call in five computes 50 times as long as the rest, the first a hundred times; those in the thread wait."""
    now, computed, threads = 0.0, 0.0, []

    def run(rows):
        nonlocal now, computed
        seconds = (5e-3 if threads else 10e-3) if len(threads) % 5 == 0 else 100e-6
        threads.append(threading.current_thread().name)
        in_thread = threads[-1].startswith("brayx-batcher")
        computed, now = computed + seconds, now + seconds + waits_s * in_thread
        return rows

    batcher = make(run, inline_below_s=200e-6)
    times = SimpleNamespace(perf_counter=lambda: now, thread_time=lambda: computed)
    monkeypatch.setattr(batcher_module, "time", times)
    for i in range(500):
        await batcher.submit(i)
    assert threads[0].startswith("brayx-batcher")
    assert set(threads[10:]) == {threading.current_thread().name}


async def test_each_batch_size_is_timed_separately(make, engine):
    batcher = make(inline_below_s=10)
    await batcher.submit(1)
    await batcher.submit(1)
    await asyncio.gather(*[batcher.submit(i) for i in range(16)])
    names = [name.startswith("brayx-batcher") for name in engine.threads]
    assert names == [True, False, True]


async def test_the_loop_goes_on_while_a_slow_call_runs(make, engine):
    batcher = make()
    first = await block_engine(engine, batcher)
    turns = 0
    for _ in range(50):
        await asyncio.sleep(0)
        turns += 1
    assert turns == 50
    assert not first.done()
    engine.gate.set()
    await first


async def test_coroutine_functions_are_awaited_one_at_a_time(make):
    running = most = 0

    async def run(rows):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.005)
        running -= 1
        return [row * 2 for row in rows]

    batcher = make(run, max_batch_size=2)
    assert await asyncio.gather(*[batcher.submit(i) for i in range(5)]) == [0, 2, 4, 6, 8]
    assert most == 1


async def test_several_calls_run_at_once_if_configured(make):
    running, most, go_on = 0, [], asyncio.Event()

    async def run(rows):
        nonlocal running
        running += 1
        most.append((running, len(rows)))
        await go_on.wait()
        running -= 1
        return [row * 2 for row in rows]

    batcher = make(run, max_batch_size=2, max_calls=3)
    submitted = [asyncio.create_task(batcher.submit(i)) for i in range(9)]
    await let_loop_run()
    assert most == [(1, 2), (2, 2), (3, 2)]
    assert len(batcher) == 3
    go_on.set()
    assert await asyncio.gather(*submitted) == [2 * i for i in range(9)]
    assert max(most) == (3, 2)
    await let_loop_run()
    assert not batcher._calls
    with pytest.raises(ValueError, match="max_calls"):
        Batcher(list, max_calls=2)


async def test_closing_ends_every_hanging_call(make):
    batcher = make(hangs, max_batch_size=1, max_calls=2, deadline_s=0.05)
    hanging = [asyncio.create_task(batcher.submit(i, deadline_s=60)) for i in range(2)]
    await let_loop_run()
    async with asyncio.timeout(60):
        await batcher.close()
    for caller in hanging:
        with pytest.raises(DeadlineExceeded, match="in its call"):
            await caller


async def hangs(rows):
    await asyncio.sleep(600)


async def test_a_fixed_size_pads_with_the_last_row_and_drops_its_results(make, engine):
    batcher = make(max_batch_size=-4)
    assert await asyncio.gather(*[batcher.submit(i) for i in range(3)]) == [0, 2, 4]
    assert await asyncio.gather(*[batcher.submit(i) for i in range(5)]) == [0, 2, 4, 6, 8]
    assert engine.batches == [[0, 1, 2, 2], [0, 1, 2, 3], [4, 4, 4, 4]]


async def test_submit_many_is_one_batch_and_all_or_nothing_at_the_bound(make, engine):
    batcher = make(max_queue=4)
    assert await batcher.submit_many([1, 2, 3]) == [2, 4, 6]
    assert engine.batches == [[1, 2, 3]]
    with pytest.raises(QueueFull, match=r"5 more.*max_queue is 4") as refused:
        await batcher.submit_many([1, 2, 3, 4, 5])
    assert refused.value.details == {"max_queue": 4}
    assert len(batcher) == 0


async def test_rows_of_a_cancelled_submit_many_free_their_slots(make, engine):
    batcher = make(max_queue=4)
    first = await block_engine(engine, batcher)
    many = asyncio.create_task(batcher.submit_many([1, 2, 3]))
    await let_loop_run()
    many.cancel()
    await let_loop_run()
    rest = asyncio.create_task(batcher.submit_many([4, 5, 6, 7]))
    await let_loop_run()
    engine.gate.set()
    assert await rest == [8, 10, 12, 14]
    assert await first == 0


async def test_close_fails_waiting_rows_and_lets_the_running_call_end(make, engine):
    batcher = make()
    first = await block_engine(engine, batcher)
    waiting = asyncio.create_task(batcher.submit(1))
    await asyncio.sleep(0)
    closing = asyncio.create_task(batcher.close())
    with pytest.raises(ModelError, match="closed"):
        await waiting
    engine.gate.set()
    await closing
    assert await first == 0
    with pytest.raises(ModelError, match="closed"):
        await batcher.submit(2)
    await batcher.close()


async def test_close_does_not_wait_for_ever(make, engine):
    batcher = make(deadline_s=0.05)
    first = await block_engine(engine, batcher)
    async with asyncio.timeout(60):
        await batcher.close()
    with pytest.raises(DeadlineExceeded):
        await first


async def test_nothing_is_left_on_the_loop_when_idle(make, clock):
    batcher = make(deadline_s=5)
    assert await batcher.submit(1) == 2
    await clock.move(5.1)
    assert batcher._deadline_timer is None
    assert batcher._flush_handle is None
    assert not batcher._calls


async def test_on_batch_receives_rows_time_and_wait(make, engine, clock):
    calls = []
    batcher = make(max_wait_s=1000, deadline_s=5000, max_batch_size=-4, on_batch=lambda *args: calls.append(args))
    submitted = asyncio.gather(batcher.submit(1), batcher.submit(2))
    await clock.move(1000)
    await submitted
    [(rows, seconds, waited_s)] = calls
    assert rows == 2
    assert seconds > 0
    assert 900 < waited_s <= 1000, "the wait without the call"


async def test_many_callers_under_random_cancellation_never_get_anothers_result(make):
    batcher = make(max_batch_size=7, inline_below_s=0)

    async def caller(i):
        for k in range(20):
            value = i * 1000 + k
            try:
                async with asyncio.timeout(0.0003 if (i + k) % 3 == 0 else 5):
                    assert await batcher.submit(value) == 2 * value
            except TimeoutError:
                assert (i + k) % 3 == 0

    await asyncio.gather(*[caller(i) for i in range(40)])


@pytest.mark.parametrize("options", [{"max_batch_size": 0}, {"max_queue": 0}, {"max_wait_s": -1}, {"deadline_s": 0}])
def test_invalid_options_are_refused(options):
    with pytest.raises(ValueError, match="max_batch_size"):
        Batcher(list, **options)
