"""`RemoteBuffer` on a real Ray: created or attached to, in shards, with pushes that wait; several in one stream."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import uuid
from collections import Counter

import numpy as np
import pytest
import ray

from brayx.cluster.housekeeping import Housekeeping
from brayx.cluster.hub import create_hub
from brayx.cluster.remote_buffer import RemoteBuffer
from brayx.cluster.shards import Shards, flush_metrics
from brayx.cluster.stream import batches_of, read_buffer, replay_dataset
from brayx.errors import BadFragment, ConfigError, DeadlineExceeded, ReplayError
from brayx.types import Columns
from tests.unit.replay.made import columns, fragment
from tests.waiting import until

OPTIONS = {"size": 4, "batch_size": 2, "unroll_length": 4}
WHOLE = 8


@contextlib.contextmanager
def running(**options):
    buffer = RemoteBuffer(f"buffer-{uuid.uuid4().hex[:8]}", **{**OPTIONS, **options})
    try:
        yield buffer
    finally:
        buffer.close(0)
        buffer.shards.kill()


def pid(shard):
    try:
        return ray.get(shard.actor.__ray_call__.remote(lambda self: os.getpid()), timeout=60)
    except ray.exceptions.RayActorError:  # it is being restarted
        return None


def test_the_same_name_is_the_same_buffer_from_anywhere(ray_cluster):
    with running(num_workers=2) as buffer:

        @ray.remote(num_cpus=0)
        def push(name):
            with pytest.raises(ConfigError, match="running with size 4, not 5"):
                RemoteBuffer(name, size=5)
            mine = RemoteBuffer(name, size=4)
            mine.push(fragment(WHOLE, 3), drop=False)
            return mine.config

        assert ray.get(push.remote(buffer.name)) == buffer.config
        assert buffer.stats()["pushed"] == WHOLE
        assert buffer.stats()["shards"] == 2
        assert next(iter(buffer))["reward"][0, 0] == 3
    with pytest.raises(ReplayError, match=r"no buffer named|does not answer"):
        RemoteBuffer.attach(buffer.name)


def test_a_push_that_may_not_drop_waits_for_room_and_says_what_is_wrong(ray_cluster):
    with running(size=1) as buffer:
        with pytest.raises(BadFragment, match="obs: holds NaN"):
            asyncio.run(buffer.push_async(columns(1, float("nan")), drop=False))
        buffer.push(columns(2), drop=False)
        with pytest.raises(DeadlineExceeded, match=r"no room for 24 transitions within 0\.2 s"):
            buffer.push(columns(6), drop=False, timeout_s=0.2)
        got = []
        reader = threading.Thread(target=lambda: got.extend(buffer), daemon=True)
        reader.start()
        asyncio.run(buffer.push_async(*[columns(2, number) for number in range(5)], drop=False))
        buffer.end(drain=True)
        reader.join(60)
        assert not reader.is_alive()
        assert sum(int(batch["mask"].sum()) for batch in got) == 6 * WHOLE
        assert buffer.stats()["dropped.bad_fragment"] == 4
        assert "dropped.full" not in buffer.stats()
        with pytest.raises(ReplayError, match="ended"):
            buffer.push(columns(2), drop=False)


def test_closing_a_handle_ends_a_push_that_waits_for_a_hung_shard(ray_cluster):
    with running() as buffer:
        hung = pid(buffer.shards[0])
        raised = []

        def push():
            with pytest.raises(ReplayError, match="this handle to it was closed") as caught:
                buffer.offer(columns(2), timeout_s=0.1)
            raised.append(caught.value)

        thread = threading.Thread(target=push, daemon=True)
        os.kill(hung, signal.SIGSTOP)
        try:
            thread.start()
            buffer.close(0)
            thread.join(20)  # it would wait a minute for an answer
            assert raised, "it is still waiting"
        finally:
            os.kill(hung, signal.SIGCONT)
        with pytest.raises(ReplayError, match="was closed"):
            buffer.push(columns(2), drop=False)


@pytest.mark.cluster
def test_attaching_waits_for_a_shard_that_restarts(ray_cluster):
    with running(num_workers=2) as buffer:
        for number in range(2):
            os.kill(pid(buffer.shards[number]), signal.SIGKILL)
            mine = RemoteBuffer.attach(buffer.name)
            mine.push(columns(2), drop=False)
            mine.close()
        assert buffer.stats()["pushed"] >= WHOLE


def test_the_counts_of_the_shards_are_in_the_hub_before_it_closes(ray_cluster):
    hub_name = f"hub-{uuid.uuid4().hex[:8]}"
    hub = create_hub(hub_name, None)
    with (
        running(num_workers=2, size=1, hub=hub_name) as buffer,
        running(size=1, hub=hub_name, learned=False) as held_out,
    ):
        for shard in (*buffer.shards, *held_out.shards):
            ray.get(shard.actor.push.remote([columns(2), columns(2), columns(1, float("nan"))]))
        flush_metrics([buffer.shards, held_out.shards])
        numbers = ray.get(hub.close.remote())
        assert (numbers["env_steps"], numbers["fragments_pushed"]) == (4 * WHOLE, 4)
        assert numbers["replay_dropped.full"] == 2 * WHOLE
        assert numbers["replay_dropped.bad_fragment"] == WHOLE
        assert (numbers["eval_dropped.full"], numbers["eval_dropped.bad_fragment"]) == (WHOLE, WHOLE // 2)
    ray.kill(hub)


@pytest.mark.cluster
def test_a_hung_shard_does_not_keep_the_others_counts_from_the_hub(ray_cluster):
    hub_name = f"hub-{uuid.uuid4().hex[:8]}"
    hub = create_hub(hub_name, None)
    with running(hub=hub_name) as silent, running(hub=hub_name) as buffer:
        ray.get(buffer.shards[0].actor.push.remote([columns(2)]))
        hung = pid(silent.shards[0])
        os.kill(hung, signal.SIGSTOP)
        try:
            flush_metrics([silent.shards, buffer.shards], 2.0)
            until(lambda: ray.get(hub.snapshot.remote()).get("env_steps") == WHOLE, "the other's counts")
        finally:
            os.kill(hung, signal.SIGCONT)
    ray.kill(hub)


def test_iterating_has_a_deadline(ray_cluster):
    with running() as buffer, pytest.raises(DeadlineExceeded, match="no batch came"):
        next(buffer.batches(timeout_s=0.2))


@pytest.mark.cluster
def test_batches_that_ranks_have_taken_are_freed(ray_cluster):
    with running(max_in_flight=4) as buffer:
        shards = replay_dataset(buffer.name).streaming_split(2)
        streams = [batches_of(shard, buffer.name) for shard in shards]
        done = threading.Event()
        taken = Counter()

        def push():
            while not done.wait(0.001):
                buffer.push(fragment(WHOLE))

        def take(rank):
            with contextlib.suppress(ray.exceptions.RayActorError):
                for _ in streams[rank]:
                    streams[rank].took()
                    taken[rank] += 1

        threads = [threading.Thread(target=push), *(threading.Thread(target=take, args=(rank,)) for rank in (0, 1))]
        for thread in threads:
            thread.start()
        try:
            until(lambda: taken.total() >= 300, timeout_s=120)
            objects, statistics = ray.get(shards[0]._coord_actor.__ray_call__.remote(_kept), timeout=60)
        finally:
            done.set()
            ray.kill(shards[0]._coord_actor)  # which the ranks notice
            for thread in threads:
                thread.join(60)
            for stream in streams:
                stream.close()
        assert objects < 100
        assert statistics < 100


class Seen(Housekeeping):
    executor = None

    def before_execution_starts(self, executor):
        super().before_execution_starts(executor)
        Seen.executor = executor


@pytest.mark.cluster
def test_batches_that_this_process_has_taken_are_freed(ray_cluster):
    with running(max_in_flight=4) as buffer:
        dataset = replay_dataset(buffer.name)
        dataset.context.custom_execution_callback_classes[:] = [Seen]
        stream = batches_of(dataset, buffer.name)
        before = _objects()
        for _ in range(250):
            buffer.push(columns(2), drop=False)
            next(stream)
            stream.took()
        assert _objects() - before < 100
        assert _statistics(Seen.executor) < 100
        buffer.end()
        list(stream)


class Changed(Housekeeping):
    """Sees executors without the attributes that it reads."""

    def before_execution_starts(self, executor):
        super().before_execution_starts(object())

    def on_execution_step(self, executor):
        super().on_execution_step(object())


@pytest.mark.cluster
@pytest.mark.parametrize("ranks", [0, 2])
def test_a_stream_goes_on_where_ray_has_changed_its_executor(ray_cluster, ranks):
    with running() as buffer:
        dataset = replay_dataset(buffer.name)
        dataset.context.custom_execution_callback_classes[:] = [Changed]
        shards = dataset.streaming_split(ranks) if ranks else [dataset]
        taken = Counter()

        def take(rank):
            stream = batches_of(shards[rank], buffer.name)
            for _ in stream:
                stream.took()
                taken[rank] += 1

        threads = [threading.Thread(target=take, args=(rank,), daemon=True) for rank in range(len(shards))]
        for thread in threads:
            thread.start()
        for _ in range(20):
            buffer.push(columns(2), drop=False)
        buffer.end(drain=True)
        for thread in threads:
            thread.join(60)
        assert taken.total() == 20


def _kept(coordinator):
    """Objects in its process's memory, and blocks of which there are statistics."""
    return _objects(), _statistics(coordinator._current_executor)


def _objects():
    return ray._private.worker.global_worker.core_worker.get_memory_store_size()


def _statistics(executor):
    operators = executor._topology
    blocks = [
        len(value) for operator in operators for value in operator.get_stats().values() if isinstance(value, list)
    ]
    return sum(blocks)


@pytest.mark.cluster
@pytest.mark.parametrize("through_ray_data", [True, False])
def test_the_stream_reads_from_all_shards_and_goes_on_when_one_dies(ray_cluster, through_ray_data):
    hub_name = f"hub-{uuid.uuid4().hex[:8]}"
    hub = create_hub(hub_name, None)
    with running(num_workers=2, hub=hub_name) as buffer:
        first, other = (shard.actor for shard in buffer.shards)
        stream = batches_of(replay_dataset(buffer.name), buffer.name) if through_ray_data else read_buffer(buffer.name)
        got, failed = [], []

        def read():
            try:
                for batch in stream:
                    got.append(float(batch["reward"][0, 0]))
                    stream.took()
            except Exception as error:
                failed.append(error)

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        ray.get([first.push.remote([columns(2, 1)]), other.push.remote([columns(2, 2)])])
        until(lambda: sorted(got) == [1, 2], "a batch of each shard", timeout_s=60)
        before = pid(buffer.shards[1])
        os.kill(before, signal.SIGKILL)
        for number in range(3):
            ray.get(first.push.remote([columns(2, 10 + number)]))
        until(lambda: len(got) == 5, "the other shard's", timeout_s=60)
        until(lambda: pid(buffer.shards[1]) not in (None, before), "the shard's restart", timeout_s=60)
        ray.get(other.push.remote([columns(2, 3)]))
        until(lambda: 3 in got, "a batch of the shard that restarted", timeout_s=60)
        assert not failed
        until(lambda: ray.get(hub.snapshot.remote()).get("replay_restarts") == 1, "the restart being counted")
        buffer.end()
        reader.join(30)
        assert not reader.is_alive()
    ray.kill(hub)


def test_a_hung_shard_does_not_block_the_others(ray_cluster):
    with running(num_workers=2, max_in_flight=8) as buffer, running() as other:
        for number in range(2):
            ray.get(buffer.shards[0].actor.push.remote([columns(2, number)]))
        other.push(columns(2, 2), drop=False)
        hung = pid(buffer.shards[1])
        os.kill(hung, signal.SIGSTOP)
        got = []

        def read():
            stream = read_buffer({buffer.name: 1.0, other.name: 1.0})
            for batch in stream:
                stream.took()
                got.append(float(batch["reward"][0, 0]))

        reader = threading.Thread(target=read, daemon=True)
        try:
            reader.start()
            until(lambda: sorted(got) == [0, 1, 2], "those of the others, though one was silent from the start", 25)
            for number in range(3, 13):
                ray.get(buffer.shards[0].actor.push.remote([columns(2, number)], False, 60.0))
            until(lambda: sorted(got) == list(range(13)), "those that followed", 25)
        finally:
            os.kill(hung, signal.SIGCONT)
        ray.get(buffer.shards[1].actor.push.remote([columns(2, 13)]))
        until(lambda: 13 in got, "its own, once it answers", timeout_s=60)
        buffer.end()
        other.end()
        reader.join(60)
        assert not reader.is_alive()


@pytest.mark.cluster
def test_looking_for_a_hung_buffer_ends_in_time(ray_cluster):
    with running() as buffer:
        hung = pid(buffer.shards[0])
        os.kill(hung, signal.SIGSTOP)
        try:
            with pytest.raises(ReplayError, match="does not answer"):
                Shards.find(buffer.name, timeout_s=0.5)
        finally:
            os.kill(hung, signal.SIGCONT)


def test_a_push_goes_on_to_the_next_shard_when_the_first_is_full_or_dead(ray_cluster):
    with running(num_workers=2, size=1) as buffer:
        for number in range(2):
            buffer.push(columns(2, number), drop=False, timeout_s=30)
        numbers = ray.get([shard.actor.stats.remote() for shard in buffer.shards])
        assert [stats["batches"] for stats in numbers] == [1, 1]
    with running(num_workers=1, size=1) as buffer:
        os.kill(pid(buffer.shards[0]), signal.SIGKILL)
        buffer.push(columns(2), drop=False, timeout_s=60)
        assert buffer.stats()["pushed"] == WHOLE


def have_come(stream):
    """Whether each shard's next batch is here, as the reader that is suspended in the stream will find."""
    lanes = stream._items.gi_frame.f_locals["lanes"]
    return all(lane.batch is not None or ray.wait([lane.coming], timeout=0)[0] for lane in lanes)


def test_several_buffers_are_mixed_by_weight_without_waiting_for_an_empty_one(ray_cluster):
    with running(size=100, max_in_flight=4) as games, running(size=100) as records:
        for _ in range(30):
            games.push(columns(2, 1), drop=False)
            records.push(columns(2, 2), drop=False)
        stream = read_buffer({games.name: 3.0, records.name: 1.0}, timeout_s=60)
        counts: Counter[float] = Counter()
        for batch in stream:
            stream.took()
            counts[float(batch["reward"][0, 0])] += 1
            until(lambda: have_come(stream), "a batch of each, since one that has none is not waited for")
            if counts.total() == 24:
                break
        assert 15 <= counts[1] <= 21
        for batch in stream:  # the games run dry
            stream.took()
            counts[float(batch["reward"][0, 0])] += 1
            if counts.total() == 60:
                break
        assert counts == {1: 30, 2: 30}
        stream.close()


def test_priorities_reach_the_shard_of_their_batch(ray_cluster):
    with running(num_workers=2, sampler="prioritised", priority_exponent=1.0) as buffer:
        for shard, number in zip(buffer.shards, (1, 2), strict=True):
            ray.get(shard.actor.push.remote([columns(2, number), columns(2, 5)]))
        stream = read_buffer(buffer.name, timeout_s=60)
        for _ in range(20):
            batch = next(stream)
            stream.took()
            stream.update_priorities(batch["index"], np.where(batch["reward"][:, 0] == 5, 1e6, 0.0))

        def has_high_priorities_only():
            batch = next(stream)
            stream.took()  # otherwise the shards soon send no more
            return set(batch["reward"][:, 0].tolist()) == {5.0}

        until(has_high_priorities_only, "priorities")
        assert buffer.stats()["stale"] == 0
        stream.close()
        origins = [shard.actor.__ray_call__.remote(lambda self: self._buffer.table._origin) for shard in buffer.shards]
        assert [origin >> 16 for origin in ray.get(origins)] == [0, 1], "it cannot be taken for the other's"


@pytest.mark.cluster
def test_priorities_of_a_learner_behind_ray_data_change_what_the_shards_draw(ray_cluster):
    options = {"sampler": "prioritised", "priority_exponent": 1.0, "importance_exponent": 0.5}
    with running(num_workers=2, batch_size=8, size=1, **options) as buffer:
        for shard, first in zip(buffer.shards, (0, 4), strict=True):
            ray.get(shard.actor.push.remote([columns(1, first + n) for n in range(4)]))
        stream = batches_of(replay_dataset(buffer.name), buffer.name)
        counts, updated = np.zeros(8), set()

        def learn():
            batch = next(stream)
            stream.took()
            numbers = batch["reward"][:, 0].astype(int)
            stream.update_priorities(batch["index"], 1.0 + numbers % 4)
            return numbers, batch["weight"]

        numbers, weights = learn()
        assert sorted(numbers % 4) == [0, 0, 1, 1, 2, 2, 3, 3], "new items come equally often"
        assert (weights == 1).all()
        while len(updated) < 8:
            updated.update(learn()[0].tolist())
        for _ in range(8):  # batches drawn before the last update arrived
            learn()
        for _ in range(300):  # shares of about 1,200 draws: five standard errors are .07
            numbers, weights = learn()
            counts += np.bincount(numbers, minlength=8)
            correction = (1.0 + numbers % 4) ** -0.5
            np.testing.assert_allclose(weights, correction / correction.max(), rtol=1e-5)
        for shard in (counts[:4], counts[4:]):
            assert shard / shard.sum() == pytest.approx([0.1, 0.2, 0.3, 0.4], abs=0.07)
        assert counts[:4].sum() == pytest.approx(1200, abs=240), "each shard gives its share"
        assert buffer.stats()["stale"] == 0
        buffer.end()
        list(stream)  # batches in flight


def test_importance_grows_by_the_batches_of_all_shards_and_goes_on_when_one_dies(ray_cluster):
    options = {"priority_exponent": 1.0, "importance_exponent": 0.0, "importance_batches": 20}
    with running(num_workers=2, batch_size=8, size=1, sampler="prioritised", **options) as buffer:
        arrays = columns(2).arrays
        pushed = Columns({**arrays, "priority": np.array([[1.0], [4.0]]) * np.ones((2, 5))})
        for shard in buffer.shards:
            ray.get(shard.actor.push.remote([pushed]))
        stream = read_buffer(buffer.name, timeout_s=60)
        betas, shards = [], set()

        def learn():
            batch = next(stream)
            stream.took()
            shards.add(int(batch["index"][0] >> 40))
            betas.append(np.log(batch["weight"].min()) / np.log(1 / 4))

        while len(betas) < 6 or len(shards) < 2:
            learn()
        before = pid(buffer.shards[0])
        os.kill(before, signal.SIGKILL)
        until(lambda: pid(buffer.shards[0]) not in (None, before), "the shard's restart", timeout_s=60)
        ray.get(buffer.shards[0].actor.push.remote([pushed]))
        while len(betas) < 25 or len(shards) < 3:
            learn()
        np.testing.assert_allclose(betas, np.minimum(np.arange(len(betas)) / 20, 1), atol=1e-4)
        stream.close()


def test_columns_arrive_as_they_were_pushed(ray_cluster):
    with running() as buffer:
        made = columns(2, 7)
        buffer.push(Columns(dict(made.arrays)), drop=False)
        batch = next(iter(buffer))
    for key, array in made.arrays.items():
        np.testing.assert_array_equal(batch[key], array)
