"""Handles of one named model in one process, over a replica in this process: what they share, and which one ends it."""

from __future__ import annotations

import asyncio
import contextlib
from datetime import timedelta

import numpy as np
import pytest
from ray import cloudpickle
from ray.exceptions import RaySystemError

from brayx.cluster import named_model as named
from brayx.cluster import remote_model as remote
from brayx.cluster.remote_model import RemoteModel
from brayx.cluster.weights import WeightPublisher
from brayx.errors import ConfigError, DeadlineExceeded, ModelError, QueueFull
from brayx.model.config import ModelConfig
from brayx.tracking import Trial
from brayx.tracking.store import client_of
from tests.unit.cluster.running import Running, X, build


@pytest.fixture
async def running(monkeypatch):
    made = Running(monkeypatch, local=False)
    yield made
    await made.replica.close()


async def test_forwards_of_many_handles_are_one_call(running):
    handles = [RemoteModel("m") for _ in range(8)]
    results = await asyncio.gather(*[handle.forward(X) for handle in handles])
    assert running.calls == [8]
    assert len({float(result[0]) for result in results}) == 1
    for handle in handles:
        await asyncio.to_thread(handle.close)


async def test_closing_a_handle_does_not_affect_the_others(running):
    first, other = RemoteModel("m"), RemoteModel("m")
    client = first.client()
    assert other.client() is client
    await asyncio.to_thread(first.close)
    await other.forward(X)
    await asyncio.to_thread(other.close)
    with pytest.raises(ModelError, match="closed"):
        await client.forward(X)
    again = RemoteModel("m")
    await again.forward(X)
    await asyncio.to_thread(again.close)


@pytest.mark.parametrize("local", [True, False])
async def test_a_closed_handle_refuses_forwards(monkeypatch, local):
    running = Running(monkeypatch, local=local)
    first, last = RemoteModel("m"), RemoteModel("m")
    shared = last._shared
    await asyncio.to_thread(first.close)
    with pytest.raises(ModelError, match="closed"):
        await first.forward(X)
    await last.forward(X)
    await asyncio.to_thread(last.close)
    with pytest.raises(ModelError, match="closed"):
        await last.forward(X)
    with pytest.raises(ModelError, match="closed"):
        await asyncio.to_thread(last, X)  # on an event loop that none of the handles was used on
    with pytest.raises(ModelError, match="closed"):
        last.client()
    with pytest.raises(ModelError, match="closed"):
        shared.on_this_loop()  # as from a caller while the last handle is being closed
    await running.replica.close()


async def test_another_ray_connection_or_model_of_that_name_shares_nothing(running):
    first = RemoteModel("m")
    running.connection = "2"
    other = RemoteModel("m")
    assert other.client() is not first.client()
    for handle in (first, other):
        await asyncio.to_thread(handle.close)


@pytest.mark.parametrize("local", [True, False])
async def test_forwards_are_batched_as_the_model_configures(monkeypatch, local):
    options = {"max_batch_size": -4, "max_wait_ms": 10_000, "max_queue": 4}
    running = Running(monkeypatch, local=local, **options)
    model = RemoteModel("m")
    if local:
        newest = model._shared._versions.newest
        run = newest.run
        newest.run = lambda leaves: running.calls.append(len(leaves[0])) or run(leaves)
    first = asyncio.create_task(model.forward(X))
    await asyncio.sleep(0.05)
    assert not running.calls, "it waits for other rows"
    results = await asyncio.gather(first, *[model.forward(X) for _ in range(4)], return_exceptions=True)
    assert [isinstance(result, QueueFull) for result in results] == [False] * 4 + [True]
    assert running.calls == [4]
    if local:
        await model.client().forward_columns([np.ones((5, 2), np.float32)])
        assert running.calls == [4, 4, 4], "padded"
    await asyncio.to_thread(model.close)
    await running.replica.close()


async def test_a_large_batch_has_one_deadline_for_all_of_its_parts(running):
    left_s = []

    async def forward(columns, version, deadline_s):
        left_s.append(deadline_s)
        await asyncio.sleep(0.01)
        return await running.replica.forward(columns, version, deadline_s)

    running.forward.remote = forward
    model = RemoteModel("m")
    outputs = await model.forward(np.ones((20 * 64, 2), np.float32), batch=True)
    assert outputs.shape == (20 * 64, 1)
    assert len(left_s) == 20
    assert 5 >= max(left_s[:8]) > max(left_s[8:]), "parts that wait for a slot have the remaining time"
    await asyncio.to_thread(model.close)


async def test_no_part_of_a_failed_large_batch_continues(running):
    started, ended = [], []
    all_begun = asyncio.Event()

    async def forward(columns, version, deadline_s):
        started.append(columns)
        if len(started) == 8:
            all_begun.set()
        try:
            await all_begun.wait()
            if columns is started[0]:
                raise QueueFull("no room")
            await asyncio.Event().wait()
        finally:
            ended.append(columns)

    running.forward.remote = forward
    model = RemoteModel("m")
    with pytest.raises(QueueFull, match="no room"):
        await model.forward(np.ones((20 * 64, 2), np.float32), batch=True)
    assert len(started) == len(ended) < 20
    await asyncio.to_thread(model.close)


async def test_a_faulty_model_does_not_end_the_running_one(running):
    with pytest.raises(ModelError, match="fails on its own forward_args"):
        RemoteModel("m", build()[0], (np.zeros((1, 3), np.float32),), override_model=True)
    assert running.removed == []


@pytest.fixture
def recipes(monkeypatch):
    """The recipes stored by starts; no model of that name exists before a start, and one exists after it."""
    running, recipes = Running(monkeypatch, local=True), []

    def create(name, *, about, **options):
        recipes.append(cloudpickle.loads(about))
        return running

    monkeypatch.setattr(remote, "find", lambda name: None)
    monkeypatch.setattr(remote, "create_weight_store", create)
    return recipes


@pytest.mark.parametrize("error", [KeyboardInterrupt, DeadlineExceeded])
def test_a_start_interrupted_after_it_took_the_name_releases_it(recipes, monkeypatch, error):
    def interrupted(store, timeout_s):
        raise error("while the store starts")

    withdrawn = []
    monkeypatch.setattr(remote, "recipe_of", interrupted)
    monkeypatch.setattr(remote, "withdraw", lambda *args: withdrawn.append(args))
    with pytest.raises(error):
        RemoteModel("m", *build())
    assert withdrawn == [("m", recipes[0].token, None)]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RaySystemError])
@pytest.mark.parametrize(
    "where", ["InitialWeights", "initial_recipe", "create_weight_store", "recipe_of", "WeightPublisher"]
)
def test_a_failed_start_never_leaves_its_trial_running(recipes, monkeypatch, tracking_db, where, error):
    """Otherwise no other process could start the model while this one lives."""
    opened, begin = [], Trial.open

    def open_trial(*args, **options):
        opened.append(begin(*args, **options))
        monkeypatch.setattr(remote, where, failing)  # from here on
        return opened[0]

    def failing(*args, **options):
        raise error("on its way")

    failing.of = failing
    monkeypatch.setattr(remote, "named_lock", lambda *args: contextlib.nullcontext())
    monkeypatch.setattr(remote.Trial, "open", open_trial)
    monkeypatch.setattr(named, "find_actor", failing)  # the started model cannot be found either
    with pytest.raises(error):
        RemoteModel("m", *build(), checkpoint_interval=1, tracking=tracking_db)
    run = client_of(tracking_db).get_run(opened[0].run_id).info
    assert (run.lifecycle_stage, run.status) in {("deleted", "RUNNING"), ("active", "KILLED")}


def test_batching_options_are_stored_for_every_process(recipes):
    options = {"max_wait_ms": 5, "max_queue": 2, "threads": 2}
    RemoteModel("m", *build(), local_mode=True, **options).close()
    assert recipes[0].config.model_dump(include={*options}) == options


def test_options_match_those_of_a_model_component(recipes):
    config = ModelConfig(module="unused", engine="torch", max_versions=3, threads=2)
    RemoteModel("m", *build(), config=config, threads=4, deadline_s=1).close()
    assert recipes[0].config == config.model_copy(update={"threads": 4, "deadline_s": 1.0})
    for options, message in (
        ({"max_batchsize": 8}, "a model has no option 'max_batchsize', nearest is 'max_batch_size'"),
        ({"num_workers": 0}, "num_workers is 0: Input should be greater than or equal to 1"),
        ({"engine": "int8"}, "int8"),
    ):
        with pytest.raises(ConfigError, match=message):
            RemoteModel("other", *build(), **options)
    assert len(recipes) == 1


@pytest.mark.parametrize(
    "interval", ["5m", 0, -1, True, 2.5, float("nan"), timedelta(0), timedelta(seconds=-1), np.float32(3)]
)
def test_an_invalid_checkpoint_interval_is_refused_before_anything_starts(recipes, interval):
    with pytest.raises(ConfigError, match=r"expected .*\(1 or more\), a positive .*minutes=5") as refused:
        RemoteModel("m", *build(), checkpoint_interval=interval)
    assert refused.value.details == {"key": "checkpoint_interval"}
    assert refused.value.message.startswith(f"checkpoint_interval is {interval!r}, ")
    assert recipes == []


def test_a_gpu_that_onnx_runtime_would_not_use_is_refused_by_constructor_argument(recipes):
    with pytest.raises(ConfigError, match=r"^gpus_per_worker is 1, .*use_onnx=False") as refused:
        RemoteModel("m", *build(), gpus_per_worker=1)
    assert refused.value.details == {"key": "gpus_per_worker"}
    assert recipes == []
    RemoteModel("m", *build(), gpus_per_worker=1, use_onnx=False).close()
    assert (recipes[0].config.device, recipes[0].config.gpus_per_worker) == ("cuda", 1)


@pytest.mark.parametrize("step", [1.0, True, -2, "7", None, np.float32(1), np.bool_(True), np.int64(-5)])
async def test_every_publisher_refuses_an_invalid_step(running, step):
    model = RemoteModel("m")
    for publish in (model.publish_weights, WeightPublisher(running).publish):
        with pytest.raises(ConfigError) as refused:
            publish(running.weights, step)
        assert refused.value.message == f"step is {step!r}, expected an integer from 0, or -1: one more than the last"
    await asyncio.to_thread(model.close)
