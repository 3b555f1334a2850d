"""``POST /step`` over a kept-alive HTTP/1.1 connection: the transports, and requests and replies as bytes.

Standard library only. Reads ``Content-Length`` and chunked replies, replies that end with the connection, and interim
(1xx) replies. `http.client` is not used because its header parsing alone costs more than the rest of a tick.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from brayx.errors import ProtocolError, TransportError, from_wire
from brayx.gamecore.protocol import STEP_PATH, StepRequest, request_headers
from brayx.gamecore.transports.base import MAX_REPLY_BYTES, Endpoint
from brayx.gamecore.transports.stream import AsyncStreamTransport, StreamTransport

MAX_HEAD_BYTES = 64 * 1024

_HEX = re.compile(rb"[0-9a-fA-F]{1,15}").fullmatch


class HttpTransport(StreamTransport):
    """The blocking HTTP transport; see `Transport`."""

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__(endpoint, RequestEncoder(endpoint))


class AsyncHttpTransport(AsyncStreamTransport):
    """The asyncio HTTP transport; see `AsyncTransport`. Belongs to one event loop. ``headers``: of every request."""

    def __init__(self, endpoint: Endpoint, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(endpoint, RequestEncoder(endpoint, headers))


class RequestEncoder:
    """Writes requests; caches the last head, since the ticks of a session differ in ``seq`` only."""

    layer = "http"

    def __init__(self, endpoint: Endpoint, headers: Mapping[str, str] | None = None) -> None:
        """``headers``: additional headers of every request."""
        self._start = f"POST {endpoint.prefix}{STEP_PATH} HTTP/1.1\r\nhost: {endpoint.authority}\r\n"
        for name, value in (headers or {}).items():
            self._start += f"{name}: {header_value(name, value)}\r\n"
        self._fields: tuple[object, ...] = ()
        self._head = b""

    def begin(self, request: StepRequest) -> tuple[bytes, HttpReply]:
        """See `StreamCodec.begin`."""
        return self.encode(request), HttpReply()

    def encode(self, request: StepRequest) -> bytes:
        """The bytes of ``request``.

        Raises:
            ProtocolError: a field cannot be a header value.
        """
        kind, session, _, key, time, token, _, *others = request
        fields = (kind, session, key, time, token, *others)
        if fields != self._fields:
            lines = "".join(
                f"{name}: {header_value(name, value)}\r\n"
                for name, value in request_headers(request._replace(seq=None)).items()
            )
            self._head = f"{self._start}{lines}".encode("latin-1")
            self._fields = fields
        body = request.body
        if request.seq is None:
            return b"%scontent-length: %d\r\n\r\n%s" % (self._head, len(body), body)
        return b"%sseq: %d\r\ncontent-length: %d\r\n\r\n%s" % (self._head, request.seq, len(body), body)


def header_value(name: str, value: str) -> str:
    """Returns ``value`` if it is valid for header ``name``: a line break in it could inject other headers.

    Raises:
        ProtocolError: it is not printable ASCII.
    """
    if not (value.isascii() and value.isprintable()):
        raise ProtocolError(f"header {name!r} is {value!r}, expected printable ASCII", header=name)
    return value


class HttpReply:
    """One reply, fed with bytes as they come.

    Attributes:
        done: the reply is complete.
        status, body: status and body of the final (not interim) reply; ``body`` is set once ``done``.
        keep_alive: the connection can carry another request.
        started: at least one byte has arrived.
    """

    __slots__ = ("_buffer", "_chunked", "_end", "_start", "body", "done", "keep_alive", "started", "status")

    def __init__(self) -> None:
        self.done = False
        self.started = False
        self.status = 0
        self.body = b""
        self.keep_alive = True
        self._buffer = bytearray()
        self._start = -1
        self._end: int | None = None
        self._chunked: _Chunks | None = None

    def feed(self, data: bytes) -> bool:
        """Processes ``data``; returns whether the reply is complete.

        Raises:
            TransportError: not an HTTP/1.1 reply, or larger than `MAX_REPLY_BYTES`.
        """
        self.started = True
        self._buffer += data
        if self._start < 0 and not self._read_head():
            return False
        if len(self._buffer) - self._start > MAX_REPLY_BYTES:
            raise TransportError(f"the reply is larger than {MAX_REPLY_BYTES} bytes")
        if self._chunked is not None:
            if self._chunked.read(self._buffer):
                self.body = bytes(self._chunked.body)
                self.done = True
        elif self._end is not None and len(self._buffer) >= self._end:
            self.body = bytes(self._buffer[self._start : self._end])
            self.keep_alive = self.keep_alive and len(self._buffer) == self._end
            self.done = True
        return self.done

    def end(self) -> bool:
        """Handles the end of the stream; returns whether the reply is complete."""
        if not self.done and self._start >= 0 and self._end is None and self._chunked is None:
            self.body = bytes(self._buffer[self._start :])
            self.done = True
        self.keep_alive = False
        return self.done

    def result(self) -> bytes:
        """The body of a complete reply.

        Raises:
            BrayxError: its status is not 200.
        """
        if self.status != 200:
            raise from_wire(self.body, http_status=self.status)
        return self.body

    def _read_head(self) -> bool:
        while True:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                if len(self._buffer) > MAX_HEAD_BYTES or not _may_be_http(self._buffer):
                    raise _not_http(self._buffer)
                return False
            head = bytes(self._buffer[:end]).lower()
            status = head[9:12]
            if not head.startswith(b"http/1.") or not status.isdigit():
                raise _not_http(self._buffer)
            if status[0] != ord("1"):
                break
            del self._buffer[: end + 4]
        self.status = int(status)
        self._start = end + 4
        connection = _field(head, b"connection")
        self.keep_alive = connection != b"close" and (head[7:8] == b"1" or connection == b"keep-alive")
        if b"chunked" in _field(head, b"transfer-encoding"):
            self._chunked = _Chunks(self._start)
            return True
        length = _field(head, b"content-length")
        if length.isdigit():
            self._end = self._start + int(length)
        elif self.status in (204, 304):
            self._end = self._start
        else:
            self.keep_alive = False
        if self._end is not None and self._end - self._start > MAX_REPLY_BYTES:
            raise TransportError(f"the reply announces {length.decode()} bytes, more than {MAX_REPLY_BYTES}")
        return True


class _Chunks:
    """The body of a chunked reply that starts at ``position`` of the buffer."""

    __slots__ = ("_position", "_trailer", "body")

    def __init__(self, position: int) -> None:
        self.body = bytearray()
        self._position = position
        self._trailer = False

    def read(self, buffer: bytearray) -> bool:
        while True:
            line_end = buffer.find(b"\r\n", self._position)
            if line_end < 0:
                return False
            if self._trailer:
                empty = line_end == self._position
                self._position = line_end + 2
                if empty:
                    return True
                continue
            digits = bytes(buffer[self._position : line_end]).partition(b";")[0].strip()
            if not _HEX(digits):
                raise TransportError(f"the reply has a malformed chunk size: {digits[:20]!r}")
            size = int(digits, 16)
            if size == 0:
                self._trailer = True
                self._position = line_end + 2
                continue
            chunk_end = line_end + 2 + size
            if len(buffer) < chunk_end + 2:
                return False
            if buffer[chunk_end : chunk_end + 2] != b"\r\n":
                raise TransportError("the reply has a chunk of another size than it says")
            self.body += buffer[line_end + 2 : chunk_end]
            self._position = chunk_end + 2


def _field(head: bytes, name: bytes) -> bytes:
    """The value of header ``name`` in lower-case ``head``, empty if absent."""
    start = head.find(b"\r\n" + name + b":")
    if start < 0:
        return b""
    start += len(name) + 3
    end = head.find(b"\r\n", start)
    return head[start : end if end >= 0 else len(head)].strip()


def _may_be_http(buffer: bytearray) -> bool:
    return b"HTTP/1.".startswith(buffer[:7].upper())


def _not_http(buffer: bytearray) -> TransportError:
    return TransportError(f"the service does not answer in HTTP/1.1: {bytes(buffer[:80])!r}")
