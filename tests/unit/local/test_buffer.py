"""The buffer between the threads of one process, and the stream that the learner reads."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from typing import Any

import pytest

from brayx.errors import BadFragment, ReplayError
from brayx.local.buffer import LocalBuffer
from brayx.local.stream import Batches
from brayx.metrics import Recorder
from brayx.replay.config import BufferConfig
from brayx.replay.packing import READY_KEY
from tests.unit.local.batches import T, fragment, made, values
from tests.waiting import WAIT_S, until


def test_what_is_pushed_comes_out_once_in_order_and_is_counted():
    buffer, sink = made()
    assert buffer.pop() is None
    before = time.time()
    buffer.push(fragment(1.0), fragment(2.0), fragment(3.0))
    batch = buffer.pop()
    assert values(batch) == [1.0, 2.0]
    assert before <= float(batch[READY_KEY]) <= time.time()
    assert buffer.pop() is None
    assert sink.summary() == {"env_steps": 12, "fragments_pushed": 3, "replay_batches": 1, "replay_reused": 0}


def test_without_room_the_oldest_batch_is_dropped_and_counted():
    buffer, sink = made(size=1)
    buffer.push(*(fragment(float(value)) for value in range(6)))
    assert values(buffer.pop()) == [4.0, 5.0]
    assert sink.summary()["replay_dropped.full"] == 4 * T


def test_a_fragment_that_does_not_fit_is_refused_and_counted_with_why_and_where():
    buffer, sink = made()
    buffer.push(fragment(1.0), fragment(float("nan")), fragment(2.0))
    assert values(buffer.pop()) == [1.0, 2.0]
    note = sink.notes()["fragments_dropped.refused"]
    assert note.startswith("BadFragment: obs")
    assert re.search(rf"\({re.escape(__file__)}:\d+\)$", note)
    assert sink.summary()["fragments_dropped.refused"] == 1
    assert sink.summary()["replay_dropped.bad_fragment"] == T
    assert sink.summary()["fragments_pushed"] == 2


def test_play_that_lags_too_far_behind_is_dropped_and_play_of_versions_to_come_refused():
    buffer, sink = made(max_policy_lag=1)
    buffer.published(1)
    buffer.push(fragment(1.0, version=1), fragment(9.0, version=2), fragment(1.0, version=1))
    assert "version" in sink.notes()["fragments_dropped.refused"]
    buffer.published(3)
    assert buffer.pop() is None
    buffer.push(fragment(2.0, version=3), fragment(2.0, version=2))
    assert values(buffer.pop()) == [2.0, 2.0]
    assert sink.summary()["replay_dropped.policy_lag"] == 2 * T


def test_what_is_evaluated_is_not_counted_as_learned_from():
    sink = Recorder()
    buffer = LocalBuffer(BufferConfig(size=1, batch_size=1, unroll_length=T), None, sink, learned=False)
    buffer.push(fragment(), fragment())
    assert sink.summary() == {"eval_dropped.full": T}


def test_a_push_does_not_wait_for_a_thread_that_is_in_the_buffer_which_takes_it_in():
    """The event loop pushes while the learner's thread draws a batch: it goes on at once, and nothing is lost."""
    buffer, _ = made()
    inside, leave = threading.Event(), threading.Event()
    inner = buffer._buffer.pop

    def slow_pop(**options):
        inside.set()
        assert leave.wait(WAIT_S)
        return inner(**options)

    buffer._buffer.pop = slow_pop
    popped = []
    thread = threading.Thread(target=lambda: popped.append(buffer.pop()))
    thread.start()
    assert inside.wait(WAIT_S)
    buffer.push(fragment(1.0), fragment(2.0))  # in this thread: it would hang here
    leave.set()
    thread.join(WAIT_S)
    assert popped == [None]
    buffer._buffer.pop = inner
    assert values(buffer.pop()) == [1.0, 2.0]


def test_a_refused_fragment_that_another_thread_took_in_has_the_line_of_its_push():
    buffer, sink = made()

    def push_a_bad_one():
        buffer.push(fragment(float("nan")))

    def note():
        return sink.notes()["fragments_dropped.refused"]

    def pop_while(push):
        """A call of another thread that holds the buffer meanwhile, and takes in what is pushed."""
        with buffer._turn():
            thread = threading.Thread(target=push)
            thread.start()
            thread.join(WAIT_S)

    place = f" ({__file__}:{push_a_bad_one.__code__.co_firstlineno + 1})"
    pop_while(push_a_bad_one)
    assert __file__ not in note(), "a location other than the push's misleads"
    pop_while(push_a_bad_one)
    assert note().endswith(place)
    assert sink.summary()["fragments_dropped.refused"] == 2


def test_what_is_pushed_while_the_buffer_is_held_is_bounded(monkeypatch):
    monkeypatch.setattr("brayx.local.buffer.MAX_PENDING", 3)
    buffer, sink = made()
    with buffer._lock:
        for value in range(10):
            buffer.push(fragment(float(value)))
    buffer.push()
    assert sink.summary()["replay_dropped.full"] == 7 * T
    assert values(buffer.pop()) == [7.0, 8.0]


@pytest.mark.parametrize("options", [{}, {"sampler": "uniform", "samples_per_insert": 1.0}])
def test_nothing_of_one_push_is_dropped_however_many_fragments_it_has(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.setattr("brayx.local.buffer.MAX_PENDING", 3)
    buffer, sink = made(size=5, **options)
    with buffer._lock:
        buffer.push(*(fragment(float(value)) for value in range(10)))
    buffer.push()
    taken = 0
    while buffer.pop() is not None:
        taken += 1
    assert taken >= 5
    assert sink.summary()["env_steps"] == 10 * T
    assert not [name for name in sink.summary() if name.startswith("replay_dropped")]


def test_the_reader_waits_for_a_batch_and_an_end_from_another_thread_wakes_it():
    buffer, _ = made()
    batches, seen = Batches({"b": buffer}, {"b": 1.0}), []
    reader = threading.Thread(target=lambda: seen.extend(values(batch) for batch in batches))
    reader.start()
    buffer.push(fragment(1.0), fragment(2.0))
    until(lambda: seen == [[1.0, 2.0]], "the batch is read")
    batches.end()
    reader.join(WAIT_S)
    assert not reader.is_alive()


def test_a_push_says_so_when_a_whole_batch_waits_already():
    buffer, _ = made(size=10)
    calls: list[int] = []
    buffer.behind = lambda: calls.append(len(calls))
    buffer.push(fragment(1.0))
    assert not calls
    buffer.push(fragment(2.0))
    buffer.push(fragment(3.0))
    assert len(calls) == 2
    buffer.pop()
    buffer.push()
    assert len(calls) == 2
    sampled, _ = made(size=10, sampler="uniform")
    sampled.behind = buffer.behind
    sampled.push(*(fragment(float(value)) for value in range(8)))
    held_out = LocalBuffer(BufferConfig(size=2, batch_size=2, unroll_length=T), None, Recorder(), learned=False)
    held_out.behind = buffer.behind
    held_out.push(*(fragment(float(value)) for value in range(8)))
    assert len(calls) == 2, "a table has its own limit, and evaluations come seldom"


def test_pushes_return_while_the_learner_is_in_an_update_that_does_not_end():
    buffer, sink = made()
    batches = Batches({"b": buffer}, {"b": 1.0})
    buffer.push(fragment(1.0), fragment(2.0))
    assert values(next(batches)) == [1.0, 2.0]
    part = threading.Thread(target=lambda: [buffer.push(fragment(float(value))) for value in range(20)])
    part.start()
    part.join(WAIT_S)
    assert not part.is_alive()
    assert sink.summary()["replay_dropped.full"] == 16 * T


def test_pushes_of_many_threads_all_arrive_while_another_reads():
    buffer, _ = made(size=1000)
    batches, seen = Batches({"b": buffer}, {"b": 1.0}), Counter()
    reader = threading.Thread(target=lambda: [seen.update(values(batch)) for batch in batches])
    reader.start()
    pushers = [
        threading.Thread(target=lambda part=part: [buffer.push(fragment(float(part * 50 + i))) for i in range(50)])
        for part in range(4)
    ]
    for thread in pushers:
        thread.start()
    for thread in pushers:
        thread.join(WAIT_S)
    buffer.end(drain=True)
    reader.join(WAIT_S)
    assert seen == Counter(float(value) for value in range(200))


def test_what_was_pushed_while_another_thread_held_the_buffer_is_drained_too():
    buffer, _ = made(batch_size=2)
    end = threading.Thread(target=lambda: buffer.end(drain=True))
    with buffer._lock:
        buffer.push(fragment(1.0), fragment(2.0))
        end.start()
    end.join(WAIT_S)
    assert values(buffer.pop()) == [1.0, 2.0]


def test_an_offer_waits_for_room_and_drops_nothing():
    buffer, sink = made(size=1, batch_size=1)
    assert buffer.offer(fragment(1.0), timeout_s=0) == []
    (left,) = buffer.offer(fragment(2.0), timeout_s=0)
    offered = []
    thread = threading.Thread(target=lambda: offered.append(buffer.offer(left, timeout_s=WAIT_S)))
    thread.start()
    assert [float(buffer.pop()["reward"][0, 0])] == [1.0]
    thread.join(WAIT_S)
    assert offered == [[]]
    assert float(buffer.pop()["reward"][0, 0]) == 2.0
    assert sink.summary()["env_steps"] == 2 * T
    assert "replay_dropped.full" not in sink.summary()
    buffer.end()
    with pytest.raises(ReplayError, match="takes no more"):
        buffer.offer(fragment(), timeout_s=0)


def test_an_offer_that_is_refused_is_counted_with_why_and_what_came_before_it_is_kept():
    buffer, sink = made()
    with pytest.raises(BadFragment, match="obs"):
        buffer.offer(fragment(1.0), fragment(float("nan")), timeout_s=0.0)
    assert sink.notes()["fragments_dropped.refused"].startswith("BadFragment: obs")
    assert sink.summary()["replay_dropped.bad_fragment"] == T
    assert buffer.offer(fragment(2.0), timeout_s=0.0) == []
    assert values(buffer.pop()) == [1.0, 2.0]


def test_every_thread_that_offers_wakes_when_there_is_room():
    buffer, _ = made(size=1)
    buffer.push(fragment(), fragment())
    left = [["not offered"], ["not offered"]]

    def offer(number):
        left[number] = buffer.offer(fragment(), timeout_s=WAIT_S)

    threads = [threading.Thread(target=offer, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    assert buffer.pop() is not None
    for thread in threads:
        thread.join(WAIT_S)
    assert left == [[], []]
