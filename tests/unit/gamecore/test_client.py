"""Both clients over every door of the echo server, as a game programmer uses them."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Iterator

import pytest

from brayx.errors import AgentError, ConfigError, ConnectFailed, ProtocolError, SessionExists, SessionUnknown
from brayx.gamecore import AsyncClient, Client
from brayx.gamecore.auth import Keys
from brayx.gamecore.transports import Endpoint
from brayx.ports import free_port
from tests.unit.gamecore.echo_server import EchoApp, serving, serving_tcp


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


@pytest.fixture(scope="module")
def tcp_address(app: EchoApp) -> Iterator[str]:
    with serving_tcp(app.answered) as address:
        yield address


@pytest.fixture(params=["http", "ws", "tcp"])
def url(request: pytest.FixtureRequest, address: str, tcp_address: str) -> str:
    return f"{request.param}://{tcp_address if request.param == 'tcp' else address}"


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


async def test_credentials_are_sent(url: str, app: EchoApp) -> None:
    app.requests.clear()
    with Client(url, key="k", time="17", token="secret") as client:
        client.start()
        client.tick(b"x")
    async with AsyncClient(url, key="k", time="17", token="secret") as awaited:
        await awaited.start()
        await awaited.tick(b"x")
    assert len(app.requests) == 6
    assert {(request.key, request.time, request.token) for request in app.requests} == {("k", "17", "secret")}


SECRET = b"0123456789abcdef"


@pytest.mark.parametrize("secret", [SECRET, SECRET.decode()])
async def test_requests_are_signed_as_a_service_checks_them(url: str, app: EchoApp, secret: bytes | str) -> None:
    app.requests.clear()
    with Client(url, key="k", secret=secret) as client:
        client.start()
        client.tick(b"x")
        client.stop()
        if not url.startswith("ws"):
            client.call(b"x")
    async with AsyncClient(url, key="k", secret=secret, reconnect_s=1.0) as awaited:
        await awaited.start()
        await awaited.tick(b"x")
    keys = Keys({"k": SECRET}, window_s=60.0)
    assert len(app.requests) == (6 if url.startswith("ws") else 7)
    for request in app.requests:
        keys.check(request, time.time())


def test_a_new_token_is_made_when_its_second_has_passed(
    tcp_address: str, app: EchoApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    signed: list[tuple[object, ...]] = []

    def counting(*call: object) -> str:
        signed.append(call)
        return "token"

    monkeypatch.setattr("brayx.gamecore.auth.sign", counting)
    with Client(f"tcp://{tcp_address}", key="k", secret=SECRET) as client:
        client.start(session="signed")
        began = time.time()
        while len(signed) < 2:
            assert time.time() < began + 20
            client.tick(b"x")
        ticks = sum(request.session == "signed" for request in app.requests)
    assert ticks > len(signed)
    assert {call[:3] for call in signed} == {(SECRET, "k", "signed")}
    assert len({call[3] for call in signed}) == len(signed)


@pytest.mark.parametrize(
    "credentials",
    [{"secret": b"s"}, {"key": "k", "secret": b"s", "token": "t"}, {"key": "k", "secret": b"s", "time": "1"}],
)
def test_incomplete_credentials_are_refused(credentials: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="secret needs key"):
        Client("http://h", **credentials)  # type: ignore[arg-type]


def test_a_time_that_a_tcp_frame_cannot_hold(tcp_address: str) -> None:
    with Client(f"tcp://{tcp_address}", key="k", time="now", token="t") as client:
        with pytest.raises(ProtocolError, match="Unix seconds"):
            client.start()
        assert client.session is None


def test_misuse_is_refused_by_the_client(url: str) -> None:
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


async def test_misuse_awaited_is_refused_by_the_client(url: str) -> None:
    async with AsyncClient(url) as client:
        with pytest.raises(SessionUnknown, match="call start first"):
            await client.tick(b"")
        await client.start()
        with pytest.raises(SessionExists):
            await client.start()


def test_an_agent_error_ends_the_session_in_the_client_too(url: str) -> None:
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


def test_stateless_calls(address: str, tcp_address: str) -> None:
    for url in (f"http://{address}", f"tcp://{tcp_address}"):
        with Client(url) as client:
            assert client.call(b"now") == b"now"
    with Client(f"ws://{address}") as client, pytest.raises(ProtocolError, match="use http://"):
        client.call(b"now")


async def test_stateless_calls_awaited(address: str, tcp_address: str) -> None:
    for url in (f"http://{address}", f"tcp://{tcp_address}"):
        async with AsyncClient(url) as client:
            replies = await asyncio.gather(*(client.call(str(index)) for index in range(20)))
            assert replies == [str(index).encode() for index in range(20)]
    async with AsyncClient(f"ws://{address}") as client:
        with pytest.raises(ProtocolError, match="use http://"):
            await client.call(b"now")


@pytest.fixture
def closed_port() -> int:
    return free_port()


@pytest.mark.parametrize("scheme", ["http", "ws", "tcp"])
async def test_a_closed_port_is_a_failed_connection(scheme: str, closed_port: int) -> None:
    url = f"{scheme}://127.0.0.1:{closed_port}"
    with Client(url) as client, pytest.raises(ConnectFailed, match=rf"{url}.*is the service running") as caught:
        client.start()
    assert caught.value.details["url"] == url
    async with AsyncClient(url) as awaited:
        with pytest.raises(ConnectFailed, match=f"{url}.*is the service running"):
            await awaited.start()


@pytest.mark.parametrize("scheme", ["http", "ws", "tcp"])
def test_unknown_host(scheme: str) -> None:
    with Client(f"{scheme}://no-such-host.invalid") as client, pytest.raises(ConnectFailed, match="does not resolve"):
        client.start()


def test_an_untrusted_certificate_says_how_to_trust_it() -> None:
    error = Endpoint.parse("wss://arena").connect_failed(ssl.SSLCertVerificationError("self-signed certificate"))
    assert "SSL_CERT_FILE" in error.message


def test_bad_url() -> None:
    with pytest.raises(ConfigError, match="gopher"):
        Client("gopher://h")


@pytest.mark.parametrize("scheme", ["http", "ws"])
async def test_a_wrong_path_is_an_error(scheme: str, address: str) -> None:
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
