"""A model's gRPC door and its client against a real server; the generated code against what it is generated from."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import grpc
import numpy as np
import optree
import pytest
import torch

from brayx.engines.torch import TorchEngine
from brayx.errors import (
    BadBody,
    BodyTooLarge,
    ConfigError,
    ConnectFailed,
    DeadlineExceeded,
    QueueFull,
    ShapeMismatch,
    TransportError,
    VersionUnknown,
    from_wire,
)
from brayx.gamecore.v1 import ERROR_METADATA
from brayx.model.dialled import DialledModel
from brayx.model.encoding import pack, unpack
from brayx.model.grpc import ModelDoor
from brayx.model.local import LocalModel
from brayx.model.v1 import model_pb2 as pb
from brayx.model.v1.model_pb2_grpc import ModelServicer, ModelStub, add_ModelServicer_to_server
from brayx.ports import free_port
from tests.waiting import WAIT_S

ROOT = Path(__file__).parents[3]
GENERATED = ("model_pb2.py", "model_pb2.pyi", "model_pb2_grpc.py")


class Scale(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.ones(1))

    def forward(self, obs, pair):
        return {"scaled": obs["x"] * self.factor, "sums": (pair[0] + pair[1], pair[0] - pair[1])}


EXAMPLE = ({"x": np.zeros((1, 3), np.float32)}, (np.zeros(1, np.int64), np.zeros(1, np.int64)))
ONE = ({"x": [1, 2, 3]}, (np.int64(5), np.int64(4)))


class Door(ModelDoor):
    def __init__(self, model):
        self.model = model


@contextlib.asynccontextmanager
async def serving(door, port=0):
    server = grpc.aio.server()
    add_ModelServicer_to_server(door, server)
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield f"127.0.0.1:{bound}"
    finally:
        await server.stop(None)


@pytest.fixture
async def model():
    made = LocalModel(TorchEngine(Scale(), EXAMPLE), max_queue=64)
    made.load(3, {"factor": np.array([2], np.float32)})
    yield made
    await made.close()


@pytest.fixture
async def url(model):
    async with serving(Door(model)) as address:
        yield f"grpc://{address}"


@pytest.fixture
async def dialled(url):
    made = await DialledModel.connect(url)
    yield made
    await made.close()


async def test_one_observation(dialled, model):
    assert (dialled.version, dialled.spec) == (3, model.spec)
    outputs, version = await dialled.forward(*ONE)
    np.testing.assert_array_equal(outputs["scaled"], [2, 4, 6])
    assert outputs["sums"] == (9, 1)
    assert version == 3
    assert (await dialled.forward(*ONE, version=0)).outputs["scaled"].tolist() == [1, 2, 3]
    assert (await dialled.pinned(0).forward(*ONE)).policy_version == 0


async def test_a_withdrawn_version_is_no_longer_reported_or_pinned(dialled, model):
    for version in (5, 1):
        model.load(version, {"factor": np.array([2], np.float32)})
        await dialled.forward(*ONE)
        assert dialled.version == dialled.pinned().version == version
    assert (await dialled.forward(*ONE, version=5)).policy_version == 5
    assert dialled.version == 1, "a forward of a pinned version does not change the newest one"


async def test_concurrent_forwards_share_one_call_and_each_gets_its_own_answer(dialled, model):
    batches = []
    model._batcher._on_batch = lambda rows, *_: batches.append(rows)
    forwards = [dialled.forward({"x": np.full(3, i)}, (i, 1), version=3 * (i % 2)) for i in range(32)]
    for i, (outputs, version) in enumerate(await asyncio.gather(*forwards)):
        assert version == 3 * (i % 2)
        assert outputs["scaled"].tolist() == [i * (1 + i % 2)] * 3
        assert outputs["sums"] == (i + 1, i - 1)
    assert len(batches) < 32


async def test_a_batch(dialled):
    x = np.arange(30, dtype=np.float32).reshape(10, 3)
    outputs, versions = await dialled.forward_batch({"x": x}, (np.arange(10), np.ones(10, np.int64)))
    np.testing.assert_array_equal(outputs["scaled"], 2 * x)
    assert versions.tolist() == [3] * 10


class Unsorted(torch.nn.Module):
    """Arguments and results in another order than their keys sort as text."""

    def forward(self, by_size, named):
        sums = {2: by_size[2] + 20, 10: by_size[10] + 100}
        return OrderedDict(value=named["value"] + 1, logits=named["logits"] + 2, sums=sums)


async def test_keys_keep_their_values_in_any_order():
    zeros = np.zeros((1, 3), np.float32)
    example = ({2: zeros, 10: zeros}, OrderedDict(value=zeros, logits=zeros))
    model = LocalModel(TorchEngine(Unsorted(), example))
    async with serving(Door(model)) as address:
        dialled = await DialledModel.connect(f"grpc://{address}")
        args = {"2": np.full(3, 3), "10": np.full(3, 4)}, {"value": np.full(3, 5), "logits": np.full(3, 6)}
        single, _ = await dialled.forward(*args)
        batch, _ = await dialled.forward_batch(*optree.tree_map(lambda leaf: np.stack([leaf, leaf]), args))
        await dialled.close()
    await model.close()
    want = {"value": [6] * 3, "logits": [8] * 3, "sums": {"2": [23] * 3, "10": [104] * 3}}
    assert optree.tree_map(lambda leaf: leaf.tolist(), single) == want
    assert optree.tree_map(lambda leaf: leaf[1].tolist(), batch) == want


@pytest.mark.parametrize("count", [65, 1025])
async def test_a_large_batch_is_few_calls_of_the_engine(dialled, model, count):
    batches = []
    model._batcher._on_batch = lambda rows, *_: batches.append(rows)
    x = np.arange(3 * count, dtype=np.float32).reshape(count, 3)
    outputs, versions = await dialled.forward_batch({"x": x}, (np.arange(count), np.ones(count, np.int64)))
    np.testing.assert_array_equal(outputs["scaled"], 2 * x)
    assert versions.tolist() == [3] * count
    assert batches == [64] * (count // 64) + [1]


async def test_a_full_queue_is_reported(dialled, model):
    model._batcher._queue.max_rows = 1
    model._batcher._busy = True  # as during a call
    waits = asyncio.create_task(model.forward(*ONE))
    await asyncio.sleep(0)
    with pytest.raises(QueueFull):
        await dialled.forward(*ONE)
    waits.cancel()


async def test_the_wire_as_another_language_uses_it(url, model):
    async with grpc.aio.insecure_channel(url.removeprefix("grpc://")) as channel:
        stub = ModelStub(channel)
        description = await stub.Describe(pb.DescribeRequest())
        assert [(leaf.path, list(leaf.shape), leaf.dtype) for leaf in description.inputs] == [
            ("obs/x", [3], "float32"), ("pair/0", [], "int64"), ("pair/1", [], "int64"),
        ]  # fmt: skip
        arrays = {"obs/x": np.ones((2, 3), np.float32), "pair/0": np.ones(2, np.int64), "pair/1": np.ones(2, np.int64)}
        reply = await stub.Forward(pb.ForwardRequest(arrays=pack(arrays), version=0))
        outputs, _ = unpack(reply.arrays)
        assert sorted(outputs) == ["policy_version", "scaled", "sums/0", "sums/1"]
        assert outputs["policy_version"].tolist() == [0, 0]

        async def refused(**fields):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await stub.Forward(pb.ForwardRequest(**fields))
            [document] = [value for key, value in raised.value.trailing_metadata() if key == ERROR_METADATA]
            assert json.loads(document)["message"].startswith(raised.value.details())
            return raised.value.code(), type(from_wire(document))

        invalid, status = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode
        assert await refused(arrays=b"nonsense") == (invalid, BadBody)
        assert await refused(arrays=pack({"obs/x": arrays["obs/x"]})) == (invalid, BadBody)
        assert await refused(arrays=pack(arrays | {"obs/x": np.ones((2, 4), np.float32)})) == (invalid, ShapeMismatch)
        assert await refused(arrays=pack(arrays), version=9) == (status.NOT_FOUND, VersionUnknown)
        many = {path: np.repeat(array, 64 * 64, 0) for path, array in arrays.items()}
        assert await refused(arrays=pack(many)) == (invalid, BodyTooLarge)


async def test_a_body_too_large_is_refused(model):
    door = Door(model)
    door.max_body_bytes = 100
    async with serving(door) as address:
        dialled = await DialledModel.connect(f"grpc://{address}")
        with pytest.raises(BodyTooLarge):
            await dialled.forward(*ONE)
        await dialled.close()


async def test_a_mismatch_is_refused_before_it_is_sent(dialled):
    with pytest.raises(ShapeMismatch, match=r"obs/x: \[3\] float32; pair/0: \[\] int64"):
        await dialled.forward({"x": np.zeros(4)}, (0, 0))


async def test_a_broken_connection_is_restored_within_the_deadline(model):
    port = free_port()
    async with serving(Door(model), port):
        dialled = await DialledModel.connect(f"grpc://127.0.0.1:{port}", deadline_s=WAIT_S)
        await dialled.forward(*ONE)
    slow = asyncio.Event()

    class Breaks(Door):
        async def Forward(self, request, grpc_context):
            slow.set()
            await asyncio.sleep(10 * WAIT_S)

    async with serving(Breaks(model), port):
        forward = asyncio.create_task(_until_answered(dialled))
        await asyncio.wait_for(slow.wait(), WAIT_S)
    async with serving(Door(model), port):
        assert (await asyncio.wait_for(forward, WAIT_S)).policy_version == 3
    await dialled.close()


async def _until_answered(dialled):
    """Forwards as soon as the server listens again; until then connecting fails."""
    while True:
        with contextlib.suppress(ConnectFailed):
            return await dialled.forward(*ONE)
        await asyncio.sleep(0.05)


async def test_a_missing_server_or_model_is_reported(model):
    with pytest.raises(ConfigError, match="expected grpc://"):
        await DialledModel.connect("http://127.0.0.1:1")
    with pytest.raises(ConnectFailed, match="nothing listens there"):
        await DialledModel.connect(f"grpc://127.0.0.1:{free_port()}")
    async with serving(ModelServicer()) as address:
        with pytest.raises(TransportError, match="UNIMPLEMENTED"):
            await DialledModel.connect(f"grpc://{address}")

    class Silent(Door):
        async def Describe(self, request, grpc_context):
            await asyncio.sleep(30)

    async with serving(Silent(model)) as address:
        with pytest.raises(DeadlineExceeded, match="signature"):
            await DialledModel.connect(f"grpc://{address}", deadline_s=0.2)


def test_the_wire_has_exactly_these_bytes():
    assert pb.ForwardRequest(arrays=b"a", version=0).SerializeToString() == b"\n\x01a\x10\x00"
    assert pb.ForwardReply(arrays=b"a").SerializeToString() == b"\n\x01a"
    leaf = pb.Leaf(path="x", shape=[3], dtype="bool")
    signature = pb.Signature(inputs=[leaf], policy_version=7)
    assert signature.SerializeToString() == b"\n\x0c\n\x01x\x12\x01\x03\x1a\x04bool\x18\x07"


def test_the_client_needs_neither_ray_nor_torch():
    code = "import sys, brayx.model.dialled\nprint(*sorted({'ray', 'torch', 'onnx', 'mlflow'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout.strip() == ""
