"""The replay buffer as an actor and as a Ray Data stream, on a real Ray."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import ray

from brayx.cluster.remote_buffer import RemoteBuffer
from brayx.cluster.shards import Shards
from brayx.cluster.stream import batches_of, read_buffer, replay_dataset
from brayx.errors import ReplayError
from brayx.metrics import Recorder
from brayx.replay.config import BufferConfig
from brayx.types import Fragment
from tests.processes import ours
from tests.waiting import until

WHOLE = 64
"""Transitions of one batch."""
CONFIG = BufferConfig(size=1000, batch_size=4, unroll_length=16, max_in_flight=2)


def fragment(number: float, length: int = WHOLE) -> Fragment:
    return Fragment(
        obs=np.full((length + 1, 4), number, np.float32),
        action=np.zeros(length, np.int64),
        log_prob=np.zeros(length, np.float32),
        reward=np.full(length, number, np.float32),
        terminated=True,
        truncated=False,
        policy_version=np.zeros(length, np.int64),
    )


@contextlib.contextmanager
def running_buffer(config=CONFIG, name=None):
    name = name or f"buffer-{uuid.uuid4().hex[:8]}"
    shards = Shards.start(name, config)
    try:
        yield name, shards[0].actor
    finally:
        shards.kill()


def dataset_of(name):
    return batches_of(replay_dataset(name), name)


def take(stream, got):
    for batch in stream:
        got.append(batch)
        stream.took()


def read_in_background(stream):
    got, failed = [], []

    def read():
        try:
            take(stream, got)
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread, got, failed


def is_waited_for(actor):
    """Whether a reader waits for a batch of the buffer."""
    return ray.get(actor.__ray_call__.remote(lambda self: len(self._changed._waiters) > 0))


def test_a_learner_gets_nothing_older_than_its_publish_even_if_the_buffer_gets_it_late(ray_cluster, monkeypatch):
    """A buffer's calls come in any order; here the publish comes as late as possible."""
    monkeypatch.setattr(Shards, "expire", lambda self, newest: None)
    config = BufferConfig(size=1000, batch_size=4, unroll_length=16, max_in_flight=1, max_policy_lag=0)
    first, second = (dataclasses.replace(fragment(0), policy_version=np.full(WHOLE, version)) for version in (1, 2))
    with running_buffer(config) as (name, actor), ThreadPoolExecutor(1) as pool:
        remote = RemoteBuffer.attach(name)
        remote.push(first, first)
        stream = read_buffer(name, timeout_s=60)
        stream.holds = True
        next(stream)
        stream.took()
        stream.published(2)
        coming = pool.submit(next, stream)
        until(
            lambda: coming.done() or "dropped.policy_lag" in ray.get(actor.stats.remote()),
            "the old batch is dropped, or given out",
        )
        remote.push(second)
        batch = coming.result(60)
        stream.close()
    assert (batch["policy_version"][batch["mask"] > 0] == 2).all()


def test_pushes_of_another_process_come_out_whole_in_order_one_batch_a_block(ray_cluster):
    with running_buffer() as (name, actor):

        @ray.remote(num_cpus=0)
        def push(count):
            remote = RemoteBuffer.attach(name)
            for number in range(count):
                remote.push(fragment(number, WHOLE // 2), fragment(number, WHOLE // 2))
            assert remote.flush(20)
            ray.get(actor.end.remote(drain=True))

        done = push.remote(50)
        got = []
        take(dataset_of(name), got)
        ray.get(done)
    assert [float(batch["reward"][0, 0]) for batch in got] == list(range(50))
    assert {batch["obs"].shape for batch in got} == {(4, 17, 4)}
    assert len({sum(array.nbytes for array in batch.values()) for batch in got}) == 1
    assert sum(batch["mask"].sum() for batch in got) == 50 * WHOLE
    assert {key: array.dtype.name for key, array in got[0].items()} == {
        "ready_s": "float64",
        "obs": "float32",
        "action": "int64",
        "log_prob": "float32",
        "reward": "float32",
        "terminated": "bool",
        "truncated": "bool",
        "mask": "float32",
        "policy_version": "int64",
    }


def test_other_datasets_of_the_process_are_executed_as_before(ray_cluster):
    with running_buffer() as (name, _):
        ours = replay_dataset(name).context
        theirs = ray.data.range(1).context
    assert (ours.target_max_block_size, ours.execution_no_progress_timeout_s) == (1, -1)
    fresh = ray.data.DataContext()
    for option in ("target_max_block_size", "execution_no_progress_timeout_s", "custom_execution_callback_classes"):
        assert getattr(theirs, option) == getattr(fresh, option) != getattr(ours, option)
    assert ours.execution_options.preserve_order
    assert not theirs.execution_options.preserve_order


def test_each_batch_arrives_before_the_next_one_is_pushed(ray_cluster):
    """Ray Data would by itself hold small blocks back until a large one is full."""
    with running_buffer() as (name, actor):
        thread, got, failed = read_in_background(dataset_of(name))
        remote = RemoteBuffer.attach(name)
        for number in range(10):
            remote.push(fragment(number))
            until(lambda count=number: len(got) > count, timeout_s=60)
        ray.get(actor.end.remote(drain=True))
        thread.join(30)
    assert not failed
    assert [float(batch["reward"][0, 0]) for batch in got] == list(range(10))


def test_credits_bound_what_is_in_flight(ray_cluster):
    with running_buffer() as (name, actor):
        ray.get(actor.push.remote([fragment(number) for number in range(10)]))
        stream = dataset_of(name)
        next(stream)

        def left():
            stats = ray.get(actor.stats.remote())
            return stats["batches"], stats["in_flight"]

        until(lambda: left() == (8, 2), "the first taken but not acknowledged", timeout_s=60)
        time.sleep(0.5)  # for more, which must not come
        assert left() == (8, 2)
        ray.get(actor.ack.remote(1))
        until(lambda: ray.get(actor.stats.remote())["batches"] == 7)
        stream.close()


def test_a_stream_without_any_push_can_be_ended(ray_cluster):
    with running_buffer() as (name, actor):
        thread, got, failed = read_in_background(dataset_of(name))
        until(lambda: is_waited_for(actor), "the reader waiting", timeout_s=60)
        ray.get(actor.end.remote())
        thread.join(30)
        assert not thread.is_alive()
        assert (got, failed) == ([], [])


@pytest.mark.cluster
def test_a_killed_read_task_is_an_error_and_a_new_stream_goes_on(ray_cluster):
    with running_buffer() as (name, actor):
        dataset = replay_dataset(name)
        thread, got, failed = read_in_background(batches_of(dataset, name))
        ray.get(actor.push.remote([fragment(0)]))
        until(lambda: got, timeout_s=60)
        victims = _read_task_pids()
        assert victims
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        thread.join(30)
        assert not thread.is_alive(), "a dead reader must not hang the stream"
        assert failed
        thread, got, failed = read_in_background(dataset_of(name))

        def another():  # what was on its way to the dead reader is lost
            ray.get(actor.push.remote([fragment(1)]))
            return len(got) >= 2

        until(another, timeout_s=60)
        ray.get(actor.end.remote())
        thread.join(60)
        assert not failed


def _read_task_pids():
    return [process.pid for process in ours("ReadReplay")]


@pytest.mark.cluster
def test_reading_without_ray_data_goes_on_after_the_buffer_died(ray_cluster):
    def pid(actor):
        try:
            return ray.get(actor.__ray_call__.remote(lambda self: os.getpid()), timeout=30)
        except ray.exceptions.RayActorError:  # it is being restarted
            return None

    with running_buffer() as (name, actor):
        thread, got, failed = read_in_background(read_buffer(name))
        remote = RemoteBuffer.attach(name)
        remote.push(fragment(0))
        until(lambda: got)
        before = pid(actor)
        os.kill(before, signal.SIGKILL)
        until(lambda: pid(actor) not in (None, before), timeout_s=60)
        number = 0

        def another():
            nonlocal number
            number += 1
            remote.push(fragment(number))
            return len(got) >= 2

        until(another, timeout_s=60)
        assert remote.dropped["buffer_lost"] % WHOLE == 0
        ray.get(actor.end.remote())
        thread.join(60)
        assert not failed


def test_a_buffer_that_is_gone_for_good_is_an_error(ray_cluster):
    with running_buffer() as (name, actor):
        thread, _, failed = read_in_background(read_buffer(name))
        until(lambda: is_waited_for(actor), "the reader waiting")
        ray.kill(actor)
        thread.join(20)
        assert [type(error) for error in failed] == [ReplayError]
    with pytest.raises(ReplayError, match=name):
        Shards.find(name)


def test_pushing_never_waits_and_drops_the_oldest_when_the_buffer_is_slow(ray_cluster):
    with running_buffer() as (name, actor):
        recorder = Recorder()
        remote = RemoteBuffer.attach(name, max_pending=5, recorder=recorder)
        pid = ray.get(actor.__ray_call__.remote(lambda self: os.getpid()))
        os.kill(pid, signal.SIGSTOP)
        try:
            pusher = threading.Thread(
                target=lambda: [remote.push(fragment(number)) for number in range(20)], daemon=True
            )
            pusher.start()
            pusher.join(30)
            assert not pusher.is_alive(), "a push waits for an actor that does not run"
            assert not remote.flush(0.2)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert remote.flush(60)
        assert remote.dropped == {"full": 14 * WHOLE}
        assert recorder.summary() == {"replay_dropped.full": 14 * WHOLE}
        assert ray.get(actor.stats.remote())["pushed"] == 6 * WHOLE


def test_a_taken_name_is_refused(ray_cluster):
    with running_buffer() as (name, _), pytest.raises(ReplayError, match=name):
        Shards.start(name, CONFIG)
