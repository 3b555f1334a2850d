"""gRPC ``Step``, one call per request, blocking and for asyncio. Needs the package ``grpcio``.

A session does not belong to a call, so there is nothing to restore when a connection breaks. ``Play`` would be twice as
fast, but a blocking client would need another thread to give each tick a deadline.

A URL's path, if it has one, names the Serve application, as gRPC clients of Serve do in the metadata ``application``.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import threading
from typing import Any

import grpc

from brayx.errors import BodyTooLarge, BrayxError, Overloaded, ProtocolError, TransportError, from_wire
from brayx.gamecore.protocol import StepKind, StepRequest
from brayx.gamecore.transports.base import MAX_REPLY_BYTES, AsyncTransport, Endpoint, Transport, describe
from brayx.gamecore.v1 import ERROR_METADATA
from brayx.gamecore.v1 import gamecore_pb2 as pb
from brayx.gamecore.v1.gamecore_pb2_grpc import GamecoreStub

CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_REPLY_BYTES),
    ("grpc.max_send_message_length", -1),
    # As on the other doors: a separate connection, straight to the address, and no delay before reconnecting.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 1000),
)
"""Options of a client's channel."""

_KINDS = {
    StepKind.CALL: pb.STEP_KIND_CALL,
    StepKind.START: pb.STEP_KIND_START,
    StepKind.TICK: pb.STEP_KIND_TICK,
    StepKind.STOP: pb.STEP_KIND_STOP,
}


class _GrpcCalls:
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


class GrpcTransport(_GrpcCalls, Transport):
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


class AsyncGrpcTransport(_GrpcCalls, AsyncTransport):
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


def target_of(endpoint: Endpoint) -> str:
    """The address in a channel's format."""
    host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
    return f"{host}:{endpoint.port}"


def application_of(endpoint: Endpoint) -> tuple[tuple[str, str], ...]:
    """Metadata with the Serve application in the URL's path, if there is one."""
    application = endpoint.prefix.strip("/")
    return (("application", application),) if application else ()


def failure(endpoint: Endpoint, request: str, timeout_s: float, error: Any) -> BrayxError:
    """The typed error for a failed call.

    Args:
        endpoint: the service's address.
        request: description of the request, for the message.
        timeout_s: the call's time limit.
        error: a `grpc.RpcError`.
    """
    for name, value in error.trailing_metadata() or ():
        if name == ERROR_METADATA:
            return from_wire(value)
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return endpoint.deadline_exceeded(f"reply to the {request}", timeout_s, layer="grpc")
    if code is grpc.StatusCode.UNAVAILABLE and (never_sent := _connect_error(details)):
        return endpoint.connect_failed(never_sent)
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return endpoint.connection_lost(request, ConnectionError(details), started=False)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "CLIENT: Received message larger" not in details:
        # Serve's, or the server's own limit on a message.
        refused = BodyTooLarge if "message larger than max" in details else Overloaded
        return refused(f"{endpoint.url}: {details}")
    return TransportError(
        f"{endpoint.url}: the service answered {code.name} without a brayx error document: {details[:200]!r}",
        grpc_status=code.name,
    )


def _connect_error(details: str) -> OSError | None:
    """The error of a connection that was never made, from ``details``; None for one that broke.

    gRPC has one status for both, so only the text distinguishes them.
    """
    if "resolving" in details or "resolution" in details:
        return socket.gaierror(socket.EAI_NONAME, "name not found")
    if "failed to connect" not in details:
        return None
    if "Connection refused" in details:
        return ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
    return OSError(details[:200])
