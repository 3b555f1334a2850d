"""``POST /step`` over a kept-alive HTTP/1.1 connection, blocking and for asyncio. Standard library only.

A server may close a connection that is idle. That is looked for before a request is sent, and then a new connection
is opened; once a byte of the request is out, a broken connection is a `ConnectionLost` and nothing is sent again.
"""

from __future__ import annotations

import asyncio
import threading
import time

from brayx.errors import BrayxError, ConnectionLost, TransportError, from_wire
from brayx.gamecore.protocol import StepRequest
from brayx.gamecore.transports.base import Endpoint, describe
from brayx.gamecore.transports.connection import AsyncConnection, Connection, within
from brayx.gamecore.transports.http1 import Reply, RequestEncoder


class HttpTransport:
    """The blocking HTTP transport; see `Transport`."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._encoder = RequestEncoder(endpoint)
        self._connection: Connection | None = None
        self._lock = threading.Lock()

    @property
    def holds_session(self) -> bool:
        return True

    def step(self, request: StepRequest, timeout_s: float) -> bytes:
        with self._lock:
            data = self._encoder.encode(request)
            deadline = time.monotonic() + timeout_s
            reply = Reply()
            connection = self._usable(timeout_s)
            try:
                self._exchange(connection, data, reply, timeout_s, deadline)
            except TimeoutError:
                raise self._endpoint.deadline_exceeded(
                    f"reply to the {describe(request)}", timeout_s, layer="http"
                ) from None
            except OSError as error:
                raise _lost(self._endpoint, request, reply, error) from error
            finally:
                if not (reply.done and reply.keep_alive):
                    self._drop()
            return _body(reply)

    def close(self) -> None:
        with self._lock:
            self._drop()

    def _exchange(self, connection: Connection, data: bytes, reply: Reply, timeout_s: float, deadline: float) -> None:
        broken: OSError | None = None
        try:
            connection.send(data, timeout_s)
        except TimeoutError:
            raise
        except OSError as error:
            broken = error  # a server that refuses a large body answers, then closes: its answer may still be there
        while not reply.done:
            received = connection.recv(deadline)
            if not received:
                if not reply.end():
                    raise broken or ConnectionResetError("closed by the service")
            else:
                reply.feed(received)

    def _usable(self, timeout_s: float) -> Connection:
        if self._connection is not None:
            try:
                if self._connection.recv_ready() is None:
                    return self._connection
            except OSError:
                pass
            self._drop()
        self._connection = Connection(self._endpoint, timeout_s)
        return self._connection

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class AsyncHttpTransport:
    """The asyncio HTTP transport; see `AsyncTransport`. Belongs to one event loop."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._encoder = RequestEncoder(endpoint)
        self._connection: AsyncConnection | None = None
        self._reply: Reply | None = None
        self._waiter: asyncio.Future[bytes] | None = None
        self._lock = asyncio.Lock()

    @property
    def holds_session(self) -> bool:
        return True

    async def step(self, request: StepRequest, timeout_s: float) -> bytes:
        async with self._lock:
            data = self._encoder.encode(request)
            loop = asyncio.get_running_loop()
            deadline = loop.time() + timeout_s
            connection = await self._usable(timeout_s)
            self._reply = reply = Reply()
            self._waiter = loop.create_future()
            connection.write(data)
            try:
                await within(self._waiter, deadline - loop.time())
            except TimeoutError:
                raise self._endpoint.deadline_exceeded(
                    f"reply to the {describe(request)}", timeout_s, layer="http"
                ) from None
            except OSError as error:
                raise _lost(self._endpoint, request, reply, error) from error
            finally:
                self._reply = self._waiter = None
                if not (reply.done and reply.keep_alive):
                    self._drop()
            return _body(reply)

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
            self._drop()  # nothing was asked for: this connection is out of step
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


def _body(reply: Reply) -> bytes:
    if reply.status != 200:
        raise from_wire(reply.body, http_status=reply.status)
    return reply.body


def _lost(endpoint: Endpoint, request: StepRequest, reply: Reply, error: OSError) -> TransportError:
    when = "in the middle of the reply" if reply.started else "before any of the reply"
    return ConnectionLost(
        f"{endpoint.url}: the connection broke {when} to the {describe(request)} ({error}); it may have been applied",
        url=endpoint.url,
    )
