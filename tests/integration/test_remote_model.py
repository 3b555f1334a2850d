"""`RemoteModel` on a real Ray and Serve: found by its name, from loops, threads and processes; published to, cloned."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from datetime import timedelta
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import ray
import torch
from ray import serve

from brayx import RemoteModel, Services, forward, pinned
from brayx.cluster import remote_model as remote
from brayx.cluster.applications import wait_for_route
from brayx.cluster.named import call_with_retry, named_lock
from brayx.cluster.process_model import background_loop
from brayx.cluster.serving import ModelArgs, model_app
from brayx.engines.base import save_weights
from brayx.engines.scaling import Scaling, to_weights
from brayx.engines.torch import module_weights
from brayx.errors import (
    BadWeights,
    ConfigError,
    DeadlineExceeded,
    ModelError,
    ModelNotFound,
    ShapeMismatch,
    StartupError,
    TransportError,
    VersionUnknown,
    from_wire,
)
from brayx.jobs.shipped import TEMPLATES
from brayx.model.dialled import DialledModel
from brayx.model.encoding import JSON, SAFETENSORS, pack, unpack
from brayx.tracking import register
from tests.integration.test_prometheus import scrape
from tests.processes import ours
from tests.waiting import until, until_awaited

# Workers cannot import this file: what it defines travels by value.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Scale(torch.nn.Module):
    """Answers with its one weight, so that a result shows which weights made it."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor([float(factor)]))

    def forward(self, obs, offset):
        return {"scaled": obs["x"] * self.factor + offset.unsqueeze(-1)}


class Held(torch.nn.Module):
    """While a file ``held`` exists, a forward leaves a file named after its process, and waits."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.factor = torch.nn.Parameter(torch.tensor([2.0]))

    def forward(self, x):
        marker = self.folder / "held"
        if marker.exists():
            (self.folder / f"{os.getpid()}.pid").touch()
        while marker.exists():
            time.sleep(0.01)
        return x * self.factor


class Broken(torch.nn.Module):
    """Works on its example, but not in a replica."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def __deepcopy__(self, memo):
        return Broken()

    def __setstate__(self, state):
        raise RuntimeError("not here")

    def forward(self, x):
        return x * self.weight


EXAMPLE = ({"x": np.zeros((1, 3), np.float32)},)
OFFSET = {"offset": np.zeros(1, np.float32)}
X = {"x": np.array([1, 2, 3], np.float32)}
ZERO = np.float32(0)


def factor(value):
    return {"factor": np.array([value], np.float32)}


@pytest.fixture(scope="module")
def serve_instance(grpc_ingress):
    """URL of Serve's ingress."""
    return grpc_ingress.http


@pytest.fixture(params=["local", "remote"])
def model(request, serve_instance):
    made = RemoteModel(f"scale-{request.param}", Scale(2), EXAMPLE, OFFSET, local_mode=request.param == "local")
    yield made
    made.delete()


def seen(model, value):
    """Waits until forwards use the weights ``value``."""
    until(lambda: model(X, offset=ZERO)["scaled"][0] == value, f"weights {value}")


@ray.remote(num_cpus=0)
class Elsewhere:
    """Another process, which knows only a model's name."""

    async def forward(self, name):
        model = RemoteModel(name)
        return await model.forward(X, ZERO), model.step

    def publish(self, name, value, step):
        return RemoteModel(name).publish_weights(factor(value), step)

    def override(self, name, value, num_workers):
        RemoteModel(name, Scale(value), EXAMPLE, OFFSET, num_workers=num_workers, override_model=True)

    def start(self, name, local_mode, tracking, folder, first):
        """One of two concurrent starts of a model. The first has its trial when the other looks up the name."""
        find, create = remote.find, remote.create_weight_store

        def looked(name):
            store = find(name)
            (folder / "looked").touch()
            return store

        def made(*args, **options):
            (folder / "begun").touch()
            while not (folder / "looked").exists():
                time.sleep(0.01)
            return create(*args, **options)

        patched = ("create_weight_store", made) if first else ("find", looked)
        with mock.patch.object(remote, *patched):
            model = RemoteModel(
                name, Scale(2), EXAMPLE, OFFSET, local_mode=local_mode, checkpoint_interval=1, tracking=tracking
            )
        return model._recipe.token, model._recipe.trial.run_id, model(X, ZERO)["scaled"][0], os.getpid()

    def take_the_lock(self, name, has):
        """Holds the lock of a name until it is killed."""
        with named_lock(name, time.monotonic() + 60):
            has.write_text(str(os.getpid()))
            threading.Event().wait()


async def test_a_named_model_from_start_to_end(model):
    # The synchronous call, with a loop running in this thread as in a notebook.
    np.testing.assert_array_equal(model(X, offset=ZERO)["scaled"], [2, 4, 6])
    np.testing.assert_array_equal((await model.forward(X, np.float32(1)))["scaled"], [3, 5, 7])
    assert (model.version, model.step) == (1, 0)

    again = RemoteModel(model.name)
    assert again.spec == model.spec
    with pytest.raises(ModelNotFound, match=f"'{model.name}s' .*'{model.name}'"):
        RemoteModel(f"{model.name}s")

    batch = {"x": np.arange(600, dtype=np.float32).reshape(200, 3)}
    outputs = await again.forward(batch, np.arange(200), batch=True)
    np.testing.assert_array_equal(outputs["scaled"], 2 * batch["x"] + np.arange(200)[:, None])

    results = await asyncio.gather(
        model.forward({"x": np.zeros(4)}, ZERO),
        *[model.forward({"x": np.full(3, i)}, ZERO) for i in range(32)],
        return_exceptions=True,
    )
    assert isinstance(results[0], ShapeMismatch)
    assert "expected [obs/x: [3] float32; offset: [] float32], got [obs/x: [4] float64; offset: [] float32]" in str(
        results[0]
    )
    assert [result["scaled"][0] for result in results[1:]] == [2.0 * i for i in range(32)]

    assert model.publish_weights(factor(5), step=10) == 2
    assert again.step == 10
    assert again.publish_weights(Scale(7)) == 3
    assert (model.version, model.step) == (3, 11)
    await asyncio.to_thread(seen, model, 7)
    with pytest.raises(BadWeights, match="'factor' holds 1 values that are NaN"):
        model.publish_weights(factor(np.nan))
    with pytest.raises(BadWeights, match=r"factor: \[1\] float32, got \[2\] float32"):
        model.publish_weights({"factor": np.zeros(2, np.float32)})
    assert model.step == 11

    assert model.get_model().factor.item() == 7
    assert model.get_model(10).factor.item() == 5
    with pytest.raises(VersionUnknown, match=r"step 4, nearest is 0; .* 0, 10, 11"):
        model.get_model(4)

    elsewhere = Elsewhere.remote()
    outputs, step = await elsewhere.forward.remote(model.name)
    assert (outputs["scaled"].tolist(), step) == ([7, 14, 21], 11)
    assert await elsewhere.publish.remote(model.name, 9, 12) == 4
    await asyncio.to_thread(seen, model, 9)

    with Services(models={"policy": model.client()}).use():
        mine = pinned("policy", 4)
        model.publish_weights(factor(11), 13)
        await until_awaited(lambda: model.client().version == 5 or model(X, ZERO)["scaled"][0] == 11)
        async with asyncio.timeout(120):
            while (newest := await forward("policy", X, ZERO)).policy_version < 5:
                pass
        assert newest.outputs["scaled"][0] == 11
        assert (await mine.forward(X, ZERO)).outputs["scaled"][0] == 9
    again.close()
    np.testing.assert_array_equal((await model.forward(X, ZERO))["scaled"], [11, 22, 33])


def test_clones_have_their_own_weights_and_lineage(model):
    model.publish_weights(factor(3), step=5)
    model.publish_weights(factor(4), step=6)
    with contextlib.ExitStack() as stack:
        clone = model.clone(step=5)
        stack.callback(clone.delete)
        assert clone.name == f"{model.name}-1"
        if model._recipe.local:  # a further deployment takes seconds, and would show nothing else
            grandchild = clone.clone(name=f"{model.name}-grandchild")
            stack.callback(grandchild.delete)
        clone.publish_weights(factor(30), step=1)
        seen(clone, 30)
        seen(model, 4)
        [parent] = clone.lineage
        assert (parent.name, parent.version, parent.step) == (model.name, 2, 5)
        if model._recipe.local:
            assert grandchild(X, ZERO)["scaled"][0] == 3
            assert [origin.name for origin in RemoteModel(grandchild.name).lineage] == [clone.name, model.name]
        with pytest.raises(ConfigError, match="already runs"):
            model.clone(name=clone.name)


@pytest.fixture(scope="module")
def door(serve_instance):
    """A model with doors of its own."""
    made = RemoteModel("door", Scale(2), EXAMPLE, OFFSET, route_prefix="/door", cors_origins=["*"])
    yield made
    made.delete()


def test_forwards_over_http(serve_instance, door):
    def post(body, kind):
        request = urllib.request.Request(f"{serve_instance}/door", body, {"content-type": kind})
        try:
            with urllib.request.urlopen(request, timeout=30) as reply:
                return reply.status, reply.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    with urllib.request.urlopen(f"{serve_instance}/door", timeout=30) as reply:
        assert [leaf["path"] for leaf in json.load(reply)["inputs"]] == ["obs/x", "offset"]
    status, body = post(json.dumps({"args": [{"x": [1, 2, 3]}, 1]}).encode(), JSON)
    assert (status, json.loads(body)) == (200, {"outputs": {"scaled": [3, 5, 7]}, "policy_version": 1})
    ask = urllib.request.Request(f"{serve_instance}/door", headers={"origin": "https://a.example"}, method="OPTIONS")
    with urllib.request.urlopen(ask, timeout=30) as reply:
        assert (reply.status, reply.headers["access-control-allow-origin"]) == (200, "*")
    x = np.arange(300, dtype=np.float32).reshape(100, 3)
    status, body = post(pack({"obs/x": x, "offset": np.zeros(100, np.float32)}), SAFETENSORS)
    assert status == 200
    np.testing.assert_array_equal(unpack(body)[0]["scaled"], 2 * x)
    status, body = post(json.dumps({"args": [{"x": [1, 2, 3]}, 1], "version": 9}).encode(), JSON)
    assert (status, from_wire(body).code) == (404, "version_unknown")


@pytest.mark.chaos
async def test_a_replica_that_dies_in_a_forward_is_an_error_over_http_and_retried_over_grpc(
    serve_instance, grpc_ingress, tmp_path
):
    """The HTTP answer is Serve's own, as the guide says; the gRPC client is brayx's and repeats the forward."""
    made = asyncio.to_thread(
        RemoteModel, "held", Held(tmp_path), (np.zeros((1, 1), np.float32),), route_prefix="/held", use_onnx=False
    )
    model = await made
    dialled = await DialledModel.connect(f"grpc://{grpc_ingress.grpc}/model-held", deadline_s=60)
    (tmp_path / "held").touch()
    killed = set()

    def replicas():
        return {int(path.stem) for path in tmp_path.glob("*.pid")} - killed

    async def kill():
        await until_awaited(replicas, "a replica has the forward", 60)
        [pid] = replicas()
        os.kill(pid, signal.SIGKILL)
        killed.add(pid)

    def post():
        body = json.dumps({"args": [[3]]}).encode()
        request = urllib.request.Request(f"{serve_instance}/held", body, {"content-type": JSON})
        with pytest.raises(urllib.error.HTTPError) as raised:
            urllib.request.urlopen(request, timeout=60)
        return raised.value.code, raised.value.headers.get_content_type(), raised.value.read()

    over_http = asyncio.create_task(asyncio.to_thread(post))
    await kill()
    status, kind, body = await over_http
    assert (status, kind, body) == (500, "text/plain", b"Internal Server Error")
    assert type(from_wire(body, http_status=status)) is TransportError
    over_grpc = asyncio.create_task(dialled.forward(np.array([3], np.float32)))
    await kill()
    (tmp_path / "held").unlink()
    assert (await over_grpc).outputs.tolist() == [6]
    await dialled.close()
    await asyncio.to_thread(model.delete)


async def test_forwards_over_grpc(grpc_ingress, door):
    dialled = await DialledModel.connect(f"grpc://{grpc_ingress.grpc}/model-door", deadline_s=30)
    assert dialled.spec == door.spec
    with pytest.raises(ShapeMismatch, match="offset"):
        dialled.spec.check((X,))
    forwards = await asyncio.gather(*[dialled.forward(X, np.float32(i)) for i in range(32)])
    assert [forward.outputs["scaled"].tolist() for forward in forwards] == [[2 + i, 4 + i, 6 + i] for i in range(32)]
    assert await asyncio.to_thread(door.publish_weights, factor(3)) == 2
    async with asyncio.timeout(120):
        while (newest := await dialled.forward(X, ZERO)).policy_version < 2:
            pass
    assert newest.outputs["scaled"].tolist() == [3, 6, 9]
    assert (await dialled.pinned(1).forward(X, ZERO)).outputs["scaled"].tolist() == [2, 4, 6]
    x = np.arange(300, dtype=np.float32).reshape(100, 3)
    outputs, versions = await dialled.forward_batch({"x": x}, np.zeros(100, np.float32))
    np.testing.assert_array_equal(outputs["scaled"], 3 * x)
    assert versions.tolist() == [2] * 100
    # Through Serve's ingress an error is still a typed one, with its details.
    with pytest.raises(VersionUnknown, match="no policy version 9, nearest is 2") as raised:
        await dialled.forward(X, ZERO, version=9)
    assert raised.value.details["nearest"] == 2
    await dialled.close()


async def test_a_job_s_model_is_served_alone(serve_instance, grpc_ingress, tracking_db):
    args = ModelArgs(config=str(TEMPLATES / "cartpole.yaml"), tracking=tracking_db)
    await asyncio.to_thread(serve.run, model_app(args), name="policy", route_prefix="/policy")
    dialled = await DialledModel.connect(f"grpc://{grpc_ingress.grpc}/policy", deadline_s=30)
    outputs, version = await dialled.forward(np.zeros(4, np.float32))
    assert (outputs["logits"].shape, version) == ((2,), 0)
    await dialled.close()
    await asyncio.to_thread(serve.delete, "policy")


def test_a_model_that_does_not_start_is_an_error_and_leaves_nothing(serve_instance):
    with pytest.raises(ModelError, match="fails on its own forward_args"):
        RemoteModel("broken", Scale(), (np.zeros((1, 3), np.float32),), OFFSET, local_mode=True)
    with pytest.raises(ModelError, match="code cannot be loaded here: not here"):
        RemoteModel("broken", Broken(), (np.zeros((1, 3), np.float32),), local_mode=True)
    with pytest.raises(ModelNotFound):
        RemoteModel("broken")
    with pytest.raises(ConfigError, match=r"max_batch_size is 0: .*at least 1"):
        RemoteModel("broken", Scale(), EXAMPLE, OFFSET, local_mode=True, max_batch_size=0)
    with pytest.raises(ConfigError, match="name is 'no/name'"):
        RemoteModel("no/name")


@pytest.mark.cluster
def test_a_model_is_started_again_from_its_checkpoint(serve_instance, tracking_db):
    def start(**options):
        return RemoteModel(
            "kept", Scale(1), EXAMPLE, OFFSET, local_mode=True, checkpoint_interval=timedelta.resolution,
            tracking=tracking_db, **options,
        )  # fmt: skip

    model = start()
    assert model.publish_weights(factor(6), step=40) == 2
    model.delete()
    with pytest.raises(ModelNotFound):
        RemoteModel("kept")
    again = start()
    assert again(X, ZERO)["scaled"][0] == 6
    assert (again.version, again.step) == (3, 40), "versions only grow"
    over = start(override_model=True)
    assert over(X, ZERO)["scaled"][0] == 1
    assert over.step == 0
    again.close()
    with pytest.raises(ModelError, match="handle of model 'kept' is closed"):
        again.publish_weights(factor(5), step=50)
    assert over.version == 1, "it is refused before it is published"
    trial = over._recipe.trial
    over.delete()
    assert trial.status == "KILLED", "another process may continue it"
    fresh = start()
    assert fresh(X, ZERO)["scaled"][0] == 1, "an overridden model does not come back"
    fresh.delete()


@pytest.mark.cluster
def test_a_clone_has_its_origins_weights_not_those_of_a_former_clone_of_its_name(serve_instance, tracking_db):
    def start(name, value):
        return RemoteModel(
            name, Scale(value), EXAMPLE, OFFSET, local_mode=True, checkpoint_interval=1, tracking=tracking_db
        )

    model = start("origin", 2)
    first = model.clone()
    first.publish_weights(factor(9), step=5)
    first.delete()
    second = model.clone()
    assert second.name == first.name
    assert (second(X, ZERO)["scaled"][0], second.version) == (2, 1)
    lineage = second.lineage
    assert [(origin.name, origin.version, origin.step) for origin in lineage] == [("origin", 1, 0)]
    second.publish_weights(factor(8), step=3)
    second.delete()
    again = start(second.name, 1)
    assert again(X, ZERO)["scaled"][0] == 8
    assert again.lineage == lineage, "it outlives the clone"
    again.publish_weights(factor(7), step=40)
    again.close()
    [newest] = [checkpoint for checkpoint in again._recipe.trial.checkpoints() if checkpoint.step == 40]
    tags = register(again._recipe.trial, newest, "descendant").tags
    assert (tags["parent"], tags["parent_version"], tags["parent_step"]) == ("origin", "1", "0")
    again.delete()
    model.delete()
    registered = RemoteModel(
        "offspring", Scale(1), EXAMPLE, OFFSET, local_mode=True, checkpoint="models:/descendant@champion",
        tracking=tracking_db,
    )  # fmt: skip
    assert registered(X, ZERO)["scaled"][0] == 7
    assert [(origin.name, origin.version, origin.step) for origin in registered.lineage] == [
        ("models:/descendant", 1, 40),
        ("origin", 1, 0),
    ]
    registered.delete()


@pytest.mark.cluster
def test_clones_made_concurrently_have_different_names(serve_instance, tracking_db):
    model = RemoteModel("many", Scale(2), EXAMPLE, OFFSET, local_mode=True, checkpoint_interval=1, tracking=tracking_db)
    both = threading.Barrier(2)
    clones = []

    def clone():
        both.wait()
        clones.append(model.clone())

    threads = [threading.Thread(target=clone) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first, other = sorted(clones, key=lambda made: made.name)
    assert (first.name, other.name) == ("many-1", "many-2")
    first.publish_weights(factor(3), step=1)
    assert (first.version, other.version) == (2, 1)
    first.delete()
    again = RemoteModel(
        "many-1", Scale(1), EXAMPLE, OFFSET, local_mode=True, checkpoint_interval=1, tracking=tracking_db
    )
    assert again(X, ZERO)["scaled"][0] == 3, "the trial of the second thread is not in its way"
    for made in (again, other, model):
        made.delete()


@pytest.mark.cluster
@pytest.mark.parametrize(("local_mode", "learned"), [(True, 5), (False, 2)])
def test_processes_that_start_a_model_with_checkpoints_together_get_one_model(
    serve_instance, tracking_db, tmp_path, local_mode, learned
):
    name = f"raced-{local_mode}-{learned}"
    if learned == 5:  # there is a trial to continue
        before = RemoteModel(
            name, Scale(1), EXAMPLE, OFFSET, local_mode=True, checkpoint_interval=1, tracking=tracking_db
        )
        before.publish_weights(factor(5), step=1)
        before.delete()
    processes = [Elsewhere.remote() for _ in range(2)]  # both live on: the trial is at work in the first
    first = processes[0].start.remote(name, local_mode, tracking_db, tmp_path, True)
    until((tmp_path / "begun").exists, "the first has its trial")
    second = processes[1].start.remote(name, local_mode, tracking_db, tmp_path, False)
    made = ray.get([first, second], timeout=200)
    tokens, trials, answers, pids = (set(values) for values in zip(*made, strict=True))
    assert (len(tokens), len(trials), len(pids)) == (1, 1, 2)
    assert answers == {learned}
    model = RemoteModel(name)
    assert model._recipe.trial.status == "RUNNING"
    model.delete()


@pytest.mark.cluster
def test_the_last_of_several_concurrent_overrides_owns_the_name(serve_instance):
    model = RemoteModel("contested", Scale(1), EXAMPLE, OFFSET)
    processes = [Elsewhere.remote() for _ in range(2)]
    ray.get([process.forward.remote("contested") for process in processes])  # imports are done after this
    ray.get([process.override.remote("contested", 2 + i, 1 + i) for i, process in enumerate(processes)], timeout=200)
    last = RemoteModel("contested")
    value = last.get_model().factor.item()
    assert last(X, ZERO)["scaled"][0] == value
    assert (last.version, last._recipe.config.num_workers) == (1, value - 1)
    model.delete()
    replicas = serve.status().applications["model-contested"].deployments["model"].replica_states
    assert sum(replicas.values()) == value - 1
    assert RemoteModel("contested").publish_weights(factor(7)) == 2, "an overridden model ends nothing"
    last.delete()


@pytest.mark.chaos
def test_a_process_killed_while_it_overrides_a_model_is_not_waited_for(ray_cluster, tmp_path):
    def override(timeout_s):
        return RemoteModel(
            "abandoned", Scale(2), EXAMPLE, OFFSET, local_mode=True, override_model=True, start_timeout_s=timeout_s
        )

    other, has = Elsewhere.remote(), tmp_path / "pid"
    other.take_the_lock.remote("abandoned", has)
    until(lambda: has.exists() and has.read_text(), "it has the turn")
    with pytest.raises(StartupError, match=r"another process .*'abandoned'"):
        override(0.5)
    os.kill(int(has.read_text()), signal.SIGKILL)
    model = override(60)
    assert model(X, ZERO)["scaled"][0] == 2
    model.delete()


@pytest.mark.cluster
def test_replicas_that_cannot_be_placed_are_given_up_in_time(serve_instance):
    with pytest.raises(StartupError, match="model 'large' did not start in time: "):
        RemoteModel("large", Scale(), EXAMPLE, OFFSET, num_workers=4, cpus_per_worker=64, start_timeout_s=15)
    with pytest.raises(ModelNotFound):
        RemoteModel("large")
    assert "model-large" not in serve.status().applications


@pytest.mark.cluster
def test_a_door_that_hangs_is_waited_for_as_long_as_the_start_may_take(serve_instance):
    (door,) = ours("ray::ProxyActor")
    door.suspend()
    try:
        with pytest.raises(StartupError, match=r"1 of 1 doors .*'unheard' in time"):
            wait_for_route("model 'unheard'", time.monotonic() + 1)
    finally:
        door.resume()
    wait_for_route("model 'heard'", time.monotonic() + 30)


def kill_store(model):
    """Kills the process of its weight store, and does not wait for the next one."""
    os.kill(call_with_retry(model._store.pid), signal.SIGKILL)


@pytest.mark.cluster
def test_a_killed_store_continues_its_versions_and_loses_nothing_published(serve_instance):
    model = RemoteModel("counted", Scale(1), EXAMPLE, OFFSET, local_mode=True)
    other = RemoteModel("counted")
    for step in (10, 20, 30):
        model.publish_weights(factor(step), step)
    seen(model, 30)
    follower = model._shared.subscriber
    background_loop().run(follower.stop(), 10)  # so that no subscriber restores the store
    kill_store(model)
    assert other.step == 30
    assert other.publish_weights(factor(7)) == 5, "it has published nothing before"
    assert (model.version, model.step) == (5, 31)
    assert model.get_model().factor.item() == 7
    background_loop().run(follower.start(), 30)
    seen(model, 7)

    kill_store(model)
    assert model.get_model().factor.item() == 7, "restored by a follower"
    kill_store(model)
    clone = model.clone()
    assert clone(X, ZERO)["scaled"][0] == 7
    clone.delete()
    kill_store(model)
    assert RemoteModel("counted").publish_weights(factor(8)) == 6
    seen(model, 8)
    assert model.step == 32
    model.delete()
    with pytest.raises(ModelError, match="the weight store has ended"):
        other.publish_weights(factor(9))
    again = RemoteModel("counted", Scale(1), EXAMPLE, OFFSET, local_mode=True)
    assert (again.version, again.step) == (1, 0), "another model, which starts from nothing"
    again.delete()


@pytest.mark.cluster
async def test_connecting_does_not_hold_up_the_event_loop(ray_cluster):
    turns = 0

    async def count():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0.001)

    counting = asyncio.create_task(count())
    model = await RemoteModel.connect("aside", Scale(2), EXAMPLE, OFFSET, local_mode=True)
    assert turns > 10, "an engine was built meanwhile, which takes a hundred milliseconds"
    assert (await model.forward(X, offset=ZERO))["scaled"].tolist() == [2, 4, 6]
    again = await RemoteModel.connect("aside")
    assert again.spec == model.spec
    with pytest.raises(ModelNotFound, match="aside"):
        await RemoteModel.connect("asid")
    counting.cancel()
    await asyncio.to_thread(model.delete)


@pytest.mark.cluster
@pytest.mark.slow  # Ray's processes report every ten seconds
def test_replicas_are_in_ray_s_prometheus_export(serve_instance):
    model = RemoteModel("seen", Scale(2), EXAMPLE, OFFSET)
    try:
        assert (
            model({"x": np.ones((8, 3), np.float32)}, offset=np.zeros(8, np.float32), batch=True)["scaled"][0, 0] == 2
        )

        def exported():
            samples = [sample for family in scrape().values() for sample in family.samples]
            mine = [sample for sample in samples if sample.labels.get("application") == "model-seen"]
            return {sample.name.removeprefix("ray_brayx_"): sample.value for sample in mine}

        wanted = {"forward_batch_size", "forward_seconds_count", "forward_wait_seconds_count", "acting_version"}
        until(lambda: wanted <= exported().keys(), "the replica's metrics", timeout_s=60)
        values = exported()
        assert values["forward_batch_size"] == 8
        assert (values["forward_seconds_samples_total"], values["acting_version"]) == (1, 1)
        with pytest.raises(DeadlineExceeded):
            model(X, offset=ZERO, deadline_s=1e-6)
    finally:
        model.delete()


def test_a_model_trained_on_normalised_observations_takes_raw_ones(ray_cluster, tmp_path):
    scaling = Scaling(np.full(3, 10, np.float32), np.full(3, 0.5, np.float32), 4.0)
    module = torch.nn.Linear(3, 1)
    save_weights(tmp_path / "weights.npz", module_weights(module) | to_weights({"obs": scaling}, ["obs"]))
    model = RemoteModel(
        "normalises", torch.nn.Linear(3, 1), (np.zeros((1, 3), np.float32),), checkpoint=str(tmp_path), local_mode=True
    )
    try:
        game = np.array([12, 8, 100], np.float32)
        with torch.no_grad():
            want = module(torch.tensor([1.0, -1.0, 4.0])).numpy()
            np.testing.assert_allclose(model(game), want, atol=1e-5)
            np.testing.assert_allclose(model.get_model()(torch.tensor(game)), want, atol=1e-5)
        assert model.publish_weights(model.get_model()) == 2
        plain = torch.nn.Linear(3, 1)
        assert model.publish_weights(plain) == 3
        want = plain(torch.tensor(game)).detach().numpy()
        until(lambda: np.allclose(model(game), want, atol=1e-3), "weights that normalise nothing")
    finally:
        model.delete()


@pytest.mark.cluster
def test_a_dropped_handle_follows_nothing(serve_instance):
    model = RemoteModel("dropped", Scale(1), EXAMPLE, OFFSET, local_mode=True)
    handle = RemoteModel("dropped")
    subscriber = handle._shared.subscriber
    del handle
    gc.collect()
    assert subscriber.running, "the other handle has the same"
    del model
    gc.collect()
    until(lambda: not subscriber.running, "the subscriber ended")
    RemoteModel("dropped").delete()


LEAVES = """
import logging, os, sys
import numpy as np, ray, torch
from brayx import RemoteModel
from brayx.cluster.start import join_ray
from brayx.cluster.weights import WeightSubscriber
WeightSubscriber.__init__.__kwdefaults__["quiet_s"] = 0.5  # 30 s by default, which it would be waited for
join_ray(sys.argv[1], log_to_driver=False, logging_level=logging.ERROR)
model = RemoteModel("left", torch.nn.Linear(2, 1), (np.zeros((1, 2), np.float32),), local_mode=True, use_onnx=False)
assert model(np.zeros(2, np.float32)).shape == (1,)
ray.shutdown()
from tests.waiting import until
until(lambda: not model._shared.subscriber.running, "the subscriber ended")
assert not ray.is_initialized(), "asking the store has started another cluster"
print("left")
"""


@pytest.mark.cluster
def test_a_process_that_leaves_ray_is_not_connected_again(ray_cluster):
    command = [sys.executable, "-c", LEAVES, ray.get_runtime_context().gcs_address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "left", done.stderr
    RemoteModel("left").delete()
