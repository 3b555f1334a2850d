"""One request and one reply at a time over a persistent byte stream, blocking and for asyncio; for HTTP and TCP.

A service may close an idle connection. The transport checks for that before it sends a request, and reconnects. Once a
byte of the request is sent, a broken connection is a `ConnectionLost`, and nothing is sent again. If a request times
out or is cancelled, its connection is dropped, so that a late reply cannot be mistaken for another. Knows nothing of
the meaning of the bytes: a `StreamCodec` does.
"""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Protocol

from brayx.errors import BrayxError
from brayx.gamecore.protocol import StepRequest
from brayx.gamecore.transports.base import AsyncTransport, Endpoint, Transport, describe
from brayx.gamecore.transports.connection import AsyncConnection, ClientConnection, within


class PendingReply(Protocol):
    """A reply that is being received.

    Attributes:
        done: the reply is complete.
        started: at least one byte has arrived.
        keep_alive: the connection can carry another request.
    """

    done: bool
    started: bool
    keep_alive: bool

    def feed(self, data: bytes) -> bool:
        """Processes ``data``; returns whether the reply is complete.

        Raises:
            TransportError: not a valid reply.
        """

    def end(self) -> bool:
        """Handles the end of the stream; returns whether the reply is complete."""

    def result(self) -> bytes:
        """The body of the complete reply.

        Raises:
            BrayxError: it is a typed error.
        """


class StreamCodec(Protocol):
    """The format of requests and replies on the stream.

    Attributes:
        layer: the protocol's name in the details of a `DeadlineExceeded`.
    """

    layer: str

    def begin(self, request: StepRequest) -> tuple[bytes, PendingReply]:
        """The bytes of ``request``, and the object that receives its reply.

        Raises:
            ProtocolError: ``request`` cannot be written.
        """


class StreamTransport(Transport):
    """The blocking transport; see `Transport`."""

    def __init__(self, endpoint: Endpoint, codec: StreamCodec) -> None:
        self._endpoint = endpoint
        self._codec = codec
        self._connection: ClientConnection | None = None
        self._lock = threading.Lock()

    def step(self, request: StepRequest, timeout_s: float) -> bytes:
        with self._lock:
            data, reply = self._codec.begin(request)
            deadline = time.monotonic() + timeout_s
            connection = self._usable(timeout_s)
            try:
                self._exchange(connection, data, reply, timeout_s, deadline)
            except TimeoutError:
                raise _late(self._endpoint, request, timeout_s, self._codec) from None
            except OSError as error:
                raise self._endpoint.connection_lost(request, error, started=reply.started) from error
            finally:
                if not (reply.done and reply.keep_alive):
                    self._drop()
            return reply.result()

    def close(self) -> None:
        with self._lock:
            self._drop()

    @staticmethod
    def _exchange(
        connection: ClientConnection, data: bytes, reply: PendingReply, timeout_s: float, deadline: float
    ) -> None:
        broken: OSError | None = None
        try:
            connection.send(data, timeout_s)
        except TimeoutError:
            raise
        except OSError as error:
            broken = error  # a service that refuses a large body answers and closes: its answer may still be readable
        while not reply.done:
            received = connection.recv(deadline)
            if not received:
                if not reply.end():
                    raise broken or ConnectionResetError("closed by the service")
            else:
                reply.feed(received)

    def _usable(self, timeout_s: float) -> ClientConnection:
        if self._connection is not None:
            try:
                if self._connection.recv_ready() is None:
                    return self._connection
            except OSError:
                pass
            self._drop()
        self._connection = ClientConnection(self._endpoint, timeout_s)
        return self._connection

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class AsyncStreamTransport(AsyncTransport):
    """The asyncio transport; see `AsyncTransport`. Belongs to one event loop."""

    def __init__(self, endpoint: Endpoint, codec: StreamCodec) -> None:
        self._endpoint = endpoint
        self._codec = codec
        self._connection: AsyncConnection | None = None
        self._reply: PendingReply | None = None
        self._waiter: asyncio.Future[bytes] | None = None
        self._lock = asyncio.Lock()

    async def step(self, request: StepRequest, timeout_s: float) -> bytes:
        async with self._lock:
            data, reply = self._codec.begin(request)
            loop = asyncio.get_running_loop()
            deadline = loop.time() + timeout_s
            self._reply = reply  # before connecting: a full service sends its refusal without waiting for a request
            self._waiter = loop.create_future()
            try:
                connection = await self._usable(timeout_s)
                connection.write(data)
                await within(self._waiter, deadline - loop.time())
            except TimeoutError:
                raise _late(self._endpoint, request, timeout_s, self._codec) from None
            except OSError as error:
                raise self._endpoint.connection_lost(request, error, started=reply.started) from error
            finally:
                self._reply = self._waiter = None
                if not (reply.done and reply.keep_alive):
                    self._drop()
            return reply.result()

    async def close(self) -> None:
        self._drop()
        await asyncio.sleep(0)  # the loop closes the socket in its next turn

    async def _usable(self, timeout_s: float) -> AsyncConnection:
        if self._connection is None or not self._connection.is_open:
            self._connection = await AsyncConnection.open(self._endpoint, timeout_s, self._on_data, self._on_lost)
        return self._connection

    def _on_data(self, data: bytes) -> None:
        reply, waiter = self._reply, self._waiter
        if reply is None or waiter is None or waiter.done():
            self._drop()  # no request is waiting: the connection is out of step
            return
        try:
            if reply.feed(data):
                waiter.set_result(b"")
        except BrayxError as error:
            waiter.set_exception(error)

    def _on_lost(self, error: Exception | None) -> None:
        reply, waiter = self._reply, self._waiter
        if reply is None or waiter is None or waiter.done():
            return
        if reply.end():
            waiter.set_result(b"")
        else:
            waiter.set_exception(error or ConnectionResetError("closed by the service"))

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.abort()
            self._connection = None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(ConnectionResetError("closed by this client"))


def _late(endpoint: Endpoint, request: StepRequest, timeout_s: float, codec: StreamCodec) -> BrayxError:
    return endpoint.deadline_exceeded(f"reply to the {describe(request)}", timeout_s, layer=codec.layer)
