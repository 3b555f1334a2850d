"""The WebSocket transports against applications that close, refuse, stall and ping."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from websockets.frames import Close
from websockets.sync.server import ServerConnection, serve
from websockets.typing import Subprotocol

from brayx.errors import (
    BodyTooLarge,
    BrayxError,
    ConnectionLost,
    DeadlineExceeded,
    ProtocolError,
    ServiceFull,
    SessionExists,
    SessionLost,
    TransportError,
)
from brayx.gamecore import AsyncClient, Client
from brayx.gamecore.transports import websocket
from brayx.gamecore.transports.frames import closed
from tests.unit.gamecore.echo_server import EchoApp, Message, Receive, Send, serving
from tests.unit.gamecore.scripted_server import reply, scripted
from tests.waiting import WAIT_S, until, until_awaited

App = Callable[[Message, Receive, Send], Awaitable[None]]


def _app(*steps: Message) -> App:
    """Accepts, then sends each ASGI message, before which it takes one message; then it is silent."""

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "websocket.accept", "subprotocol": "brayx.v1"})
        for step in steps:
            if step.pop("after_a_message", True):
                await receive()
            await send(step)
        while (await receive())["type"] != "websocket.disconnect":
            pass

    return app


def _message(data: bytes) -> Message:
    return {"type": "websocket.send", "bytes": data}


def _close(code: int, reason: str) -> Message:
    return {"type": "websocket.close", "code": code, "reason": reason}


async def _errors_of(app: Callable[[], App], use: Callable[[Any], Any]) -> list[BrayxError]:
    """The errors that ``use`` raises with each client; it gives awaitables for the asyncio client."""

    def play(client: Client) -> None:
        for request in use(client):
            request()

    async def play_awaited(client: AsyncClient) -> None:
        for request in use(client):
            await request()

    with (
        serving(app()) as address,
        Client(f"ws://{address}") as client,
        pytest.raises(BrayxError) as first,
    ):
        play(client)
    with serving(app()) as address:
        async with AsyncClient(f"ws://{address}") as awaited:
            with pytest.raises(BrayxError) as second:
                await play_awaited(awaited)
    return [first.value, second.value]


async def test_an_error_message_before_the_close_is_raised_in_full() -> None:
    error = SessionExists("x" * 300, session="s")
    cut = error.to_wire()[:123].decode()
    app = lambda: _app(_message(b"E" + error.to_wire()), {**_close(4409, cut), "after_a_message": False})  # noqa: E731
    for raised in await _errors_of(app, lambda client: [client.start]):
        assert type(raised) is SessionExists
        assert raised.message == "x" * 300


async def test_a_close_with_an_error_document() -> None:
    app = lambda: _app(_close(4410, SessionLost("owner died", reason="lost").to_wire().decode()))  # noqa: E731
    for raised in await _errors_of(app, lambda client: [client.start]):
        assert type(raised) is SessionLost
        assert raised.details == {"reason": "lost"}


def test_close_codes() -> None:
    full = ServiceFull("no room for another session: 4096 of 4096 are running" * 3).to_wire()[:123].decode()
    cut = closed("ws://h", Close(4503, full))
    assert type(cut) is ServiceFull
    assert cut.message.startswith("no room for another session")
    assert type(closed("ws://h", Close(4502, "bad gateway"))) is TransportError
    assert type(closed("ws://h", Close(1009, ""))) is BodyTooLarge
    ended = closed("ws://h", Close(4410, "session ended: idle"))
    assert type(ended) is SessionLost
    assert ended.details == {"reason": "idle"}
    assert type(closed("ws://h", Close(4410, SessionLost("gone").to_wire().decode()))) is SessionLost
    assert "1012" in closed("ws://h", Close(1012, "")).message
    assert type(closed("ws://h", Close(1000, "done"))) is ConnectionLost


async def test_a_session_ended_between_two_ticks_is_raised_at_the_next() -> None:
    lost = SessionLost("idle for 60 s", reason="idle")

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "websocket.accept", "subprotocol": "brayx.v1"})
        await receive()
        await send(_message(b"R"))
        await send(_message(b"E" + lost.to_wire()))
        await send(_close(4410, ""))

    with serving(app) as address:
        with Client(f"ws://{address}") as client:
            client.start()
            await asyncio.sleep(0.1)
            with pytest.raises(SessionLost, match="idle for 60 s"):
                client.tick(b"")
            assert client.session is None
        async with AsyncClient(f"ws://{address}") as awaited:
            await awaited.start()
            await asyncio.sleep(0.1)
            with pytest.raises(SessionLost, match="idle for 60 s"):
                await awaited.tick(b"")
            assert awaited.session is None


async def test_timeout_gives_the_connection_up() -> None:
    def in_time(client: Any) -> Any:
        client.timeout_s = 0.2  # not from the beginning, since the start is to be in time
        return client.tick(b"")

    app = lambda: _app(_message(b"R"))  # noqa: E731
    for raised in await _errors_of(app, lambda client: [client.start, lambda: in_time(client)]):
        assert type(raised) is DeadlineExceeded
        assert "no reply to the tick of session" in raised.message
        assert raised.details["layer"] == "websocket"


async def test_handshake_has_a_deadline() -> None:
    stall = lambda sock: sock.recv(1 << 16) and sock.recv(1)  # noqa: E731
    with scripted(stall, stall) as (address, _):
        with (
            Client(f"ws://{address}", timeout_s=0.2) as client,
            pytest.raises(DeadlineExceeded, match="no WebSocket handshake within"),
        ):
            client.start()
        async with AsyncClient(f"ws://{address}", timeout_s=0.2) as awaited:
            with pytest.raises(DeadlineExceeded, match="no WebSocket handshake within"):
                await awaited.start()


@pytest.mark.parametrize(
    ("answer", "expected", "match"),
    [
        (reply(ServiceFull("no room").to_wire(), status="503 Busy"), ServiceFull, "no room"),
        (reply(b"<html>Bad Gateway", status="502 Bad Gateway"), TransportError, "status 502.*Bad Gateway"),
        (b"HTTP/1.1 403 Forbidden\r\n\r\nuntil the end", TransportError, "status 403.*until the end"),
        (reply(b"hello"), TransportError, "status 200.*hello"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", TransportError, "does not answer as a WebSocket"),
        (b"", ConnectionLost, "closed by the service"),
    ],
)
async def test_refused_handshakes(answer: bytes, expected: type[BrayxError], match: str) -> None:
    def script(sock: socket.socket) -> None:
        sock.recv(1 << 16)
        sock.sendall(answer)

    with scripted(script, script) as (address, _):
        with Client(f"ws://{address}") as client, pytest.raises(expected, match=match):
            client.start()
        async with AsyncClient(f"ws://{address}") as awaited:
            with pytest.raises(expected, match=match):
                await awaited.start()


async def test_a_service_without_the_subprotocol() -> None:
    async def app(scope: Message, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        await receive()

    for raised in await _errors_of(lambda: app, lambda client: [client.start]):
        assert type(raised) is ProtocolError
        assert "brayx.v1" in raised.message


async def test_a_message_of_an_unknown_kind() -> None:
    app = lambda: _app(_message(b"R"), _message(b"?what"))  # noqa: E731
    for raised in await _errors_of(app, lambda client: [client.start, lambda: client.tick(b"")]):
        assert type(raised) is ProtocolError
        assert "not R or E" in raised.message


async def test_a_service_that_dies_is_connection_lost() -> None:
    async def app(scope: Message, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "websocket.accept", "subprotocol": "brayx.v1"})
        await receive()
        await send(_message(b"R"))
        await receive()
        # returning drops the TCP connection without a close frame

    for raised in await _errors_of(lambda: app, lambda client: [client.start, lambda: client.tick(b"")]):
        assert type(raised) is ConnectionLost
        assert "may have been applied" in raised.message


async def test_pings_are_answered_while_the_game_thinks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket, "IDLE_CHECK_S", 0.05)
    answered: list[bool] = []

    def ping(connection: ServerConnection) -> None:
        connection.recv()
        connection.send(b"R")
        answered.extend(connection.ping().wait(WAIT_S) for _ in range(3))
        for message in connection:
            connection.send(b"R" + message[1:])  # type: ignore[operator]

    with serve(ping, "127.0.0.1", 0, subprotocols=[Subprotocol("brayx.v1")]) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = "ws://{}:{}".format(*server.socket.getsockname())
        with Client(url) as client:
            client.start()
            until(lambda: answered == [True] * 3, "the pings are answered")
            assert client.tick(b"still here") == b"still here"
        async with AsyncClient(url) as awaited:
            await awaited.start()
            await until_awaited(lambda: answered == [True] * 6, "the pings are answered")
            assert await awaited.tick(b"still here") == b"still here"
    thread.join(WAIT_S)


def test_closing_ends_the_session_at_the_service() -> None:
    app = EchoApp()
    with serving(app) as address:
        client = Client(f"ws://{address}")
        client.start()
        assert len(app.running) == 1
        client.close()
        until(lambda: not app.running)
