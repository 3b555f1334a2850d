"""HTTP/1.1 on the native port: ``POST /step`` without a framework; WebSocket connections are handed over to uvicorn's.

httptools parses. The rules for requests and errors are those of the other HTTP door, from the same functions. A
connection has one request in progress at a time; further ones wait, as HTTP/1.1 requires.
"""

from __future__ import annotations

import asyncio
import hmac
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING

import httptools
import uvicorn
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.exceptions import InvalidHeaderValue, InvalidMessage, SecurityError
from websockets.extensions import ServerExtensionFactory
from websockets.http11 import Request

import brayx.clock as clock
from brayx.actor.doors.asgi import DoorApp
from brayx.actor.doors.browser import Answer, is_preflight, other
from brayx.actor.doors.http import headers_too_large
from brayx.actor.doors.native import Connection, Limits, Listener
from brayx.errors import (
    BodyTooLarge,
    BrayxError,
    DeadlineExceeded,
    HeaderTooLarge,
    Overloaded,
    ProtocolError,
    ServiceFull,
    TooManyConnections,
    Unauthorized,
)
from brayx.gamecore.deflate import ServerDeflate
from brayx.gamecore.protocol import SESSION_PATH, STEP_PATH, StepRequest, parse_request, text_of
from brayx.logs import limit_others, limited

if TYPE_CHECKING:
    from uvicorn._types import ASGISendEvent

logger = limited(__name__)

_STEP = STEP_PATH.encode()
FORWARDED_PREFIX = "/-/peer"
"""Path prefix of requests that a replica forwards to a session's owner, which never forwards them again. Only listeners
for peers have it."""
_FORWARDED_STEP = FORWARDED_PREFIX.encode() + _STEP
LEFT_PREFIX = "/-/left"
"""Path prefix by which a replica notifies a peer that the connection of one of the peer's sessions is gone; with a
body, for good."""
ENDED_PREFIX = "/-/ended"
"""Path prefix by which a replica notifies a peer that one of the peer's connections lost its session; the body is the
reason."""
CONSOLE_PREFIX = "/-/console"
"""Path prefix of a console's questions to a replica; the body is a JSON list of a verb and its arguments."""
SECRET_HEADER = "peer-secret"
"""Header with the secret by which a replica proves to a peer that it is a replica."""
PeerHandler = Callable[[StepRequest], Awaitable[bytes | None]]
"""Answers a peer's message; None: with an empty body."""
_SECRET = SECRET_HEADER.encode()
PEER = "peer"
"""Layer of the errors on the way from replica to replica."""
_LEFT_STEP = LEFT_PREFIX.encode() + _STEP
_ENDED_STEP = ENDED_PREFIX.encode() + _STEP
_CONSOLE_STEP = CONSOLE_PREFIX.encode() + _STEP
_MESSAGE_STEPS = (_LEFT_STEP, _ENDED_STEP, _CONSOLE_STEP)
_PEERS_STEPS = (_FORWARDED_STEP, *_MESSAGE_STEPS)
_OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/octet-stream\r\ncontent-length: %d\r\n\r\n%b"
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_JSON = b"application/json"
_KEEP_IMPLICIT = b""
_KEEP_EXPLICIT = b"connection: keep-alive\r\n"
"""Header for clients of HTTP/1.0, which otherwise expect the connection to close."""
_CLOSE = b"connection: close\r\n"
_FIELDS = (
    "session", "step_kind", "step-kind", "key", "time", "token", "seq", "holder", "attached", "opponent", "record",
    "origin", "accept",
)  # fmt: skip
_NAMES = {name.encode(): name for name in _FIELDS}


class WebSockets:
    """Hands connections over to uvicorn's WebSocket protocol.

    Args:
        app: the ASGI application with the session door.
        limits: limits of the native port.
        window_bits: window of the compression, 9 to 15; None: none.
    """

    def __init__(self, app: DoorApp, limits: Limits, window_bits: int | None = None) -> None:
        self._config = uvicorn.Config(
            app,
            log_config=None,  # uvicorn's own would close every handler of the process, Serve's too
            log_level="error",
            access_log=False,
            lifespan="off",
            ws_max_size=limits.max_body_bytes + 65536,
            ws_per_message_deflate=False,  # its window of 4 kB may not reach the message before
        )
        self._config.load()
        self._extensions = [] if window_bits is None else [ServerDeflate(window_bits)]
        limit_others()
        self._state = ServerState()

    def protocol(self, gone: Callable[[], None]) -> WebSocket:
        """The protocol of one connection; ``gone`` is called when that has ended."""
        return WebSocket(self._config, self._state, gone, self._extensions)

    def close(self) -> None:
        """Closes all connections, as going away."""
        for connection in list(self._state.connections):
            try:
                connection.shutdown()
            except Exception:  # a half-open connection must not keep the others from closing
                logger.warning("a WebSocket connection did not close cleanly", exc_info=True)
                connection.transport.abort()


class WebSocket(WebSocketsSansIOProtocol):
    """uvicorn's protocol of one connection, with better answers to clients that break the protocol.

    uvicorn fails on data that comes before it has answered the handshake: here that data waits. uvicorn also refuses an
    opening in its own words: here the opening is checked before uvicorn takes the connection over, and a refused client
    gets the error's document.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        state: ServerState,
        gone: Callable[[], None],
        extensions: Sequence[ServerExtensionFactory] = (),
    ) -> None:
        super().__init__(config=config, server_state=state, app_state={})
        self.conn.available_extensions = extensions
        self._gone = gone
        self._early = b""

    def read(self, opening: bytes) -> Request:
        """Parses ``opening``, a whole request for a WebSocket.

        Raises:
            _Refused: it is not a valid opening.
        """
        self.conn.receive_data(opening)
        status = 400
        for event in self.conn.events_received():
            if isinstance(event, Request):
                status = self.conn.accept(event).status_code
                if status == 101:
                    event.path = _origin_form(event.path.encode()).decode()
                    return event
        wrong = self.conn.handshake_exc
        reason = wrong.__cause__ if isinstance(wrong, InvalidMessage) else wrong
        message = f"this is not a WebSocket handshake: {reason}"
        if isinstance(wrong, SecurityError):
            raise _Refused(HeaderTooLarge(message))
        if isinstance(wrong, InvalidHeaderValue) and wrong.name == "Sec-WebSocket-Version":
            message, status = f"{message}, expected 13", 426
        raise _Refused(ProtocolError(message), status)

    def begin(self, transport: asyncio.Transport, request: Request, early: bytes) -> None:
        """Takes over a connection.

        Args:
            transport: transport of the connection.
            request: the opening, as parsed by `read`.
            early: data that came after the opening.
        """
        self._early = early
        self.connection_made(transport)
        transport.pause_reading()
        self.handle_connect(request)

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
            logger.info("a WebSocket connection was dropped: %s: %s", type(error).__name__, error)
            self.transport.abort()

    def shutdown(self) -> None:
        if not self.handshake_complete:
            self._refuse(ServiceFull("this replica is ending: connect again"))
        super().shutdown()

    def send_500_response(self) -> None:
        if not self.handshake_complete:
            self._refuse(BrayxError("the reply to a handshake could not be sent"))

    def _refuse(self, error: BrayxError) -> None:
        if not self.transport.is_closing():
            retry = isinstance(error, Overloaded)
            self.transport.write(_response(error.http_status, error.to_wire(), _CLOSE, retry=retry))
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._gone()


@dataclass(frozen=True)
class ForPeers:
    """Options of a listener for peers.

    Attributes:
        left: handles messages about sessions whose connection is gone.
        ended: handles messages about connections that lost their session.
        asked: answers a console's questions.
        secret: gives the secret that a peer's requests carry.
        closed: refuse all other requests; False: the listener is also a normal door.
    """

    left: PeerHandler
    ended: PeerHandler
    asked: PeerHandler
    secret: Callable[[], str]
    closed: bool = True

    def handler(self, url: bytes) -> PeerHandler | None:
        """What handles a peer's message at this path; None: it is a request."""
        if not url.startswith(_MESSAGE_STEPS):
            return None
        if url.startswith(_LEFT_STEP):
            return self.left
        return self.ended if url.startswith(_ENDED_STEP) else self.asked


class HttpConnection(Connection):
    """One client's connection; with ``peers`` it may be a peer's."""

    def __init__(self, listener: Listener, websockets: WebSockets, peers: ForPeers | None = None) -> None:
        super().__init__(listener)
        self._websockets = websockets
        self._peers = peers
        self._proved = False
        self._handling: asyncio.Task[None] | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._queue: deque[tuple[bytes, StepRequest | BrayxError | Answer, bytes, bool]] = deque()
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
        self._expects = False
        self._says_connection = False
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
            self._headers[known] = text_of(value.strip(b" \t"))
        elif name == b"content-length":
            value = value.strip(b" \t")
            if value.isdigit() and int(value) > self.limits.max_body_bytes:
                self._too_large(value.decode())
        elif name == b"expect":
            self._expects |= value.strip(b" \t").lower() == b"100-continue"
        elif name == b"connection":
            self._says_connection = True
        elif name == _SECRET and self._peers is not None:
            self._proved = hmac.compare_digest(value.strip(b" \t"), self._peers.secret().encode())

    def on_headers_complete(self) -> None:
        if self._url[:1] != b"/":
            self._url = _origin_form(self._url)
        if self._expects and self._parser.get_http_version() != "1.0":  # RFC 9110, 10.1.1
            if self._refused is None:
                self.write(_CONTINUE)
            else:  # the body may or may not follow, so the connection ends with the answer
                self._enqueue(_CLOSE)

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
        connection = _KEEP_IMPLICIT
        if not self._parser.should_keep_alive():
            connection = _CLOSE
        elif self._says_connection and self._parser.get_http_version() == "1.0":
            connection = _KEEP_EXPLICIT
        self._enqueue(connection)
        self.stalled_since = None

    def _enqueue(self, connection: bytes) -> None:
        request = self._request()
        bodiless = False
        if isinstance(request, StepRequest):
            self._queued_bytes += len(request.body)
        else:
            bodiless = self._bodiless()
        self._queue.append((self._url, request, connection + self._cors(), bodiless))

    def _cors(self) -> bytes:
        """Header lines of the answer for a browser; most clients are none."""
        if not self.service.cors.is_on:
            return b""
        headers = self.service.cors.headers(self._headers.get("origin"), self._method())
        return b"".join(b"%b: %b\r\n" % header for header in headers)

    def _method(self) -> str:
        method: bytes = self._parser.get_method()
        return method.decode("latin-1")

    def _bodiless(self) -> bool:
        """Whether the request is a HEAD, whose answer has no body."""
        # Without a URL the method is still that of the request before.
        return bool(self._url) and self._parser.get_method() == b"HEAD"

    def _measure(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > self.limits.max_header_bytes:
            raise _Refused(headers_too_large(self.limits.max_header_bytes))

    def _too_large(self, size: str) -> None:
        limit = self.limits.max_body_bytes
        self._refused = self._refused or BodyTooLarge(
            f"body has {size} bytes, at most {limit} are allowed", limit=limit
        )

    def _request(self) -> StepRequest | BrayxError | Answer:
        """The message as a request, or what answers it."""
        path = self._url.partition(b"?")[0]
        of_peers = self._peers is not None and path in _PEERS_STEPS
        if self._peers is not None and not self._proved and (of_peers or self._peers.closed):
            return _not_a_peer()
        method = self._method()
        if (path != _STEP and not of_peers) or is_preflight(self.service, method):
            return other(self.service, method, path.decode("latin-1"), self._headers.get("accept", ""))
        if self._refused is not None:
            return self._refused
        if method != "POST":
            return ProtocolError(f"{STEP_PATH} takes POST, not {method}", status=405)
        body = bytes(self._body)
        headers = self._headers
        try:
            request = parse_request(headers, body)
        except ProtocolError as error:
            return error
        if of_peers:
            request = request._replace(holder=headers.get("holder", ""), attached="attached" in headers)
        return request

    # What asyncio calls

    def data_received(self, data: bytes) -> None:
        """Parses received data, and answers complete requests."""
        if self.transport.is_closing():
            return
        if self.stalled_since is None:
            self.stalled_since = clock.now()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._peers is not None and self._peers.closed and not self._proved:
                self._fail(_not_a_peer())
            elif self._url.partition(b"?")[0] == _STEP and self._refused is not None:
                self._fail(self._refused)
            elif self._url.partition(b"?")[0] != SESSION_PATH.encode():
                hint = "send no Upgrade header; Java's HttpClient sends one unless its version is HTTP_1_1"
                self._fail(ProtocolError(f"only {SESSION_PATH} is upgraded, to a WebSocket: {hint}"), 426)
            elif self.in_flight or self._queue:
                self._fail(ProtocolError("upgrade to a WebSocket only after the replies to all earlier requests"), 426)
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
            self._head += data  # in case it is a WebSocket handshake
        self._next()

    def _whole(self) -> bool:
        """Whether no request is partly received."""
        return self.stalled_since is None

    def _next(self) -> None:
        """Answers waiting requests one at a time; a loop, so that replies before `submit` returns do not recurse."""
        if self._answering:
            return
        self._answering = True
        try:
            while self._queue and not self.in_flight and self._writable and not self.transport.is_closing():
                url, request, connection, bodiless = self._queue.popleft()
                if isinstance(request, StepRequest):
                    self._queued_bytes -= len(request.body)
                if isinstance(request, Answer):
                    self._write(request.status, request.body, connection, request.content_type, bodiless=bodiless)
                elif isinstance(request, BrayxError):
                    if request.details.get("layer") != PEER:
                        self.service.refused(request)
                    status = request.details.pop("status", request.http_status)
                    self._write(status, request.to_wire(), connection, bodiless=bodiless)
                elif self._peers is not None and (handler := self._peers.handler(url)) is not None:
                    self.in_flight = 1
                    self._handling = asyncio.get_running_loop().create_task(self._handle(handler, request))
                else:
                    self.in_flight = 1
                    self.waiting_since = None
                    forwarded = self._peers is not None and url.startswith(_FORWARDED_STEP)
                    reply = self._reply
                    if connection or forwarded:
                        reply = partial(self._reply, connection=connection, to_peer=forwarded)
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

    async def _handle(self, handler: PeerHandler, request: StepRequest) -> None:
        answer: bytes | BrayxError
        try:
            answer = await handler(request) or b""
        except BrayxError as error:
            answer = error
        self._reply(answer, to_peer=True)

    def _reply(self, result: bytes | BrayxError, connection: bytes = _KEEP_IMPLICIT, *, to_peer: bool = False) -> None:
        self.in_flight = 0
        self.waiting_since = clock.now()
        if isinstance(result, bytes):
            if connection:
                self._write(200, result, connection, b"application/octet-stream")
            else:
                self.write(_OK % (len(result), result))
        else:
            if not to_peer:
                self.service.refused(result)
            self._write(result.http_status, result.to_wire(), connection, retry=isinstance(result, Overloaded))
        if self._queue:
            self._next()

    def _write(
        self,
        status: int,
        body: bytes,
        connection: bytes,
        content_type: bytes = _JSON,
        *,
        retry: bool = False,
        bodiless: bool = False,
    ) -> None:
        if self.transport.is_closing():
            return
        response = _response(status, body, connection, content_type, retry=retry)
        self.write(response[: len(response) - len(body)] if bodiless else response)
        if connection.startswith(_CLOSE):
            self.close()

    def _fail(self, error: BrayxError, status: int = 0) -> None:
        """Answers with an error and closes, as the rest of the input cannot be read."""
        self.service.refused(error)
        retry = isinstance(error, Overloaded)
        self._write(
            status or error.http_status, error.to_wire(), _CLOSE + self._cors(), retry=retry, bodiless=self._bodiless()
        )

    def _hand_over(self, data: bytes, early: int) -> None:
        """Hands the connection over to the WebSocket protocol; the listener still counts it.

        The last ``early`` bytes of ``data`` came after the opening.
        """
        opening = len(data) - early
        protocol = self._websockets.protocol(partial(self.listener.drop, self))
        try:
            request = protocol.read(data[:opening])
        except _Refused as refused:
            self._fail(refused.error, refused.status)
            return
        self.flush()
        self.stalled_since = self.waiting_since = None
        self._clear()
        self._head.clear()
        self.transport.set_protocol(protocol)
        protocol.begin(self.transport, request, data[opening:])

    def refuse(self) -> None:
        self._fail(TooManyConnections(f"this door holds {self.limits.max_connections} connections"))

    def expire(self, what: str) -> None:
        if self.stalled_since is not None and not self.in_flight:
            self._fail(DeadlineExceeded(what, layer="door"), 408)
        self.close()


def _origin_form(url: bytes) -> bytes:
    """Path and query of an absolute URI, the form that proxies get; any other target unchanged."""
    try:
        parsed = httptools.parse_url(url)
    except httptools.HttpParserInvalidURLError:
        return url
    if not parsed.schema:
        return url
    path: bytes = parsed.path or b"/"
    return path if parsed.query is None else path + b"?" + parsed.query


def _response(
    status: int, body: bytes, connection: bytes, content_type: bytes = _JSON, *, retry: bool = False
) -> bytes:
    """A whole response; ``connection`` are further header lines, that of Connection first, or empty."""
    more = (b"retry-after: 1\r\n" if retry else b"") + connection
    if status == HTTPStatus.UPGRADE_REQUIRED:
        more += b"upgrade: websocket\r\nsec-websocket-version: 13\r\n"
    phrase = HTTPStatus(status).phrase.encode()
    head = b"HTTP/1.1 %d %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n%b\r\n"
    return head % (status, phrase, content_type, len(body), more) + body


def _not_a_peer() -> Unauthorized:
    return Unauthorized("this port accepts requests of the application's replicas only", layer=PEER)


class _Refused(Exception):
    """Stops the reading of a request; a ``status`` other than 0 replaces the error's HTTP status."""

    def __init__(self, error: BrayxError, status: int = 0) -> None:
        super().__init__(str(error))
        self.error = error
        self.status = status
