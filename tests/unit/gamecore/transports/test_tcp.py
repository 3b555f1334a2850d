"""The TCP transports against servers that misbehave."""

from __future__ import annotations

import asyncio
import socket
import struct

import psutil
import pytest

from brayx.errors import (
    BrayxError,
    ConfigError,
    ConnectionLost,
    DeadlineExceeded,
    TooManyConnections,
    TransportError,
)
from brayx.gamecore import AsyncClient, Client
from brayx.gamecore.tcp import (
    NO_REQUEST,
    REQUEST_HEAD,
    encode_error,
    encode_reply,
)
from tests.unit.gamecore.scripted_server import Late, held, reset, scripted
from tests.waiting import until, until_awaited


def test_tcp_has_no_path() -> None:
    for url in ("tcp://h", "tcp://h:8101/"):
        Client(url).close()
    with pytest.raises(ConfigError, match="no paths"):
        Client("tcp://h/games")


def take(sock: socket.socket) -> tuple[bytes, int]:
    """One request: its session and time."""
    head = sock.recv(REQUEST_HEAD.size, socket.MSG_WAITALL)
    *sizes, time_ = REQUEST_HEAD.unpack(head)
    rest = sock.recv(sum(sizes), socket.MSG_WAITALL) if sum(sizes) else b""
    return rest[: sizes[0]], time_


def _answer_all(sock: socket.socket) -> None:
    while True:
        try:
            session, time_ = take(sock)
        except struct.error:
            return
        sock.sendall(encode_reply(session, b"again", time_))


def _answer_one(sock: socket.socket) -> None:
    session, time_ = take(sock)
    sock.sendall(encode_reply(session, b"one", time_))


async def test_one_connection_is_kept_and_times_go_up() -> None:
    times: list[int] = []

    def script(sock: socket.socket) -> None:
        for _ in range(3):
            session, time_ = take(sock)
            times.append(time_)
            sock.sendall(encode_reply(session, b"x", time_))

    with scripted(script, script) as (address, connections):
        with Client(f"tcp://{address}") as client:
            assert [client.call(b"") for _ in range(3)] == [b"x"] * 3
        async with AsyncClient(f"tcp://{address}") as awaited:
            assert [await awaited.call(b"") for _ in range(3)] == [b"x"] * 3
        assert connections == [0, 1]
    assert times == [1, 2, 3] * 2


async def test_a_connection_closed_while_idle_is_replaced_before_sending() -> None:
    with (
        scripted(_answer_one, _answer_one, _answer_all) as (address, connections),
        Client(f"tcp://{address}") as client,
    ):
        for _ in range(2):
            client.call(b"")
            until(lambda: held(address) == [psutil.CONN_CLOSE_WAIT], "the service's close arriving")
        client.call(b"")
        assert connections == [0, 1, 2]
    with scripted(_answer_one, _answer_one, _answer_all) as (again, connections):
        async with AsyncClient(f"tcp://{again}") as awaited:
            for _ in range(2):
                await awaited.call(b"")
                await until_awaited(lambda: held(again) == [], "the service's close arriving")
            await awaited.call(b"")
            assert connections == [0, 1, 2]


def _die_before_the_reply(sock: socket.socket) -> None:
    take(sock)


def _die_within_the_reply(sock: socket.socket) -> None:
    session, time_ = take(sock)
    sock.sendall(encode_reply(session, b"whole", time_)[:-2])


def _reset_before_the_reply(sock: socket.socket) -> None:
    take(sock)
    reset(sock)


@pytest.mark.parametrize("die", [_die_before_the_reply, _die_within_the_reply, _reset_before_the_reply])
async def test_a_tick_is_never_sent_twice(die: object) -> None:
    def script(sock: socket.socket) -> None:
        _answer_one(sock)
        die(sock)  # type: ignore[operator]

    with scripted(script, _answer_all) as (address, connections), Client(f"tcp://{address}") as client:
        client.start()
        with pytest.raises(ConnectionLost, match="may have been applied"):
            client.tick(b"x")
        assert connections == [0]
        assert client.tick(b"by the game's own decision") == b"again"
    with scripted(script, _answer_all) as (address, connections):
        async with AsyncClient(f"tcp://{address}") as awaited:
            await awaited.start()
            with pytest.raises(ConnectionLost, match="may have been applied"):
                await awaited.tick(b"x")
            assert connections == [0]
            assert await awaited.tick(b"by the game's own decision") == b"again"


async def test_a_late_reply_is_not_taken_for_the_next() -> None:
    def answer(sock: socket.socket) -> bytes:
        session, time_ = take(sock)
        return encode_reply(session, b"late", time_)

    def script(sock: socket.socket) -> None:
        _answer_one(sock)
        late(sock)

    for credentials in ({}, {"key": "k", "time": "17", "token": "t"}):  # where every frame has the same time
        late = Late(answer)
        with (
            scripted(script, _answer_all) as (address, _),
            Client(f"tcp://{address}", **credentials) as client,  # type: ignore[arg-type]
        ):
            client.call(b"")
            client.timeout_s, timeout_s = 0.2, client.timeout_s
            with pytest.raises(DeadlineExceeded, match="no reply to the stateless call") as caught:
                client.call(b"")
            assert caught.value.details["layer"] == "tcp"
            late.send()
            client.timeout_s = timeout_s
            assert client.call(b"") == b"again"
        late = Late(answer)
        with scripted(script, _answer_all) as (address, _):
            async with AsyncClient(f"tcp://{address}", **credentials) as awaited:  # type: ignore[arg-type]
                await awaited.call(b"")
                awaited.timeout_s = 0.2
                with pytest.raises(DeadlineExceeded):
                    await awaited.call(b"")
                await asyncio.to_thread(late.send)
                awaited.timeout_s = timeout_s
                assert await awaited.call(b"") == b"again"


async def _errors_of(script: object, scripts: int = 2) -> list[BrayxError]:
    """The errors that a stateless call raises, with each client."""
    with scripted(*[script] * scripts) as (address, _):  # type: ignore[list-item]
        with Client(f"tcp://{address}") as client, pytest.raises(BrayxError) as first:
            client.call(b"")
        async with AsyncClient(f"tcp://{address}") as awaited:
            with pytest.raises(BrayxError) as second:
                await awaited.call(b"")
    return [first.value, second.value]


async def test_a_reply_of_another_time_is_an_error() -> None:
    def stray(sock: socket.socket) -> None:
        session, time_ = take(sock)
        sock.sendall(encode_reply(session, b"", time_ + 1))

    for error in await _errors_of(stray):
        assert type(error) is TransportError
        assert "none was sent but" in error.message


async def test_a_server_that_is_not_a_tcp_door() -> None:
    def babble(sock: socket.socket) -> None:
        sock.sendall(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")
        sock.recv(1000)

    for error in await _errors_of(babble):
        assert type(error) is TransportError
        assert "is this a brayx TCP door?" in error.message


async def test_an_error_of_the_connection_is_raised() -> None:
    def full(sock: socket.socket) -> None:
        sock.sendall(encode_error(b"", TooManyConnections("4096 are open"), ~NO_REQUEST))
        sock.recv(1000)

    for error in await _errors_of(full):
        assert type(error) is TooManyConnections
        assert error.message == "4096 are open"
