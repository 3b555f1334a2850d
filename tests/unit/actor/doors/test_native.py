"""The native ports over a real session table, without Serve: the compliance suite, and further cases."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import logging.handlers
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect as websocket

import brayx.clock as clock
from brayx.actor.config import SessionConfig
from brayx.actor.doors.asgi import DoorApp
from brayx.actor.doors.native import DoorLimits, Listener
from brayx.actor.doors.tcp import TcpConnection
from brayx.actor.doors.ws1 import WebSockets
from brayx.errors import StartupError
from brayx.gamecore.client import Client
from brayx.gamecore.compliance import DoorCompliance
from brayx.gamecore.protocol import StepKind, StepRequest
from brayx.gamecore.tcp import REQUEST_HEAD, ReplyReader, encode_request
from brayx.logs import LINES
from brayx.ports import free_port
from tests.clocks import Clock
from tests.unit.actor.doors.native_doors import (
    MAX_BODY_BYTES,
    WAIT_S,
    Native,
    connect,
    native,
    post,
    read_all,
)
from tests.unit.actor.doors.test_asgi import TableService, refusals
from tests.unit.gamecore.echo_server import serving
from tests.waiting import until


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


def test_an_idle_connection_is_closed_and_one_that_is_used_is_not(seconds: Clock) -> None:
    with native(idle_s=0.3) as service, connect(service.http) as idle, Client(service.url) as client:
        client.start()
        for _ in range(8):
            assert client.tick(b"on") == b"on"
            seconds.now += 0.1
            time.sleep(0.02)  # for the door to look
        assert client.tick(b"on") == b"on"
        assert read_all(idle) == b""
        assert len(service.http) == 1, "the client did not have to connect again"


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
            with contextlib.ExitStack() as stack:
                with clock.hold():  # otherwise the first could be idle before the second comes
                    first = stack.enter_context(connect(listener))
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
            refused_before = []  # while a tick waited
            until_s = time.monotonic() + WAIT_S
            while (len(refused_before) < 200 or refused <= 1000) and time.monotonic() < until_s:
                before = refused
                assert client.tick(b"on") == b"on"
                refused_before.append(refused - before)
        finally:
            over.set()
            pushing.join(WAIT_S)
        assert refused > 1000, "starts were refused all the time"
        assert sorted(refused_before)[len(refused_before) // 2] < 1000, "one lot may be before a tick, not ten"


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
