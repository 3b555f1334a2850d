"""The engine of a named model in each process: built once, shared by its handles, and ended with the last."""

from __future__ import annotations

import asyncio
import gc
import threading

import numpy as np

from brayx.cluster.remote_model import RemoteModel
from tests.unit.cluster.running import Running, X
from tests.waiting import until


def test_in_local_mode_a_process_builds_one_engine_at_the_newest_version(monkeypatch):
    running = Running(monkeypatch, local=True)
    first, other = RemoteModel("m"), RemoteModel("m")
    assert running.built == 1
    assert first(X) == other(X)
    subscriber = first._shared.subscriber

    async def version():
        return other.client().version

    assert asyncio.run(version()) == 3
    first.close()
    assert subscriber.running
    other.close()
    assert not subscriber.running


def test_dropped_handles_stop_following(monkeypatch):
    Running(monkeypatch, local=True)
    first, other = RemoteModel("m"), RemoteModel("m")
    subscriber = first._shared.subscriber
    del first
    gc.collect()
    assert subscriber.running
    del other
    gc.collect()
    until(lambda: not subscriber.running, "the end of the subscriber")


async def test_in_local_mode_others_are_served_between_the_calls_of_a_batch(monkeypatch):
    running = Running(monkeypatch, local=True)
    model = RemoteModel("m")
    newest = model._shared._versions.newest
    run = newest.run
    entered, gate = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def gated(leaves):
        running.calls.append(len(leaves[0]))
        loop.call_soon_threadsafe(entered.set)
        assert gate.wait(60)
        return run(leaves)

    newest.run = gated
    large = asyncio.create_task(model.forward(np.ones((9 * 64, 2), np.float32), batch=True))
    await entered.wait()
    single = asyncio.create_task(model.forward(X))
    await asyncio.sleep(0)
    gate.set()
    assert (await large).shape == (9 * 64, 1)
    await single
    assert running.calls == [64, 1, *[64] * 8]
    await asyncio.to_thread(model.close)
    await running.replica.close()
