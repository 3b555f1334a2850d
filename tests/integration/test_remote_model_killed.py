"""`RemoteModel` on a real Ray and Serve, with kills of its replicas and weight store during forwards and publishes.

The forward is slow on purpose, so that every kill hits one.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time

import numpy as np
import pytest
import ray
import torch
from ray import serve

from brayx import RemoteModel
from brayx.cluster.applications import delete_application
from brayx.cluster.named import call_with_retry
from brayx.errors import DeadlineExceeded
from tests.waiting import until, until_awaited

pytestmark = pytest.mark.chaos

# Workers cannot import this file: what it defines travels by value.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

CALLERS = 16
COMES_BACK_S = 120.0


class ReportsPid(torch.nn.Module):
    """Returns its output and the id of its process."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4))

    def forward(self, x):
        time.sleep(0.005)
        return {"y": self.layers(x), "pid": torch.full((len(x),), os.getpid())}


class Number(torch.nn.Module):
    """Answers with its one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.number = torch.nn.Parameter(torch.ones(1))

    def forward(self, x):
        time.sleep(0.005)
        return x * self.number


async def test_replicas_killed_under_load_answer_right_or_fail_in_time_and_are_replaced(ingress):
    module, x = ReportsPid(), np.random.default_rng(0).standard_normal((64, 8)).astype(np.float32)
    with torch.no_grad():
        want = module(torch.tensor(x))["y"].numpy()
    model = await RemoteModel.connect("killed", module, (x,), num_workers=2, use_onnx=False, deadline_s=10)
    pids: set[int] = set()
    late: list[DeadlineExceeded] = []
    answered, ended = 0, asyncio.Event()

    async def ask(row):
        nonlocal answered
        while not ended.is_set():
            row = (row + 7) % len(x)
            try:
                async with asyncio.timeout(15):
                    outputs = await model.forward(x[row])
            except DeadlineExceeded as error:
                late.append(error)
                continue
            np.testing.assert_allclose(outputs["y"], want[row], rtol=1e-5, atol=1e-6)
            pids.add(int(outputs["pid"]))
            answered += 1

    async with asyncio.TaskGroup() as callers:
        for row in range(CALLERS):
            callers.create_task(ask(row))
        await until_awaited(lambda: len(pids) == 2, "both replicas answer")
        for number in (1, 2):
            victims = set(list(pids)[:number])
            for victim in victims:
                os.kill(victim, signal.SIGKILL)
            pids.clear()
            await until_awaited(lambda: len(pids - victims) == 2, "two replicas answer", COMES_BACK_S)  # noqa: B023
            pids -= victims  # replies that were on their way when the replicas died
        before, failed = answered, len(late)
        await until_awaited(lambda: answered > before + 200, "forwards go on")
        assert len(late) == failed
        ended.set()

    def replicas():
        return serve.status().applications["model-killed"].deployments["model"].replica_states

    await asyncio.to_thread(until, lambda: replicas() == {"RUNNING": 2}, "Serve has two replicas", COMES_BACK_S)
    await asyncio.to_thread(model.delete)


async def test_a_store_killed_while_publishing_fails_no_forward_and_gets_the_newest_back(ingress):
    x = np.ones(1, np.float32)
    model = await RemoteModel.connect("published", Number(), (x[None],), num_workers=2, use_onnx=False)
    client = model.client()
    newest, last, seen, numbers = 1, 1, 0, {1: 1.0}
    ended, enough = asyncio.Event(), threading.Event()

    async def ask():
        nonlocal seen
        while not ended.is_set():
            outputs, version = await client.forward(x)
            assert numbers.setdefault(version, float(outputs[0])) == outputs[0], "a version is one set of weights"
            seen = max(seen, version)

    def learn():
        nonlocal newest, last
        number = 1
        while not enough.is_set():
            number += 1
            version = model.publish_weights({"number": np.full(1, number, np.float32)}, step=10 * number)
            assert version > newest
            assert numbers.setdefault(version, float(number)) == number
            newest, last = version, number

    def kill():
        os.kill(call_with_retry(model._store.pid), signal.SIGKILL)

    async with asyncio.TaskGroup() as group:
        for _ in range(CALLERS):
            group.create_task(ask())
        learning = group.create_task(asyncio.to_thread(learn))
        try:
            for _ in range(3):
                before = newest
                await asyncio.to_thread(kill)
                await until_awaited(lambda: newest > before + 20, "publishing goes on", COMES_BACK_S)  # noqa: B023
                published = newest
                await until_awaited(lambda: seen >= published, "what is published acts", COMES_BACK_S)  # noqa: B023
        finally:
            enough.set()
        await learning
        await until_awaited(lambda: seen == newest, "the newest acts", COMES_BACK_S)
        await asyncio.to_thread(kill)

        def kept():
            published = call_with_retry(model._store.newest)
            return published is not None and published[:2] == (newest, 10 * last)

        await asyncio.to_thread(until, kept, "the store has the newest back", COMES_BACK_S)
        assert (model.version, model.step, model.get_model().number.item()) == (newest, 10 * last, last)
        again = await asyncio.to_thread(model.publish_weights, {"number": np.full(1, -1, np.float32)})
        assert again == newest + 1
        await until_awaited(lambda: seen == again, "and takes another", COMES_BACK_S)
        ended.set()
    await asyncio.to_thread(model.delete)


def test_an_application_is_given_up_in_time_where_serve_hangs(ingress):
    """In a process without a Serve client: creating one would call the controller without a deadline."""
    controller = ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
    pid = ray.get(controller.get_pid.remote(), timeout=30)

    @ray.remote(num_cpus=0)
    def delete():
        return delete_application("no such", 1.0)

    assert ray.get(delete.remote(), timeout=60)
    os.kill(pid, signal.SIGSTOP)
    try:
        assert not ray.get(delete.remote(), timeout=60)
    finally:
        os.kill(pid, signal.SIGCONT)
