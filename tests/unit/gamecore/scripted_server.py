"""A TCP server with scripted connections, for behaviour that a correct server never shows."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator

import psutil

Script = Callable[[socket.socket], None]


def reply(body: bytes, *, status: str = "200 OK", extra: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n{extra}\r\n".encode() + body


def read_request(sock: socket.socket) -> bytes:
    """One HTTP request whose body has a content-length; empty when the client has closed."""
    data = b""
    while b"\r\n\r\n" not in data:
        if not (more := sock.recv(65536)):
            return b""
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length:")[2].split()[0])
    while len(body) < length:
        body += sock.recv(65536)
    return head + b"\r\n\r\n" + body


def reset(sock: socket.socket) -> None:
    """Close with a reset, as the kernel does for a killed process with unread data."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


class Late:
    """A script that answers its one request after the client has stopped waiting.

    Args:
        take: reads the request from a connection, and returns the answer.
    """

    def __init__(self, take: Callable[[socket.socket], bytes]) -> None:
        self._take = take
        self._given_up, self._sent = threading.Event(), threading.Event()

    def __call__(self, sock: socket.socket) -> None:
        answer = self._take(sock)
        self._given_up.wait(60)
        try:
            sock.sendall(answer)
        finally:
            self._sent.set()

    def send(self) -> None:
        """Sends it, now that the client has given up."""
        self._given_up.set()
        assert self._sent.wait(60), "nothing was asked"


def held(address: str) -> list[str]:
    """States of this process's connections to ``address``: one that the server has closed is in ``CLOSE_WAIT``."""
    port = int(address.rpartition(":")[2])
    connections = psutil.Process().net_connections("tcp")
    return [connection.status for connection in connections if connection.raddr and connection.raddr[1] == port]


@contextlib.contextmanager
def scripted(*scripts: Script) -> Iterator[tuple[str, list[int]]]:
    """Serve the first connection by the first script, and so on; gives ``127.0.0.1:port`` and a list that grows by
    one number for each connection. After the last script the port is closed.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(60)
    connections: list[int] = []

    def serve() -> None:
        with listener:
            for index, script in enumerate(scripts):
                try:
                    sock, _ = listener.accept()
                except OSError:
                    return
                connections.append(index)
                sock.settimeout(60)
                with sock, contextlib.suppress(OSError):
                    script(sock)

    address = f"127.0.0.1:{listener.getsockname()[1]}"
    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield address, connections
    finally:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits in accept; close does not
        thread.join(60)
        listener.close()
        assert not thread.is_alive(), "a script did not end"
