"""Clients that number their ticks, over connections that break: applied once, reported once, failed in time."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest

from brayx.errors import (
    AgentError,
    BadBody,
    BrayxError,
    ConnectFailed,
    ConnectionLost,
    OutOfSequence,
    Overloaded,
    SessionLost,
    SessionResumed,
    SessionUnknown,
)
from brayx.gamecore import AsyncClient, Client
from brayx.gamecore.protocol import StepKind, StepRequest
from tests.unit.gamecore.echo_server import EchoApp, serving, serving_tcp
from tests.unit.gamecore.relay import Relay, When, relaying
from tests.waiting import until

WINDOW_S = 20.0


class Service(EchoApp):
    """The echo, which raises what a test has put into `errors` for the next requests of a kind."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: dict[StepKind, list[BrayxError]] = {}

    def step(self, request: StepRequest) -> bytes:
        errors = self.errors.get(request.kind)
        if errors:
            error = errors.pop(0)
            if isinstance(error, SessionLost):
                self.running.discard(request.session)
            raise error
        return super().step(request)


class Play:
    """One client, blocking or asynchronous, behind the same awaited calls."""

    def __init__(self, client: Client | AsyncClient) -> None:
        self.client = client

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        call = getattr(self.client, name)

        async def made(*args: Any, **kwargs: Any) -> Any:
            if isinstance(self.client, Client):
                return await asyncio.to_thread(call, *args, **kwargs)
            done = call(*args, **kwargs)
            return await done if inspect.isawaitable(done) else done

        return made


@pytest.fixture(params=["http", "ws", "tcp"], scope="module")
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def running(scheme: str) -> Iterator[tuple[Service, str]]:
    service = Service()
    with serving_tcp(service.answered) if scheme == "tcp" else serving(service) as address:
        yield service, address


@pytest.fixture
def service(running: tuple[Service, str]) -> Service:
    service, _ = running
    for part in (service.errors, service.running, service.requests, service.applied, service.kept):
        part.clear()
    return service


@pytest.fixture
def relay(running: tuple[Service, str], service: Service) -> Iterator[Relay]:
    with relaying(running[1]) as relay:
        yield relay


@pytest.fixture(params=[Client, AsyncClient])
async def make(request: pytest.FixtureRequest, relay: Relay, scheme: str) -> AsyncIterator[Callable[..., Play]]:
    """Makes a client of the relay."""
    made: list[Play] = []

    def make(**options: Any) -> Play:
        options = {"timeout_s": 10.0, "reconnect_s": WINDOW_S, **options}
        made.append(Play(request.param(f"{scheme}://{relay.address}", **options)))
        return made[-1]

    yield make
    for play in made:
        await play.close()


@pytest.mark.parametrize("breaks", [("before",), ("after",), ("before", "after", "after", "before")], ids="-".join)
async def test_ticks_are_applied_once_each_in_order(
    make: Callable[..., Play], service: Service, relay: Relay, breaks: tuple[When, ...], scheme: str
) -> None:
    play = make()
    await play.start()
    bodies = [str(number).encode() for number in range(12)]
    for number, body in enumerate(bodies):
        if number in (3, 7, 8):
            # Over WebSocket the first piece of a new connection is its handshake, which breaks too.
            relay.break_next(*breaks)
        assert await play.tick(body) == body
    assert [(seq, body) for _, seq, body in service.applied] == list(enumerate(bodies))
    assert relay.connections >= 4
    await play.stop(b"")
    assert not service.running


async def test_a_start_is_never_sent_twice(make: Callable[..., Play], service: Service, relay: Relay) -> None:
    play = make()
    relay.break_next("after")
    with pytest.raises(ConnectionLost):
        await play.start()
    assert play.client.session is None
    await play.start()
    assert await play.tick(b"x") == b"x"
    await play.stop()


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_lost_stop_is_repeated(make: Callable[..., Play], service: Service, relay: Relay, when: When) -> None:
    play = make()
    await play.start()
    assert await play.tick(b"x") == b"x"
    relay.break_next(when)
    assert await play.stop() == (b"stopped" if when == "before" else b"")
    assert play.client.session is None
    assert not service.running
    assert sum(request.kind is StepKind.STOP for request in service.requests) == (1 if when == "before" else 2)


async def test_an_unknown_session_is_an_error_if_no_stop_was_lost(make: Callable[..., Play], service: Service) -> None:
    play = make()
    await play.start()
    await play.tick(b"x")
    service.running.clear()
    with pytest.raises(SessionUnknown):
        await play.stop()
    assert play.client.session is None


async def test_the_service_comes_back_in_time(make: Callable[..., Play], service: Service, relay: Relay) -> None:
    play = make()
    await play.start()
    await play.tick(b"0")
    relay.down()
    back = threading.Timer(0.3, relay.up)
    back.start()
    assert await play.tick(b"1") == b"1"
    back.join()
    await play.stop()
    assert [(seq, body) for _, seq, body in service.applied] == [(0, b"0"), (1, b"1")]


async def test_the_service_does_not_come_back(make: Callable[..., Play], service: Service, relay: Relay) -> None:
    play = make(reconnect_s=0.3)
    await play.start()
    await play.tick(b"0")
    relay.break_next("down")
    for _ in range(2):
        with pytest.raises((ConnectionLost, ConnectFailed)):
            await play.tick(b"1")
    assert play.client.session is not None
    relay.up()
    # The same number again: the game need not know whether tick 1 was applied.
    assert await play.tick(b"1") == b"1"
    assert [(seq, body) for _, seq, body in service.applied] == [(0, b"0"), (1, b"1")]
    await play.stop()


async def test_zero_numbers_ticks_and_leaves_reconnecting_to_the_game(
    make: Callable[..., Play], service: Service, relay: Relay
) -> None:
    play = make(reconnect_s=0)
    await play.start()
    await play.tick(b"0")
    relay.break_next("after")
    with pytest.raises(ConnectionLost):
        await play.tick(b"1")
    assert await play.tick(b"1") == b"1"
    assert [(seq, body) for _, seq, body in service.applied] == [(0, b"0"), (1, b"1")]
    await play.stop()


async def test_without_the_keyword_nothing_is_numbered_or_sent_twice(
    make: Callable[..., Play], service: Service, relay: Relay
) -> None:
    play = make(reconnect_s=None)
    await play.start()
    await play.tick(b"0")
    relay.break_next("after")
    with pytest.raises(ConnectionLost):
        await play.tick(b"1")
    assert [(seq, body) for _, seq, body in service.applied] == [(None, b"0"), (None, b"1")]
    assert relay.connections == 1


async def test_a_short_overload_is_waited_out(make: Callable[..., Play], service: Service) -> None:
    play = make()
    await play.start()
    service.errors[StepKind.TICK] = [Overloaded("the directory did not answer") for _ in range(3)]
    assert await play.tick(b"0") == b"0"
    assert not service.errors[StepKind.TICK]
    service.errors[StepKind.STOP] = [Overloaded("the directory did not answer")]
    assert await play.stop() == b"stopped"


@pytest.mark.parametrize("applied", [True, False])
async def test_a_stop_that_a_peer_may_have_applied_is_done_when_its_session_is_gone(
    make: Callable[..., Play], service: Service, applied: bool
) -> None:
    play = make()
    await play.start()
    unreached = Overloaded("its replica could not be reached", layer="peer", maybe_applied=applied)
    service.errors[StepKind.STOP] = [unreached, SessionUnknown("it has ended")]
    with contextlib.nullcontext() if applied else pytest.raises(SessionUnknown):
        await play.stop()
    assert not service.errors[StepKind.STOP]


async def test_a_long_overload_is_an_error(make: Callable[..., Play], service: Service) -> None:
    play = make(reconnect_s=0.2)
    await play.start()
    service.errors[StepKind.TICK] = [Overloaded("the directory did not answer") for _ in range(1000)]
    with pytest.raises(Overloaded):
        await play.tick(b"0")
    service.errors.clear()
    assert await play.tick(b"0") == b"0"
    await play.stop()


async def test_a_resumed_session_continues_from_its_tick(make: Callable[..., Play], service: Service) -> None:
    play = make()
    await play.start()
    for number in range(5):
        await play.tick(str(number))
    session = str(play.client.session)
    service.kept[session] = (2, b"2")
    service.errors[StepKind.TICK] = [SessionResumed("tick 3 comes next", tick=3)]
    with pytest.raises(SessionResumed):
        await play.tick(b"5")
    assert play.client.session == session
    assert await play.tick(b"three again") == b"three again"
    assert service.applied[-1] == (session, 3, b"three again")
    await play.stop()


async def test_a_number_out_of_sequence_is_raised_and_corrected(make: Callable[..., Play], service: Service) -> None:
    play = make()
    await play.start()
    await play.tick(b"0")
    session = str(play.client.session)
    service.kept[session] = (6, b"another client's")
    with pytest.raises(OutOfSequence, match="expected 7"):
        await play.tick(b"1")
    assert play.client.session == session
    assert await play.tick(b"7") == b"7"
    await play.stop()


@pytest.mark.parametrize("error", [SessionLost("owner died", reason="owner_died"), AgentError("it raised")], ids=repr)
async def test_an_error_that_ends_a_session_ends_it_in_the_client(
    make: Callable[..., Play], service: Service, error: BrayxError
) -> None:
    play = make()
    await play.start()
    await play.tick(b"0")
    service.errors[StepKind.TICK] = [error]
    with pytest.raises(type(error)):
        await play.tick(b"1")
    assert play.client.session is None
    await play.start()
    assert await play.tick(b"anew") == b"anew"
    assert service.applied[-1][1:] == (0, b"anew")
    await play.stop()


async def test_a_refused_tick_keeps_its_number(make: Callable[..., Play], service: Service) -> None:
    play = make()
    await play.start()
    service.errors[StepKind.TICK] = [BadBody("no JSON")]
    with pytest.raises(BadBody):
        await play.tick(b"bad")
    assert await play.tick(b"good") == b"good"
    assert service.applied[-1][1:] == (0, b"good")
    await play.stop()


async def test_ticks_side_by_side_get_a_number_each(scheme: str, relay: Relay, service: Service) -> None:
    url = f"{scheme}://{relay.address}"
    async with AsyncClient(url, reconnect_s=WINDOW_S) as client:
        await client.start()
        assert await asyncio.gather(*(client.tick(str(n)) for n in range(20))) == [str(n).encode() for n in range(20)]
    with Client(url, reconnect_s=WINDOW_S) as blocking:
        blocking.start()
        replies: list[bytes] = []
        threads = [threading.Thread(target=lambda: replies.append(blocking.tick(b"x"))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert replies == [b"x"] * 8
    assert [seq for _, seq, _ in service.applied] == [*range(20), *range(8)]


async def test_a_cancelled_tick_keeps_its_number(scheme: str, relay: Relay, service: Service) -> None:
    async with AsyncClient(f"{scheme}://{relay.address}", reconnect_s=WINDOW_S) as client:
        await client.start()
        assert await client.tick(b"0") == b"0"
        relay.down()
        tick = asyncio.create_task(client.tick(b"1"))
        await asyncio.sleep(0.1)
        tick.cancel()
        with pytest.raises(asyncio.CancelledError):
            await tick
        relay.up()
        assert await client.tick(b"1") == b"1"
    assert [(seq, body) for _, seq, body in service.applied] == [(0, b"0"), (1, b"1")]


def test_a_closed_websocket_ends_a_numbered_session_too() -> None:
    service = Service()
    with serving(service) as address:
        client = Client(f"ws://{address}", reconnect_s=WINDOW_S)
        client.start()
        client.tick(b"0")
        client.close()
        until(lambda: not service.running)
