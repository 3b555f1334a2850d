"""A forward's own deadline: it fails with a typed error over every handle and door, and the model keeps running."""

from __future__ import annotations

import contextlib
import json
import threading
from types import SimpleNamespace

import grpc
import numpy as np
import pytest
import torch

from brayx.cluster.model import ModelReplica
from brayx.cluster.model_client import ModelClient
from brayx.errors import BadBody, DeadlineExceeded, from_wire
from brayx.gamecore.v1 import ERROR_METADATA
from brayx.model.config import ModelConfig
from brayx.model.dialled import DialledModel
from brayx.model.encoding import JSON, SAFETENSORS, pack
from brayx.model.grpc import ModelDoor
from brayx.model.http import answer
from brayx.model.v1 import model_pb2 as pb
from brayx.model.v1.model_pb2_grpc import ModelStub, add_ModelServicer_to_server

OPEN = threading.Event()
SOON_S = 0.05
OBS = np.ones(2, np.float32)


class Gated(torch.nn.Module):
    """A module that blocks while its gate is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, obs):
        assert OPEN.wait(30)
        return obs * self.weight


def build():
    return Gated(), (np.zeros((1, 2), np.float32),)


class Door(ModelDoor):
    def __init__(self, model):
        self.model = model


@pytest.fixture
async def replica():
    OPEN.set()
    made = ModelReplica(build, ModelConfig(module="unused", engine="torch"))
    OPEN.clear()
    yield made
    OPEN.set()
    await made.close()


@contextlib.asynccontextmanager
async def serving(replica):
    server = grpc.aio.server()
    add_ModelServicer_to_server(Door(replica.model), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def handle_of(replica):
    """The three methods in the form of a Serve handle."""
    return SimpleNamespace(
        **{name: SimpleNamespace(remote=getattr(replica, name)) for name in ("forward", "get_spec", "get_version")}
    )


@contextlib.asynccontextmanager
async def handle(replica, which):
    """A function that forwards one observation with a deadline, over one kind of handle."""
    async with contextlib.AsyncExitStack() as stack:
        model = replica.model
        if which.startswith("remote"):
            model = await ModelClient.connect(handle_of(replica))
            stack.push_async_callback(model.close)
        elif which.startswith("dialled"):
            address = await stack.enter_async_context(serving(replica))
            model = await DialledModel.connect(f"grpc://{address}")
            stack.push_async_callback(model.close)
        if which.endswith("batch"):
            many = model.forward_batch if which.startswith("dialled") else None
            columns = model.forward_columns if many is None else None

            async def forward(deadline_s=None):
                if many is not None:
                    outputs, versions = await many(OBS[None], deadline_s=deadline_s)
                    return outputs[0], versions[0]
                outputs, versions = await columns([OBS[None]], deadline_s=deadline_s)
                return outputs[0][0], versions[0]

            yield forward
            return
        if which.endswith("caller"):
            model = model.as_caller()
        elif which.endswith("pinned"):
            model = model.pinned()
        version = {"version": 0} if which.endswith("version") else {}

        async def forward(deadline_s=None):
            return await model.forward(OBS, deadline_s=deadline_s, **version)

        yield forward


KINDS = ["local", "local version", "local caller", "local pinned", "local batch"]
KINDS += ["remote", "remote caller", "remote pinned", "remote batch", "dialled", "dialled pinned", "dialled batch"]


@pytest.mark.parametrize("which", KINDS)
async def test_a_forward_over_each_handle_has_its_own_deadline(replica, which):
    async with handle(replica, which) as forward:
        with pytest.raises(DeadlineExceeded):
            await forward(SOON_S)
        OPEN.set()
        outputs, version = await forward()
        assert (outputs.tolist(), version) == ([1, 1], 0)


async def ask(replica, kind, document):
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    return await answer(replica.model, "POST", kind, body)


@pytest.mark.parametrize("batch", [False, True])
async def test_over_http(replica, batch):
    args = [[1, 1]] if not batch else [[[1, 1]]]
    status, _, body = await ask(replica, JSON, {"args": args, "batch": batch, "deadline_s": SOON_S})
    assert (status, type(from_wire(body))) == (DeadlineExceeded.http_status, DeadlineExceeded)
    status, _, body = await ask(replica, SAFETENSORS, pack({"obs": OBS[None]}, {"deadline_s": str(SOON_S)}))
    assert (status, type(from_wire(body))) == (DeadlineExceeded.http_status, DeadlineExceeded)
    OPEN.set()
    assert (await ask(replica, JSON, {"args": args, "batch": batch, "deadline_s": 30}))[0] == 200


@pytest.mark.parametrize("wrong", [0, -1, "soon", True, float("nan"), float("inf"), [1]])
async def test_an_invalid_deadline_is_refused(replica, wrong):
    status, _, body = await ask(replica, JSON, {"args": [[1, 1]], "deadline_s": wrong})
    assert (status, type(from_wire(body))) == (BadBody.http_status, BadBody)
    assert "deadline_s" in from_wire(body).message or "NaN" in from_wire(body).message


async def test_over_grpc(replica):
    async with serving(replica) as address, grpc.aio.insecure_channel(address) as channel:
        stub = ModelStub(channel)
        for deadline_s, kind in ((SOON_S, DeadlineExceeded), (-1.0, BadBody)):
            with pytest.raises(grpc.RpcError) as raised:
                await stub.Forward(pb.ForwardRequest(arrays=pack({"obs": OBS[None]}), deadline_s=deadline_s))
            document = dict([*raised.value.trailing_metadata()])[ERROR_METADATA]
            assert type(from_wire(document)) is kind
        OPEN.set()
        await stub.Forward(pb.ForwardRequest(arrays=pack({"obs": OBS[None]}), deadline_s=20.0))


async def test_a_deadline_is_at_most_the_model_s():
    OPEN.set()
    replica = ModelReplica(build, ModelConfig(module="unused", engine="torch", deadline_s=0.1))
    OPEN.clear()
    try:
        with pytest.raises(DeadlineExceeded):
            await replica.model.forward(OBS, deadline_s=3600.0)
    finally:
        OPEN.set()
        await replica.close()
