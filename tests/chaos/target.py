"""Every door over one session table, in a separate process, for tests that attack it.

The process reports sessions, connections, tasks, memory, and errors of its loop. A `guarded` block plays a well-behaved
client on each door and checks its replies. Knows nothing of Ray, nor of the attacks.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import random
import re
import resource
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import psutil

from brayx.actor.actor import Actor
from brayx.errors import SessionLost, TransportError
from brayx.gamecore.client import AsyncClient
from tests.waiting import until_awaited as until

Door = Literal["http", "ws", "tcp", "asgi http", "asgi ws", "grpc"]
DOORS: tuple[Door, ...] = ("http", "ws", "tcp", "asgi http", "asgi ws", "grpc")

ROOT = Path(__file__).parents[2]
MAX_BODY_BYTES = 64 * 1024
IDLE_S = 5.0
"""Longer than a busy machine may pause a well-behaved client."""
WAIT_S = 20.0
SETTLE_S = 60.0


class Echo(Actor):
    """Every reply is its request's body."""

    async def start(self, session: str, body: bytes) -> bytes:
        return body

    async def tick(self, body: bytes) -> bytes:
        return body

    async def stop(self, body: bytes) -> bytes:
        return body

    async def call(self, body: bytes) -> bytes:
        return body


class Faults(logging.Handler):
    """What went wrong in the service's loop, or was logged as an error, and how often."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.seen: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self._count(f"{record.name}: {record.getMessage()[:200]} {error!r}", error)

    def in_loop(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._count(f"loop: {context.get('message')} {context.get('exception')!r}", context.get("exception"))

    def _count(self, what: str, error: BaseException | None) -> None:
        where = ""
        if error is not None and error.__traceback__ is not None:
            trace = error.__traceback__
            while trace.tb_next is not None:
                trace = trace.tb_next
            where = f" at {Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}"
        if len(self.seen) < 1000:
            self.seen[f"{what}{where}"] += 1


async def _serve(options: dict[str, Any]) -> None:
    import grpc
    import uvicorn

    from brayx.actor.config import SessionConfig
    from brayx.actor.doors.asgi import DoorApp
    from brayx.actor.doors.grpc import GrpcDoor
    from brayx.actor.doors.http1 import HttpConnection
    from brayx.actor.doors.native import DoorLimits, Listener
    from brayx.actor.doors.tcp import TcpConnection
    from brayx.actor.doors.ws1 import WebSockets
    from brayx.actor.table import SessionTable
    from brayx.gamecore.v1.gamecore_pb2_grpc import add_GamecoreServicer_to_server

    class Replica(GrpcDoor, SessionTable):
        max_body_bytes = MAX_BODY_BYTES
        idle_timeout_s = options.get("idle_timeout_s", IDLE_S)

    loop = asyncio.get_running_loop()
    faults = Faults()
    loop.set_exception_handler(faults.in_loop)
    table = Replica(
        Echo,
        SessionConfig(actors_per_worker=4096, idle_timeout_s=Replica.idle_timeout_s, reconnect_timeout_s=0.5),
        max_waiting=1024,
    )
    bounds = DoorLimits(
        max_body_bytes=MAX_BODY_BYTES,
        max_connections=options.get("max_connections", 8192),
        stall_s=options.get("stall_s", 2.0),
        idle_s=options.get("idle_s", 5.0),
    )
    app = DoorApp(table, max_body_bytes=MAX_BODY_BYTES, idle_timeout_s=Replica.idle_timeout_s)
    websockets = WebSockets(app, bounds)
    logging.getLogger().addHandler(faults)
    native = Listener(table, lambda listener: HttpConnection(listener, websockets), bounds)
    tcp = Listener(table, TcpConnection, bounds)
    for listener in (native, tcp):
        await listener.open("127.0.0.1", 0)

    listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
    config = uvicorn.Config(
        app, log_level="error", log_config=None, lifespan="off", ws="websockets-sansio", ws_max_size=MAX_BODY_BYTES + 64
    )
    asgi = uvicorn.Server(config)
    serving = loop.create_task(asgi.serve(sockets=[listening]))
    rpc = grpc.aio.server(options=[("grpc.max_receive_message_length", 2 * MAX_BODY_BYTES)])
    add_GamecoreServicer_to_server(table, rpc)
    rpc_port = rpc.add_insecure_port("127.0.0.1:0")
    await rpc.start()

    async def report() -> dict[str, Any]:
        gc.collect()
        _trim()
        return {
            "sessions": table.sessions,
            "connections": {
                "http": len(native),
                "tcp": len(tcp),
                "ws": len(websockets._state.connections),
                "asgi": len(asgi.server_state.connections),
            },
            "tasks": len(asyncio.all_tasks()),
            "rss": psutil.Process().memory_info().rss,
            "faults": dict(faults.seen),
        }

    over = asyncio.Event()

    def answer() -> None:
        for _ in sys.stdin:
            print(json.dumps(asyncio.run_coroutine_threadsafe(report(), loop).result()), flush=True)
        loop.call_soon_threadsafe(over.set)

    http, framing, plain = native.address[1], tcp.address[1], listening.getsockname()[1]
    urls: dict[Door, str] = {
        "http": f"http://127.0.0.1:{http}",
        "ws": f"ws://127.0.0.1:{http}",
        "tcp": f"tcp://127.0.0.1:{framing}",
        "asgi http": f"http://127.0.0.1:{plain}",
        "asgi ws": f"ws://127.0.0.1:{plain}",
        "grpc": f"grpc://127.0.0.1:{rpc_port}",
    }
    print(json.dumps(urls), flush=True)
    threading.Thread(target=answer, daemon=True).start()
    await over.wait()
    asgi.should_exit = asgi.force_exit = True
    await serving
    await rpc.stop(None)
    websockets.close()
    for listener in (native, tcp):
        await listener.close()
    await table.close()


def _trim() -> None:
    """Returns the C library's free memory to the system, so that it does not count as used."""
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def main() -> None:
    """Serves until standard input ends; each line of it is answered with a report."""
    import uvloop

    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    uvloop.run(_serve(json.loads(sys.argv[1])))


@dataclass(frozen=True)
class Report:
    """The service's report of itself."""

    sessions: list[str]
    connections: dict[str, int]
    tasks: int
    rss: int
    faults: dict[str, int]


class Target:
    """A context: the service, running.

    Args:
        **options: its limits.

    Attributes:
        urls: by door.
        idle_s: a session without a request for this long is ended.
    """

    def __init__(self, **options: float) -> None:
        self._options = options
        self.idle_s = options.get("idle_timeout_s", IDLE_S)
        self.urls: dict[Door, str] = {}

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.target", json.dumps(self._options)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.urls = json.loads(self._line())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            code = self._process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        if kind is None:
            assert code == 0, f"the service ended with {code}"

    def address(self, door: Door) -> tuple[str, int]:
        """Host and port of a door."""
        host, _, port = self.urls[door].partition("://")[2].partition(":")
        return host, int(port)

    def report(self) -> Report:
        """Asks the service."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return Report(**json.loads(self._line()))

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the service died with {self._process.wait(WAIT_S)}"
        return line

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None


NOISE = [
    # A client's fault that the library logs as an error.
    r"^uvicorn\.error: Invalid UTF-8 sequence",
    r"^grpc\._cython\.cygrpc: Unexpected \[DecodeError\]",
]
NOISE_OF_UVICORN = [
    # uvicorn itself, under Serve's ingress, when a client leaves or does not keep to WebSocket; the connection ends.
    r"^uvicorn\.error: ASGI callable returned without completing",
    r"handler is closed",
    r"^loop: Fatal error on transport TCPTransport .* at (protocol|websockets_sansio_impl)\.py",
    r"^loop: Task exception was never retrieved .* at (protocol|websockets_sansio_impl)\.py",
    r"^uvicorn\.error: Exception in ASGI application\n .* at (protocol|websockets_sansio_impl|handle)\.py",
]


def faults(report: Report, *allowed: str) -> list[str]:
    """The faults of the service, without the errors that its libraries log about clients."""
    patterns = [re.compile(pattern, re.DOTALL) for pattern in [*NOISE, *allowed]]
    return [
        f"{count} times {what}" for what, count in report.faults.items() if not any(p.search(what) for p in patterns)
    ]


async def settled(target: Target, tasks: int) -> Report:
    """Waits until the clients have left nothing: no session, no connection, no task."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        report = target.report()
        left = (report.sessions, {k: n for k, n in report.connections.items() if n}, max(0, report.tasks - tasks - 2))
        if left == ([], {}, 0):
            return report
        assert time.monotonic() < deadline, f"left behind: sessions, connections, tasks {left}"
        await asyncio.sleep(0.2)


async def further(ticks: Counter[str], door: Door) -> None:
    """Waits for more right replies to the well-behaved client."""
    before = ticks[door]
    await until(lambda: ticks[door] > before + 20, f"{door} answering")


@contextlib.asynccontextmanager
async def guarded(
    target: Target, doors: tuple[Door, ...] = DOORS, pause_s: float = 0.01, turns: int = 50
) -> AsyncIterator[Counter[str]]:
    """A context in which a client on each door plays one session after the other, and gets a right reply each time.

    Args:
        target: the service.
        doors: of these.
        pause_s: between two ticks.
        turns: ticks of a session; over WebSocket each session has a separate connection.

    Yields the number of replies by door; raises an error of any client, or for a wrong reply, at the end.
    """
    ticks: Counter[str] = Counter()
    over = asyncio.Event()

    async def play(door: Door) -> None:
        rng = random.Random(door)
        async with AsyncClient(target.urls[door], timeout_s=SETTLE_S) as client:
            while not over.is_set():
                seen = time.monotonic()
                try:
                    await client.start()
                    for _ in range(turns):
                        if over.is_set():
                            break
                        body = rng.randbytes(rng.randrange(64))
                        assert await client.tick(body) == body, f"a wrong reply on {door}"
                        ticks[door] += 1
                        seen = time.monotonic()
                        await asyncio.sleep(pause_s)
                    assert await client.stop(b"bye") == b"bye"
                except (SessionLost, TransportError) as error:
                    # This process was paused for so long that the service was right to end the session, or to close a
                    # WebSocket on which none had started.
                    idle = error.details.get("reason") == "idle" or error.details.get("http_status") == 408
                    if not idle or time.monotonic() - seen < target.idle_s / 2:
                        raise

    players = [asyncio.create_task(play(door), name=door) for door in doors]
    try:
        yield ticks
    finally:
        over.set()
        await asyncio.wait(players, timeout=SETTLE_S)
    for player in players:
        assert player.done(), f"the client on {player.get_name()} waits for a reply"
        player.result()


if __name__ == "__main__":
    main()
