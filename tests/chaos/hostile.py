"""Hostile clients: they stall, send slowly, connect by the thousand, or never read.

Each returns its connections, so that tests can check their end. Knows nothing of limits.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Literal

from brayx.gamecore.protocol import StepKind, StepRequest
from brayx.gamecore.tcp import encode_request
from tests.chaos.target import Door, Target
from tests.chaos.traffic import ws_frame

Where = Literal["opening", "request"]

_OPENING = (
    b"GET /session HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: Upgrade\r\nsec-websocket-version: 13\r\n"
    b"sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\nsec-websocket-protocol: brayx.v1\r\n\r\n"
)

_HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""The first bytes of a gRPC connection."""


def request(door: Door, body: bytes) -> bytes:
    """A stateless call; over WebSocket, which has none, a tick; over gRPC the opening and the head of one."""
    if door == "grpc":
        return _HTTP2 + b"\0\0\x40\1\4\0\0\0\1" + bytes(64)
    if door == "tcp":
        return encode_request(StepRequest(StepKind.CALL, "", body), 1)
    if door.endswith("http"):
        return b"POST /step HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    return ws_frame(2, b"T" + body)


async def connected(target: Target, door: Door, *, started: bool = True) -> socket.socket:
    """A connection; over WebSocket past its opening, with a session if it is to be ``started``."""
    loop = asyncio.get_running_loop()
    connection = socket.socket()
    connection.setblocking(False)
    await loop.sock_connect(connection, target.address(door))
    if door.endswith("ws"):
        await loop.sock_sendall(connection, _OPENING + (ws_frame(2, b"S") if started and door == "ws" else b""))
        data = b""
        while b"\r\n\r\n" not in data:
            piece = await loop.sock_recv(connection, 65536)
            if not piece or not b"HTTP/1.1 101".startswith((data + piece)[:12]):
                connection.close()
                raise ConnectionRefusedError(data + piece)
            data += piece
        if started and door != "ws":
            await loop.sock_sendall(connection, ws_frame(2, b"S"))
    return connection


async def stalled(target: Target, door: Door, where: Where, count: int) -> list[socket.socket]:
    """Opens ``count`` connections that send half of an opening or a request, and then nothing."""
    loop = asyncio.get_running_loop()
    connections = []
    for _ in range(count):
        if where == "opening":
            connection = socket.socket()
            connection.setblocking(False)
            await loop.sock_connect(connection, target.address(door))
            await loop.sock_sendall(connection, (_OPENING if door.endswith("ws") else request(door, b""))[:30])
        else:
            connection = await connected(target, door)
            await loop.sock_sendall(connection, request(door, bytes(100))[:-50])
        connections.append(connection)
    return connections


async def dawdling(target: Target, door: Door, pause_s: float) -> float:
    """Sends a request a byte at a time; returns the seconds until the service ended the connection."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    connection = socket.socket()
    connection.setblocking(False)
    with connection:
        await loop.sock_connect(connection, target.address(door))
        data = _OPENING if door.endswith("ws") else request(door, bytes(1000))
        with contextlib.suppress(ConnectionError):
            for index in range(len(data)):
                await loop.sock_sendall(connection, data[index : index + 1])
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        if not await loop.sock_recv(connection, 65536):
                            break
            else:
                raise AssertionError(f"{len(data)} bytes were taken one at a time")
    return loop.time() - began


async def deaf(target: Target, door: Door, count: int, seconds: float) -> list[socket.socket]:
    """Opens ``count`` connections that send as fast as they can for ``seconds``, and never read a reply."""
    loop = asyncio.get_running_loop()
    data = request(door, bytes(32 * 1024))
    connections = [await connected(target, door) for _ in range(count)]

    async def shout(connection: socket.socket) -> None:
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(seconds):
                while True:
                    await loop.sock_sendall(connection, data)
                    await asyncio.sleep(0)  # a send that completes at once does not yield to other tasks

    await asyncio.gather(*(shout(connection) for connection in connections))
    return connections


async def closed(connections: list[socket.socket], timeout_s: float) -> int:
    """Waits for the service to end connections; returns how many are left."""
    loop = asyncio.get_running_loop()

    async def ends(connection: socket.socket) -> None:
        with contextlib.suppress(ConnectionError):
            while await loop.sock_recv(connection, 65536):
                pass

    tasks = [asyncio.create_task(ends(connection)) for connection in connections]
    _, left = await asyncio.wait(tasks, timeout=timeout_s)
    for task in left:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for connection in connections:
        connection.close()
    return len(left)
