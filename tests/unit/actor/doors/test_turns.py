"""On real connections: a burst does not delay other clients, and a connection holds a bounded amount of data."""

from __future__ import annotations

import contextlib
import socket
import threading
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from brayx.actor.doors.ws1 import WebSocket
from brayx.errors import BrayxError
from brayx.gamecore.client import Client
from brayx.gamecore.protocol import StepKind, StepRequest
from brayx.gamecore.tcp import ReplyReader, encode_request
from tests.unit.actor.doors.native_doors import MAX_BODY_BYTES, WAIT_S, Native, connect, native, opening
from tests.unit.actor.doors.test_asgi import TableService
from tests.waiting import until

TICKS = 10


class Order(TableService):
    """Records the session of each request in order, refusals as ``refused``."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[str] = []
        self.decoded: Callable[[], int] = lambda: 0
        self.decoded_before: list[int] = []

    def submit(self, request: StepRequest, reply: Any, **more: Any) -> None:
        self.order.append(request.session)
        if request.session == "quiet":
            self.decoded_before.append(self.decoded())
        super().submit(request, reply, **more)

    def refused(self, error: BrayxError) -> None:
        self.order.append("refused")
        super().refused(error)


class Holding(TableService):
    """Answers requests with the body ``hold`` only when the test calls `release`."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []

    def submit(self, request: StepRequest, reply: Any, **more: Any) -> None:
        if request.body == b"hold":
            self.kept.append(lambda: super(Holding, self).submit(request, reply, **more))
        else:
            super().submit(request, reply, **more)

    async def release(self) -> None:
        answers, self.kept = self.kept, []
        for answer in answers:
            answer()


@contextlib.contextmanager
def held(service: Native) -> Iterator[None]:
    """Blocks the service's loop, so that what clients send waits in the kernel."""
    holding, over = threading.Event(), threading.Event()

    def hold() -> None:
        holding.set()
        over.wait(WAIT_S)

    service.loop.call_soon_threadsafe(hold)
    assert holding.wait(WAIT_S)
    try:
        yield
    finally:
        over.set()


def push(connection: socket.socket, data: bytes) -> int:
    """Sends as much as the kernel takes; returns the number of bytes."""
    connection.setblocking(False)
    sent = 0
    with contextlib.suppress(BlockingIOError):
        while sent < len(data):
            sent += connection.send(data[sent : sent + 65536])
    connection.settimeout(WAIT_S)
    return sent


def read_head(connection: socket.socket) -> bytes:
    """The answer to an opening."""
    said = b""
    while b"\r\n\r\n" not in said:
        said += connection.recv(65536)
    return said


def decoded_bytes(websocket: WebSocket) -> Callable[[], int]:
    """Counts the bytes of a connection that are decoded from now on."""
    reader, received = websocket.conn.reader, 0
    feed = reader.feed_data

    def counted(data: bytes | bytearray) -> None:
        nonlocal received
        received += len(data)
        feed(data)

    reader.feed_data = counted  # type: ignore[method-assign]
    return lambda: received - len(reader.buffer)


def frame(opcode: int, data: bytes = b"", *, fin: bool = True, compressed: bool = False) -> bytes:
    """A WebSocket frame, masked with zeros."""
    first = opcode | 0x80 * fin | 0x40 * compressed
    size = bytes([0x80 | len(data)]) if len(data) < 126 else b"\xfe" + len(data).to_bytes(2, "big")
    return bytes([first]) + size + bytes(4) + data


def request(kind: StepKind, session: str, body: bytes = b"", time_: int = 1) -> bytes:
    return encode_request(StepRequest(kind, session, body), time_)


WORDS = b"POST /step HTTP/1.1\r\nsession: loud\r\nstep_kind: tick\r\ncontent-length: 1\r\n\r\nx"
BURSTS = {
    "ws fragments": frame(2, b"x", fin=False) + frame(0, fin=False) * 10_000,
    "ws pings": frame(9) * 10_000,
    "ws ticks": frame(2, b"x") * 10_000,
    "tcp ticks": request(StepKind.TICK, "loud", b"x") * 2_000,
    "http ticks": WORDS * 1_000,
    "http refusals": b"GET /nothing HTTP/1.1\r\n\r\n" * 4_000,
}


@pytest.mark.parametrize("uv", [True, False], ids=["uvloop", "asyncio"])
@pytest.mark.parametrize("burst", BURSTS)
def test_the_ticks_of_others_are_answered_before_a_burst_is(burst: str, uv: bool) -> None:
    door = "tcp" if burst.startswith("tcp") else "http"
    with native(uv=uv, table=Order) as service, connect(service.tcp) as quiet, connect(getattr(service, door)) as loud:
        table: Order = service.table
        quiet.sendall(request(StepKind.START, "quiet") + request(StepKind.START, "loud"))
        reader, got = ReplyReader(MAX_BODY_BYTES), 0
        while got < 2:
            got += len(list(reader.feed(quiet.recv(65536))))
        if burst.startswith("ws"):
            loud.sendall(opening())
            read_head(loud)
            (websocket,) = service.websockets._state.connections
            table.decoded = decoded_bytes(websocket)
        table.order.clear()
        table.decoded_before.clear()
        with held(service):
            sent = push(loud, BURSTS[burst])
            quiet.sendall(request(StepKind.TICK, "quiet", b"x") * TICKS)
        got = 0
        while got < TICKS:
            got += len(list(reader.feed(quiet.recv(65536))))
        assert sent > 20_000, "the kernel has most of the burst"
        before = table.order.index("quiet")
        assert table.order[before : before + TICKS] == ["quiet"] * TICKS
        assert before <= 200, "a few turns of the other"
        if burst.startswith("ws"):
            assert table.decoded_before[-1] < 5_000, "most of the burst waits undecoded"
        else:
            until(lambda: len(table.order) > 10 * TICKS, "that the burst goes on")


def test_a_client_that_reads_no_pongs_is_read_no_more() -> None:
    with native() as service, connect(service.http) as greedy:
        greedy.sendall(opening())
        read_head(greedy)
        pings, sent = frame(9, bytes(125)) * 1000, 0
        greedy.settimeout(1.0)
        with contextlib.suppress(TimeoutError):
            while sent < 64 * 1024 * 1024:
                greedy.sendall(pings)
                sent += len(pings)
        assert sent < 64 * 1024 * 1024, "64 MB of pongs were kept for a client that reads none"
        (websocket,) = service.websockets._state.connections
        assert websocket.transport.get_write_buffer_size() < 1024 * 1024
        with Client(service.url) as client:
            assert client.call(b"others") == b"others"


def test_fragments_are_joined_as_they_come_and_the_message_is_whole() -> None:
    with native() as service, connect(service.http) as client:
        client.sendall(opening())
        read_head(client)
        (websocket,) = service.websockets._state.connections
        client.sendall(frame(2, b"a", fin=False) + frame(0, b"b", fin=False) * 500 + frame(0, fin=False) * 500)
        until(lambda: len(websocket._fragments) == 500, "that all fragments were taken")
        assert len(websocket.frames) == 1, "one part, however many fragments came"
        client.sendall(frame(9, b"between") + frame(0, b"c"))
        body = b"a" + b"b" * 500 + b"c"
        expected = b"\x8a\x07between" + b"\x82\x7e" + len(body).to_bytes(2, "big") + body
        said = b""
        while len(said) < len(expected):
            said += client.recv(65536)
        assert said == expected


def test_a_connection_holds_one_inflated_message_that_its_session_has_not_taken() -> None:
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    large = b""
    for _ in range(62):
        message = packer.compress(bytes(MAX_BODY_BYTES)) + packer.flush(zlib.Z_SYNC_FLUSH)
        large += frame(2, message[:-4], compressed=True)
    with native(window_bits=15, table=Holding) as service, connect(service.http) as client:
        client.sendall(opening(sec_websocket_extensions="permessage-deflate"))
        assert b"permessage-deflate" in read_head(client)
        (websocket,) = service.websockets._state.connections
        client.sendall(frame(2, b"hold"))
        until(lambda: service.table.kept, "that the first message was taken")
        client.sendall(large)
        until(lambda: websocket.queue.qsize() > 0, "that a message waits")

        async def hold() -> tuple[int, int]:
            return websocket.queue.qsize(), len(websocket.conn.reader.buffer)

        queued, unread = service.run(hold())
        assert (queued, websocket.conn.events) == (1, [])
        assert 0 < unread < len(large), "the others stay as small as they came"
        service.run(service.table.release())


def test_a_connection_has_no_more_requests_in_progress_than_the_limit() -> None:
    with native(max_in_flight=8, table=Holding) as service, connect(service.tcp) as client:
        client.sendall(b"".join(request(StepKind.START, f"game{number}") for number in range(40)))
        reader, got = ReplyReader(MAX_BODY_BYTES), 0
        while got < 40:
            got += len(list(reader.feed(client.recv(65536))))
        (connection,) = service.tcp._connections
        client.sendall(b"".join(request(StepKind.TICK, f"game{number}", b"hold") for number in range(40)))
        until(lambda: len(service.table.kept) >= 8, "that ticks are in progress")

        async def counted() -> int:
            return connection.in_flight

        assert service.run(counted()) == len(service.table.kept) == 8
        got = 0
        while got < 40:
            service.run(service.table.release())
            got += len(list(reader.feed(client.recv(65536))))
