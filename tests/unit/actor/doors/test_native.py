"""The native ports over a real session table, without Serve: the compliance suite, and further cases."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import logging.handlers
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import uvloop
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect as websocket

from brayx.actor.config import ActorConfig, SessionConfig
from brayx.actor.doors.asgi import DoorApp
from brayx.actor.doors.http1 import HttpConnection
from brayx.actor.doors.native import DoorLimits, HeldPort, Listener, check_shared_port
from brayx.actor.doors.ports import NativeDoors
from brayx.actor.doors.tcp import TcpConnection
from brayx.actor.doors.ws1 import WebSockets
from brayx.errors import StartupError
from brayx.gamecore.client import Client
from brayx.gamecore.compliance import DoorCompliance
from brayx.gamecore.protocol import StepKind, StepRequest
from brayx.gamecore.tcp import REQUEST_HEAD, ReplyReader, encode_request
from brayx.logs import LINES
from brayx.ports import free_port
from tests.unit.actor.doors.test_asgi import Gated, TableService, refusals
from tests.unit.gamecore.echo_server import serving
from tests.waiting import until

MAX_BODY_BYTES = 2 * 1024 * 1024
WAIT_S = 10.0


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
        run(made.table.close())
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(WAIT_S)


@pytest.fixture(scope="module")
def service() -> Iterator[Native]:
    with native() as made:
        yield made


def test_a_door_leaves_the_logging_of_its_process_unchanged(tmp_path: Path) -> None:
    """Serve's replicas log through such a pair of handlers, and Serve ends a replica whose pair was closed."""
    file = logging.FileHandler(tmp_path / "replica.log")
    buffer = logging.handlers.MemoryHandler(1, target=file)
    try:
        WebSockets(DoorApp(TableService(), max_body_bytes=MAX_BODY_BYTES), DoorLimits(max_body_bytes=MAX_BODY_BYTES))
        assert buffer.target is file
        buffer.handle(logging.makeLogRecord({"msg": "still written"}))
        assert (tmp_path / "replica.log").read_text() == "still written\n"
    finally:
        buffer.close()
        file.close()


class TestNativeDoors(DoorCompliance):
    doors = ("http", "ws", "tcp")
    max_body_bytes = MAX_BODY_BYTES

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _service(cls, service: Native) -> None:
        cls.url, cls.urls = service.url, {"tcp": service.tcp_url}


class TestNativeDoorsOnAsyncio(DoorCompliance):
    """The same without uvloop, which not every system has."""

    doors = ("http", "ws", "tcp")
    max_body_bytes = MAX_BODY_BYTES

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _service(cls) -> Iterator[None]:
        with native(uv=False) as service:
            cls.url, cls.urls = service.url, {"tcp": service.tcp_url}
            yield


def test_text_frames_that_are_not_utf_8_do_not_fill_the_log(service: Native, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3 * LINES):
        with websocket(f"{service.url.replace('http', 'ws')}/session", proxy=None) as connection:
            connection.send(b"\xff", text=True)
            with pytest.raises(ConnectionClosed) as closed:
                connection.recv(timeout=WAIT_S)
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1007
    lines = [record for record in caplog.records if "UTF-8" in record.getMessage()]
    assert 0 < len(lines) <= LINES
    for record in lines:
        assert "UnicodeDecodeError" in record.getMessage()
        assert "\n" not in logging.Formatter().format(record)


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


def test_pipelined_requests_are_answered_in_order(service: Native) -> None:
    session = uuid.uuid4().hex
    with connect(service.http) as connection:
        requests = [post("start", session), *(post("tick", session, b"%d" % i) for i in range(50))]
        connection.sendall(b"".join(requests) + post("stop", session, more="connection: close\r\n"))
        replies = read_all(connection).split(b"HTTP/1.1 200 OK\r\n")[1:]
    assert [reply.partition(b"\r\n\r\n")[2] for reply in replies[1:-1]] == [b"%d" % i for i in range(50)]
    assert len(replies) == 52


def test_a_request_in_pieces_of_a_byte(service: Native) -> None:
    with connect(service.http) as connection:
        for byte in post("", "", b"call", more="connection: close\r\n").replace(b"session: \r\nstep_kind: \r\n", b""):
            connection.sendall(bytes([byte]))
        assert read_all(connection).endswith(b"\r\n\r\ncall")


def chunked(coding: str) -> bytes:
    head = f"POST /step HTTP/1.1\r\nhost: x\r\ntransfer-encoding: {coding}\r\nconnection: close\r\n\r\n"
    return head.encode() + b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"


def test_a_chunked_body(service: Native) -> None:
    with connect(service.http) as connection:
        connection.sendall(chunked("chunked"))
        assert read_all(connection).endswith(b"\r\n\r\nabcde")


def test_a_client_that_expects_100_continue_gets_it(service: Native) -> None:
    with connect(service.http) as connection:
        head = (
            b"POST /step HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\nexpect: 100-continue\r\nconnection: close\r\n\r\n"
        )
        connection.sendall(head)
        assert connection.recv(1024) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(b"body")
        assert read_all(connection).endswith(b"body")


def test_a_second_expectation_does_not_hide_the_first(service: Native) -> None:
    with connect(service.http) as connection:
        head = b"POST /step HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\nexpect: foo\r\nconnection: close\r\n"
        connection.sendall(head + b"content-length: 4\r\n\r\n")
        assert connection.recv(1024) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(b"body")
        assert read_all(connection).endswith(b"body")


def test_an_expectation_of_http_1_0_is_ignored(service: Native) -> None:
    """RFC 9110, 10.1.1: such a client knows no interim response."""
    with connect(service.http) as connection:
        connection.sendall(b"POST /step HTTP/1.0\r\nexpect: 100-continue\r\ncontent-length: 4\r\n\r\nbody")
        said = read_all(connection)
    assert said.startswith(b"HTTP/1.1 200 OK\r\n")
    assert said.endswith(b"body")


@pytest.mark.parametrize("order", [1, -1])
def test_expect_100_continue_with_a_large_body_is_refused_at_once(service: Native, order: int) -> None:
    session = uuid.uuid4().hex
    headers = "\r\n".join([f"content-length: {MAX_BODY_BYTES + 1}", "expect: 100-continue"][::order])
    with connect(service.http) as connection:
        connection.sendall(post("start", session) + post("tick", session, b"ahead"))
        connection.sendall(f"POST /step HTTP/1.1\r\nhost: x\r\n{headers}\r\n\r\n".encode())
        *_, ticked, refused = read_all(connection).split(b"HTTP/1.1 ")
    assert ticked.endswith(b"\r\n\r\nahead")
    assert refused.startswith(b"413 ")
    assert json.loads(refused.partition(b"\r\n\r\n")[2])["error"] == "body_too_large"


def test_expect_100_continue_with_a_large_body_and_an_upgrade_is_refused_for_the_body(service: Native) -> None:
    more = "expect: 100-continue\r\nupgrade: h2c\r\nconnection: Upgrade\r\n"
    with connect(service.http) as connection:
        connection.sendall(
            f"POST /step HTTP/1.1\r\nhost: x\r\n{more}content-length: {MAX_BODY_BYTES + 1}\r\n\r\n".encode()
        )
        said = read_all(connection)
    assert said.startswith(b"HTTP/1.1 413 ")
    assert json.loads(said.partition(b"\r\n\r\n")[2])["error"] == "body_too_large"


def test_http_1_0_responses_say_whether_the_connection_is_kept(service: Native) -> None:
    keep_alive, closing = (
        f"POST /step HTTP/1.0\r\n{connection}content-length: 4\r\n\r\ncall".encode()
        for connection in ("connection: Keep-Alive\r\n", "")
    )
    with connect(service.http) as connection:
        connection.sendall(keep_alive + keep_alive + closing)
        *replies, last = read_all(connection).split(b"HTTP/1.1 200 OK\r\n")[1:]
    assert len(replies) == 2
    assert all(b"connection: keep-alive\r\n" in reply for reply in replies)
    assert b"connection: close\r\n" in last


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


def test_a_websocket_opens_with_an_absolute_uri(service: Native) -> None:
    with connect(service.http) as connection:
        connection.sendall(opening("http://x/session?session=" + uuid.uuid4().hex))
        assert connection.recv(4096).startswith(b"HTTP/1.1 101 ")


@pytest.mark.parametrize(
    ("sent", "status", "code", "says"),
    [
        (opening(leave="upgrade"), 426, "bad_request", "Upgrade: websocket"),
        (opening(leave="connection"), 426, "bad_request", "Connection: Upgrade"),
        (opening(upgrade="h2c"), 426, "bad_request", "h2c"),
        (opening(sec_websocket_version="8"), 426, "bad_request", "8, expected 13"),
        (opening(leave="sec-websocket-version"), 400, "bad_request", "Sec-WebSocket-Version"),
        (opening(leave="sec-websocket-key"), 400, "bad_request", "Sec-WebSocket-Key"),
        (opening(sec_websocket_key="short"), 400, "bad_request", "Sec-WebSocket-Key"),
        (opening(content_length="2") + b"{}", 400, "bad_request", "body"),
        (opening().replace(b"GET", b"POST"), 405, "bad_request", "POST"),
        (opening().replace(b"HTTP/1.1", b"HTTP/1.0"), 505, "bad_request", "HTTP/1.0"),
        (opening(x="y" * 9000), 431, "header_too_large", "WebSocket handshake"),
    ],
)
def test_a_malformed_opening_gets_an_error_document(
    service: Native, sent: bytes, status: int, code: str, says: str
) -> None:
    before = refusals(service.table).get(code, 0)
    with connect(service.http) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        head, _, body = read_all(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), head
    document = json.loads(body)
    assert document["error"] == code
    assert says in document["message"]
    assert refusals(service.table)[code] == before + 1
    assert (b"\r\nsec-websocket-version: 13" in head) == (status == 426)


def test_an_opening_that_waits_when_the_replica_ends_gets_an_error_document() -> None:
    with native(table=Gated) as service, connect(service.http) as connection:
        connection.sendall(opening())
        until(lambda: service.websockets._state.connections, "the opening came")
        service.loop.call_soon_threadsafe(service.websockets.close)
        said = read_all(connection)
        service.table.allowed = True
    assert said.startswith(b"HTTP/1.1 503 ")
    assert json.loads(said.partition(b"\r\n\r\n")[2])["error"] == "service_full"


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (b"rubbish\r\n\r\n", 400, "bad_request"),
        (b"GET / HTTP/9.9\r\n\r\n", 400, "bad_request"),
        (b"POST /step HTTP/1.1\r\ncontent-length: -1\r\n\r\n", 400, "bad_request"),
        (b"POST /step HTTP/1.1\r\nhost: x\r\nhost: x\r\ncontent-length: 0\r\n\r\n", 400, "bad_request"),
        (b"GET / HTTP/1.1\r\nhost: x\r\nhost: y\r\n\r\n", 400, "bad_request"),
        (opening().replace(b"host: x", b"host: x\r\nhost: y"), 400, "bad_request"),
        (chunked("identity, chunked"), 400, "bad_request"),
        (chunked("chunked, identity"), 400, "bad_request"),
        (chunked("identity\r\ntransfer-encoding: chunked"), 400, "bad_request"),
        (chunked("chunked\r\ntransfer-encoding: chunked"), 400, "bad_request"),
        (b"POST /step HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 70_000 + b"\r\n\r\n", 431, "header_too_large"),
        (b"GET /step HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: Upgrade\r\n\r\n", 426, "bad_request"),
        (post("start", "java", b"{}", "upgrade: h2c\r\nconnection: Upgrade, HTTP2-Settings\r\n"), 426, "bad_request"),
    ],
)
def test_a_malformed_request_gets_an_error_and_is_closed(service: Native, sent: bytes, status: int, code: str) -> None:
    with connect(service.http) as connection:
        connection.sendall(sent)
        said = read_all(connection)
    assert said.startswith(b"HTTP/1.1 %d " % status), said
    assert json.loads(said.partition(b"\r\n\r\n")[2])["error"] == code
    with Client(service.url) as client:
        assert client.call(b"others") == b"others"


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (opening().replace(b"GET", b"HEAD"), 405),
        (b"HEAD / HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 70_000 + b"\r\n\r\n", 431),
        (b"HEAD / HTTP/1.1\r\ncontent-length: -1\r\n\r\n", 400),
    ],
)
def test_an_error_that_answers_a_head_request_has_no_body(service: Native, sent: bytes, status: int) -> None:
    with connect(service.http) as connection:
        connection.sendall(sent)
        head, _, body = read_all(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), head
    assert b"content-length: 0" not in head
    assert body == b""


def test_an_error_that_follows_a_head_request_has_a_body(service: Native) -> None:
    with connect(service.http) as connection:
        connection.sendall(b"HEAD / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert connection.recv(1024).startswith(b"HTTP/1.1 200 ")
        connection.sendall(b"rubbish\r\n\r\n")
        assert b"bad_request" in read_all(connection)


def test_status_page_and_unknown_paths(service: Native) -> None:
    connection = http.client.HTTPConnection(*service.http.address, timeout=WAIT_S)
    for path, status in (("/", 200), ("/nothing", 404), ("/-/peer/step", 404), ("/-/left/step", 404)):
        connection.request("POST" if "step" in path else "GET", path)
        response = connection.getresponse()
        document = json.loads(response.read())
        assert response.status == status
        assert "sessions" in document or document["error"] == "bad_request"
    connection.close()


def test_a_connection_that_stalls_in_a_request_gets_an_error_is_closed_and_hurts_no_other() -> None:
    with native(stall_s=0.2) as service, connect(service.http) as half, connect(service.tcp) as piece:
        half.sendall(b"POST /step HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\nabc")
        piece.sendall(bytes(20))
        with Client(service.url) as client:
            client.start()
            began = time.monotonic()
            while time.monotonic() - began < 0.5:
                assert client.tick(b"on") == b"on"
        assert read_all(half).startswith(b"HTTP/1.1 408 ")
        assert b"incomplete after 0.2 s" in read_all(piece)


def test_a_connection_whose_reads_all_end_in_mid_frame_is_not_stalled() -> None:
    frames = [encode_request(StepRequest(StepKind.CALL, "", b"x" * 100), time_) for time_ in range(20)]
    with native(stall_s=0.2) as service, connect(service.tcp) as busy:
        reader, got, unsent = ReplyReader(MAX_BODY_BYTES), 0, b""
        for frame in frames:
            busy.sendall(unsent + frame[:60])
            unsent = frame[60:]
            time.sleep(0.05)
        busy.sendall(unsent)
        while got < len(frames):
            for _, body, _ in reader.feed(busy.recv(65536)):
                assert body == b"x" * 100
                got += 1


def test_a_connection_is_not_stalled_while_a_running_tick_delays_its_next_frame() -> None:
    large = encode_request(StepRequest(StepKind.CALL, "", bytes(1024 * 1024)), 9)
    with native(stall_s=0.2, max_in_flight=1) as service, connect(service.tcp) as busy:
        service.table._services.config = SessionConfig(tick_timeout_s=1.0)
        session = StepRequest(StepKind.START, "busy", b"")
        busy.sendall(encode_request(session, 1))
        reader, got = ReplyReader(MAX_BODY_BYTES), []
        while not got:
            got += reader.feed(busy.recv(65536))
        busy.sendall(encode_request(session._replace(kind=StepKind.TICK, body=b"slow"), 2) + large[:100])
        sending = threading.Thread(target=busy.sendall, args=(large[100:],))
        sending.start()
        while len(got) < 3:
            got += reader.feed(busy.recv(65536))
        sending.join(WAIT_S)
        assert [time_ for _, _, time_ in got] == [1, ~2, 9], "the late tick gets an error, the frame after it a reply"


def test_a_burst_of_connections_waits_to_be_accepted() -> None:
    most = int(Path("/proc/sys/net/core/somaxconn").read_text()) if sys.platform == "linux" else 128

    async def burst() -> None:
        listener = Listener(TableService(), TcpConnection, DoorLimits())
        await listener.open("127.0.0.1", 0)
        with contextlib.ExitStack() as stack:
            for _ in range(min(most, 300)):  # the loop accepts none before its next iteration
                stack.enter_context(socket.create_connection(listener.address, timeout=0.5))
        await listener.close()

    for run in (asyncio.run, uvloop.run):
        run(burst())


def test_an_idle_connection_is_closed_and_one_that_is_used_is_not() -> None:
    with native(idle_s=0.3) as service, connect(service.http) as idle, Client(service.url) as client:
        client.start()
        began = time.monotonic()
        while time.monotonic() - began < 0.8:
            assert client.tick(b"on") == b"on"
            time.sleep(0.02)
        assert read_all(idle) == b""


def test_connections_past_the_limit_get_an_error_and_are_closed() -> None:
    with native(max_connections=2) as service:
        with connect(service.http) as first, connect(service.http) as second:
            for connection in (first, second):
                connection.sendall(post("", "", b"x").replace(b"session: \r\nstep_kind: \r\n", b""))
                assert connection.recv(1024).startswith(b"HTTP/1.1 200")
            with connect(service.http) as third:
                said = read_all(third)
            assert said.startswith(b"HTTP/1.1 503 ")
            assert json.loads(said.partition(b"\r\n\r\n")[2])["error"] == "too_many_connections"
        until(lambda: not len(service.http), "that closed connections are not counted")


def test_refusals_of_the_native_doors_are_counted_once() -> None:
    upgrade = b"connection: Upgrade\r\nupgrade: websocket\r\n\r\n"
    sent: list[tuple[bytes, str]] = [
        (b"rubbish\r\n\r\n", "bad_request"),
        (b"POST /step HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 70_000 + b"\r\n\r\n", "header_too_large"),
        (post("tick", "unknown", more="connection: close\r\n"), "session_unknown"),
        (post("", "", bytes(65), more="connection: close\r\n"), "body_too_large"),
        (post("jump", "s", more="connection: close\r\n"), "bad_request"),
        (b"GET /nothing HTTP/1.1\r\nconnection: close\r\n\r\n", "bad_request"),
        (b"GET /step HTTP/1.1\r\nhost: x\r\n" + upgrade, "bad_request"),
        (b"GET /session HTTP/1.1\r\n" + 200 * b"x: 1\r\n" + upgrade, "header_too_large"),
        (b"POST /step HTTP/1.1\r\ncontent-length: 10\r\n\r\nabc", "deadline_exceeded"),
    ]
    too_large = encode_request(StepRequest(StepKind.CALL, "", bytes(65)), 1)
    framed = [(bytes(20), "bad_request"), (too_large, "body_too_large"), (b"\xff" * 48, "bad_request")]
    expected: Counter[str] = Counter()
    with native(max_body_bytes=64, max_connections=1, stall_s=0.3, idle_s=0.6) as service:
        for listener, those in ((service.http, sent), (service.tcp, framed)):
            for data, code in those:
                with connect(listener) as connection:
                    connection.sendall(data)
                    said = read_all(connection)
                assert code.encode() in said, (data[:40], said)
                expected[code] += 1
                assert refusals(service.table) == expected, (data[:40], said)
                until(lambda door=listener: not len(door), "the connection was gone")  # type: ignore[misc]
            with connect(listener) as first:
                until(lambda door=listener: len(door) == 1, "the only place was taken")  # type: ignore[misc]
                with connect(listener) as second:
                    assert b"too_many_connections" in read_all(second)
                expected["too_many_connections"] += 1
                assert read_all(first) == b"", "an idle connection has asked for nothing"
        assert refusals(service.table) == expected


@pytest.mark.parametrize("sent", ["接球".encode(), "café".encode("latin-1")], ids=["UTF-8", "Latin-1"])
def test_the_error_for_an_id_that_is_not_ascii_quotes_it_as_sent(service: Native, sent: bytes) -> None:
    message = f"header 'session' is {'接球' if len(sent) > 4 else 'café'!r}, expected printable ASCII without spaces"
    request = b"POST /step HTTP/1.1\r\nsession: %b\r\nstep_kind: start\r\nconnection: close\r\n\r\n" % sent
    with serving(DoorApp(TableService())) as asgi:
        host, _, port = asgi.partition(":")
        for address in ((host, int(port)), service.http.address):
            with socket.create_connection(address, timeout=WAIT_S) as connection:
                connection.sendall(request)
                head, _, document = read_all(connection).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 400")
            assert json.loads(document)["message"] == message
    with connect(service.tcp) as connection:
        connection.sendall(REQUEST_HEAD.pack(len(sent), 5, 0, 0, 0, 1) + sent + b"start")
        reader, got = ReplyReader(MAX_BODY_BYTES), []
        while not got:
            got += reader.feed(connection.recv(65536))
    [(session, body, time_)] = got
    assert (session, time_, json.loads(body)["message"]) == (sent, ~1, message)


def test_a_tcp_connection_carries_many_sessions_and_slow_ones_hold_up_no_others(service: Native) -> None:
    names = [uuid.uuid4().hex for _ in range(4)]
    with connect(service.tcp) as connection:
        for time_, name in enumerate(names):
            connection.sendall(encode_request(StepRequest(StepKind.START, name, b""), time_))
        reader, got = ReplyReader(MAX_BODY_BYTES), []
        while len(got) < len(names):
            got += reader.feed(connection.recv(65536))
        connection.sendall(encode_request(StepRequest(StepKind.TICK, names[0], b"slow"), 10))
        ticks = [encode_request(StepRequest(StepKind.TICK, name, b"x"), 11) for name in names[1:]]
        connection.sendall(b"".join(ticks))
        got.clear()
        while len(got) < 3:
            got += reader.feed(connection.recv(65536))
        assert sorted(session.decode() for session, _, _ in got) == sorted(names[1:])
        assert {(body, time_) for _, body, time_ in got} == {(b"x", 11)}


def test_the_server_stops_reading_from_a_client_that_reads_nothing() -> None:
    body = bytes(256 * 1024)
    with native() as service, connect(service.tcp) as greedy:
        greedy.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
        greedy.settimeout(1.0)
        sent = 0
        with contextlib.suppress(TimeoutError):
            while sent < 400 * len(body):
                greedy.sendall(encode_request(StepRequest(StepKind.CALL, "", body), sent))
                sent += len(body)
        assert sent < 400 * len(body), "100 MB of replies were kept for a client that reads none"
        with Client(service.tcp_url) as client:
            assert client.call(b"others") == b"others"


def test_a_full_replica_that_refuses_starts_keeps_the_latency_of_ticks() -> None:
    starts = b"".join(encode_request(StepRequest(StepKind.START, f"late{time_}", b""), time_) for time_ in range(100))
    with native() as service, connect(service.tcp) as crowd, Client(service.tcp_url) as client:
        client.start()
        service.table._services.config = SessionConfig(actors_per_worker=1)
        refused, over = 0, threading.Event()

        def push() -> None:
            nonlocal refused
            while not over.is_set():
                crowd.sendall(starts)
                reader, got = ReplyReader(MAX_BODY_BYTES), 0
                while got < 100:
                    for _, body, time_ in reader.feed(crowd.recv(65536)):
                        assert time_ < 0, "no start was accepted"
                        assert b"service_full" in body
                        got += 1
                refused += got

        pushing = threading.Thread(target=push)
        pushing.start()
        try:
            until(lambda: refused >= 100, "starts being refused")
            took = []
            for _ in range(200):
                began = time.monotonic()
                assert client.tick(b"on") == b"on"
                took.append(time.monotonic() - began)
        finally:
            over.set()
            pushing.join(WAIT_S)
        assert refused > 1000, "starts were refused all the time"
        assert sorted(took)[len(took) // 2] < 0.1, "half a lot of refusals may be before a tick, and a busy machine"


def test_a_port_of_another_application_is_refused(service: Native) -> None:
    host, port = service.http.address
    with pytest.raises(StartupError, match=rf"{port} of 127\.0\.0\.1") as refused:
        check_shared_port(host, port, "mine")
    assert refused.value.details == {"port": port}
    check_shared_port("127.0.0.1", free_port(), "mine")


def test_a_port_is_held_by_one_application_until_its_last_replica_releases_it(tmp_path: Path) -> None:
    folder = tmp_path / "ports"
    replicas = [HeldPort(8101, "a", folder) for _ in range(2)]
    with pytest.raises(StartupError, match=r"8101 .*'a'") as taken:
        HeldPort(8101, "b", folder)
    assert taken.value.details == {"port": 8101}
    HeldPort(8102, "b", folder).release()
    replicas[0].release()
    later = HeldPort(8101, "a", folder)  # as in a rolling redeploy
    replicas[1].release()
    with pytest.raises(StartupError, match="'a'"):
        HeldPort(8101, "b", folder)
    later.release()
    later.release()
    HeldPort(8101, "b", folder).release()


def test_a_port_is_free_once_the_process_that_held_it_is_killed(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys; from brayx.actor.doors.native import HeldPort\n"
        "held = HeldPort(8101, 'a', pathlib.Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdin=-1, stdout=-1, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(StartupError, match="'a'"):
            HeldPort(8101, "b", tmp_path)
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait(WAIT_S)
    HeldPort(8101, "b", tmp_path).release()


def test_one_of_two_applications_that_start_together_gets_the_port_for_all_its_replicas(tmp_path: Path) -> None:
    (tmp_path / "8101").write_text("of another time")
    begin, ports, refused = threading.Barrier(8), [], []

    def start(application: str) -> None:
        begin.wait(WAIT_S)
        try:
            ports.append((application, HeldPort(8101, application, tmp_path)))
        except StartupError:
            refused.append(application)

    threads = [threading.Thread(target=start, args=("ab"[number % 2],)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(ports) == len(refused) == 4
    assert {application for application, _ in ports} | {*refused} == {"a", "b"}
    for _, port in ports:
        port.release()


def test_two_applications_with_the_same_tcp_port_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, service: Native
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    config = ActorConfig(agents=["a"], native_port=None, tcp_port=free_port())

    def ports(application: str) -> NativeDoors:
        return NativeDoors(service.table, DoorApp(service.table), config, application)

    first, second, other = ports("mine"), ports("mine"), ports("another")
    service.run(first.open())
    service.run(second.open())
    with pytest.raises(StartupError, match=f"{config.tcp_port} .*'mine'"):
        service.run(other.open())
    first.shut()
    service.run(second.close())
    service.run(other.open())
    for opened in (first, other):
        service.run(opened.close())


@pytest.mark.parametrize(("idle_timeout_s", "closed_after_s"), [(60.0, 300.0), (600.0, 600.0)])
def test_an_idle_connection_is_closed_when_the_protocol_says(
    service: Native, idle_timeout_s: float, closed_after_s: float
) -> None:
    config = ActorConfig(agents=["a"], idle_timeout_s=idle_timeout_s)
    ports = NativeDoors(service.table, DoorApp(service.table), config, "mine")
    assert ports._limits.idle_s == closed_after_s
    protocol = Path(__file__).parents[4] / "docs/protocol.md"
    assert "without a request for 300 s, or for `idle_timeout_s` if that is longer, is closed" in protocol.read_text()


def test_replicas_share_a_port_and_others_cannot_take_it(service: Native) -> None:
    port = free_port()

    async def listener(shared: bool) -> Listener:
        made = Listener(service.table, TcpConnection, DoorLimits())
        await made.open("127.0.0.1", port, shared=shared)
        return made

    first, second = service.run(listener(True)), service.run(listener(True))
    with pytest.raises(StartupError, match="is taken"):
        service.run(listener(False))
    service.run(first.close())
    with Client(f"tcp://127.0.0.1:{port}") as client:
        assert client.call(b"x") == b"x"
    service.run(second.close())
