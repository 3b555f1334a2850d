"""Both native doors of one table, on a loop in a separate thread, and what tests send to them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

import uvloop

from brayx.actor.doors.asgi import DoorApp
from brayx.actor.doors.http1 import HttpConnection
from brayx.actor.doors.native import DoorLimits, Listener
from brayx.actor.doors.tcp import TcpConnection
from brayx.actor.doors.ws1 import WebSockets
from tests.unit.actor.doors.test_asgi import TableService
from tests.waiting import until

MAX_BODY_BYTES = 2 * 1024 * 1024
WAIT_S = 60.0


@dataclass
class Native:
    """Both native doors of one table, on a loop in a separate thread."""

    table: Any
    http: Listener
    tcp: Listener
    websockets: WebSockets
    loop: asyncio.AbstractEventLoop
    run: Callable[[Coroutine[Any, Any, Any]], Any]

    @property
    def url(self) -> str:
        return "http://{}:{}".format(*self.http.address)

    @property
    def tcp_url(self) -> str:
        return "tcp://{}:{}".format(*self.tcp.address)


@contextlib.contextmanager
def native(
    *, uv: bool = True, table: type[TableService] = TableService, window_bits: int | None = None, **limits: Any
) -> Iterator[Native]:
    loop = uvloop.new_event_loop() if uv else asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def run(work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(WAIT_S)

    async def make() -> Native:
        service = table()
        bounds = DoorLimits(**{"max_body_bytes": MAX_BODY_BYTES, **limits})
        websockets = WebSockets(DoorApp(service, max_body_bytes=MAX_BODY_BYTES), bounds, window_bits)
        doors = (
            Listener(service, lambda listener: HttpConnection(listener, websockets), bounds),
            Listener(service, TcpConnection, bounds),
        )
        for door in doors:
            await door.open("127.0.0.1", 0)
        return Native(service, *doors, websockets, loop, run)

    made: Native = run(make())
    try:
        yield made
        loop.call_soon_threadsafe(made.websockets.close)
        until(lambda: not made.websockets._state.tasks, "that WebSocket connections are closed")
        for door in (made.http, made.tcp):
            run(door.close())
        run(made.table.close(timeout_s=0.1))  # actors may still be slow
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(WAIT_S)


def connect(listener: Listener) -> socket.socket:
    return socket.create_connection(listener.address, timeout=WAIT_S)


def read_all(connection: socket.socket) -> bytes:
    """Everything received until the peer closes the connection."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(65536):
            data += piece
    return data


def post(kind: str, session: str, body: bytes = b"", more: str = "") -> bytes:
    head = f"POST /step HTTP/1.1\r\nhost: x\r\nsession: {session}\r\nstep_kind: {kind}\r\n{more}"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def chunked(coding: str) -> bytes:
    head = f"POST /step HTTP/1.1\r\nhost: x\r\ntransfer-encoding: {coding}\r\nconnection: close\r\n\r\n"
    return head.encode() + b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"


def opening(path: str = "/session", *, leave: str = "", **headers: str) -> bytes:
    """A WebSocket opening request without the header ``leave``, with others added or replaced."""
    fields = {
        "host": "x",
        "connection": "Upgrade",
        "upgrade": "websocket",
        "sec-websocket-version": "13",
        "sec-websocket-key": "AAAAAAAAAAAAAAAAAAAAAA==",
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items() if name != leave)
    return f"GET {path} HTTP/1.1\r\n{lines}\r\n".encode()
