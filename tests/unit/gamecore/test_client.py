"""Both clients over both doors against the echo server: what a game programmer meets."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import pytest

from brayx.errors import AgentError, ConfigError, ConnectFailed, ProtocolError, SessionExists, SessionUnknown
from brayx.gamecore import AsyncClient, Client, StepKind
from tests.unit.gamecore.echo_server import EchoApp, serving


def _answer(body: bytes) -> bytes:
    if body == b"raise":
        raise AgentError("the agent raised KeyError", agent="echo")
    return body


@pytest.fixture(scope="module")
def app() -> EchoApp:
    return EchoApp(_answer)


@pytest.fixture(scope="module")
def address(app: EchoApp) -> Iterator[str]:
    with serving(app) as address:
        yield address


@pytest.fixture(params=["http", "ws"])
def url(request: pytest.FixtureRequest, address: str) -> str:
    return f"{request.param}://{address}"


def test_a_game(url: str, app: EchoApp) -> None:
    with Client(url) as client:
        assert not client.session
        assert client.start("hello") == b"started"
        session = str(client.session)
        assert session in app.running
        assert client.tick("tick é") == "tick é".encode()
        assert client.stop(b"bye") == b"stopped"
        assert session not in app.running
    with Client(url) as client:
        client.start(session="second-game")
        assert client.session == "second-game"
        client.stop()
        assert "second-game" not in app.running
        client.start(session="second-game")
    assert "second-game" not in app.running


async def test_a_game_awaited(url: str, app: EchoApp) -> None:
    async with AsyncClient(url) as client:
        assert await client.start("hello") == b"started"
        assert await client.tick(b"x" * 300_000) == b"x" * 300_000
        assert await client.stop() == b"stopped"
        await client.start(session="second-game")
    assert "second-game" not in app.running


def test_credentials_are_sent(url: str, app: EchoApp) -> None:
    with Client(url, key="k", time="17", token="secret") as client:
        client.start(session="credentials")
    if url.startswith("http"):
        request = next(r for r in app.requests if r.session == "credentials")
        assert (request.kind, request.key, request.time, request.token) == (StepKind.START, "k", "17", "secret")


def test_misuse_is_told_here(url: str) -> None:
    with Client(url) as client:
        for request in (client.tick, client.stop):
            with pytest.raises(SessionUnknown, match="call start first"):
                request(b"")
        client.start()
        with pytest.raises(SessionExists, match=client.session):
            client.start()
        assert client.tick(b"on") == b"on"
    with Client(url) as client, pytest.raises(ProtocolError, match="'a b'"):
        client.start(session="a b")


async def test_misuse_awaited_is_told_here(url: str) -> None:
    async with AsyncClient(url) as client:
        with pytest.raises(SessionUnknown, match="call start first"):
            await client.tick(b"")
        await client.start()
        with pytest.raises(SessionExists):
            await client.start()


def test_an_agent_error_ends_the_session_here_too(url: str) -> None:
    with Client(url) as client:
        client.start()
        with pytest.raises(AgentError, match="KeyError") as caught:
            client.tick(b"raise")
        assert caught.value.details == {"agent": "echo"}
        assert client.session is None
        client.start()
        assert client.tick(b"anew") == b"anew"


async def test_an_agent_error_awaited(url: str) -> None:
    async with AsyncClient(url) as client:
        await client.start()
        with pytest.raises(AgentError):
            await client.tick(b"raise")
        await client.start()
        assert await client.tick(b"anew") == b"anew"


def test_an_exception_closes_without_stop(address: str, app: EchoApp) -> None:
    def play() -> None:
        with Client(f"http://{address}") as client:
            client.start(session="left-behind")
            raise KeyError

    with pytest.raises(KeyError):
        play()
    assert "left-behind" in app.running
    app.running.discard("left-behind")


def test_stateless_calls(address: str) -> None:
    with Client(f"http://{address}") as client:
        assert client.call(b"now") == b"now"
    with Client(f"ws://{address}") as client, pytest.raises(ProtocolError, match="use http://"):
        client.call(b"now")


async def test_stateless_calls_awaited(address: str) -> None:
    async with AsyncClient(f"http://{address}") as client:
        replies = await asyncio.gather(*(client.call(str(index)) for index in range(20)))
        assert replies == [str(index).encode() for index in range(20)]
    async with AsyncClient(f"ws://{address}") as client:
        with pytest.raises(ProtocolError, match="use http://"):
            await client.call(b"now")


@pytest.fixture
def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.mark.parametrize("scheme", ["http", "ws"])
async def test_nobody_listens(scheme: str, closed_port: int) -> None:
    url = f"{scheme}://127.0.0.1:{closed_port}"
    with Client(url) as client, pytest.raises(ConnectFailed, match=rf"{url}.*is the service running") as caught:
        client.start()
    assert caught.value.details["url"] == url
    async with AsyncClient(url) as awaited:
        with pytest.raises(ConnectFailed, match=f"{url}.*is the service running"):
            await awaited.start()


@pytest.mark.parametrize("scheme", ["http", "ws"])
def test_unknown_host(scheme: str) -> None:
    with Client(f"{scheme}://no-such-host.invalid") as client, pytest.raises(ConnectFailed, match="does not resolve"):
        client.start()


def test_bad_url() -> None:
    with pytest.raises(ConfigError, match="gopher"):
        Client("gopher://h")


@pytest.mark.parametrize("scheme", ["http", "ws"])
async def test_a_wrong_path_is_told(scheme: str, address: str) -> None:
    with Client(f"{scheme}://{address}/wrong") as client, pytest.raises(ProtocolError, match="no such path"):
        client.start()
    async with AsyncClient(f"{scheme}://{address}/wrong") as awaited:
        with pytest.raises(ProtocolError, match="no such path"):
            await awaited.start()


async def test_a_cancelled_tick_leaves_no_late_reply(url: str) -> None:
    async with AsyncClient(url) as client:
        await client.start()
        tick = asyncio.create_task(client.tick(b"first"))
        await asyncio.sleep(0)
        tick.cancel()
        with pytest.raises(asyncio.CancelledError):
            await tick
        try:
            assert await client.tick(b"second") == b"second"
        except SessionUnknown:  # a WebSocket's session has ended with its connection
            await client.start()
            assert await client.tick(b"second") == b"second"
