"""Clients without a network: a service in this process, on the caller's loop or on one in a separate thread."""

from __future__ import annotations

import asyncio
import threading

import pytest

from brayx.errors import ConfigError, ConnectFailed, ConnectionLost, DeadlineExceeded, ProtocolError, SessionUnknown
from brayx.gamecore import AsyncClient, Client, ServiceThread, StepKind, StepRequest
from tests.unit.gamecore.echo_server import EchoApp


class Echo:
    """The echo as a service, which never answers the body ``stall``; `both` is set when two such wait."""

    def __init__(self) -> None:
        self.app = EchoApp()
        self.threads: set[str] = set()
        self.stalled = 0
        self.both = threading.Event()

    async def step(self, request: StepRequest) -> bytes:
        self.threads.add(threading.current_thread().name)
        if request.body == b"stall":
            self.stalled += 1
            if self.stalled == 2:
                self.both.set()
            await asyncio.Event().wait()
        return self.app.step(request)


def test_a_game() -> None:
    echo = Echo()
    with ServiceThread(echo) as running:
        with Client(running) as client:
            assert client.url == "local:"
            assert client.start("hello") == b"started"
            assert client.tick("tick é") == "tick é".encode()
            assert client.call(b"now") == b"now"
            with Client(running) as other:
                other.start()
                assert other.tick(b"beside") == b"beside"
                assert len(echo.app.running) == 2
            assert client.stop() == b"stopped"
            with pytest.raises(SessionUnknown):
                client.tick(b"")
        assert not echo.app.running
    assert echo.threads == {"brayx-service"}


async def test_a_game_awaited_on_this_loop() -> None:
    echo = Echo()
    async with AsyncClient(echo) as client:
        assert await client.start() == b"started"
        assert await asyncio.gather(*(client.tick(str(n)) for n in range(5))) == [str(n).encode() for n in range(5)]
    assert not echo.app.running
    assert echo.threads == {threading.current_thread().name}


async def test_a_game_awaited_on_another_loop() -> None:
    echo = Echo()
    with ServiceThread(echo) as running:
        async with AsyncClient(running) as client:
            await client.start()
            assert await client.tick(b"x") == b"x"
    assert echo.threads == {"brayx-service"}


def test_numbered_ticks() -> None:
    echo = Echo()
    with ServiceThread(echo) as running, Client(running, reconnect_s=1.0) as client:
        client.start()
        for number in range(3):
            client.tick(str(number))
    assert [seq for _, seq, _ in echo.app.applied] == [0, 1, 2]


async def test_typed_errors_come_through() -> None:
    echo = Echo()
    with ServiceThread(echo) as running, Client(running) as client, pytest.raises(ProtocolError, match="'a b'"):
        client.start(session="a b")
    async with AsyncClient(echo) as awaited:
        await awaited.start()
        echo.app.running.clear()
        with pytest.raises(SessionUnknown):
            await awaited.tick(b"")
        assert awaited.session is None


async def test_deadlines() -> None:
    echo = Echo()
    with ServiceThread(echo) as running:
        with Client(running, timeout_s=0.1) as client:
            with pytest.raises(DeadlineExceeded, match="no reply to the stateless call") as caught:
                client.call(b"stall")
            assert caught.value.details["layer"] == "local"
            client.timeout_s = 10.0
            assert client.call(b"on") == b"on"
        async with AsyncClient(running, timeout_s=0.1) as awaited:
            with pytest.raises(DeadlineExceeded):
                await awaited.call(b"stall")
    async with AsyncClient(Echo(), timeout_s=0.1) as awaited:
        with pytest.raises(DeadlineExceeded):
            await awaited.call(b"stall")


async def test_the_services_own_timeout_is_not_taken_for_the_clients() -> None:
    class Late:
        async def step(self, request: StepRequest) -> bytes:
            raise TimeoutError("mine")

    with ServiceThread(Late()) as running, Client(running) as client, pytest.raises(TimeoutError, match="mine"):
        client.call(b"")
    async with AsyncClient(Late()) as awaited:
        with pytest.raises(TimeoutError, match="mine"):
            await awaited.call(b"")


async def test_a_service_that_ends_while_it_answers() -> None:
    echo = Echo()
    running = ServiceThread(echo)
    with running, Client(running) as client:
        calls = [asyncio.create_task(asyncio.to_thread(client.call, b"stall"))]
        calls.append(asyncio.create_task(AsyncClient(running).call(b"stall")))
        await asyncio.to_thread(echo.both.wait, 10)
    for error in await asyncio.gather(*calls, return_exceptions=True):
        assert type(error) is ConnectionLost
    with Client(running) as client, pytest.raises(ConnectFailed, match="enter it"):
        client.call(b"")


def test_work_on_the_services_loop() -> None:
    echo = Echo()
    with ServiceThread(echo) as running:
        assert running.run(echo.step(StepRequest(StepKind.CALL, "", b"x"))) == b"x"


def test_an_invalid_service() -> None:
    with pytest.raises(ConfigError, match=r"a URL or a ServiceThread.*got Echo"):
        Client(Echo())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"a URL or a service.*got int"):
        AsyncClient(5)  # type: ignore[arg-type]
