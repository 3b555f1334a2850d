"""Weights and the model deployment on a real Ray: ownership, restarts, swaps while serving, typed errors across it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import re
import signal
import sys
import time
import uuid

import numpy as np
import psutil
import pytest
import ray
import torch
from ray import serve

from brayx.cluster.hub import create_hub
from brayx.cluster.model import model_application
from brayx.cluster.model_client import ModelClient
from brayx.cluster.named import WEIGHT_STORE, call_with_retry, find_actor, get_actor
from brayx.cluster.weight_store import create_weight_store
from brayx.cluster.weights import WeightPublisher, WeightSubscriber, fetch_weights
from brayx.engines.base import save_weights
from brayx.errors import (
    BadWeights,
    BrayxError,
    DeadlineExceeded,
    ModelError,
    ShapeMismatch,
    StartupError,
    VersionUnknown,
)
from brayx.model.arms import WeightSource
from brayx.model.config import ModelConfig
from tests.waiting import until as until_sync
from tests.waiting import until_awaited as until

# Workers cannot import this file: what it defines travels by value.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Scale(torch.nn.Module):
    """Answers with its one weight, so that a result shows which weights made it."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.zeros(1))

    def forward(self, obs):
        return {"scaled": obs * self.factor, "factor": obs[:, 0] * 0 + self.factor}


class Telltale(Scale):
    """Also answers with the process it runs in."""

    def forward(self, obs):
        return {**super().forward(obs), "pid": torch.full((len(obs),), os.getpid())}


def build_telltale():
    return Telltale(), (np.zeros((1, 3), np.float32),)


def build():
    return Scale(), (np.zeros((1, 3), np.float32),)


def factor(value, size=1):
    return {"factor": np.full(size, value, np.float32)}


@pytest.fixture
def store(ray_cluster):
    handle = create_weight_store(f"weights-{uuid.uuid4().hex[:8]}")
    yield handle
    ray.kill(handle)


def test_store_is_found_by_name_and_made_once(ray_cluster):
    name = f"weights-{uuid.uuid4().hex[:8]}"
    with pytest.raises(StartupError, match=name):
        get_actor(name, WEIGHT_STORE)
    first = create_weight_store(name)
    assert WeightPublisher(first).publish(factor(1), 1) == 1
    assert WeightPublisher(create_weight_store(name)).publish(factor(1), 2) == 2
    assert ray.get(find_actor(name).newest.remote())[:2] == (2, 2)
    ray.kill(first)


@ray.remote(num_cpus=0)
class Learner:
    def publish(self, handle, value, size):
        return WeightPublisher(handle).publish(factor(value, size), 1)

    def pid(self):
        return os.getpid()


async def test_weights_outlive_the_learner_that_published_them(store):
    size = 1_000_000  # far above what Ray sends inline
    learner = Learner.remote()
    assert await learner.publish.remote(store, 3, size) == 1
    os.kill(await learner.pid.remote(), signal.SIGKILL)
    with pytest.raises(ray.exceptions.RayActorError):
        await learner.pid.remote()
    seen = {}
    subscriber = WeightSubscriber(store, seen.__setitem__)
    assert await subscriber.start() == 1
    assert seen[1]["factor"].shape == (size,)
    assert (seen[1]["factor"] == 3).all()
    assert not seen[1]["factor"].flags.writeable, "a view of shared memory, not a copy"
    await subscriber.stop()


async def test_subscribers_get_the_newest_and_versions_only_grow(store):
    publisher = WeightPublisher(store)
    seen = [[], []]
    subscribers = [WeightSubscriber(store, lambda v, w, s=s: s.append((v, float(w["factor"][0])))) for s in seen]
    for subscriber in subscribers:
        assert await subscriber.start() == 0
    for step in range(1, 51):
        await asyncio.to_thread(publisher.publish, factor(step), step)
    await until(lambda: all(s and s[-1][0] == 50 for s in seen), timeout_s=40)
    for s in seen:
        versions = [version for version, _ in s]
        assert versions == sorted(set(versions))
        assert all(version == value for version, value in s)
    for subscriber in subscribers:
        await subscriber.stop()
        assert not subscriber.running


def test_nan_is_refused_at_publish_and_nothing_changes(store):
    publisher = WeightPublisher(store)
    publisher.publish(factor(1), 1)
    with pytest.raises(BadWeights, match="'factor' holds 1 values"):
        publisher.publish(factor(np.nan), 2)
    assert ray.get(store.newest.remote())[:2] == (1, 1)
    assert publisher.publish(factor(2), 3) == 2


async def test_a_subscriber_that_refuses_a_version_goes_on(store):
    publisher, seen = WeightPublisher(store), []

    def take(version, weights):
        if weights["factor"][0] == 2:
            raise BadWeights("not these")
        seen.append(version)

    subscriber = WeightSubscriber(store, take)
    await subscriber.start()
    for value in (1, 2, 3):
        version = await asyncio.to_thread(publisher.publish, factor(value), value)
        await until(lambda version=version: subscriber.version == version, timeout_s=40)
    assert seen == [1, 3]
    assert subscriber.running
    await subscriber.stop()


async def test_a_killed_store_comes_back_and_versions_go_on(store):
    publisher, seen = WeightPublisher(store), []
    subscriber = WeightSubscriber(store, lambda version, weights: seen.append((version, float(weights["factor"][0]))))
    await subscriber.start()
    for value in (1, 2, 3):
        await asyncio.to_thread(publisher.publish, factor(value), value)
    await until(lambda: subscriber.version == 3, timeout_s=40)
    # Not ray.kill, which may let the old process take another publish before it goes.
    os.kill(await store.pid.remote(), signal.SIGKILL)
    assert await asyncio.to_thread(publisher.publish, factor(4), 4) >= 4
    await until(lambda: seen[-1][1] == 4, timeout_s=40)
    versions = [version for version, _ in seen]
    assert versions == sorted(set(versions))
    assert subscriber.running
    await subscriber.stop()


def kill_9(store):
    """Kills the process of a weight store, and waits until another one answers."""
    pid = ray.get(store.pid.remote(), timeout=30)
    os.kill(pid, signal.SIGKILL)

    def answers():
        try:
            return ray.get(store.pid.remote(), timeout=1) != pid
        except ray.exceptions.RayError:
            return False

    until_sync(answers, "the store runs again")


@pytest.mark.cluster
async def test_a_killed_store_without_a_publisher_gets_the_newest_back_from_a_subscriber(ray_cluster):
    store = create_weight_store(f"weights-{uuid.uuid4().hex[:8]}", about=b"what it is")
    publisher = WeightPublisher(store)
    size = 1_000_000
    seen, also, late = [], [], []
    subscribers = [
        WeightSubscriber(store, lambda version, weights, seen=seen: seen.append((version, weights["factor"][-1])))
        for seen in (seen, also)
    ]
    for subscriber in subscribers:
        await subscriber.start()
    for value in (1, 2, 3):
        await asyncio.to_thread(publisher.publish, factor(value, size), 10 * value)
    await until(lambda: seen and seen[-1] == (3, 3) and also and also[-1] == (3, 3), timeout_s=40)
    await asyncio.to_thread(kill_9, store)
    await until(lambda: ray.get(store.steps.remote(), timeout=60) == {3: 30}, timeout_s=60)
    subscribers.append(
        WeightSubscriber(store, lambda *published: late.append((published[0], published[1]["factor"][-1])))
    )
    assert await subscribers[-1].start() == 3
    assert late == [(3, 3)], "a subscriber that joins after the restart gets the newest at once"
    assert ray.get(store.about.remote(), timeout=60) == b"what it is"
    assert await asyncio.to_thread(publisher.publish, factor(4, size), 40) == 4
    await until(lambda: seen[-1] == also[-1] == late[-1] == (4, 4), timeout_s=40)
    assert [version for version, _ in seen] == sorted({version for version, _ in seen}), "nothing came twice"
    for subscriber in subscribers:
        await subscriber.stop()
    ray.kill(store)


async def test_old_versions_are_fetched_while_the_store_keeps_them(ray_cluster):
    store = create_weight_store(f"weights-{uuid.uuid4().hex[:8]}", keep=3)
    publisher = WeightPublisher(store)
    for value in range(1, 6):
        publisher.publish(factor(value, 500_000), 10 * value)
    assert (await fetch_weights(store, 3))["factor"][0] == 3
    with pytest.raises(VersionUnknown, match="no policy version 2, nearest is 3") as unknown:
        await fetch_weights(store, 2)
    assert unknown.value.details == {"version": 2, "nearest": 3, "known": [3, 4, 5]}
    ray.kill(store)


def objects_in_shared_memory():
    from ray._private.internal_api import memory_summary

    address = ray.get_runtime_context().gcs_address  # else it looks for a Ray, and there may be several
    return int(re.search(r"Plasma memory usage \d+ MiB, (\d+) objects", memory_summary(address, stats_only=True))[1])


@pytest.mark.cluster
async def test_a_thousand_publishes_leave_the_newest_and_nothing_else(store):
    publisher, seen = WeightPublisher(store), []
    subscriber = WeightSubscriber(store, lambda version, weights: seen.append((version, weights["factor"][-1])))
    await subscriber.start()
    size = 250_000  # 1 MB each: in total twice the object store
    before = objects_in_shared_memory()
    most = 0
    processes = [
        psutil.Process(),
        psutil.Process(await store.pid.remote()),
    ]  # the publisher and follower, and the store
    used = []  # private bytes and open descriptors, after each hundred

    def publish():
        nonlocal most
        for value in range(1, 1001):
            publisher.publish(factor(value, size), value)
            if value % 100 == 0:
                most = max(most, objects_in_shared_memory() - before)
                used.append([(process.memory_full_info().uss, process.num_fds()) for process in processes])

    await asyncio.to_thread(publish)
    await until(lambda: seen[-1] == (1000, 1000), timeout_s=60)
    versions = [version for version, _ in seen]
    assert versions == sorted(set(versions))
    assert most <= 400, "of 2000: four are kept, and Ray frees what was dropped a hundred at a time"
    for of_each in zip(*used, strict=True):
        sizes, descriptors = np.array(of_each).T
        # The 800 after the first 200, which fill what is kept, are 800 MB and a descriptor each.
        assert sizes[2:].max() - sizes[1] < 100 * 2**20, sizes
        assert descriptors[2:].max() - descriptors[1] < 50, descriptors
    await subscriber.stop()


def ask(store, timeout_s):
    return call_with_retry(store.standing, timeout_s=timeout_s)


def publish(store, timeout_s):
    return WeightPublisher(store, timeout_s=timeout_s).publish(factor(2), 2)


def fetch(store, timeout_s):
    with pytest.raises(VersionUnknown):  # an answer, too
        asyncio.run(fetch_weights(store, 99, timeout_s))


@pytest.mark.chaos
@pytest.mark.parametrize("question", [ask, publish, fetch])
def test_a_call_outlasts_a_restart_of_the_store_but_not_its_end(store, question):
    pid = call_with_retry(store.pid)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(DeadlineExceeded, match=r"in 0\.5 s"):
        question(store, 0.5)
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        under_way = thread.submit(question, store, 60)
        until_sync(under_way.running, "the question is on its way")
        os.kill(pid, signal.SIGKILL)
        under_way.result(90)
    assert call_with_retry(store.pid) != pid
    ray.kill(store)

    def ended():
        try:
            question(store, 60)
        except ModelError as error:
            return "the weight store has ended" in str(error)

    until_sync(ended, "Ray reports that the store has ended")  # it may answer for a moment yet


@contextlib.asynccontextmanager
async def served(config, build=build, store="", checkpoint="", hub=""):
    app = model_application(build, config, WeightSource(store, checkpoint), hub=hub)
    handle = await asyncio.to_thread(serve.run, app, name="model-test", route_prefix=None)
    model = await ModelClient.connect(handle, deadline_s=20)
    try:
        yield handle, model
    finally:
        await model.close()
        await asyncio.to_thread(serve.delete, "model-test")


OBS = np.array([1, 2, 3], np.float32)


async def test_remote_model_follows_the_store_and_carries_typed_errors(ingress, ray_cluster):
    name = f"weights-{uuid.uuid4().hex[:8]}"
    store = create_weight_store(name)
    publisher = WeightPublisher(store)
    await asyncio.to_thread(publisher.publish, factor(1), 1)
    config = ModelConfig(module="unused", engine="onnx", placement="remote", num_workers=1)
    hub = create_hub(f"hub-{name}", None)
    async with served(config, store=name, hub=f"hub-{name}") as (handle, model):
        first = await model.forward(OBS)
        assert first.policy_version == model.version == 1, "a replica that starts late has the newest weights at once"
        np.testing.assert_array_equal(first.outputs["scaled"], OBS)

        async def act():
            last = 0
            while last < 20:
                forward = await model.forward(OBS)
                assert forward.outputs["factor"] == forward.policy_version >= last
                last = forward.policy_version

        async def learn():
            for value in range(2, 21):
                await asyncio.to_thread(publisher.publish, factor(value), value)

        async with asyncio.timeout(120):
            await asyncio.gather(learn(), *[act() for _ in range(16)])

        async with asyncio.timeout(120):  # the hub counts the replica's engine calls; the mean is the newest interval's
            while (await hub.snapshot.remote()).get("forward_batch_size", 0) <= 1:
                await asyncio.gather(*[model.forward(OBS) for _ in range(16)])

        with pytest.raises(ShapeMismatch, match=r"expected \[obs: \[3\] float32\]"):
            await model.forward(np.zeros(4))  # refused here
        with pytest.raises(ShapeMismatch, match=r"obs: \[N, 3\] float32"):
            await model._call([[np.zeros(4, np.float32)]])  # refused there, and the error keeps its type
        assert (await model.forward(OBS)).policy_version == 20

        hurried = ModelClient(handle, model.spec, deadline_s=1e-4)
        with pytest.raises(DeadlineExceeded):
            await hurried.forward(OBS)
        await hurried.close()
        assert (await model.forward(OBS)).policy_version == 20
    numbers = ray.get(hub.snapshot.remote(), timeout=30)
    assert {"forward_seconds.p50", "forward_wait_seconds.p99"} <= set(numbers)
    ray.kill(hub)
    ray.kill(store)


async def test_sessions_of_a_remote_model_act_with_the_version_they_pinned(ingress, ray_cluster):
    name = f"weights-{uuid.uuid4().hex[:8]}"
    store = create_weight_store(name)
    publisher = WeightPublisher(store)
    await asyncio.to_thread(publisher.publish, factor(1), 1)
    config = ModelConfig(module="unused", placement="remote", max_versions=1)
    async with served(config, store=name) as (_, model):
        pinned = [model.pinned()]
        for value in (2, 3):
            await asyncio.to_thread(publisher.publish, factor(value), value)
            async with asyncio.timeout(120):
                while (await model.forward(OBS)).policy_version < value:
                    pass
            pinned.append(model.pinned())
        handles = [*pinned, model] * 8
        forwards = await asyncio.gather(*[handle.forward(OBS) for handle in handles])
        assert [f.policy_version for f in forwards] == [1, 2, 3, 3] * 8
        assert all(f.policy_version == f.outputs["factor"] for f in forwards)
        with pytest.raises(VersionUnknown, match="no policy version 7, nearest is 3"):
            await model.forward(OBS, version=7)
        for value in range(4, 9):  # the store keeps four
            await asyncio.to_thread(publisher.publish, factor(value), value)
            async with asyncio.timeout(120):
                while (await model.forward(OBS)).policy_version < value:
                    pass
        with pytest.raises(VersionUnknown, match="no policy version 1, nearest is 5") as unknown:
            await pinned[0].forward(OBS)
        assert unknown.value.details == {"version": 1, "nearest": 5, "known": [5, 6, 7, 8]}
        assert (await model.pinned(5).forward(OBS)).outputs["factor"] == 5
    ray.kill(store)


@pytest.mark.chaos
async def test_replicas_killed_under_load_give_no_wrong_answer(ingress, tmp_path):
    save_weights(tmp_path / "weights.npz", factor(5))
    config = ModelConfig(module="unused", engine="torch", placement="remote", num_workers=2)
    async with served(config, build_telltale, checkpoint=str(tmp_path)) as (_, model):
        pids, answered, failed, ended = set(), 0, [], False

        async def act(value):
            nonlocal answered
            while not ended:
                obs = np.full(3, value, np.float32)
                try:
                    outputs = (await model.forward(obs)).outputs
                except BrayxError as error:
                    failed.append(error)
                    continue
                assert (outputs["scaled"] == 5 * value).all(), "another caller's answer"
                pids.add(int(outputs["pid"]))
                answered += 1

        callers = [asyncio.create_task(act(value)) for value in range(16)]
        for _ in range(3):
            # Without a second one forwards wait for the new replica, which a busy machine starts after their deadline.
            await until(lambda: len(pids) == 2, "both replicas answer", timeout_s=120)
            victim = pids.pop()
            pids.clear()
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
            before = answered
            await until(lambda before=before: answered > before + 200, "forwards go on", timeout_s=60)
        ended = True
        await asyncio.gather(*callers)
        assert not failed, "each was sent again within its deadline"


@pytest.mark.chaos
async def test_replicas_killed_while_a_thousand_publishes_run_answer_with_the_version_they_name(ingress, ray_cluster):
    """Every answer comes from the weights that it names. A forward hit by a kill is repeated, or fails in time."""
    name = f"weights-{uuid.uuid4().hex[:8]}"
    store = create_weight_store(name)
    publisher = WeightPublisher(store)
    await asyncio.to_thread(publisher.publish, factor(1), 1)
    config = ModelConfig(module="unused", engine="torch", placement="remote", num_workers=2, max_versions=4)
    async with served(config, build_telltale, store=name) as (_, model):
        pids, versions, failed, asked, kills = set(), set(), [], 0, []
        published = asyncio.Event()

        async def act(value):
            nonlocal asked
            last = 0
            while not published.is_set():
                asked += 1
                # One in four asks for the version that it got last, which may be gone.
                version = last if last and asked % 4 == 0 else None
                try:
                    async with asyncio.timeout(
                        30
                    ):  # a forward without an answer or an error after its 20 s is a failure
                        outputs, made_by = await model.forward(np.full(3, value, np.float32), version=version)
                except BrayxError as error:
                    failed.append((version, error))
                    continue
                assert outputs["factor"] == made_by
                assert (outputs["scaled"] == np.float32(made_by) * value).all(), (
                    "another version's, or another caller's"
                )
                assert version in (None, made_by)
                pids.add(int(outputs["pid"]))
                versions.add(made_by)
                last = made_by

        def learn():
            for value in range(2, 1001):
                publisher.publish(factor(value), value)
                time.sleep(0.01)
                if value % 250 == 0 and value < 1000 and pids:
                    victim = pids.pop()
                    pids.clear()
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(victim, signal.SIGKILL)
                        kills.append(victim)

        callers = [asyncio.create_task(act(value)) for value in range(1, 17)]
        await until(lambda: pids, "a replica answers", timeout_s=60)
        await asyncio.to_thread(learn)
        await until(lambda: 1000 in versions, "the newest acts", timeout_s=60)
        published.set()
        await asyncio.gather(*callers)
        assert kills
        assert len(versions) > 20
        unknown = [error for version, error in failed if isinstance(error, VersionUnknown) and version is not None]
        late = [error for _, error in failed if isinstance(error, DeadlineExceeded)]
        assert len(unknown) + len(late) == len(failed), failed
        assert len(failed) < asked / 2
    ray.kill(store)


@pytest.mark.chaos
async def test_a_replica_that_dies_is_replaced_and_forwards_are_sent_again(ingress, tmp_path):
    save_weights(tmp_path / "weights.npz", factor(5))
    config = ModelConfig(module="unused", engine="torch", placement="remote")
    async with served(config, build_telltale, checkpoint=str(tmp_path)) as (_, model):
        first = (await model.forward(OBS)).outputs
        assert first["factor"] == 5
        os.kill(int(first["pid"]), signal.SIGKILL)
        forwards = await asyncio.gather(*[model.forward(OBS) for _ in range(8)])
        assert all(forward.outputs["factor"] == 5 for forward in forwards)
        assert all(forward.outputs["pid"] != first["pid"] for forward in forwards)
