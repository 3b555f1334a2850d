"""Batches prepared by the learner or prefetched by a thread: how many, in which order, and how it ends."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from brayx.errors import ConfigError, ReplayError
from brayx.replay.packing import READY_KEY
from brayx.trainer.prefetch import Prefetch, Prepare, close, settle
from tests.unit.trainer.parts import batches, run
from tests.waiting import until

CPU = torch.device("cpu")
ARGS = (np.zeros((1, 3), np.float32),)


class Stream:
    """A stream that counts the batches taken, and gives only as many as the test allows."""

    def __init__(self, count, gate=None):
        self.taken, self.closed = 0, False
        self._count, self._gate = count, gate

    def __iter__(self):
        return self

    def __next__(self):
        if self._gate is not None:
            self._gate.acquire(timeout=30)
        if self.taken == self._count:
            raise StopIteration
        self.taken += 1
        return {"mask": np.full((1, 2), self.taken, np.float32), "obs": np.zeros((1, 2, 3), np.float32)}

    def close(self):
        self.closed = True


def number(ready):
    return int(ready.tensors["mask"][0, 0])


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_all_batches_come_in_order_and_then_the_stream_ends(depth):
    with Prefetch(Stream(7), Prepare(ARGS, CPU), depth) as stream:
        assert [number(ready) for ready in stream] == [1, 2, 3, 4, 5, 6, 7]
        assert next(stream, None) is None, "the stream stays at its end"


def test_without_depth_nothing_is_prefetched_and_there_is_no_thread():
    source = Stream(5)
    with Prefetch(source, Prepare(ARGS, CPU)) as stream:
        assert source.taken == 0
        next(stream)
        assert source.taken == 1
        assert stream._thread is None


@pytest.mark.parametrize("depth", [1, 3])
def test_at_most_the_depth_is_prefetched(depth):
    source = Stream(50)
    with Prefetch(source, Prepare(ARGS, CPU), depth) as stream:
        for learned in range(1, 6):
            assert number(next(stream)) == learned
            until(lambda: stream._ready.qsize() == depth)
            assert source.taken == learned + depth, "the thread waits for room"


def test_on_the_cpu_writable_arrays_are_not_copied():
    (batch,) = batches(1)
    ready = Prepare(ARGS, CPU)(batch)
    assert all(ready.tensors[key].data_ptr() == batch[key].ctypes.data for key in batch if key != "obs")
    batch["reward"].flags.writeable = False
    assert Prepare(ARGS, CPU)(batch).tensors["reward"].data_ptr() != batch["reward"].ctypes.data


def test_the_ready_time_is_removed_from_the_batch():
    (batch,) = batches(1)
    ready = Prepare(ARGS, CPU)({**batch, READY_KEY: np.asarray(123.5)})
    assert ready.ready_at_s == 123.5
    assert READY_KEY not in ready.batch.keys() | ready.tensors.keys()
    assert Prepare(ARGS, CPU)(batch).ready_at_s is None
    assert Prepare(ARGS, CPU)({**batch, READY_KEY: np.asarray(np.nan)}).ready_at_s is None


@pytest.mark.parametrize("depth", [0, 2])
def test_an_error_of_the_stream_is_raised_to_the_consumer(depth):
    def broken():
        yield from batches(2)
        raise ReplayError("the stream broke")

    with Prefetch(broken(), Prepare(ARGS, CPU), depth) as stream:
        next(stream), next(stream)
        for _ in range(2 if depth else 1):
            with pytest.raises(ReplayError, match="the stream broke"):
                next(stream)


@pytest.mark.parametrize("depth", [0, 2])
def test_an_error_of_the_preparation_is_raised_to_the_consumer(depth):
    two = Prepare((np.zeros((1, 3), np.float32), np.zeros((1, 1), np.float32)), CPU)
    with Prefetch(batches(1), two, depth) as stream, pytest.raises(ConfigError, match="batches hold no 'obs/0'"):
        next(stream)


def test_a_thread_that_waits_for_a_batch_does_not_delay_the_end():
    gate = threading.Semaphore(1)
    source = Stream(9, gate)
    with Prefetch(source, Prepare(ARGS, CPU), 2) as stream:
        assert number(next(stream)) == 1
        assert stream.poll() is None, "no other batch is ready yet"
    assert not source.closed
    gate.release()
    until(lambda: source.closed, "the thread's closing of the stream")
    until(lambda: "brayx-prefetch" not in {thread.name for thread in threading.enumerate()})


def test_poll_returns_only_ready_batches():
    source = Stream(2)
    with Prefetch(source, Prepare(ARGS, CPU), 2) as stream:
        until(lambda: stream._ready.qsize() >= 2)
        assert [number(stream.poll()) for _ in range(2)] == [1, 2]
        until(lambda: not stream._thread.is_alive())
        assert [stream.poll(), stream.poll()] == [None, None]


def test_a_generator_that_is_running_is_closed_later():
    inside, go_on = threading.Event(), threading.Event()

    def stream():
        inside.set()
        go_on.wait(30)
        yield {}

    generator = stream()
    thread = threading.Thread(target=lambda: next(generator), daemon=True)
    thread.start()
    assert inside.wait(30)
    close(generator)
    go_on.set()
    thread.join(30)
    close(generator)
    assert next(generator, "closed") == "closed"


@pytest.mark.gpu
@pytest.mark.parametrize("depth", [0, 2])
def test_on_a_gpu_copies_on_the_side_stream_are_complete_when_used(depth):
    """Work on the copy stream delays the copies, so a consumer that did not wait would read wrong values."""
    device = torch.device("cuda")
    prepare = Prepare(ARGS, device, aside=True)
    host_batches = list(batches(20))
    with torch.cuda.stream(prepare._side):
        big = torch.ones(4096, 4096, device=device)
        for _ in range(50):
            big = big @ big * 1e-4
    with Prefetch(iter(host_batches), prepare, depth) as stream:
        for batch, ready in zip(host_batches, stream, strict=True):
            assert ready.copied is not None
            for key in ("reward", "action", "mask"):
                doubled = ready.tensors[key].double() * 2  # on the current stream
                np.testing.assert_array_equal(doubled.cpu().numpy(), batch[key] * 2.0)
            settle(ready)


@pytest.mark.parametrize("prefetch", [1, 4])
def test_prefetching_does_not_change_learning(tmp_path, prefetch):
    _, plain, *_ = run(tmp_path / "plain", count=6)
    summary, weights, _, _, batches_taken = run(tmp_path / "ahead", count=6, prefetch=prefetch)
    assert (summary.updates, len(batches_taken)) == (6, 6)
    for key, array in plain.published[-1][2].items():
        np.testing.assert_array_equal(weights.published[-1][2][key], array)
