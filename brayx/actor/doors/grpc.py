"""The gRPC door: the methods of `brayx/gamecore/v1/gamecore.proto`, unary ``Step`` and bidirectional ``Play``.

Serve's gRPC ingress calls them on the replica by their names; so does a server of ``grpc.aio``, such as
`GrpcListener`, which a process opens on its own. Knows nothing of Serve, nor of sessions beyond the `Service`.

An error is set on the call, never raised, see `brayx.gamecore.grpc_status`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from brayx.actor.config import ActorConfig
from brayx.actor.doors.native import MAX_CONNECTIONS
from brayx.actor.service import Holder, Reply, Service, attaches, leaves_running, to_typed
from brayx.errors import (
    BodyTooLarge,
    BrayxError,
    DeadlineExceeded,
    OutOfSequence,
    ProtocolError,
    SessionLost,
    StartupError,
)
from brayx.gamecore.grpc_status import refuse
from brayx.gamecore.protocol import (
    DEFAULT_MAX_BODY_BYTES,
    MAX_SEQ,
    StepKind,
    StepRequest,
    check_credentials,
    check_session,
)
from brayx.gamecore.transports.base import ends_session
from brayx.gamecore.v1 import gamecore_pb2 as pb
from brayx.gamecore.v1.gamecore_pb2_grpc import add_GamecoreServicer_to_server

_MORE_BYTES = 64 * 1024
"""Allowance for the other fields of a message than its body."""
_LAST_REPLY_S = 0.5
"""Time for streams to write their last reply: a call that is cancelled meanwhile loses it."""

_KINDS: dict[int, StepKind] = {
    pb.STEP_KIND_CALL: StepKind.CALL,
    pb.STEP_KIND_START: StepKind.START,
    pb.STEP_KIND_TICK: StepKind.TICK,
    pb.STEP_KIND_STOP: StepKind.STOP,
}


class GrpcDoor(Service):
    """A `Service` with the methods of the gRPC service ``brayx.gamecore.v1.Gamecore``.

    Attributes:
        max_body_bytes: limit on a request's body. The server's own limit on a message must be higher, since what it
            refuses gets no brayx error.
        idle_timeout_s: a stream without a session for this long is ended.
    """

    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    idle_timeout_s: float = 60.0

    # Serve passes the call's context to a method with a parameter named `grpc_context`.

    async def Step(self, request: pb.StepRequest, grpc_context: Any) -> pb.StepReply:
        """Answers one request."""
        try:
            try:
                step = _read(request, self.max_body_bytes)
            except ProtocolError as error:
                self.refused(error)
                raise
            return pb.StepReply(body=await self.step(step))
        except Exception as error:
            refuse(grpc_context, to_typed(error))
            return pb.StepReply()

    async def Play(self, requests: AsyncIterator[pb.StepRequest], grpc_context: Any) -> AsyncIterator[pb.PlayReply]:
        """Answers the requests of one session; ends without an error when it has moved to another replica."""
        stream = _Stream(self, requests)
        try:
            while (request := await stream.next()) is not None:
                yield await stream.answer(request)
                if stream.over:
                    return
            if stream.farewell is not None:
                yield _error(stream.farewell)
        finally:
            await stream.abandon()


class _Stream:
    """The session of one call of ``Play``."""

    def __init__(self, door: GrpcDoor, requests: AsyncIterator[pb.StepRequest]) -> None:
        self.over = False
        self.farewell: BrayxError | None = None
        self._door = door
        self._requests = requests
        self._session = ""
        self._key = ""
        self._running = False
        self._may_hold = False
        self._holder = door.holder(self._on_end)
        self._opening: asyncio.Task[bytes] | None = None
        self._coming: asyncio.Task[pb.StepRequest | None] | None = None
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def next(self) -> pb.StepRequest | None:
        """The next request; None at the stream's end, with `farewell` set if the client needs the reason."""
        # The session's owner ends it when idle, and reports that. Wait twice as long, since the owner may be another
        # replica that cannot reach this one.
        timeout_s = self._door.idle_timeout_s * (2 if self._running else 1)
        self._coming = asyncio.create_task(self._read())
        await asyncio.wait((self._coming, self._ended), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if self._ended.done():
            self._running = False
            reason = self._ended.result()
            if reason not in ("error", "moved"):  # the previous reply had the error, or the session continues
                self.farewell = SessionLost(f"the session was ended: {reason}", reason=reason)
        elif self._coming.done():
            return self._coming.result()
        else:
            self.farewell = DeadlineExceeded(f"no request came for {timeout_s:g} s", layer="grpc")
        return None

    async def _read(self) -> pb.StepRequest | None:
        return await anext(self._requests, None)

    async def answer(self, message: pb.StepRequest) -> pb.PlayReply:
        """The reply to a request; `over` tells whether it is the last one."""
        try:
            try:
                request = self._request(message)
            except BrayxError as refusal:
                self._door.refused(refusal)
                raise
            if self._running:
                # The first request checked the credentials of this stream; another replica checks them too.
                reply = await self._door.step(request._replace(key=self._key), let_in=True)
            else:
                self._opening = asyncio.create_task(self._door.step(request))
                reply = await asyncio.shield(self._opening)
        except Exception as failure:
            self._opening = None
            error = to_typed(failure)
            self._may_hold = isinstance(error, OutOfSequence)
            if not self._running and attaches(error) and request.kind is not StepKind.START:
                self._attach(request)
            elif ends_session(error) or not (self._running or leaves_running(error)):
                self._running = False
                self.over = True
            return _error(error)
        self._opening = None
        if request.kind is StepKind.STOP:
            self._running = False
            self.over = True
        elif not self._running:
            self._attach(request)
        return pb.PlayReply(body=reply)

    def _attach(self, request: StepRequest) -> None:
        """Makes this stream the session's holder."""
        self._running = self._holder.attached = True
        self._key = request.key

    def _request(self, message: pb.StepRequest) -> StepRequest:
        if message.kind == pb.STEP_KIND_CALL:
            raise ProtocolError("kind is STEP_KIND_CALL, expected START, TICK or STOP: a stateless call goes to Step")
        if self._session and not message.session:
            message.session = self._session
        request = _read(message, self._door.max_body_bytes)
        if self._session and request.session != self._session:
            raise ProtocolError(
                f"session is {request.session!r} on the stream of {self._session!r}: one stream is one session"
            )
        if self._running and request.kind is StepKind.START:
            raise ProtocolError("this stream's session is running: one stream is one session")
        self._session = request.session
        return request._replace(holder=self._holder.name, attached=self._holder.attached)

    def _on_end(self, reason: str) -> None:
        if not self._ended.done():
            self._ended.set_result(reason)

    async def abandon(self) -> None:
        """Disconnects the client of a session that still runs or is being opened."""
        if self._coming is not None:
            self._coming.cancel()
        opening = self._opening
        if opening is not None:
            self._door.withdraw(self._session, self._holder.name)
            await asyncio.wait([opening])  # the service gives it a deadline
            self._running = not opening.cancelled() and opening.exception() is None
        if self._running or self._may_hold:  # a tick may be refused after it has taken the session over
            self._running = False
            await self._door.disconnect(self._session, self._holder.name)


def _read(message: pb.StepRequest, max_body_bytes: int) -> StepRequest:
    """Converts ``message`` to a request.

    Raises:
        ProtocolError: it is invalid, or too large.
    """
    kind = _KINDS.get(message.kind)
    if kind is None:
        raise ProtocolError(f"kind is {int(message.kind)}, expected 0 to {len(_KINDS) - 1}", field="kind")
    body = message.body
    if len(body) > max_body_bytes:
        raise BodyTooLarge(f"body has {len(body)} bytes, at most {max_body_bytes} are allowed", limit=max_body_bytes)
    key, time, token = message.key, message.time, message.token
    opponent = message.opponent if kind is StepKind.START else ""
    record = kind is StepKind.START and message.record
    check_credentials(key, time, token, opponent)
    session = message.session
    if kind is not StepKind.CALL:
        check_session(session)
    elif session:
        raise ProtocolError(
            "session came without kind: send STEP_KIND_START, TICK or STOP; a stateless call has no session",
            field="kind",
        )
    seq = message.seq if message.HasField("seq") else None
    if seq is not None and seq > MAX_SEQ:
        raise ProtocolError(f"seq is {seq}, expected a number from 0 to 2^63 - 1", field="seq")
    return StepRequest(kind, session, body, key, time, token, seq, opponent=opponent, record=record)


def _error(error: BrayxError) -> pb.PlayReply:
    return pb.PlayReply(error=error.to_wire())


class _ServiceDoor(GrpcDoor):
    """The door's methods for a service that is not a `GrpcDoor` itself."""

    def __init__(self, service: Service, config: ActorConfig) -> None:
        self.max_body_bytes, self.idle_timeout_s = config.max_body_bytes, config.idle_timeout_s
        self._service = service

    def submit(self, request: StepRequest, reply: Reply, *, let_in: bool = False) -> None:
        self._service.submit(request, reply, let_in=let_in)

    def holder(self, on_end: Callable[[str], None]) -> Holder:
        return self._service.holder(on_end)

    async def disconnect(self, session: str, holder: str = "", *, for_good: bool = False) -> None:
        await self._service.disconnect(session, holder, for_good=for_good)

    def withdraw(self, session: str, holder: str = "") -> None:
        self._service.withdraw(session, holder)

    def refused(self, error: BrayxError) -> None:
        self._service.refused(error)


class GrpcListener:
    """A gRPC server on the running event loop, from `open` to `close`.

    Args:
        service: answers the requests.
        config: the actor component's options. The server's own limit is twice the door's, because its refusals are not
            `brayx.errors`.
    """

    def __init__(self, service: Service, config: ActorConfig) -> None:
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", 2 * config.max_body_bytes + _MORE_BYTES),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", 0),  # otherwise two hosts could share a port
            ],
            maximum_concurrent_rpcs=MAX_CONNECTIONS,
        )
        add_GamecoreServicer_to_server(_ServiceDoor(service, config), self._server)

    async def open(self, host: str, port: int) -> int:
        """Listens; 0 takes a free port. Returns the port.

        Raises:
            StartupError: the port is taken.
        """
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            bound: int = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise StartupError(f"port {port} of {host} is taken, or cannot be opened: {error}", port=port) from error
        await self._server.start()
        return bound

    async def close(self) -> None:
        """Refuses new calls, lets streams write their last reply, and cancels what takes longer."""
        await self._server.stop(_LAST_REPLY_S)
