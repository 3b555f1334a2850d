"""gRPC ``Step``, one call per request, blocking and for asyncio. Needs the package ``grpcio``.

A session does not belong to a call, so there is nothing to restore when a connection breaks. ``Play`` would be twice as
fast, but a blocking client would need another thread to give each tick a deadline.

A URL's path, if it has one, names the Serve application, as gRPC clients of Serve do in the metadata ``application``.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import grpc

from brayx.errors import BrayxError, ProtocolError
from brayx.gamecore.grpc_status import CHANNEL_OPTIONS, application_of, failure, target_of
from brayx.gamecore.protocol import StepKind, StepRequest
from brayx.gamecore.transports.base import AsyncTransport, Endpoint, Transport, describe
from brayx.gamecore.v1 import gamecore_pb2 as pb
from brayx.gamecore.v1.gamecore_pb2_grpc import GamecoreStub

_KINDS = {
    StepKind.CALL: pb.STEP_KIND_CALL,
    StepKind.START: pb.STEP_KIND_START,
    StepKind.TICK: pb.STEP_KIND_TICK,
    StepKind.STOP: pb.STEP_KIND_STOP,
}


class _Calls:
    """The common part of both transports: the target of calls, and the meaning of their failures."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._channel: Any = None
        self._stub: Any = None
        self._target = target_of(endpoint)
        self._application = application_of(endpoint)

    def _metadata(self, request: StepRequest) -> tuple[tuple[str, str], ...]:
        """Metadata for proxies: HAProxy routes by the session's name, as over HTTP."""
        session = request.session
        if not (session and session.isascii() and session.isprintable()):
            return self._application
        return (*self._application, ("session", session))

    def _message(self, request: StepRequest) -> pb.StepRequest:
        kind, session, body, key, time, token, seq, *_ = request
        try:
            return pb.StepRequest(
                session=session,
                kind=_KINDS[kind],
                body=body,
                key=key,
                time=time,
                token=token,
                seq=seq,
                opponent=request.opponent,
                record=request.record,
            )
        except ValueError as error:  # text that is not UTF-8, a number out of range
            raise ProtocolError(f"the {describe(request)} cannot be sent: {error}") from None

    def _failure(self, request: StepRequest, timeout_s: float, error: Any) -> BrayxError:
        return failure(self._endpoint, describe(request), timeout_s, error)


class GrpcTransport(_Calls, Transport):
    """The blocking gRPC transport; see `Transport`."""

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__(endpoint)
        self._lock = threading.Lock()

    def step(self, request: StepRequest, timeout_s: float) -> bytes:
        with self._lock:
            message = self._message(request)
            if self._channel is None:
                self._channel = grpc.insecure_channel(self._target, CHANNEL_OPTIONS)
                self._stub = GamecoreStub(self._channel)
            try:
                reply: pb.StepReply = self._stub.Step(message, timeout=timeout_s, metadata=self._metadata(request))
            except grpc.RpcError as error:
                raise self._failure(request, timeout_s, error) from None
            return reply.body

    def close(self) -> None:
        with self._lock:
            channel, self._channel = self._channel, None
            if channel is not None:
                channel.close()


class AsyncGrpcTransport(_Calls, AsyncTransport):
    """The asyncio gRPC transport; see `AsyncTransport`. Belongs to one event loop."""

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__(endpoint)
        self._lock = asyncio.Lock()

    async def step(self, request: StepRequest, timeout_s: float) -> bytes:
        async with self._lock:
            message = self._message(request)
            if self._channel is None:
                self._channel = grpc.aio.insecure_channel(self._target, CHANNEL_OPTIONS)
                self._stub = GamecoreStub(self._channel)
            try:
                reply: pb.StepReply = await self._stub.Step(
                    message, timeout=timeout_s, metadata=self._metadata(request)
                )
            except grpc.RpcError as error:
                raise self._failure(request, timeout_s, error) from None
            return reply.body

    async def close(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()
