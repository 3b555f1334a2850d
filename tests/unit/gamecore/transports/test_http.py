"""The HTTP transports against servers that close, stall, die and babble; their reply parser, fed byte by byte."""

from __future__ import annotations

import socket
import threading
import time

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from brayx.errors import BodyTooLarge, ConnectionLost, DeadlineExceeded, ServiceFull, TransportError
from brayx.gamecore import AsyncClient, Client
from brayx.gamecore.transports.http import MAX_HEAD_BYTES, HttpReply
from tests.unit.gamecore.scripted_server import Late, held, read_request, reply, reset, scripted
from tests.waiting import until, until_awaited


def _answer_one(sock: socket.socket) -> None:
    read_request(sock)
    sock.sendall(reply(b"one"))


def _answer_all(sock: socket.socket) -> None:
    while read_request(sock):
        sock.sendall(reply(b"again"))


def test_connection_is_kept_alive() -> None:
    with scripted(_answer_all) as (address, connections), Client(f"http://{address}") as client:
        assert [client.call(b"") for _ in range(5)] == [b"again"] * 5
        assert connections == [0]


def test_a_connection_closed_while_idle_is_replaced_before_sending() -> None:
    scripts = (_answer_one, _answer_one, _answer_all)
    with scripted(*scripts) as (address, connections), Client(f"http://{address}") as client:
        for _ in range(2):
            client.call(b"")
            until(lambda: held(address) == [psutil.CONN_CLOSE_WAIT], "the service's close arriving")
        client.call(b"")
        assert connections == [0, 1, 2]


async def test_a_connection_closed_while_idle_is_replaced_before_sending_awaited() -> None:
    with scripted(_answer_one, _answer_one, _answer_all) as (address, connections):
        async with AsyncClient(f"http://{address}") as client:
            for _ in range(2):
                await client.call(b"")
                await until_awaited(lambda: held(address) == [], "the service's close arriving")
            await client.call(b"")
            assert connections == [0, 1, 2]


def test_connection_close_header_is_respected() -> None:
    def closing(sock: socket.socket) -> None:
        read_request(sock)
        sock.sendall(reply(b"bye", extra="connection: close\r\n"))
        sock.recv(1)  # until the client closes; it must not wait for the server

    with scripted(closing, _answer_all) as (address, _), Client(f"http://{address}") as client:
        assert [client.call(b""), client.call(b"")] == [b"bye", b"again"]


def _die_before_the_reply(sock: socket.socket) -> None:
    read_request(sock)


def _die_within_the_reply(sock: socket.socket) -> None:
    read_request(sock)
    sock.sendall(reply(b"whole")[:-2])


def _reset_before_the_reply(sock: socket.socket) -> None:
    read_request(sock)
    reset(sock)


@pytest.mark.parametrize("die", [_die_before_the_reply, _die_within_the_reply, _reset_before_the_reply])
async def test_a_tick_is_never_sent_twice(die: object) -> None:
    ticks: list[bytes] = []

    def script(sock: socket.socket) -> None:
        read_request(sock)
        sock.sendall(reply(b""))
        ticks.append(sock.recv(10, socket.MSG_PEEK))
        die(sock)  # type: ignore[operator]

    with scripted(script, _answer_all) as (address, connections), Client(f"http://{address}") as client:
        client.start()
        with pytest.raises(ConnectionLost, match="may have been applied"):
            client.tick(b"x")
        assert (len(ticks), connections) == (1, [0])
        assert client.tick(b"by the game's own decision") == b"again"
        assert connections == [0, 1]

    with scripted(script, _answer_all) as (address, connections):
        async with AsyncClient(f"http://{address}") as awaited:
            await awaited.start()
            with pytest.raises(ConnectionLost, match="may have been applied"):
                await awaited.tick(b"x")
            assert (len(ticks), connections) == (2, [0])
            assert await awaited.tick(b"by the game's own decision") == b"again"
            await awaited.stop()


def _stall(sock: socket.socket) -> None:
    read_request(sock)
    sock.sendall(b"HTTP/1.1 200 OK\r\n")
    sock.recv(1)


def _trickle(sock: socket.socket) -> None:
    read_request(sock)
    for byte in reply(b"x" * 1000):
        sock.sendall(bytes([byte]))
        time.sleep(0.01)


@pytest.mark.parametrize("script", [_stall, _trickle])
async def test_the_deadline_covers_the_whole_request(script: object) -> None:
    for _ in range(2):
        with scripted(script, _answer_all) as (address, _), Client(f"http://{address}", timeout_s=0.3) as client:  # type: ignore[arg-type]
            began = time.monotonic()
            with pytest.raises(DeadlineExceeded, match=r"stateless call.* 0\.3 s") as caught:
                client.call(b"")
            assert 0.25 < time.monotonic() - began < 20
            assert caught.value.details["layer"] == "http"
    with scripted(script, _answer_all) as (address, _):  # type: ignore[arg-type]
        async with AsyncClient(f"http://{address}", timeout_s=0.3) as awaited:
            with pytest.raises(DeadlineExceeded, match="no reply to the stateless call"):
                await awaited.call(b"")


def test_a_late_reply_is_not_taken_for_the_next() -> None:
    def take(sock: socket.socket) -> bytes:
        read_request(sock)
        return reply(b"late")

    late = Late(take)

    def script(sock: socket.socket) -> None:
        _answer_one(sock)
        late(sock)

    with scripted(script, _answer_all) as (address, _), Client(f"http://{address}") as client:
        assert client.call(b"") == b"one"
        client.timeout_s, timeout_s = 0.2, client.timeout_s
        with pytest.raises(DeadlineExceeded):
            client.call(b"")
        late.send()
        client.timeout_s = timeout_s
        assert client.call(b"") == b"again"


async def test_connecting_has_a_deadline() -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=0)
    port = listener.getsockname()[1]
    fillers = [socket.socket() for _ in range(4)]
    try:
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
        with Client(f"http://127.0.0.1:{port}", timeout_s=0.3) as client:
            with pytest.raises(DeadlineExceeded, match="no connection within") as caught:
                client.call(b"")
            assert caught.value.details["layer"] == "connect"
        async with AsyncClient(f"http://127.0.0.1:{port}", timeout_s=0.3) as awaited:
            with pytest.raises(DeadlineExceeded, match="no connection within"):
                await awaited.call(b"")
    finally:
        for sock in (listener, *fillers):
            sock.close()


async def test_not_http() -> None:
    def babble(sock: socket.socket) -> None:
        sock.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
        sock.recv(1000)

    with scripted(babble, babble) as (address, _):
        with Client(f"http://{address}") as client, pytest.raises(TransportError, match=r"SSH-2\.0"):
            client.call(b"")
        async with AsyncClient(f"http://{address}") as awaited:
            with pytest.raises(TransportError):
                await awaited.call(b"")


def test_typed_errors_and_a_proxys_page() -> None:
    def script(sock: socket.socket) -> None:
        read_request(sock)
        sock.sendall(reply(ServiceFull("no room", sessions=9).to_wire(), status="503 Service Unavailable"))
        read_request(sock)
        sock.sendall(reply(b"<html>Bad Gateway</html>", status="502 Bad Gateway"))

    with scripted(script) as (address, _), Client(f"http://{address}") as client:
        with pytest.raises(ServiceFull, match="no room") as caught:
            client.start()
        assert caught.value.details == {"sessions": 9}
        with pytest.raises(TransportError, match=r"status 502.*Bad Gateway"):
            client.start()


def test_an_answer_given_while_the_body_is_still_on_its_way() -> None:
    def refuse(sock: socket.socket) -> None:
        sock.recv(100)
        sock.sendall(reply(BodyTooLarge("too much").to_wire(), status="413 Content Too Large"))
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(1 << 20):
            pass

    with scripted(refuse) as (address, _), Client(f"http://{address}") as client, pytest.raises(BodyTooLarge):
        client.call(bytes(8 << 20))


def test_threads_of_one_client_take_turns() -> None:
    with scripted(_answer_all) as (address, connections), Client(f"http://{address}") as client:
        replies: list[bytes] = []
        threads = [threading.Thread(target=lambda: replies.append(client.call(b""))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert replies == [b"again"] * 8
        assert connections == [0]


PLAIN = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2;x=y\r\nhe\r\n3\r\nllo\r\n0\r\nTrailer: t\r\n\r\n"
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + PLAIN
CLOSING = b"HTTP/1.1 200 OK\r\nconnection: Close\r\ncontent-length: 5\r\n\r\nhello"
OLD = b"HTTP/1.0 200 OK\r\ncontent-length: 5\r\n\r\nhello"
UNTIL_END = b"HTTP/1.1 200 OK\r\n\r\nhello"


@pytest.mark.parametrize(
    ("data", "keep_alive"), [(PLAIN, True), (CHUNKED, True), (INTERIM, True), (CLOSING, False), (OLD, False)]
)
@pytest.mark.parametrize("at_a_time", [1, 7, 10_000])
def test_whole_replies(data: bytes, keep_alive: bool, at_a_time: int) -> None:
    reply = HttpReply()
    pieces = [data[start : start + at_a_time] for start in range(0, len(data), at_a_time)]
    assert [reply.feed(piece) for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert (reply.status, reply.body, reply.keep_alive) == (200, b"hello", keep_alive)


def test_reply_that_ends_with_the_connection() -> None:
    reply = HttpReply()
    assert not reply.feed(UNTIL_END)
    assert reply.end()
    assert (reply.body, reply.keep_alive) == (b"hello", False)


@pytest.mark.parametrize("data", [PLAIN, CHUNKED, INTERIM])
def test_a_cut_reply_is_not_complete(data: bytes) -> None:
    for cut in range(len(data)):
        reply = HttpReply()
        reply.feed(data[:cut])
        assert not reply.end()


def test_empty_replies() -> None:
    for data in (b"HTTP/1.1 204 No Content\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"):
        reply = HttpReply()
        assert reply.feed(data)
        assert (reply.body, reply.keep_alive) == (b"", True)


def test_more_than_the_reply_makes_the_connection_unusable() -> None:
    reply = HttpReply()
    assert reply.feed(PLAIN + b"HTTP/1.1")
    assert (reply.body, reply.keep_alive) == (b"hello", False)


@pytest.mark.parametrize(
    "junk",
    [
        b"SSH-2.0-OpenSSH\r\n",
        b"\x16\x03\x01",
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"x" * MAX_HEAD_BYTES,
        b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n-5\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nabcd\r\n",
    ],
)
def test_a_malformed_reply_is_refused(junk: bytes) -> None:
    with pytest.raises(TransportError):
        HttpReply().feed(junk)


@given(st.lists(st.binary(max_size=40), max_size=10), st.sampled_from([b"", PLAIN[:-2], CHUNKED[:-20]]))
def test_any_bytes_give_a_reply_or_a_transport_error(pieces: list[bytes], start: bytes) -> None:
    reply = HttpReply()
    try:
        for piece in [start, *pieces]:
            if reply.feed(piece):
                break
    except TransportError:
        pass
