"""WebSocket ``/session``: one connection is one session; blocking and for asyncio. Needs the package ``websockets``.

``start`` opens the connection and ``stop`` closes it. A connection is dropped if its session ended with an error, or if
a reply was late, since the late reply must not be taken for the next one. A session with numbered ticks survives its
connection for a while: its next request, repeated or new, opens another connection and continues.
"""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from brayx.errors import BrayxError, ProtocolError, SessionUnknown
from brayx.gamecore.protocol import StepKind, StepRequest
from brayx.gamecore.transports.base import Endpoint, describe, ends_session
from brayx.gamecore.transports.connection import AsyncConnection, ClientConnection, within
from brayx.gamecore.transports.frames import SessionFrames

CLOSE_TIMEOUT_S = 1.0
"""Time that an orderly close waits for the service's close."""

IDLE_CHECK_S = 5.0
"""Interval at which an idle blocking transport answers pings; servers give up after some 20 s without a pong."""


class _SessionTransport:
    """The common part of both transports: the session's connection, and the meaning of errors for it."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._connection: ClientConnection | AsyncConnection | None = None
        self._frames: SessionFrames | None = None
        self._numbered: str | None = None

    @property
    def holds_session(self) -> bool:
        return self._frames is not None and self._frames.is_open

    def _opens(self, request: StepRequest) -> bool:
        """Whether ``request`` needs a new connection: a start, or a request that resumes a numbered session.

        Raises:
            ProtocolError, SessionUnknown: it cannot be sent at all.
        """
        if request.kind is StepKind.CALL:
            raise ProtocolError(
                f"{self._endpoint.url}: a stateless call has no WebSocket form, since a connection is a session; "
                "use http://"
            )
        if request.kind is StepKind.START:
            self._numbered = None if request.seq is None else request.session
            return True
        if request.seq is not None:
            self._numbered = request.session
        if self._frames is not None:
            return False
        if self._numbered != request.session:
            raise SessionUnknown(f"{describe(request)}: it has no open connection; start it first")
        return True

    def _check_in_step(self) -> None:
        """Raises an error that the service sent between two requests, usually that the session has ended."""
        if self._frames is not None and self._frames.take() is not None:
            raise ProtocolError(f"{self._endpoint.url}: the service sent a reply without a request")

    @contextmanager
    def _judged(self, request: StepRequest, timeout_s: float) -> Iterator[None]:
        """Translates errors, and drops the connection after errors that end its session."""
        try:
            yield
        except TimeoutError:
            awaited = f"reply to the {describe(request)}" if self.holds_session else "WebSocket handshake"
            self._drop()
            raise self._endpoint.deadline_exceeded(awaited, timeout_s, layer="websocket") from None
        except BrayxError as error:
            if request.kind is StepKind.START or ends_session(error) or not self.holds_session:
                self._drop()
            raise
        except BaseException:
            self._drop()
            raise

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = self._frames = None


class WebSocketTransport(_SessionTransport):
    """The blocking WebSocket transport; see `Transport`."""

    _connection: ClientConnection | None

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__(endpoint)
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._keeper: threading.Thread | None = None

    def step(self, request: StepRequest, timeout_s: float) -> bytes:
        with self._lock:
            deadline = time.monotonic() + timeout_s
            with self._judged(request, timeout_s):
                if self._opens(request):
                    self._drop()
                    connection, frames = self._open(request, timeout_s, deadline)
                else:
                    connection, frames = self._running()
                _send(connection, frames.request(request), timeout_s)
                while (reply := frames.take()) is None:
                    self._receive(connection, frames, deadline)
            if request.kind is StepKind.STOP:
                self._close_in_order()
            return reply

    def close(self) -> None:
        with self._lock:
            self._closed.set()
            self._close_in_order()

    def _open(self, request: StepRequest, timeout_s: float, deadline: float) -> tuple[ClientConnection, SessionFrames]:
        frames = SessionFrames(self._endpoint, request)
        self._connection = connection = ClientConnection(self._endpoint, timeout_s)
        self._frames = frames
        _send(connection, frames.to_send(), timeout_s)
        while not frames.is_open:
            self._receive(connection, frames, deadline)
            if frames.failure is not None:
                raise frames.failure
        if self._keeper is None or not self._keeper.is_alive():
            self._closed.clear()
            self._keeper = threading.Thread(
                target=_keep, args=(weakref.ref(self), self._closed), name="brayx-websocket-pings", daemon=True
            )
            self._keeper.start()
        return connection, frames

    def _running(self) -> tuple[ClientConnection, SessionFrames]:
        assert self._connection is not None
        assert self._frames is not None
        _read_ready(self._connection, self._frames)
        self._check_in_step()
        return self._connection, self._frames

    @staticmethod
    def _receive(connection: ClientConnection, frames: SessionFrames, deadline: float) -> None:
        try:
            data = connection.recv(deadline)
            if not data:
                frames.end()
            elif answer := frames.feed(data):
                connection.send(answer, max(0.001, deadline - time.monotonic()))
        except TimeoutError:
            raise
        except OSError as error:
            frames.end(error)

    def _close_in_order(self) -> None:
        connection, frames = self._connection, self._frames
        if connection is not None and frames is not None:
            deadline = time.monotonic() + CLOSE_TIMEOUT_S
            try:
                if farewell := frames.close():
                    connection.send(farewell, CLOSE_TIMEOUT_S)
                    while connection.recv(deadline):
                        pass
            except OSError:
                pass  # it is closed either way
        self._drop()

    def _answer_pings(self) -> None:
        """Reads what arrived between requests; skipped while a step uses the connection."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            connection, frames = self._connection, self._frames
            if connection is not None and frames is not None:
                _read_ready(connection, frames)
        finally:
            self._lock.release()


class AsyncWebSocketTransport(_SessionTransport):
    """The asyncio WebSocket transport; see `AsyncTransport`. Belongs to one event loop, which answers pings."""

    _connection: AsyncConnection | None

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__(endpoint)
        self._waiter: asyncio.Future[bytes] | None = None
        self._lost: asyncio.Event = asyncio.Event()
        self._lock = asyncio.Lock()

    async def step(self, request: StepRequest, timeout_s: float) -> bytes:
        async with self._lock:
            loop = asyncio.get_running_loop()
            deadline = loop.time() + timeout_s
            with self._judged(request, timeout_s):
                if self._opens(request):
                    self._drop()
                    await self._open(request, timeout_s, deadline)
                self._check_in_step()
                assert self._connection is not None
                assert self._frames is not None
                self._connection.write(self._frames.request(request))
                while (reply := self._frames.take()) is None:
                    await self._progress(deadline)
            if request.kind is StepKind.STOP:
                await self._close_in_order()
            return reply

    async def close(self) -> None:
        async with self._lock:
            await self._close_in_order()
        await asyncio.sleep(0)  # the loop closes the socket in its next turn

    async def _open(self, request: StepRequest, timeout_s: float, deadline: float) -> None:
        frames = SessionFrames(self._endpoint, request)
        self._lost = asyncio.Event()
        self._connection = await AsyncConnection.open(self._endpoint, timeout_s, self._on_data, self._on_lost)
        self._frames = frames
        self._connection.write(frames.to_send())
        while not frames.is_open:
            if frames.failure is not None:
                raise frames.failure
            await self._progress(deadline)

    async def _progress(self, deadline: float) -> None:
        """Wait until something has been received, or the connection is lost."""
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        try:
            await within(self._waiter, deadline - loop.time())
        finally:
            self._waiter = None

    def _on_data(self, data: bytes) -> None:
        if self._frames is None or self._connection is None:
            return
        if answer := self._frames.feed(data):
            self._connection.write(answer)
        self._wake()

    def _on_lost(self, error: Exception | None) -> None:
        if self._frames is not None:
            self._frames.end(error)
        self._lost.set()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(b"")

    async def _close_in_order(self) -> None:
        if self._connection is not None and self._frames is not None and (farewell := self._frames.close()):
            self._connection.write(farewell)
            try:
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await self._lost.wait()
            except TimeoutError:
                pass  # it is closed either way
        self._drop()


def _send(connection: ClientConnection, data: bytes, timeout_s: float) -> None:
    try:
        connection.send(data, timeout_s)
    except TimeoutError:
        raise
    except OSError:
        pass  # the service's last message, still unread, says more


def _read_ready(connection: ClientConnection, frames: SessionFrames) -> None:
    try:
        data = connection.recv_ready()
        if data == b"":
            frames.end()
        elif data and (answer := frames.feed(data)):
            connection.send(answer, CLOSE_TIMEOUT_S)
    except OSError as error:
        frames.end(error)


def _keep(transport: weakref.ref[WebSocketTransport], closed: threading.Event) -> None:
    while not closed.wait(IDLE_CHECK_S):
        alive = transport()
        if alive is None:
            return
        alive._answer_pings()
        del alive
