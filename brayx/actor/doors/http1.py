"""HTTP/1.1 on the native port: ``POST /step`` without a framework; WebSocket connections are handed over to uvicorn's.

httptools parses; what is a request, and what an error looks like, is told where the other HTTP door tells it. One
request of a connection is under way at a time, further ones on it wait their turn, as HTTP/1.1 has it.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING

import httptools
import uvicorn
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState

from brayx.actor.doors.asgi import DoorApp
from brayx.actor.doors.http import headers_too_large
from brayx.actor.doors.native import Connection, Limits, Listener
from brayx.errors import (
    BodyTooLarge,
    BrayxError,
    DeadlineExceeded,
    Overloaded,
    ProtocolError,
    TooManyConnections,
    Unauthorized,
)
from brayx.gamecore.protocol import SESSION_PATH, STEP_PATH, StepRequest, parse_request

if TYPE_CHECKING:
    from uvicorn._types import ASGISendEvent

logger = logging.getLogger(__name__)

_STEP = STEP_PATH.encode()
FORWARDED_PREFIX = "/-/peer"
"""Where a replica sends what it passes on to a session's owner, so that it is passed on once. Peers' listeners only."""
_FORWARDED_STEP = FORWARDED_PREFIX.encode() + _STEP
LEFT_PREFIX = "/-/left"
"""Where a replica tells a peer that the connection of one of its sessions is gone; for good if there is a body."""
SECRET_HEADER = "peer-secret"
"""Where a replica proves to a peer that it is one."""
Left = Callable[[str, bool], Awaitable[None]]
_SECRET = SECRET_HEADER.encode()
PEER = "peer"
"""Layer of the errors on the way from replica to replica."""
_LEFT_STEP = LEFT_PREFIX.encode() + _STEP
_OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/octet-stream\r\ncontent-length: %d\r\n\r\n%b"
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_JSON = b"application/json"
_NAMES = {name.encode(): name for name in ("session", "step_kind", "key", "time", "token", "seq")}


class WebSockets:
    """What uvicorn's WebSocket protocol needs to take connections over.

    Args:
        app: the ASGI application with the session door.
        limits: of the native port.
    """

    def __init__(self, app: DoorApp, limits: Limits) -> None:
        self._config = uvicorn.Config(
            app,
            log_config=None,  # uvicorn's own closes every handler of the process, also those of Serve
            log_level="error",
            access_log=False,
            lifespan="off",
            ws_max_size=limits.max_body_bytes + 65536,
        )
        self._config.load()
        self._state = ServerState()

    def protocol(self, gone: Callable[[], None]) -> WebSocket:
        """The protocol of one connection; ``gone`` is called when that has ended."""
        return WebSocket(self._config, self._state, gone)

    def close(self) -> None:
        """Closes all connections, as going away."""
        for connection in list(self._state.connections):
            try:
                connection.shutdown()
            except Exception:  # one that is half open keeps no other from its farewell
                logger.warning("a WebSocket connection did not end in order", exc_info=True)
                connection.transport.abort()


class WebSocket(WebSocketsSansIOProtocol):
    """uvicorn's protocol of one connection, for clients that do not keep to theirs.

    It takes what comes before the handshake is answered for impossible, and holds on to a connection whose opening it
    cannot read: here the former waits, and the latter is told and closed.
    """

    def __init__(self, config: uvicorn.Config, state: ServerState, gone: Callable[[], None]) -> None:
        super().__init__(config=config, server_state=state, app_state={})
        self._gone = gone
        self._early = b""

    def begin(self, transport: asyncio.Transport, opening: bytes, early: bytes) -> BrayxError | None:
        """Takes a connection over.

        Args:
            transport: its transport.
            opening: the request that asks for a WebSocket, whole.
            early: what came with it.

        Returns:
            What the client was told if it is no such request.
        """
        self._early = early
        self.connection_made(transport)
        transport.pause_reading()
        super().data_received(opening)
        if not self.handshake_initiated and not transport.is_closing():
            refusal = ProtocolError("this is not the opening of a WebSocket")
            told = refusal.to_wire()
            head = b"HTTP/1.1 400 Bad Request\r\ncontent-type: %b\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
            transport.write(head % (_JSON, len(told)) + told)
            transport.close()
            return refusal
        return None

    async def send(self, message: ASGISendEvent) -> None:
        opening = not self.handshake_complete
        await super().send(message)
        if opening and self.handshake_complete and not self.transport.is_closing():
            self.transport.resume_reading()
            early, self._early = self._early, b""
            if early:
                self.data_received(early)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if not self.handshake_complete:
            self._early += data
            return
        try:
            super().data_received(data)
        except Exception as error:
            logger.info("a WebSocket connection was given up: %s: %s", type(error).__name__, error)
            self.transport.abort()

    def send_500_response(self) -> None:
        if not self.transport.is_closing():
            super().send_500_response()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._gone()


@dataclass(frozen=True)
class ForPeers:
    """What makes a listener one for peers.

    Attributes:
        left: told of sessions whose connection broke.
        secret: what a request must prove itself with to be a peer's.
        closed: to anybody else; or a door as any for those.
    """

    left: Left
    secret: Callable[[], str]
    closed: bool = True


class HttpConnection(Connection):
    """One client's connection; with ``peers`` perhaps a peer's."""

    def __init__(self, listener: Listener, websockets: WebSockets, peers: ForPeers | None = None) -> None:
        super().__init__(listener)
        self._websockets = websockets
        self._peers = peers
        self._proved = False
        self._telling: asyncio.Task[None] | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._queue: deque[tuple[bytes, StepRequest | BrayxError | None, bool]] = deque()
        self._queued_bytes = 0
        self._answering = False
        self._head = bytearray()
        self._clear()

    def _clear(self) -> None:
        self._url = b""
        self._headers: dict[str, str] = {}
        self._body: bytes | bytearray = b""
        self._body_bytes = 0
        self._header_bytes = 0
        self._refused: BrayxError | None = None
        self._upgrade = False
        self._proved = False

    # What httptools calls

    def on_message_begin(self) -> None:
        self._clear()

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._measure(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._measure(len(name) + len(value))
        name = name.lower()
        if (known := _NAMES.get(name)) is not None:
            self._headers[known] = value.decode("latin-1")
        elif name == b"content-length":
            if value.isdigit() and int(value) > self.limits.max_body_bytes:
                self._too_large(value.decode())
        elif name == b"expect":
            if value.lower() == b"100-continue" and self._refused is None:
                self.write(_CONTINUE)
        elif name == b"upgrade":
            self._upgrade = value.lower() == b"websocket"
        elif name == _SECRET and self._peers is not None:
            self._proved = hmac.compare_digest(value, self._peers.secret().encode())

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self._body_bytes > self.limits.max_body_bytes:
            self._too_large(f"more than {self.limits.max_body_bytes}")
            self._body = b""
        elif not self._body:
            self._body = body
        elif isinstance(self._body, bytearray):
            self._body += body
        else:
            self._body = bytearray(self._body + body)  # not a list: pieces may be of a byte each

    def on_message_complete(self) -> None:
        if self._parser.should_upgrade():
            return
        keep = self._parser.should_keep_alive()
        request = self._request()
        self._queue.append((self._url, request, keep))
        if isinstance(request, StepRequest):
            self._queued_bytes += len(request.body)
        self.stalled_since = None

    def _measure(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > self.limits.max_header_bytes:
            raise _Refused(headers_too_large(self.limits.max_header_bytes))

    def _too_large(self, size: str) -> None:
        limit = self.limits.max_body_bytes
        self._refused = self._refused or BodyTooLarge(
            f"body has {size} bytes, at most {limit} are allowed", limit=limit
        )

    def _request(self) -> StepRequest | BrayxError | None:
        """What the message asks; None: nothing for the service."""
        path = self._url.partition(b"?")[0]
        of_peers = self._peers is not None and path in (_FORWARDED_STEP, _LEFT_STEP)
        if self._peers is not None and not self._proved and (of_peers or self._peers.closed):
            return _not_a_peer()
        if path != _STEP and not of_peers:
            return None
        if self._refused is not None:
            return self._refused
        method = self._parser.get_method()
        if method != b"POST":
            return ProtocolError(f"{STEP_PATH} takes POST, not {method.decode('latin-1')}", status=405)
        body = bytes(self._body)
        try:
            return parse_request(self._headers, body)
        except ProtocolError as error:
            return error

    # What asyncio calls

    def data_received(self, data: bytes) -> None:
        """Parses what came, and answers what is whole."""
        if self.transport.is_closing():
            return
        if self.stalled_since is None:
            self.stalled_since = time.monotonic()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._peers is not None and self._peers.closed and not self._proved:
                self._fail(_not_a_peer())
            elif not self._upgrade or self._url.partition(b"?")[0] != SESSION_PATH.encode():
                self._fail(ProtocolError(f"only {SESSION_PATH} is a WebSocket"), 426)
            elif self.in_flight or self._queue:
                self._fail(ProtocolError("a WebSocket is asked for once all requests before it are answered"), 426)
            else:
                self._hand_over(bytes(self._head) + data, len(data) - upgrade.args[0])
            return
        except httptools.HttpParserError as error:
            cause = error.__context__
            refused = cause if isinstance(cause, _Refused) else None
            self._fail(refused.error if refused else ProtocolError(f"this is not HTTP/1.1: {error}"))
            return
        if self._whole():
            self._head.clear()
        elif len(self._head) <= self.limits.max_header_bytes:
            self._head += data  # in case it is the opening of a WebSocket
        self._next()

    def _whole(self) -> bool:
        """Whether no request has begun that is not there whole."""
        return self.stalled_since is None

    def _next(self) -> None:
        """Answers what waits, one at a time; an answer that comes before `submit` returns goes on here, no deeper."""
        if self._answering:
            return
        self._answering = True
        try:
            while self._queue and not self.in_flight and self._writable and not self.transport.is_closing():
                url, request, keep = self._queue.popleft()
                if isinstance(request, StepRequest):
                    self._queued_bytes -= len(request.body)
                if request is None:
                    self._other(url, keep)
                elif isinstance(request, BrayxError):
                    if (
                        request.details.get("layer") != PEER
                    ):  # a replica tells its own client something else, and counts that
                        self.service.refused(request)
                    status = request.details.pop("status", request.http_status)
                    self._write(status, request.to_wire(), keep)
                elif self._peers is not None and url.startswith(_LEFT_STEP):
                    self.in_flight = 1
                    self._telling = asyncio.get_running_loop().create_task(self._tell(self._peers.left, request))
                else:
                    self.in_flight = 1
                    self.waiting_since = None
                    forwarded = self._peers is not None and url.startswith(_FORWARDED_STEP)
                    reply = self._reply_keeping if keep else self._reply_closing
                    self.service.submit(request, reply, forwarded=forwarded)
        finally:
            self._answering = False
        self.regulate()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._next()

    def regulate(self) -> None:
        if len(self._queue) >= self.limits.max_in_flight or self._queued_bytes > self.limits.max_body_bytes:
            if self._reading and not self.transport.is_closing():
                self._reading = False
                self.transport.pause_reading()
        else:
            super().regulate()

    async def _tell(self, left: Left, request: StepRequest) -> None:
        await left(request.session, bool(request.body))
        self._reply(b"", True)

    def _reply_keeping(self, result: bytes | BrayxError) -> None:
        self._reply(result, True)

    def _reply_closing(self, result: bytes | BrayxError) -> None:
        self._reply(result, False)

    def _reply(self, result: bytes | BrayxError, keep: bool) -> None:
        self.in_flight = 0
        self.waiting_since = time.monotonic()
        if isinstance(result, bytes):
            if keep:
                self.write(_OK % (len(result), result))
            else:
                self._write(200, result, keep, b"application/octet-stream")
        else:
            self._write(result.http_status, result.to_wire(), keep, retry=isinstance(result, Overloaded))
        if self._queue:
            self._next()

    def _other(self, url: bytes, keep: bool) -> None:
        """What is no step: the status page, or nothing that there is."""
        path = url.partition(b"?")[0].decode("latin-1")
        if path in ("", "/"):
            self._write(200, json.dumps(self.service.status()).encode(), keep)
        else:
            error = ProtocolError(f"no such path {path!r}: POST {STEP_PATH}, or WebSocket {SESSION_PATH}")
            self.service.refused(error)
            self._write(404, error.to_wire(), keep)

    def _write(self, status: int, body: bytes, keep: bool, content_type: bytes = _JSON, *, retry: bool = False) -> None:
        if self.transport.is_closing():
            return
        more = (b"retry-after: 1\r\n" if retry else b"") + (b"" if keep else b"connection: close\r\n")
        phrase = HTTPStatus(status).phrase.encode()
        head = b"HTTP/1.1 %d %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n%b\r\n"
        self.write(head % (status, phrase, content_type, len(body), more) + body)
        if not keep:
            self.close()

    def _fail(self, error: BrayxError, status: int = 0) -> None:
        """Answers what cannot be read any further, and closes."""
        self.service.refused(error)
        self._write(status or error.http_status, error.to_wire(), False, retry=isinstance(error, Overloaded))

    def _hand_over(self, data: bytes, early: int) -> None:
        """Makes the connection a WebSocket's; it stays counted. The last ``early`` bytes came after the opening."""
        opening = len(data) - early
        self.flush()
        self.stalled_since = self.waiting_since = None
        self._clear()
        self._head.clear()
        protocol = self._websockets.protocol(partial(self.listener.drop, self))
        self.transport.set_protocol(protocol)
        refusal = protocol.begin(self.transport, data[:opening], data[opening:])
        if refusal is not None:
            self.service.refused(refusal)

    def refuse(self) -> None:
        self._fail(TooManyConnections(f"this door holds {self.limits.max_connections} connections"))

    def expire(self, what: str) -> None:
        if self.stalled_since is not None and not self.in_flight:
            self._fail(DeadlineExceeded(what, layer="door"), 408)
        self.close()


def _not_a_peer() -> Unauthorized:
    return Unauthorized("this port is for replicas of one application, which know a secret", layer=PEER)


class _Refused(Exception):
    """Raised inside the parser's callbacks to stop it."""

    def __init__(self, error: BrayxError) -> None:
        super().__init__(str(error))
        self.error = error
