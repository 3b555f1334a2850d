"""The native port: a process's own listeners. HTTP with WebSocket on one port, TCP on another.

Every replica of a node opens the same two ports with ``SO_REUSEPORT``; the kernel distributes connections, and the
session directory forwards requests to the owner. This file owns what all such connections have in common: the listening
sockets, the bound on their number, and the deadlines of connections that are idle or stall. The protocols are
`brayx.actor.doors.http1` and `brayx.actor.doors.tcp`.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import brayx.clock as clock
from brayx import systems
from brayx.actor.doors.shared_ports import CHOOSE_OTHERS
from brayx.actor.doors.turns import Turns
from brayx.actor.service import Reply, Service
from brayx.errors import BrayxError, StartupError
from brayx.gamecore.protocol import DEFAULT_MAX_BODY_BYTES, MAX_HEADER_BYTES, StepRequest
from brayx.logs import limited

logger = limited(__name__)

MAX_CONNECTIONS = 8192
"""Connections of a replica's native port; further ones get an error and are closed."""
_BACKLOG = 1024
_GATHERED_BYTES = 64 * 1024
"""Bytes that a connection buffers until the end of a loop iteration; more is sent at once."""


@dataclass(frozen=True)
class DoorLimits:
    """Limits of one client.

    Attributes:
        max_body_bytes: limit on a request's body.
        max_header_bytes: limit on an HTTP request's line and headers together.
        max_connections: connections of one listener; further ones get an error and are closed.
        max_in_flight: maximum number of requests of one connection in progress; further ones wait.
        stall_s: deadline for the whole of a request after its first byte, and for the last replies of a connection that
            is closed.
        idle_s: a connection without a request for this long is closed.
    """

    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    max_header_bytes: int = MAX_HEADER_BYTES
    max_connections: int = MAX_CONNECTIONS
    max_in_flight: int = 256
    stall_s: float = 10.0
    idle_s: float = 60.0


class Connection(asyncio.Protocol):
    """A client's connection: counted, and closed when it is idle or stalls. The protocols extend it.

    Attributes:
        in_flight: requests in progress.
        waiting_since: when the connection became idle; None: it is not idle.
        stalled_since: when the first byte of an incomplete request arrived; None: there is none.
        closing_since: when it was found closing with unsent replies; None: it is not.
        has_more: whether received data waits for a turn.
    """

    transport: asyncio.Transport

    def __init__(self, listener: Listener) -> None:
        self.listener = listener
        self.service = listener.service
        self.limits = listener.limits
        self.in_flight = 0
        self.waiting_since: float | None = clock.now()
        self.stalled_since: float | None = None
        self.closing_since: float | None = None
        self.has_more = False
        self._reading = True
        self._writable = True
        self._unsent: list[bytes] = []
        self._unsent_bytes = 0
        self._starts: list[str] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the methods of asyncio.Transport without being one.
        self.transport = cast(asyncio.Transport, transport)
        if not self.listener.take(self):
            self.refuse()
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.listener.drop(self)
        for session in self._starts:
            self.service.withdraw(session)

    def start(self, request: StepRequest, reply: Reply) -> None:
        """Submits a start, and withdraws it if the connection ends before its reply."""

        def answered(result: bytes | BrayxError) -> None:
            self._starts.remove(request.session)
            reply(result)

        self._starts.append(request.session)
        self.service.submit(request, answered)

    def pause_writing(self) -> None:
        self._writable = False
        self.regulate()

    def resume_writing(self) -> None:
        self._writable = True
        self.regulate()

    def more(self) -> None:
        """Handles a piece of the received data, sets `has_more`, and regulates."""
        raise NotImplementedError

    def has_room(self) -> bool:
        """Whether the connection may take further requests: few are in progress, and the client reads its replies."""
        return self._writable and self.in_flight < self.limits.max_in_flight

    def regulate(self) -> None:
        """Pauses reading while there is no room or received data waits for a turn."""
        reading = self.has_room()
        if reading and self.has_more:
            self.listener.turns.wait(self)
            reading = False
        if reading == self._reading or self.transport.is_closing():
            return
        self._reading = reading
        if reading:
            if self.stalled_since is not None:
                self.stalled_since = clock.now()  # the client did not stall while reading was paused
            self.transport.resume_reading()
        else:
            self.transport.pause_reading()

    def write(self, data: bytes) -> None:
        """Sends at the end of this loop iteration, together with the listener's other connections.

        A reply sent while requests are still being read wakes the client for that reply alone. On a machine shared with
        the service, this costs more than the tick.
        """
        unsent = self._unsent
        if not unsent:
            self._unsent_bytes = 0
            self.listener.flush_soon(self)
        unsent.append(data)
        self._unsent_bytes += len(data)
        if self._unsent_bytes > _GATHERED_BYTES:
            self.flush()

    def flush(self) -> None:
        """Sends buffered replies now."""
        unsent = self._unsent
        if unsent:
            data = unsent[0] if len(unsent) == 1 else b"".join(unsent)
            unsent.clear()
            if not self.transport.is_closing():
                self.transport.write(data)

    def close(self) -> None:
        """Closes once everything is sent."""
        try:
            self.flush()
        finally:
            self.transport.close()

    def refuse(self) -> None:
        """Sends a client the error for too many connections."""
        raise NotImplementedError

    def expire(self, what: str) -> None:
        """Sends a client the timeout, if its protocol can express it, and closes."""
        self.close()


class Listener:
    """One listening socket and its connections.

    Args:
        service: answers the requests.
        make: makes the protocol of a connection.
        limits: limits of its connections.

    Attributes:
        turns: connections whose received data waits.
    """

    def __init__(self, service: Service, make: Callable[[Listener], Connection], limits: DoorLimits) -> None:
        self.service = service
        self.limits = limits
        self.turns = Turns()
        self._make = make
        self._connections: set[Connection] = set()
        self._unsent: list[Connection] = []
        self._server: asyncio.Server | None = None
        self._sweeper: asyncio.Task[None] | None = None
        self.address = ("", 0)

    def __len__(self) -> int:
        """Number of open connections."""
        return len(self._connections)

    async def open(self, host: str, port: int, *, shared: bool = False) -> None:
        """Listens.

        Args:
            host: address to bind.
            port: 0 takes a free one.
            shared: other replicas may listen at the same port.

        Raises:
            StartupError: it cannot be bound.
        """
        try:
            listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shared:
                systems.share_port(listening)
            listening.setblocking(False)
            listening.bind((host, port))
            listening.listen(_BACKLOG)
        except OSError as error:
            listening.close()
            taken = "is taken" if error.errno == errno.EADDRINUSE else "cannot be opened"
            raise StartupError(
                f"native port {port} of {host} {taken} ({error.strerror}): free it, or {CHOOSE_OTHERS}", port=port
            ) from None
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: self._make(self), sock=listening, backlog=_BACKLOG)
        self.address = listening.getsockname()[:2]
        self._sweeper = loop.create_task(self._sweep())

    def take(self, connection: Connection) -> bool:
        """Counts a new connection; False: there is no room for it."""
        if len(self._connections) >= self.limits.max_connections:
            return False
        self._connections.add(connection)
        return True

    def drop(self, connection: Connection) -> None:
        """Removes a connection that is gone, or that another protocol has taken over."""
        self._connections.discard(connection)

    def flush_soon(self, connection: Connection) -> None:
        """Schedules a connection's flush at the end of this loop iteration."""
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.append(connection)

    def _flush(self) -> None:
        unsent, self._unsent = self._unsent, []
        for connection in unsent:
            try:
                connection.flush()
            except Exception:
                logger.exception("a connection's replies could not be sent: it is closed")
                connection.transport.abort()

    def shut(self) -> None:
        """Accepts no more connections; open ones stay."""
        if self._server is not None:
            self._server.close()
            self._server = None

    async def close(self) -> None:
        """Closes the socket and all connections; replies already written are still sent."""
        self.shut()
        if self._sweeper is not None:
            self._sweeper.cancel()
        for connection in list(self._connections):
            connection.close()

    async def _sweep(self) -> None:
        limits = self.limits
        while True:
            await asyncio.sleep(min(1.0, limits.stall_s / 4, limits.idle_s / 4))
            now = clock.now()
            for connection in list(self._connections):
                stalled, waiting = connection.stalled_since, connection.waiting_since
                if connection.transport.is_closing():
                    connection.closing_since = connection.closing_since or now
                    if now - connection.closing_since > limits.stall_s:
                        connection.transport.abort()  # closing would wait for a client that does not read
                elif stalled is not None and now - stalled > limits.stall_s and not connection.in_flight:
                    connection.expire(f"a request was incomplete after {limits.stall_s:g} s")
                elif stalled is None and waiting is not None and now - waiting > limits.idle_s:
                    connection.expire(f"no request for {limits.idle_s:g} s")
