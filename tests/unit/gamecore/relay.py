"""Bytes passed on between clients and a service, over connections that a test breaks at the point it chooses."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Iterator
from typing import Literal

from brayx.ports import free_port
from tests.unit.gamecore.scripted_server import reset

When = Literal["before", "after", "down"]


class Relay:
    """A port in front of a service; what a client sends in one piece is one request.

    Attributes:
        address: ``127.0.0.1:port``.
        connections: how many were taken.
    """

    def __init__(self, service: str) -> None:
        host, _, port = service.rpartition(":")
        self._service = (host, int(port))
        self._breaks: list[When] = []
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._listener: socket.socket | None = None
        self.connections = 0
        self._port = free_port()  # no outgoing connection takes it while it is down
        self.up()
        self.address = f"127.0.0.1:{self._port}"

    def up(self) -> None:
        """Take connections, at the same port as before."""
        self._listener = socket.create_server(("127.0.0.1", self._port))
        self._port = self._listener.getsockname()[1]
        self._start(self._accept, self._listener)

    def down(self) -> None:
        """Break every connection, and accept no new ones."""
        listener, self._listener = self._listener, None
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in accept; close would not
            listener.close()
        for sock in list(self._open):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def break_next(self, *whens: When) -> None:
        """Reset the connection of the next request, ``before`` the service got it or ``after`` it has answered
        (``down``: and take no more), and so on for those after it.
        """
        self._breaks[:] = whens

    def close(self) -> None:
        self.down()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "a relayed connection did not end"

    def _start(self, target: object, *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            self.connections += 1
            self._start(self._relay, client)

    def _relay(self, client: socket.socket) -> None:
        with client, socket.create_connection(self._service) as service, contextlib.suppress(OSError):
            self._open |= {client, service}
            try:
                while self._listener is not None:
                    readable, _, _ = select.select([client, service], [], [])
                    for sock in readable:
                        data = sock.recv(1 << 20)
                        if not data:
                            return
                        if sock is service:
                            client.sendall(data)
                        elif not self._breaks:
                            service.sendall(data)
                        else:
                            when = self._breaks.pop(0)
                            if when != "before":
                                service.sendall(data)
                                service.recv(1 << 20)
                            if when == "down":
                                self.down()
                            reset(client)
                            reset(service)
                            return
            finally:
                self._open -= {client, service}


@contextlib.contextmanager
def relaying(service: str) -> Iterator[Relay]:
    """A relay in front of ``service``, ``host:port``."""
    relay = Relay(service)
    try:
        yield relay
    finally:
        relay.close()
