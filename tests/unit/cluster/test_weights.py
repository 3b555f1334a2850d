"""Subscribers of a weight store and fetches from one, without Ray: restarts, refusals, deadlines."""

from __future__ import annotations

import asyncio
import inspect
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ray.exceptions import GetTimeoutError, RayActorError

from brayx.cluster import weights as weights_module
from brayx.cluster.weight_store import WeightStore
from brayx.cluster.weights import WeightSubscriber, fetch_weights
from brayx.engines.torch import TorchEngine
from brayx.errors import DeadlineExceeded, StartupError
from brayx.model.local import LocalModel


async def test_a_subscriber_survives_an_unexpected_error(caplog):
    requested, going_on = [], asyncio.Event()

    async def wait_newer(than, timeout_s):
        requested.append(than)
        if len(requested) == 2:
            raise KeyError("not one of Ray's")
        if len(requested) == 5:
            going_on.set()
        await asyncio.sleep(0.01)

    store = SimpleNamespace(wait_newer=SimpleNamespace(remote=wait_newer))
    subscriber = WeightSubscriber(store, lambda version, weights: None, relayed=False)
    await subscriber.start()
    async with asyncio.timeout(60):
        await going_on.wait()
    assert subscriber.running
    assert "not one of Ray's" in caplog.text
    await subscriber.stop()
    assert not subscriber.running


class RestartedStore:
    """The handle of a weight store that is unavailable for the first calls and has lost version 5 afterwards."""

    def __init__(self, away=2, last=(5, 50)):
        self.store = WeightStore(last=last)
        self.away = away
        self.calls = 0

    def __getattr__(self, name):
        async def remote(*args):
            self.calls += 1
            if self.calls <= self.away:
                raise RayActorError
            answer = getattr(self.store, name)(*args)
            return await answer if inspect.isawaitable(answer) else answer

        return SimpleNamespace(remote=remote)


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(weights_module.ray, "get", lambda reference, timeout: reference)
    monkeypatch.setattr(weights_module, "_AGAIN_AFTER_S", 0.01)


async def test_a_replica_starts_with_the_published_weights(at_once):
    store, received = RestartedStore(), []
    subscriber = WeightSubscriber(store, lambda version, weights: received.append((version, weights)), relayed=False)
    starting = asyncio.create_task(subscriber.start_abreast(timeout_s=10))
    await asyncio.sleep(0.2)
    assert not starting.done(), "it would act with the weights it was built with"
    store.store.restore(5, 50, ["w50"])
    assert await starting == 5
    assert received == [(5, "w50")]
    assert subscriber.running
    await subscriber.stop()


@pytest.mark.parametrize(
    ("away", "why"), [(2, "has lost version 5, the newest"), (10**9, "does not answer: ")], ids=["lost", "away"]
)
async def test_a_replica_does_not_start_without_the_published_weights(at_once, monkeypatch, away, why):
    store = RestartedStore(away=away)
    subscriber = WeightSubscriber(store, lambda version, weights: None, relayed=False)
    # Each call takes 10 s of this clock, so the deadline comes with the seventh, however busy the machine is.
    monkeypatch.setattr(weights_module, "time", SimpleNamespace(monotonic=lambda: 10.0 * store.calls))
    with pytest.raises(StartupError, match=f"within 65 s: the weight store {why}"):
        await subscriber.start_abreast(timeout_s=65)
    assert not subscriber.running


async def test_a_replica_does_not_start_with_refused_weights(at_once):
    store = RestartedStore(away=0)
    store.store.restore(5, 50, ["w50"])

    def take(version, weights):
        raise MemoryError

    subscriber = WeightSubscriber(store, take, relayed=False)
    with pytest.raises(StartupError, match="version 5 was refused"):
        await subscriber.start_abreast(timeout_s=5)
    assert not subscriber.running


async def test_a_replica_starts_as_built_if_nothing_was_published(at_once):
    subscriber = WeightSubscriber(RestartedStore(last=(0, 0)), lambda version, weights: None, relayed=False)
    assert await subscriber.start_abreast(timeout_s=10) == 0
    assert subscriber.running
    await subscriber.stop()


class SlowEngine(TorchEngine):
    """An engine that prepares later weights only when the test allows it."""

    def __init__(self):
        super().__init__(torch.nn.Linear(2, 1), (np.zeros((1, 2), np.float32),))
        self.started, self.go_on = threading.Event(), threading.Event()
        self.bound = 0

    def bind(self, weights):
        self.bound += 1
        if self.bound > 1:
            self.started.set()
            self.go_on.wait(60)
        return super().bind(weights)


async def test_forwards_continue_while_new_weights_are_prepared(monkeypatch):
    engine = SlowEngine()
    model = LocalModel(engine)
    monkeypatch.setattr(weights_module.ray, "get", lambda reference, timeout: reference)

    async def wait_newer(than, timeout_s):
        if than:
            await asyncio.sleep(10)
        return 1, 0, [engine.initial]

    store = SimpleNamespace(wait_newer=SimpleNamespace(remote=wait_newer))
    subscriber = WeightSubscriber(store, model.load, relayed=False)
    starting = asyncio.create_task(subscriber.start())
    async with asyncio.timeout(120):
        assert await asyncio.to_thread(engine.started.wait, 60)
        for _ in range(10):
            assert (await model.forward(np.ones(2, np.float32))).policy_version == 0
        assert not starting.done(), "the weights were ready before a forward could start"
        engine.go_on.set()
        assert await starting == 1
    assert (await model.forward(np.ones(2, np.float32))).policy_version == 1
    await subscriber.stop()
    await model.close()


async def test_a_fetch_that_hangs_in_ray_is_repeated_with_a_new_reference(monkeypatch):
    given = iter(["hangs", "comes"])

    async def get(version):
        return version, 10, [next(given)]

    def ray_get(reference, timeout):
        if reference == "hangs":
            raise GetTimeoutError
        return {"w": reference}

    monkeypatch.setattr(weights_module.ray, "get", ray_get)
    store = SimpleNamespace(get=SimpleNamespace(remote=get))
    assert await fetch_weights(store, 3) == {"w": "comes"}
    with pytest.raises(DeadlineExceeded, match=r"weight store did not answer in 0\.05 s"):
        await fetch_weights(SimpleNamespace(get=SimpleNamespace(remote=hanging)), 3, timeout_s=0.05)


async def hanging(version):
    await asyncio.Event().wait()
