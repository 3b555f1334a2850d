"""HTTP/1.1 on the native port: ``POST /step`` without a framework; WebSocket connections are handed over to uvicorn's.

httptools parses. The rules for requests and errors are those of the other HTTP door, from the same functions. A
connection has one request in progress at a time; further ones wait, as HTTP/1.1 requires. A subclass may answer further
paths. Knows nothing of clients.
"""

from __future__ import annotations

from collections import deque
from functools import partial

import httptools

import brayx.clock as clock
from brayx.actor.doors.answers import (
    CLOSE,
    CONTINUE,
    JSON,
    KEEP_EXPLICIT,
    KEEP_IMPLICIT,
    OK,
    Answer,
    Refused,
    is_preflight,
    origin_form,
    other,
    response,
)
from brayx.actor.doors.http import headers_too_large
from brayx.actor.doors.native import Connection, Listener
from brayx.actor.doors.websocket import fields_of
from brayx.actor.doors.ws1 import WebSockets
from brayx.errors import (
    BodyTooLarge,
    BrayxError,
    DeadlineExceeded,
    Forbidden,
    Overloaded,
    ProtocolError,
    TooManyConnections,
)
from brayx.gamecore.protocol import (
    SESSION_PATH,
    SINGLE,
    STEP_PATH,
    StepKind,
    StepRequest,
    add_header,
    parse_request,
    text_of,
)

_STEP = STEP_PATH.encode()
_SLICE_BYTES = 512
"""Maximum size of a slice for the parser, which cannot stop after a request. A body of known length is one slice."""
_SLICES_OF_A_TURN = 32
_NAMES = {name.encode(): name for name in (*SINGLE, "origin", "accept", "authorization", "traceparent")}


class HttpConnection(Connection):
    """One client's connection.

    Attributes:
        steps: paths of the requests that `submit` takes.
    """

    steps: tuple[bytes, ...] = (_STEP,)

    def __init__(self, listener: Listener, websockets: WebSockets) -> None:
        super().__init__(listener)
        self._websockets = websockets
        self._parser = httptools.HttpRequestParser(self)
        self._queue: deque[tuple[bytes, StepRequest | BrayxError | Answer, bytes, bool]] = deque()
        self._queued_bytes = 0
        self._answering = False
        self._head = bytearray()
        self._data = b""
        self._at = 0
        self._host: str | None = None
        self.clear()

    def clear(self) -> None:
        """Prepares for the next request."""
        self._url = b""
        self._headers: dict[str, str] = {}
        self._body: bytes | bytearray = b""
        self._body_bytes = 0
        self._announced_bytes = 0
        self._header_bytes = 0
        self._refused: BrayxError | None = None
        self._expects = False
        self._says_connection = False

    # What httptools calls

    def on_message_begin(self) -> None:
        self.clear()

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._measure(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keeps a header of the request."""
        self._measure(len(name) + len(value))
        name = name.lower()
        if (known := _NAMES.get(name)) is not None:
            text = text_of(value.strip(b" \t"))
            if known not in self._headers and known != "transfer-encoding":
                self._headers[known] = text
            else:
                self._add(known, text)
        elif name == b"content-length":
            value = value.strip(b" \t")
            if value.isdigit():
                self._announced_bytes = int(value)
                if self._announced_bytes > self.limits.max_body_bytes:
                    self._too_large(value.decode())
        elif name == b"expect":
            self._expects |= value.strip(b" \t").lower() == b"100-continue"
        elif name == b"connection":
            self._says_connection = True

    def _add(self, name: str, value: str) -> None:
        try:
            add_header(self._headers, name, value)
        except ProtocolError as error:
            raise Refused(error) from None

    def on_headers_complete(self) -> None:
        if self._url[:1] != b"/":
            self._url = origin_form(self._url)
        host = self._headers.get("host")
        if host != self._host:
            try:
                self.check_host(host)
            except Forbidden as error:
                raise Refused(error) from None
            self._host = host
        if self._expects and self._parser.get_http_version() != "1.0":  # RFC 9110, 10.1.1
            if self._refused is None:
                self.write(CONTINUE)
            else:  # the body may or may not follow, so the connection ends with the answer
                self._enqueue(CLOSE)

    def check_host(self, host: str | None) -> None:
        """Checks the host name that the client used.

        Raises:
            Forbidden: this door does not answer to it.
        """
        self.service.hosts.check(host)

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
        connection = KEEP_IMPLICIT
        if not self._parser.should_keep_alive():
            connection = CLOSE
        elif self._says_connection and self._parser.get_http_version() == "1.0":
            connection = KEEP_EXPLICIT
        self._enqueue(connection)
        self.stalled_since = None

    def _enqueue(self, connection: bytes) -> None:
        path = self._url.partition(b"?")[0]
        request = self.request(path)
        bodiless = False
        if isinstance(request, StepRequest):
            self._queued_bytes += len(request.body)
        else:
            bodiless = self._bodiless()
        if self.service.cors.is_on:
            connection += self._cors()
        self._queue.append((path, request, connection, bodiless))

    def _cors(self) -> bytes:
        """Header lines of the answer for a browser; most clients are none."""
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
            raise Refused(headers_too_large(self.limits.max_header_bytes))

    def _too_large(self, size: str) -> None:
        limit = self.limits.max_body_bytes
        self._refused = self._refused or BodyTooLarge(
            f"body has {size} bytes, at most {limit} are allowed", limit=limit
        )

    def request(self, path: bytes) -> StepRequest | BrayxError | Answer:
        """The message as a request; or an error, which is counted, or a ready answer for the client."""
        is_post = self._parser.get_method() == b"POST"
        if path not in self.steps or (not is_post and is_preflight(self.service, self._method())):
            return other(self.service, self._method(), path.decode("latin-1"), self._headers)
        if self._refused is not None:
            return self._refused
        if not is_post:
            return ProtocolError(f"{STEP_PATH} takes POST, not {self._method()}", status=405)
        try:
            return parse_request(self._headers, bytes(self._body))
        except ProtocolError as error:
            return error

    # What asyncio calls

    def data_received(self, data: bytes) -> None:
        """Parses received data, and answers complete requests."""
        if self.transport.is_closing():
            return
        if self.stalled_since is None:
            self.stalled_since = clock.now()
        if len(data) <= _SLICE_BYTES:
            if self._parse(data):
                self._next()
        else:
            self._data, self._at = data, 0
            self.more()

    def more(self) -> None:
        """Parses slices until one completes a request, at most `_SLICES_OF_A_TURN`."""
        data, queued = self._data, len(self._queue)
        view, end = memoryview(data), len(data)
        for _ in range(_SLICES_OF_A_TURN):
            start, size = self._at, self._announced_bytes - self._body_bytes
            if size <= 0:  # not in a body of known length
                head_end = data.find(b"\r\n\r\n", start, start + _SLICE_BYTES)
                size = _SLICE_BYTES if head_end < 0 else head_end + 4 - start
            self._at = start + size
            if not self._parse(view[start : self._at]):
                return
            if self._at >= end or len(self._queue) > queued:
                break
        self.has_more = self._at < end
        if not self.has_more:
            self._data = b""
        elif self.stalled_since is None:
            self.stalled_since = clock.now()
        self._next()

    def _parse(self, data: bytes | memoryview) -> bool:
        """Parses a slice. False: this protocol reads nothing more from the connection."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self.upgrade(self._url.partition(b"?")[0], bytes(data), len(data) - upgrade.args[0])
            return False
        except httptools.HttpParserError as error:
            cause = error.__context__
            refused = cause if isinstance(cause, Refused) else None
            self.fail(refused.error if refused else ProtocolError(f"this is not HTTP/1.1: {error}"))
            return False
        if self._whole():
            self._head.clear()
        elif len(self._head) <= self.limits.max_header_bytes:
            self._head += data  # in case it is a WebSocket handshake
        return True

    def upgrade(self, path: bytes, data: bytes, early: int) -> None:
        """Handles a request to upgrade.

        Args:
            path: path of the request.
            data: the slice that ends the request.
            early: number of its last bytes that came after the request.
        """
        if path in self.steps and self._refused is not None:
            self.fail(self._refused)
        elif path != SESSION_PATH.encode():
            hint = "send no Upgrade header; Java's HttpClient sends one unless its version is HTTP_1_1"
            self.fail(ProtocolError(f"only {SESSION_PATH} is upgraded, to a WebSocket: {hint}"), 426)
        elif self.in_flight or self._queue:
            self.fail(ProtocolError("upgrade to a WebSocket only after the replies to all earlier requests"), 426)
        else:
            opening = bytes(self._head) + data[: len(data) - early]
            self._hand_over(opening, data[len(data) - early :] + self._data[self._at :])

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
                path, request, connection, bodiless = self._queue.popleft()
                if isinstance(request, StepRequest):
                    self._queued_bytes -= len(request.body)
                if isinstance(request, Answer):
                    self._write(request.status, request.body, connection, request.content_type, bodiless=bodiless)
                elif isinstance(request, BrayxError):
                    self.service.refused(request)
                    status = request.details.pop("status", request.http_status)
                    self._write(status, request.to_wire(), connection, bodiless=bodiless)
                else:
                    self.in_flight = 1
                    self.waiting_since = None
                    self.submit(path, request, connection)
        finally:
            self._answering = False
        self.regulate()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._next()

    def has_room(self) -> bool:
        """See `Connection.has_room`. One request is in progress; further ones are queued."""
        return (
            self._writable
            and len(self._queue) < self.limits.max_in_flight
            and self._queued_bytes <= self.limits.max_body_bytes
        )

    def submit(self, path: bytes, request: StepRequest, connection: bytes) -> None:
        """Passes a request to the service, which answers it by a call of `reply`.

        Args:
            path: its path, one of `steps`.
            request: the request.
            connection: as for `reply`.
        """
        reply = partial(self.reply, connection=connection) if connection else self.reply
        if request.kind is StepKind.START:
            self.start(request, reply)
        else:
            self.service.submit(request, reply)

    def reply(self, result: bytes | BrayxError, connection: bytes = KEEP_IMPLICIT, *, count: bool = True) -> None:
        """Answers the request in progress.

        Args:
            result: the answer's body, or the error.
            connection: further header lines of the answer, see `brayx.actor.doors.answers.response`.
            count: count an error.
        """
        self.in_flight = 0
        self.waiting_since = clock.now()
        if isinstance(result, bytes):
            if connection:
                self._write(200, result, connection, b"application/octet-stream")
            else:
                self.write(OK % (len(result), result))
        else:
            if count:
                self.service.refused(result)
            self._write(result.http_status, result.to_wire(), connection, retry=isinstance(result, Overloaded))
        if self._queue:
            self._next()

    def _write(
        self,
        status: int,
        body: bytes,
        connection: bytes,
        content_type: bytes = JSON,
        *,
        retry: bool = False,
        bodiless: bool = False,
    ) -> None:
        if self.transport.is_closing():
            return
        whole = response(status, body, connection, content_type, retry=retry)
        self.write(whole[: len(whole) - len(body)] if bodiless else whole)
        if connection.startswith(CLOSE):
            self.close()

    def fail(self, error: BrayxError, status: int = 0) -> None:
        """Answers with an error and closes, as the rest of the input cannot be read."""
        self.service.refused(error)
        retry = isinstance(error, Overloaded)
        self._write(
            status or error.http_status, error.to_wire(), CLOSE + self._cors(), retry=retry, bodiless=self._bodiless()
        )

    def _hand_over(self, opening: bytes, early: bytes) -> None:
        """Hands the connection over to the WebSocket protocol; the listener still counts it.

        Args:
            opening: the whole request.
            early: bytes that came after the request.
        """
        protocol = self._websockets.protocol(self.listener, partial(self.listener.drop, self), self._may_compress)
        try:
            request = protocol.read(opening)
        except Refused as refused:
            self.fail(refused.error, refused.status)
            return
        self.flush()
        self.stalled_since = self.waiting_since = None
        self.clear()
        self._head.clear()
        self.transport.set_protocol(protocol)
        protocol.begin(self.transport, request, early)

    def _may_compress(self) -> bool:
        """Whether the opening has valid credentials, if the service requires any."""
        try:
            fields = fields_of(self._headers, self._url.partition(b"?")[2])
        except ProtocolError:
            return False  # the WebSocket door refuses it
        key, time, token = fields["key"], fields["time"], fields["token"]
        return self.service.lets_in(StepRequest(StepKind.START, fields["session"], b"", key, time, token))

    def refuse(self) -> None:
        self.fail(TooManyConnections(f"this door holds {self.limits.max_connections} connections"))

    def expire(self, what: str) -> None:
        if self.stalled_since is not None and not self.in_flight:
            self.fail(DeadlineExceeded(what, layer="door"), 408)
        self.close()
