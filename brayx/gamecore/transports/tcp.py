"""Bray's TCP framing over one connection. Standard library only.

A frame's time is the time of the credentials if there are any, Unix seconds, and else a count. Either way the next
request is sent after the reply to the one before, so a reply of another time is of nobody's request.
"""

from __future__ import annotations

from brayx.errors import ProtocolError, TransportError, from_wire
from brayx.gamecore.protocol import StepRequest
from brayx.gamecore.tcp import NO_REQUEST, ReplyReader, encode_request, parse_time
from brayx.gamecore.transports.base import MAX_REPLY_BYTES, Endpoint
from brayx.gamecore.transports.stream import AsyncStreamTransport, StreamTransport


class TcpTransport(StreamTransport):
    """The blocking TCP transport; see `Transport`."""

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__(endpoint, _Tcp(endpoint))


class AsyncTcpTransport(AsyncStreamTransport):
    """The asyncio TCP transport; see `AsyncTransport`. Belongs to one event loop."""

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__(endpoint, _Tcp(endpoint))


class _Tcp:
    layer = "tcp"

    def __init__(self, endpoint: Endpoint) -> None:
        self._url = endpoint.url
        self._count = 0

    def begin(self, request: StepRequest) -> tuple[bytes, TcpReply]:
        if request.time:
            time = parse_time(request.time)
        else:
            self._count += 1
            time = self._count
        return encode_request(request, time), TcpReply(self._url, time)


class TcpReply:
    """The reply to the request that was sent with ``time``; see `Pending`."""

    __slots__ = ("_error", "_reader", "_time", "_url", "body", "done", "keep_alive", "started")

    def __init__(self, url: str, time: int) -> None:
        self.done = False
        self.started = False
        self.keep_alive = True
        self.body = b""
        self._url = url
        self._time = time
        self._error = False
        self._reader = ReplyReader(MAX_REPLY_BYTES)

    def feed(self, data: bytes) -> bool:
        self.started = True
        try:
            for _, body, time in self._reader.feed(data):
                self._take(body, time)
        except ProtocolError as error:
            raise TransportError(f"{self._url}: {error.message}; is this a brayx TCP door?", url=self._url) from None
        if self.done and self._reader.in_frame:
            self.keep_alive = False
        return self.done

    def end(self) -> bool:
        self.keep_alive = False
        return self.done

    def result(self) -> bytes:
        if self._error:
            raise from_wire(self.body)
        return self.body

    def _take(self, body: bytes, time: int) -> None:
        if self.done:
            self.keep_alive = False  # nobody asked for another
        elif time in (self._time, ~self._time, NO_REQUEST):
            self.body, self._error, self.done = body, time < 0, True
            self.keep_alive = time != NO_REQUEST
        else:
            raise TransportError(
                f"{self._url}: a reply came with time {time}, none was sent but {self._time}", url=self._url
            )
