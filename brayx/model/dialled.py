"""A model by the URL of its gRPC door, for processes outside the Ray cluster: a game's server, another service.

Needs neither Ray nor torch. Concurrent forwards of this process are one call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
import numpy as np

from brayx.engines.base import LeafSpec, ModelSpec
from brayx.errors import BrayxError, ConfigError, ConnectionLost, ModelError, TransportError
from brayx.gamecore.transports.base import Endpoint
from brayx.gamecore.transports.grpc import CHANNEL_OPTIONS, application_of, failure, target_of
from brayx.model import encoding
from brayx.model.batcher import Batcher
from brayx.model.handles import ModelProxy, sooner
from brayx.model.http import VERSIONS
from brayx.model.inputs import stacked, to_columns, to_rows
from brayx.model.v1 import model_pb2 as pb
from brayx.model.v1.model_pb2_grpc import ModelStub
from brayx.types import Forward, NestedArray

_AGAIN_S = 0.05


class DialledModel(ModelProxy):
    """A `Model` behind a gRPC door. `connect` makes one; use it on one event loop.

    A broken call, or one whose replica dies, is repeated until its deadline: a forward has no side effects.
    """

    def __init__(self, endpoint: Endpoint, *, max_batch_size: int, max_queue: int, deadline_s: float, max_calls: int):
        self._endpoint = endpoint
        self._deadline_s = deadline_s
        self._channel = grpc.aio.insecure_channel(target_of(endpoint), CHANNEL_OPTIONS)
        self._stub = ModelStub(self._channel)
        self._metadata = application_of(endpoint)
        self._spec = encoding.spec_of((), ())
        self._version = 0
        self._batcher: Batcher[list[np.ndarray], tuple[list[np.ndarray], int]] = Batcher(
            self._run, max_batch_size=max_batch_size, max_queue=max_queue, deadline_s=deadline_s, max_calls=max_calls
        )

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        max_batch_size: int = 64,
        max_queue: int = 1024,
        deadline_s: float = 10.0,
        max_calls: int = 4,
    ) -> DialledModel:
        """Connects to the model at ``url`` and reads its signature.

        Args:
            url: ``grpc://host:port/application``; the path names the Serve application, if there are several.
            max_batch_size: maximum observations in one call.
            max_queue: forwards that may wait here; more are refused.
            deadline_s: deadline of this call, and of each forward.
            max_calls: maximum concurrent calls.

        Raises:
            ConfigError: the URL is not a gRPC one.
            ConnectFailed, ConnectionLost, TransportError: there is no server, or it is not a model.
            DeadlineExceeded: no answer in time.
        """
        endpoint = Endpoint.parse(url)
        if endpoint.scheme != "grpc":
            raise ConfigError(f"URL {url!r} cannot be used: expected grpc://host:port/application")
        model = cls(
            endpoint, max_batch_size=max_batch_size, max_queue=max_queue, deadline_s=deadline_s, max_calls=max_calls
        )
        try:
            signature: pb.Signature = await model._ask(model._stub.Describe, pb.DescribeRequest(), "signature")
            model._spec = encoding.spec_of(_leaves(signature.inputs), _leaves(signature.outputs))
        except BaseException:
            await model.close()
            raise
        model._version = signature.policy_version
        return model

    @property
    def spec(self) -> ModelSpec:
        """Signature of the model as sent over the wire: lists and named tuples are tuples, keys are strings."""
        return self._spec

    @property
    def version(self) -> int:
        """Policy version of the service's newest reply to a forward without a version."""
        return self._version

    async def forward(self, *args: NestedArray, version: int | None = None, deadline_s: float | None = None) -> Forward:
        """The model's outputs for one observation; see `Model.forward`. Also raises `TransportError`."""
        return await self._forward(args, version, None, deadline_s)

    async def forward_batch(
        self, *args: NestedArray, version: int | None = None, deadline_s: float | None = None
    ) -> tuple[NestedArray, np.ndarray]:
        """The outputs for several observations, in a separate call.

        Args:
            *args: the model's arguments, every leaf ``[N, ...]``.
            version, deadline_s: as for `forward`.

        Returns:
            Outputs ``[N, ...]``, and the policy version of each row ``[N]`` int64.
        """
        leaves, versions = await self._send(to_columns(self._spec, args), version, deadline_s)
        return self._spec.unflatten_outputs(leaves), versions

    async def close(self) -> None:
        """Ends the handle and its connection."""
        await self._batcher.close()
        await self._channel.close()

    async def _run(
        self, rows: list[list[np.ndarray]], version: int | None = None
    ) -> list[tuple[list[np.ndarray], int]]:
        return to_rows(len(rows), *await self._send(stacked(rows), version))

    async def _send(
        self, columns: Sequence[np.ndarray], version: int | None, deadline_s: float | None = None
    ) -> tuple[list[np.ndarray], np.ndarray]:
        arrays = {leaf.path: column for leaf, column in zip(self._spec.inputs, columns, strict=True)}
        request = pb.ForwardRequest(arrays=encoding.pack(arrays), version=version, deadline_s=deadline_s)
        reply: pb.ForwardReply = await self._ask(self._stub.Forward, request, "forward", deadline_s)
        outputs, _ = encoding.unpack(reply.arrays)
        try:
            versions = outputs[VERSIONS]
            leaves = [outputs[leaf.path] for leaf in self._spec.outputs]
        except KeyError as error:
            raise ModelError(f"{self._endpoint.url}: the model answered without {error}") from None
        if version is None:
            self._version = int(versions[-1])
        return leaves, versions

    async def _ask(self, method: Any, request: Any, what: str, deadline_s: float | None = None) -> Any:
        """Calls the service; repeats a broken call until the deadline."""
        loop = asyncio.get_running_loop()
        deadline_s = sooner(self._deadline_s, deadline_s)
        until = loop.time() + deadline_s
        while True:
            try:
                return await method(request, timeout=max(until - loop.time(), 0.001), metadata=self._metadata)
            except grpc.RpcError as error:
                typed = failure(self._endpoint, what, deadline_s, error)
            if not _again(typed) or loop.time() + _AGAIN_S >= until:
                raise typed
            await asyncio.sleep(_AGAIN_S)


def _leaves(described: Any) -> list[LeafSpec]:
    try:
        return [LeafSpec(leaf.path, tuple(leaf.shape), np.dtype(leaf.dtype)) for leaf in described]
    except TypeError as error:
        raise ModelError(f"the model has an unknown dtype: {error}") from None


def _again(error: BrayxError) -> bool:
    """Whether to try again: the connection broke, or Serve reports a dead replica."""
    lost = isinstance(error, TransportError) and error.details.get("grpc_status") == "INTERNAL"
    return isinstance(error, ConnectionLost) or lost
