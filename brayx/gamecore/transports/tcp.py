"""Bray's TCP framing over one connection. Standard library only.

A frame's time is that of the credentials (Unix seconds) if there are any, otherwise a counter. Either way a request is
sent after the reply to the previous one, so a reply with another time is an error.
"""

from __future__ import annotations

import time as clock
from typing import Self

from brayx.errors import BrayxError, ProtocolError, TransportError, from_wire
from brayx.gamecore.protocol import StepRequest
from brayx.gamecore.tcp import NO_REQUEST, ReplyReader, encode_request, parse_time
from brayx.gamecore.transports.base import MAX_REPLY_BYTES, Endpoint
from brayx.gamecore.transports.connection import ClientConnection
from brayx.gamecore.transports.stream import AsyncStreamTransport, StreamTransport


class TcpTransport(StreamTransport):
    """The blocking TCP transport; see `Transport`."""

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__(endpoint, _Tcp(endpoint))


class AsyncTcpTransport(AsyncStreamTransport):
    """The asyncio TCP transport; see `AsyncTransport`. Belongs to one event loop."""

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__(endpoint, _Tcp(endpoint))


class TcpSessions:
    """Many sessions on one blocking connection, each with one request under way. A context; for one thread.

    Args:
        endpoint: endpoint of a TCP door.
        timeout_s: deadline to connect, to send, and for the first of the awaited replies.
        key, secret: credentials that sign each request; empty for none.

    Raises:
        ConnectFailed, DeadlineExceeded: no connection could be made.
    """

    def __init__(self, endpoint: Endpoint, timeout_s: float, key: str = "", secret: bytes = b"") -> None:
        self._endpoint, self._timeout_s = endpoint, timeout_s
        self._key, self._secret = key, secret
        self._connection = ClientConnection(endpoint, timeout_s)
        self._reader = ReplyReader(MAX_REPLY_BYTES)
        self._unsent: list[bytes] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def submit(self, request: StepRequest) -> None:
        """Takes a request; the next `exchange` sends it with the others."""
        now = 1  # an error's time is the complement, and that of 0 is `NO_REQUEST`
        if self._secret:
            from brayx.gamecore.auth import sign

            now = int(clock.time())
            token = sign(self._secret, self._key, request.session, str(now))
            request = request._replace(key=self._key, time=str(now), token=token)
        self._unsent.append(encode_request(request, now))

    def exchange(self, wait_s: float | None = None) -> list[tuple[str, bytes | BrayxError]]:
        """Sends the taken requests and waits for at least one reply; returns each one's session, and its body or error.

        Args:
            wait_s: deadline for a reply, after which the wait may go on; None: that of the connection.

        Raises:
            BrayxError: the service reported an error of the connection, and closes it.
            ConnectionLost: the connection broke; requests under way may have been applied.
            DeadlineExceeded: no reply came in time.
            TransportError: the received bytes are not in this framing.
        """
        wait_s = self._timeout_s if wait_s is None else wait_s
        replies: list[tuple[str, bytes | BrayxError]] = []
        broken = False
        try:
            if self._unsent:
                data = b"".join(self._unsent)
                self._unsent.clear()
                self._connection.send(data, self._timeout_s)
            deadline = clock.monotonic() + wait_s
            while not replies:
                received = self._connection.recv(deadline)
                if not received:
                    raise ConnectionResetError("closed by the service")
                for session, body, time in self._reader.feed(received):
                    replies.append((session.decode("latin-1"), from_wire(body) if time < 0 else body))
                    broken = time == NO_REQUEST
        except TimeoutError:
            raise self._endpoint.deadline_exceeded("reply", wait_s, layer="tcp") from None
        except OSError as error:
            raise self._endpoint.connection_lost("requests under way", error, started=False) from error
        except ProtocolError as error:
            message = f"{self._endpoint.url}: {error.message}; is this a brayx TCP door?"
            raise TransportError(message, url=self._endpoint.url) from None
        last = replies[-1][1]
        if broken and isinstance(last, BrayxError):
            raise last  # of the connection, which ends with it
        return replies


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
    """The reply to the request that was sent with ``time``; see `PendingReply`."""

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
            self.keep_alive = False  # an unexpected second reply
        elif time in (self._time, ~self._time, NO_REQUEST):
            self.body, self._error, self.done = body, time < 0, True
            self.keep_alive = time != NO_REQUEST
        else:
            raise TransportError(
                f"{self._url}: a reply came with time {time}, none was sent but {self._time}", url=self._url
            )
