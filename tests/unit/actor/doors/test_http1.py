"""HTTP/1.1 on the native port: pipelining, expectations, chunks, openings of WebSockets, and malformed requests."""

from __future__ import annotations

import json
import socket
import uuid

import pytest

from brayx.gamecore.client import Client
from tests.unit.actor.doors.native_doors import (
    MAX_BODY_BYTES,
    Native,
    chunked,
    connect,
    native,
    opening,
    post,
    read_all,
)
from tests.unit.actor.doors.test_asgi import Gated, refusals
from tests.waiting import until


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


def test_a_chunked_body(service: Native) -> None:
    with connect(service.http) as connection:
        connection.sendall(chunked("chunked"))
        assert read_all(connection).endswith(b"\r\n\r\nabcde")


@pytest.mark.parametrize("more", [b"", b"expect: foo\r\n"], ids=["", "a second expectation"])
def test_a_client_that_expects_100_continue_gets_it(service: Native, more: bytes) -> None:
    with connect(service.http) as connection:
        head = b"POST /step HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\n%sconnection: close\r\n" % more
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
