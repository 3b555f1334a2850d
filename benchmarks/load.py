"""Closed-loop load on a door: a number of sessions, each with one tick in flight. Runs as a separate process.

Leaner than a real client, because on two cores the load competes with the server: requests are encoded once, only
status and length of replies are read, and WebSocket frames are masked with a zero key.
Prints one JSON document. Knows nothing of Ray.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import struct
import sys
import time
import uuid
from typing import cast
from urllib.parse import urlsplit

import uvloop

from benchmarks.tables import percentile

ECHO_BODY = b"x" * 256
CARTPOLE_BODY = b'{"obs":[0.0273956,-0.00611216,0.03585979,0.0197368],"reward":1.0}'
BODIES = {"echo": ECHO_BODY, "cartpole": CARTPOLE_BODY}

_WARM_UP_S = 0.3
_DEADLINE_S = 30.0


class LoadError(Exception):
    """The door answered something that is no reply to a tick."""


class _Run:
    """Shared state of the process's sessions: the measured window, and its latencies."""

    def __init__(self) -> None:
        self.from_s = self.to_s = float("inf")
        self.latencies: list[float] = []


class _Session(asyncio.Protocol):
    """One connection with one session: start, then tick after tick, then stop."""

    def __init__(self, run: _Run, host: str, prefix: str, body: bytes) -> None:
        loop = asyncio.get_running_loop()
        self.started: asyncio.Future[None] = loop.create_future()
        self.finished: asyncio.Future[None] = loop.create_future()
        self._run, self._body = run, body
        self._host, self._prefix, self._id = host, prefix, uuid.uuid4().hex
        self._buffer = b""
        self._sent_s = 0.0
        self._stopping = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._start())

    def connection_lost(self, exc: Exception | None) -> None:
        for future in (self.started, self.finished):
            if not future.done():
                future.set_exception(LoadError(f"the door closed the connection ({exc or 'no reason'})"))

    def data_received(self, data: bytes) -> None:
        self._buffer = self._buffer + data if self._buffer else data
        try:
            reply = self._take()
        except LoadError as error:
            for future in (self.started, self.finished):
                if not future.done():
                    future.set_exception(error)
            self._transport.abort()
            return
        if reply is None:
            return
        if not self.started.done():
            self.started.set_result(None)
            self._sent_s = time.perf_counter()
            self._transport.write(self._tick)
            return
        if self._stopping:
            if not self.finished.done():
                self.finished.set_result(None)
            self._transport.close()
            return
        now, run = time.perf_counter(), self._run
        if run.from_s <= self._sent_s and now <= run.to_s:
            run.latencies.append(now - self._sent_s)
        if now < run.to_s:
            self._sent_s = now
            self._transport.write(self._tick)
        else:
            self._stopping = True
            self._transport.write(self._stop())

    _tick: bytes

    def _start(self) -> bytes:
        raise NotImplementedError

    def _stop(self) -> bytes:
        raise NotImplementedError

    def _take(self) -> bytes | None:
        """The next reply's body, taken off the buffer; None while it is not whole."""
        raise NotImplementedError


class _HttpSession(_Session):
    def _request(self, kind: str, body: bytes) -> bytes:
        head = (
            f"POST {self._prefix}/step HTTP/1.1\r\nhost: {self._host}\r\nsession: {self._id}\r\nstep_kind: {kind}\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    def _start(self) -> bytes:
        self._tick = self._request("tick", self._body)
        return self._request("start", b"")

    def _stop(self) -> bytes:
        return self._request("stop", b"")

    def _take(self) -> bytes | None:
        buffer = self._buffer
        end = buffer.find(b"\r\n\r\n")
        if end < 0:
            return None
        head = buffer[:end].lower()
        at = head.find(b"content-length:")
        chunked = at < 0
        if not head.startswith(b"http/1.1 200") or chunked:
            raise LoadError(f"expected 200 with a length, got {buffer[:300]!r}")
        stop = head.find(b"\r", at)
        size = int(head[at + 15 : stop if stop >= 0 else None])
        if len(buffer) < end + 4 + size:
            return None
        self._buffer = buffer[end + 4 + size :]
        return buffer[end + 4 : end + 4 + size]


class _WebSocketSession(_Session):
    _open = False

    def _frame(self, opcode: int, body: bytes) -> bytes:
        size = bytes([0x80 | len(body)]) if len(body) < 126 else b"\xfe" + struct.pack(">H", len(body))
        return bytes([0x80 | opcode]) + size + b"\0\0\0\0" + body

    def _start(self) -> bytes:
        self._tick = self._frame(2, self._body)
        key = base64.b64encode(uuid.uuid4().bytes).decode()
        return (
            f"GET {self._prefix}/session HTTP/1.1\r\nhost: {self._host}\r\nupgrade: websocket\r\n"
            f"connection: Upgrade\r\nsec-websocket-key: {key}\r\nsec-websocket-version: 13\r\n"
            f"session: {self._id}\r\n\r\n"
        ).encode()

    def _stop(self) -> bytes:
        return self._frame(8, struct.pack(">H", 1000))

    def _take(self) -> bytes | None:
        buffer = self._buffer
        if not self._open:
            end = buffer.find(b"\r\n\r\n")
            if end < 0:
                return None
            if not buffer.startswith(b"HTTP/1.1 101"):
                raise LoadError(f"expected 101, got {buffer[:300]!r}")
            self._open = True
            self._buffer = buffer[end + 4 :]
            return b""
        if len(buffer) < 2:
            return None
        size, start = buffer[1] & 0x7F, 2
        if size == 126:
            if len(buffer) < 4:
                return None
            size, start = int.from_bytes(buffer[2:4], "big"), 4
        if len(buffer) < start + size:
            return None
        body = buffer[start : start + size]
        expected = (8,) if self._stopping else (1, 2)
        if buffer[0] & 0x0F not in expected or body.startswith(b'{"error"'):
            raise LoadError(f"expected a frame of kind {expected}, got {buffer[:300]!r}")
        self._buffer = buffer[start + size :]
        return body


_SESSIONS: dict[str, type[_Session]] = {"http": _HttpSession, "ws": _WebSocketSession}


async def load(url: str, door: str, sessions: int, seconds: float, body: bytes) -> dict[str, float]:
    """Ticks for ``seconds`` after a short warm-up.

    Args:
        url: base URL, ``http://host:port/prefix``, for either door.
        door: ``http`` or ``ws``.
        sessions: number of sessions, each on its own connection.
        seconds: length of the measurement.
        body: of each tick.

    Returns:
        ``ticks_per_s``, ``p50_s``, ``p99_s`` and the number of ``ticks``.

    Raises:
        LoadError: the door refused, or sent an invalid reply.
    """
    parts = urlsplit(url)
    loop, run, kind = asyncio.get_running_loop(), _Run(), _SESSIONS[door]
    made: list[_Session] = []
    async with asyncio.timeout(_DEADLINE_S + seconds):
        for _ in range(sessions):
            _, session = await loop.create_connection(
                lambda: kind(run, parts.netloc, parts.path.rstrip("/"), body),
                parts.hostname or "127.0.0.1",
                parts.port or 80,
            )
            made.append(session)
        await asyncio.gather(*[session.started for session in made])
        run.from_s = time.perf_counter() + _WARM_UP_S
        run.to_s = run.from_s + seconds
        await asyncio.gather(*[session.finished for session in made])
    return {
        "ticks": len(run.latencies),
        "ticks_per_s": len(run.latencies) / seconds,
        "p50_s": percentile(run.latencies, 0.5),
        "p99_s": percentile(run.latencies, 0.99),
    }


def main(argv: list[str] | None = None) -> int:
    """Loads one door and prints the result."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("url", help="base URL of the service, http://…")
    parser.add_argument("--door", choices=sorted(_SESSIONS), default="http")
    parser.add_argument("--sessions", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--body", choices=sorted(BODIES), default="echo", help="which agent's tick body")
    options = parser.parse_args(argv)
    with contextlib.suppress(KeyboardInterrupt):
        try:
            result = uvloop.run(
                load(options.url, options.door, options.sessions, options.seconds, BODIES[options.body])
            )
        except (LoadError, OSError, TimeoutError) as error:
            print(f"{options.url} ({options.door}): {type(error).__name__}: {error}", file=sys.stderr)
            return 1
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
