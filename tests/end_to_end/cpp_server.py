"""The native TCP door over a real session table, and a proxy that breaks connections, for the tests of the C++ client.

Both run in one thread's event loop and are commanded from the test's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

from brayx.actor.actor import Actor
from brayx.actor.config import SessionConfig
from brayx.actor.doors.native import DoorLimits, Listener
from brayx.actor.doors.tcp import TcpConnection
from brayx.actor.ends import BETWEEN
from brayx.actor.service import Reply, Service
from brayx.actor.table import SessionTable
from brayx.errors import BadBody, Overloaded, Unauthorized
from brayx.gamecore.auth import Keys
from brayx.gamecore.protocol import StepKind, StepRequest
from brayx.gamecore.tcp import ReplyReader, encode_reply
from brayx.ports import free_port

Value = TypeVar("Value")

MAX_BODY_BYTES = 4 * 1024 * 1024
KEY, SECRET = "games", b"sixteen or more of them"
KEYS = Keys({KEY: SECRET})


class Ledger(Actor):
    """Answers a body with itself and writes down every tick that reached it. Some bodies are commands: the answer to
    ``slow`` waits for ``go_on``."""

    def __init__(self, applied: dict[str, list[bytes]], ends: list[tuple[str, str]], go_on: threading.Event) -> None:
        self.applied, self.ends, self._go_on = applied, ends, go_on
        self.session = ""

    async def start(self, session: str, body: bytes) -> bytes:
        self.session = session
        self.applied.setdefault(session, [])
        return body

    async def tick(self, body: bytes) -> bytes:
        if body == b"bad":
            raise BadBody("the body is bad")
        if body == b"raise":
            raise RuntimeError("the agent raised")
        self.applied[self.session].append(body)
        if body == b"slow":
            await self._held()
        return body

    async def stop(self, body: bytes) -> bytes:
        return body

    async def call(self, body: bytes) -> bytes:
        if body == b"slow":
            await self._held()
        return body

    async def on_end(self, reason: str) -> None:
        self.ends.append((self.session, reason))

    async def _held(self) -> None:
        while not self._go_on.is_set():  # noqa: ASYNC110 (another thread sets it)
            await asyncio.sleep(0.005)


class _Loop:
    """An event loop in a thread, until the block ends."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)

    def do(self, work: Coroutine[Any, Any, Value]) -> Value:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def __enter__(self) -> _Loop:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(60)
        assert not self._thread.is_alive()
        self.loop.close()


class Server(Service):
    """The native TCP door and its table. `stop` drops both; `start` opens fresh ones at the same port.

    Args:
        make_actor: what answers a session; a `Ledger` if none is given.
        keys: what requests must be signed with.
        **options: of the `SessionConfig`.

    Attributes:
        go_on: lets slow answers go.
        moving: so many ticks and stops from now are refused, as a replica refuses them while their session moves.
    """

    def __init__(
        self, loop: _Loop, make_actor: Callable[[], Actor] | None = None, *, keys: Keys | None = None, **options: Any
    ) -> None:
        self.applied: dict[str, list[bytes]] = {}
        self.ends: list[tuple[str, str]] = []
        self.accepted = 0
        self.go_on = threading.Event()
        self.moving = 0
        self.port = free_port()  # no outgoing connection takes it while the door is shut
        self._make_actor = make_actor or (lambda: Ledger(self.applied, self.ends, self.go_on))
        self._keys = keys
        self._options = options
        self._loop = loop
        self.start()

    @property
    def url(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    def start(self, **limits: Any) -> None:
        """Opens the door, with separate limits."""
        self._loop.do(self._open(DoorLimits(max_body_bytes=MAX_BODY_BYTES, **limits)))

    def stop(self) -> None:
        """Shuts the door, breaks its connections and ends its sessions."""
        self._loop.do(self._shut())

    async def _open(self, limits: DoorLimits) -> None:
        self.table = SessionTable(self._make_actor, SessionConfig(**self._options))
        self._door = Listener(self, self._accept, limits)
        await self._door.open("127.0.0.1", self.port)
        self.port = self._door.address[1]

    async def _shut(self) -> None:
        await self._door.close()
        await self.table.close(timeout_s=2.0)

    def _accept(self, listener: Listener) -> TcpConnection:
        self.accepted += 1
        return TcpConnection(listener)

    def submit(self, request: StepRequest, reply: Reply, *, let_in: bool = False) -> None:
        if self._keys is not None:
            try:
                self._keys.check(request, time.time())
            except Unauthorized as error:
                reply(error)
                return
        if self.moving and request.kind in (StepKind.TICK, StepKind.STOP):
            self.moving -= 1
            reply(Overloaded("the session is moving to another replica; try again", layer=BETWEEN))
            return
        self.table.submit(request, reply)


class Proxy:
    """Forwards bytes to a port, until it is stopped.

    Attributes:
        connections: number of connections so far.
        lose_in: number of replies until one is lost with its connection, after the service has applied its request.
        refusing: whether new connections are closed at once.
    """

    def __init__(self, loop: _Loop, port: int) -> None:
        self.connections = 0
        self.lose_in: int | None = None
        self.refusing = False
        self._to = port
        self._loop = loop
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener = loop.do(self._open())
        self.url = f"tcp://127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        """Breaks every connection there is."""
        self._loop.do(self._cut())

    def stop(self) -> None:
        self._loop.do(self._stop())

    async def _open(self) -> asyncio.Server:
        return await asyncio.start_server(self._pass_on, "127.0.0.1", 0)

    async def _stop(self) -> None:
        self._listener.close()  # in its loop: a connection that ends meanwhile wakes the same waiters
        await self._cut()

    async def _cut(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=5)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self.connections += 1
        if self.refusing:
            writer.transport.abort()
            return
        try:
            service, to_service = await asyncio.open_connection("127.0.0.1", self._to)
        except OSError:  # the service is down
            writer.transport.abort()
            return
        ends = {writer, to_service}
        self._writers |= ends
        try:
            there, back = self._requests(reader, to_service), self._replies(service, writer)
            pumps = [asyncio.ensure_future(there), asyncio.ensure_future(back)]
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
        finally:
            self._writers -= ends
            for end in ends:
                end.transport.abort()

    async def _requests(self, reader: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                to.write(data)
                await to.drain()

    async def _replies(self, service: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
        replies = ReplyReader(2 * MAX_BODY_BYTES)
        with contextlib.suppress(OSError):
            while data := await service.read(65536):
                for session, body, number in replies.feed(data):
                    if self.lose_in is not None:
                        self.lose_in -= 1
                        if self.lose_in < 0:
                            self.lose_in = None
                            return
                    to.write(encode_reply(session, body, number))
                await to.drain()


@contextlib.contextmanager
def serving(make_actor: Callable[[], Actor] | None = None, **options: Any) -> Iterator[tuple[Server, Proxy]]:
    """A `Server`, and a `Proxy` in front of it."""
    with _Loop() as loop:
        server = Server(loop, make_actor, **options)
        proxy = Proxy(loop, server.port)
        try:
            yield server, proxy
        finally:
            proxy.stop()
            server.stop()
