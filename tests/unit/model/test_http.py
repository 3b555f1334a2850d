"""Forwards over HTTP: both forms, versions, and every refusal a typed document."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
import torch

from brayx.engines.torch import TorchEngine
from brayx.errors import (
    BadBody,
    BodyTooLarge,
    ModelError,
    ProtocolError,
    QueueFull,
    ShapeMismatch,
    VersionUnknown,
    from_wire,
)
from brayx.model.encoding import JSON, SAFETENSORS, pack, unpack
from brayx.model.http import answer
from brayx.model.local import LocalModel


class Scale(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.ones(1))

    def forward(self, obs, pair):
        return {"scaled": obs["x"] * self.factor, "sum": pair[0] + pair[1]}


EXAMPLE = ({"x": np.zeros((1, 3), np.float32)}, (np.zeros(1, np.int64), np.zeros(1, np.int64)))


@pytest.fixture
async def model():
    made = LocalModel(TorchEngine(Scale(), EXAMPLE))
    made.load(3, {"factor": np.array([2], np.float32)})
    yield made
    await made.close()


async def post(model, document, kind=JSON, **options):
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    return await answer(model, "POST", kind, body, **options)


async def test_one_observation_as_json(model):
    status, kind, body = await post(model, {"args": [{"x": [1, 2, 3]}, [4, 5]]}, "application/json; charset=utf-8")
    assert (status, kind) == (200, JSON)
    assert json.loads(body) == {"outputs": {"scaled": [2, 4, 6], "sum": 9}, "policy_version": 3}


async def test_a_batch_as_json_at_a_version(model):
    args = [{"x": [[1, 2, 3], [4, 5, 6]]}, [[1, 2], [3, 4]]]
    status, _, body = await post(model, {"args": args, "batch": True, "version": 0})
    assert status == 200
    assert json.loads(body) == {
        "outputs": {"scaled": [[1, 2, 3], [4, 5, 6]], "sum": [4, 6]}, "policy_version": [0, 0]
    }  # fmt: skip


@pytest.mark.parametrize(("metadata", "version"), [({}, 3), ({"version": "0"}, 0)])
async def test_a_batch_as_safetensors(model, metadata, version):
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    inputs = {"pair/1": np.array([5, 6]), "obs/x": x, "pair/0": np.array([1, 2])}
    status, kind, body = await post(model, pack(inputs, metadata), SAFETENSORS)
    assert (status, kind) == (200, SAFETENSORS)
    outputs, _ = unpack(body)
    assert outputs["policy_version"].tolist() == [version] * 2
    np.testing.assert_array_equal(outputs["scaled"], x * (2 if version else 1))
    np.testing.assert_array_equal(outputs["sum"], [6, 8])


async def test_the_signature(model):
    status, _, body = await answer(model, "GET", "", b"")
    assert status == 200
    signature = json.loads(body)
    assert signature["inputs"][0] == {"path": "obs/x", "shape": [3], "dtype": "float32"}
    assert [leaf["path"] for leaf in signature["outputs"]] == ["scaled", "sum"]
    assert signature["policy_version"] == 3


GOOD = [{"x": [1, 2, 3]}, [4, 5]]
PAIR = {"pair/0": np.zeros(2, int), "pair/1": np.zeros(2, int)}
GOOD_ARGS = ({"x": [1, 2, 3]}, (4, 5))


@pytest.mark.parametrize(
    ("document", "kind", "error", "message"),
    [
        (b"{", JSON, BadBody, "not JSON"),
        (b"[]", JSON, BadBody, "JSON list"),
        ({}, JSON, BadBody, "args NoneType"),
        ({"args": GOOD, "vresion": 3}, JSON, BadBody, "vresion"),
        ({"args": GOOD, "version": True}, JSON, BadBody, "version True"),
        ({"args": GOOD, "batch": 1}, JSON, BadBody, "batch 1"),
        ({"args": GOOD, "deadline_s": 10**400}, JSON, BadBody, "deadline_s is 1000"),
        ({"args": [{"x": [10**400, 2, 3]}, [4, 5]]}, JSON, ShapeMismatch, "obs/x: [3] float32"),
        (b'{"args": [{"x": [1, NaN, 3]}, [4, 5]]}', JSON, BadBody, "args[0].x[1] is nan"),
        (b'{"args": [{"x": [1, 2, 1e999]}, [4, 5]]}', JSON, BadBody, "args[0].x[2] is inf"),
        ({"args": [{"x": [1, 1e39, 3]}, [4, 5]]}, JSON, BadBody, "obs/x[1] is inf"),
        ({"args": [{"x": [1, None, 3]}, [4, 5]]}, JSON, ShapeMismatch, "obs/x: list with None at [1]"),
        ({"args": [{"x": [[1, 2, 1e39]]}, [[4], [5]]], "batch": True}, JSON, BadBody, "obs/x[0, 2] is inf"),
        (
            pack({"obs/x": np.array([[1, 2, 3], [1, np.nan, 3]], np.float32), **PAIR}),
            SAFETENSORS,
            BadBody,
            "obs/x[1, 1] is nan",
        ),
        ({"args": GOOD, "version": 10**400}, JSON, VersionUnknown, "nearest is 3"),
        ({"args": [{"x": [1, 2]}, [4, 5]]}, JSON, ShapeMismatch, "obs/x: [2]"),
        ({"args": [{"y": [1, 2, 3]}, [4, 5]]}, JSON, ShapeMismatch, "obs/x: [3] float32"),
        ({"args": GOOD[:1]}, JSON, ShapeMismatch, "pair/0: [] int64"),
        ({"args": GOOD, "batch": True}, JSON, ShapeMismatch, "[N, 3]"),
        ({"args": GOOD, "version": 2}, JSON, VersionUnknown, "nearest is 3"),
        (b"short", SAFETENSORS, BadBody, "at least 8"),
        (pack({"obs/x": np.zeros((1, 3), np.float32)}), SAFETENSORS, BadBody, "pair/0"),
        (
            pack({"obs/x": np.zeros((1, 3)), "pair/0": np.zeros(1, int), "pair/1": np.zeros(1, int)}),
            SAFETENSORS,
            ShapeMismatch,
            "[1, 3] float64",
        ),
        (
            pack(
                {"obs/x": np.zeros((1, 3), np.float32), "pair/0": np.zeros(1, int), "pair/1": np.zeros(1, int)},
                {"version": "new"},
            ),
            SAFETENSORS,
            BadBody,
            "'new'",
        ),
        (b"\x80\x04N.", "application/x-pickle", ProtocolError, "application/x-pickle"),
        (b"x" * 2000, JSON, BodyTooLarge, "1000 bytes"),
    ],
)
async def test_refusals_are_typed(model, document, kind, error, message):
    status, content_type, body = await post(model, document, kind, max_body_bytes=1000)
    refused = from_wire(body)
    assert type(refused) is error
    assert (status, content_type) == (error.http_status, JSON)
    assert message in refused.message


async def test_a_full_queue_a_batch_too_large_and_another_method_are_typed(model):
    small = LocalModel(TorchEngine(Scale(), EXAMPLE), max_batch_size=1, max_queue=1, inline_below_s=0)
    waits = asyncio.create_task(small.forward(*GOOD_ARGS))
    await asyncio.sleep(0)
    status, _, body = await post(small, {"args": GOOD})
    assert (status, type(from_wire(body))) == (503, QueueFull)
    await waits
    args = [{"x": [[1, 2, 3]] * 2}, [[1, 2], [3, 4]]]
    status, _, body = await post(small, {"args": args, "batch": True})
    assert (status, type(from_wire(body))) == (413, BodyTooLarge)
    await small.close()
    status, _, body = await answer(model, "DELETE", "", b"")
    assert (status, type(from_wire(body))) == (400, ProtocolError)


@pytest.mark.parametrize("count", [65, 1025])
@pytest.mark.parametrize("kind", [JSON, SAFETENSORS])
async def test_a_large_batch_is_few_calls_of_the_engine(count, kind):
    batches = []
    model = LocalModel(TorchEngine(Scale(), EXAMPLE), on_batch=lambda rows, *_: batches.append(rows))
    x, ones = np.arange(3 * count, dtype=np.float32).reshape(count, 3), np.ones(count, np.int64)
    if kind == JSON:
        args = [{"x": x.tolist()}, [ones.tolist()] * 2]
        _, _, body = await post(model, {"args": args, "batch": True})
        scaled = json.loads(body)["outputs"]["scaled"]
    else:
        _, _, body = await post(model, pack({"obs/x": x, "pair/0": ones, "pair/1": ones}), kind)
        scaled = unpack(body)[0]["scaled"]
    np.testing.assert_array_equal(scaled, x)
    assert batches == [64] * (count // 64) + [1]
    await model.close()


@pytest.mark.parametrize("error", [KeyError("secret"), ModelError("the model failed: KeyError: secret")])
async def test_an_unexpected_error_is_one_line(model, monkeypatch, caplog, error):
    async def broken(*_, **__):
        raise error

    monkeypatch.setattr(model, "forward", broken)
    status, _, body = await post(model, {"args": GOOD})
    assert (status, from_wire(body).code) == (500, error.code if isinstance(error, ModelError) else "internal")
    assert "secret" not in body.decode()
    assert "secret" in caplog.text
