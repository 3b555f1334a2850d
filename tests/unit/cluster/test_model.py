"""A model replica as a plain class: forwards of many rows, checkpoints, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from starlette.requests import Request

from brayx.cluster.model import ModelReplica
from brayx.engines.base import save_weights
from brayx.errors import BadWeights, ConfigError, ModelError, ModelNotFound, ShapeMismatch, from_wire
from brayx.model.arms import WeightSource
from brayx.model.config import ModelConfig
from brayx.tracking import Trial, register

CONFIG = ModelConfig(module="unused", engine="torch", max_batch_size=4)


class Affine(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.ones(()))

    def forward(self, x, bias):
        return {"y": x * self.factor + bias.unsqueeze(-1)}


def build():
    return Affine(), (np.zeros((1, 2), np.float32), np.zeros(1, np.float32))


async def test_rows_of_one_call_come_back_in_order_with_their_versions():
    replica = ModelReplica(build, CONFIG)
    await replica.start()
    x, bias = np.arange(14, dtype=np.float32).reshape(7, 2), np.arange(7, dtype=np.float32)
    [y], versions = await replica.forward([x, bias])
    np.testing.assert_array_equal(y, x + bias[:, None])
    assert versions.dtype == np.int64
    assert versions.tolist() == [0] * 7
    await replica.check_health()
    await replica.close()


@pytest.mark.parametrize("origins", [[], ["https://play.example.com"]])
async def test_scripts_of_allowed_origins_may_call_it_over_http(origins):
    replica = ModelReplica(build, CONFIG.model_copy(update={"cors_origins": origins}))

    async def call(method, **headers):
        async def receive():
            return {"type": "http.request", "body": b'{"args": [[1, 2], 3]}'}

        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        return await replica(Request({"type": "http", "method": method, "path": "/", "headers": raw}, receive))

    preflight = await call("OPTIONS", origin="https://play.example.com")
    done = await call("POST", origin="https://play.example.com")
    other = await call("POST", origin="https://other.example.com")
    assert preflight.status_code == (200 if origins else 400)
    assert done.status_code == other.status_code == 200
    assert json.loads(done.body)["outputs"] == {"y": [4, 5]}
    allowed = [reply.headers.get("access-control-allow-origin") for reply in (preflight, done, other)]
    assert allowed == ([*origins * 2, None] if origins else [None] * 3)
    assert ("access-control-allow-methods" in preflight.headers) == bool(origins)
    shown = await call("GET", accept="text/html")
    assert shown.headers["content-type"] == "text/html; charset=utf-8"
    assert b"<code>y</code></td><td>float32 [2]</td>" in shown.body
    await replica.close()


@pytest.mark.parametrize(
    ("is_local", "allowed", "lets_in"),
    [(True, [], False), (True, ["model.example.com"], True), (True, ["*"], True), (False, [], True)],
)
async def test_on_loopback_it_answers_to_names_of_this_machine(is_local, allowed, lets_in):
    replica = ModelReplica(build, CONFIG.model_copy(update={"allowed_hosts": allowed}), is_local=is_local)

    async def call(method, host):
        async def receive():
            return {"type": "http.request", "body": b'{"args": [[1, 2], 3]}'}

        headers = [(b"host", host)] if host else []
        return await replica(Request({"type": "http", "method": method, "path": "/", "headers": headers}, receive))

    for method in ("GET", "POST"):
        for host in (b"", b"localhost:8000", b"127.0.0.1", b"[::1]:8000"):
            assert (await call(method, host)).status_code == 200, host
        refused = await call(method, b"model.example.com:8000")
        assert refused.status_code == (200 if lets_in else 403)
        if not lets_in:
            assert from_wire(refused.body).details == {"header": "host"}
    await replica.close()


@pytest.mark.parametrize("count", [65, 1025])
async def test_a_call_larger_than_a_batch_or_the_queue_is_few_calls_of_the_engine(count):
    batches = []
    replica = ModelReplica(build, ModelConfig(module="unused", engine="torch"))
    replica.model._batcher._on_batch = lambda rows, *_: batches.append(rows)
    x, bias = np.ones((count, 2), np.float32), np.arange(count, dtype=np.float32)
    [y], versions = await replica.forward([x, bias])
    np.testing.assert_array_equal(y, x + bias[:, None])
    assert (len(versions), batches) == (count, [64] * (count // 64) + [1])
    await replica.close()


@pytest.mark.parametrize(
    "columns",
    [
        [],
        [np.zeros((2, 2), np.float32)],
        [np.zeros((2, 2), np.float32), np.zeros(3, np.float32)],
        [np.zeros((2, 3), np.float32), np.zeros(2, np.float32)],
        [np.zeros((2, 2)), np.zeros(2)],
        [np.zeros((0, 2), np.float32), np.zeros(0, np.float32)],
        [np.float32(1), np.float32(1)],
    ],
)
async def test_mismatched_columns_are_refused(columns):
    replica = ModelReplica(build, CONFIG)
    with pytest.raises(ShapeMismatch, match=r"x: \[N, 2\] .*bias: \[N\] float32"):
        await replica.forward(columns)
    await replica.close()


async def test_a_checkpoint_sets_the_weights(tmp_path: Path):
    save_weights(tmp_path / "weights.npz", {"factor": np.array(3, np.float32)})
    replica = ModelReplica(build, CONFIG, WeightSource(checkpoint=str(tmp_path)))
    [y], _ = await replica.forward([np.ones((1, 2), np.float32), np.zeros(1, np.float32)])
    np.testing.assert_array_equal(y, [[3, 3]])
    await replica.close()


async def test_a_replica_starts_with_the_aliass_current_version_even_if_the_deployed_one_is_gone(tmp_path: Path):
    deployed = str(tmp_path / "deleted")
    factor = {"factor": np.array(4, np.float32)}
    replica = ModelReplica(build, CONFIG, WeightSource(checkpoint=deployed, version=1), preferred=(2, factor))
    [y], versions = await replica.forward([np.ones((1, 2), np.float32), np.zeros(1, np.float32)])
    assert (y.tolist(), versions.tolist()) == ([[4, 4]], [2])
    await replica.close()


async def test_a_replica_starts_with_the_deployed_version_if_the_aliass_does_not_fit(tmp_path: Path):
    save_weights(tmp_path / "weights.npz", {"factor": np.array(3, np.float32)})
    other = {"other": np.array(4, np.float32)}
    replica = ModelReplica(build, CONFIG, WeightSource(checkpoint=str(tmp_path), version=1), preferred=(2, other))
    [y], versions = await replica.forward([np.ones((1, 2), np.float32), np.zeros(1, np.float32)])
    assert (y.tolist(), versions.tolist()) == ([[3, 3]], [1])
    await replica.close()


async def test_a_checkpoint_may_be_a_version_of_the_registry(tmp_path: Path, tracking_db):
    (tmp_path / "made").mkdir()
    save_weights(tmp_path / "made" / "weights.npz", {"factor": np.array(3, np.float32)})
    trial = Trial.open("p", "t", tracking_db)
    register(trial, trial.save_checkpoint(tmp_path / "made", 1), "p")
    replica = ModelReplica(build, CONFIG, WeightSource(checkpoint="models:/p/1", tracking=tracking_db, version=1))
    [y], versions = await replica.forward([np.ones((1, 2), np.float32), np.zeros(1, np.float32)])
    assert (y.tolist(), versions.tolist()) == ([[3, 3]], [1])
    await replica.close()
    with pytest.raises(ModelNotFound, match="no version 2"):
        ModelReplica(build, CONFIG, WeightSource(checkpoint="models:/p/2", tracking=tracking_db))


def test_a_mismatched_checkpoint_is_refused(tmp_path: Path):
    save_weights(tmp_path / "weights.npz", {"other": np.array(3, np.float32)})
    with pytest.raises(BadWeights, match="factor"):
        ModelReplica(build, CONFIG, WeightSource(checkpoint=str(tmp_path)))
    with pytest.raises(BadWeights, match="nowhere"):
        ModelReplica(build, CONFIG, WeightSource(checkpoint=str(tmp_path / "nowhere")))


def checkpoint_of(folder: Path, meta: str) -> str:
    save_weights(folder / "weights.npz", {"factor": np.array(3, np.float32)})
    (folder / "meta.json").write_text(meta)
    return str(folder)


async def test_a_checkpoint_sets_the_policy_version(tmp_path: Path):
    replica = ModelReplica(
        build, CONFIG, WeightSource(checkpoint=checkpoint_of(tmp_path, '{"counters": {"policy_version": 41}}'))
    )
    assert await replica.get_version() == 41
    _, versions = await replica.forward([np.ones((1, 2), np.float32), np.zeros(1, np.float32)])
    assert versions.tolist() == [41]
    await replica.close()


@pytest.mark.parametrize("meta", ["half", "[]", '{"counters": {"policy_version": "new"}}'])
def test_a_checkpoint_whose_meta_cannot_be_read_is_refused(tmp_path: Path, meta):
    with pytest.raises(ModelError, match=r"meta\.json cannot be read"):
        ModelReplica(build, CONFIG, WeightSource(checkpoint=checkpoint_of(tmp_path, meta)))


async def test_a_frozen_engine_uses_its_checkpoint_and_follows_no_store(tmp_path):
    save_weights(tmp_path / "weights.npz", {"factor": np.array(3, np.float32)})
    config = CONFIG.model_copy(update={"engine": "onnx-frozen"})
    replica = ModelReplica(build, config, WeightSource(checkpoint=str(tmp_path)))
    [y], _ = await replica.forward([np.ones((1, 2), np.float32), np.zeros(1, np.float32)])
    np.testing.assert_array_equal(y, [[3, 3]])
    await replica.close()
    with pytest.raises(ConfigError, match="takes no new weights"):
        ModelReplica(build, config, WeightSource(store="weights"))


class Product(torch.nn.Module):
    """Two layers, so that quantisation applies."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))

    def forward(self, obs):
        return self.layers(obs)


async def test_int8_is_calibrated_on_the_checkpoints_samples(tmp_path):
    torch.manual_seed(0)
    module = Product()
    weights = {name: tensor.numpy() for name, tensor in module.state_dict().items()}
    seen = (np.random.default_rng(0).standard_normal((256, 8)) * 50).astype(np.float32)
    save_weights(tmp_path / "weights.npz", weights)

    def off(**files):
        for name, array in files.items():
            save_weights(tmp_path / f"{name}.npz", {"obs": array})
        replica = ModelReplica(
            lambda: (Product(), (np.zeros((1, 8), np.float32),)),
            CONFIG.model_copy(update={"engine": "int8"}),
            WeightSource(checkpoint=str(tmp_path)),
        )
        want = module(torch.from_numpy(seen)).detach().numpy()
        got = replica.model._versions.newest.run([seen])[0]
        return float(np.abs(got - want).max() / np.abs(want).max())

    assert off() > 0.5, "noise around the example is far from the real observations"
    assert off(samples=seen) < 0.1
