"""The replica's connections to its peers."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from brayx.actor.doors.asgi import DoorApp
from brayx.actor.doors.native import DoorLimits, Listener
from brayx.actor.doors.ws1 import WebSockets
from brayx.cluster.peers import CONSOLE_PREFIX, ENDED_PREFIX, LEFT_PREFIX, ForPeers, PeerConnection, PeerDied, Peers
from brayx.errors import Overloaded
from brayx.gamecore.protocol import StepKind, StepRequest
from brayx.gamecore.transports.http import AsyncHttpTransport
from tests.unit.actor.doors.test_asgi import TableService


def secret() -> str:
    return "between us"


class _Closing:
    def __init__(self, listener: Listener) -> None:
        self.aclose = listener.close


def door_for_peers(
    table: TableService, received: list[tuple[str, StepRequest]] | None = None, *, closed: bool = True
) -> Listener:
    """A listener for peers that collects their messages."""
    received = [] if received is None else received
    websockets = WebSockets(DoorApp(table), DoorLimits())

    async def left(request: StepRequest) -> None:
        received.append((LEFT_PREFIX, request))

    async def ended(request: StepRequest) -> None:
        received.append((ENDED_PREFIX, request))

    async def asked(request: StepRequest) -> bytes:
        if not request.body:
            raise Overloaded("no question")
        return request.body.upper()

    peers = ForPeers(table.submit, left, ended, asked, secret)
    return Listener(table, lambda door: PeerConnection(door, websockets, peers, closed=closed), DoorLimits())


def is_open(transport: AsyncHttpTransport) -> bool:
    return transport._connection is not None


async def test_no_more_connections_are_kept_than_allowed_and_dropped_ones_are_closed() -> None:
    peers, table = Peers(secret, max_idle=2), TableService()
    listener = door_for_peers(table)
    await listener.open("127.0.0.1", 0)
    async with contextlib.aclosing(_Closing(listener)):
        address = "http://{}:{}".format(*listener.address)
        transports = [peers.take(address) for _ in range(3)]
        for transport in transports:
            assert await transport.step(StepRequest(StepKind.CALL, "", b"x"), 5.0) == b"x"
        for transport in transports:
            await peers.put_back(address, transport)
        assert [is_open(transport) for transport in transports] == [True, True, False]
        assert peers.take(address) is transports[1]
        await peers.drop(address)
        assert [is_open(transport) for transport in transports] == [False, True, False]
        await peers.put_back(address, transports[1])
        await peers.close()
        assert not is_open(transports[1])


async def test_a_peer_is_notified_of_ended_sessions_and_connections() -> None:
    received: list[tuple[str, StepRequest]] = []
    table = TableService()
    listener = door_for_peers(table, received)
    await listener.open("127.0.0.1", 0)
    left = StepRequest(StepKind.STOP, "s", b"1", holder="http://127.0.0.1:1#name")
    ended = StepRequest(StepKind.CALL, "", b"taken", holder="http://127.0.0.1:1#name", attached=True)
    messages = [(LEFT_PREFIX, left), (ENDED_PREFIX, ended)]
    async with contextlib.aclosing(_Closing(listener)):
        for prefix, message in messages:
            await Peers(secret).tell("http://{}:{}".format(*listener.address), prefix, message)
    assert received == messages


async def test_a_console_asks_a_peer_and_gets_its_answer_or_its_error() -> None:
    table = TableService()
    listener = door_for_peers(table)
    await listener.open("127.0.0.1", 0)
    peers = Peers(secret, prefix=CONSOLE_PREFIX)
    async with contextlib.aclosing(_Closing(listener)):
        address = "http://{}:{}".format(*listener.address)
        assert await peers.forward(address, StepRequest(StepKind.CALL, "", b"who"), 5.0) == b"WHO"
        refused = await peers.forward(address, StepRequest(StepKind.CALL, "", b""), 5.0)
        assert isinstance(refused, Overloaded)
        assert refused.message == "no question"
        await peers.close()


@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize(
    "shown", ["", "peer-secret: \r\n", "peer-secret: between others\r\n", "peer-secret: between us\r\n"]
)
@pytest.mark.parametrize(
    "target",
    [
        "GET /",
        "POST /step",
        "GET /session",
        "POST /-/peer/step",
        "POST /-/left/step",
        "POST /-/ended/step",
        "POST /-/console/step",
    ],
)
async def test_a_port_for_peers_refuses_requests_without_the_secret(target: str, shown: str, closed: bool) -> None:
    received: list[tuple[str, StepRequest]] = []
    table = TableService()
    listener = door_for_peers(table, received, closed=closed)
    await listener.open("127.0.0.1", 0)
    async with contextlib.aclosing(_Closing(listener)):
        reader, writer = await asyncio.open_connection(*listener.address)
        upgrade = "upgrade: websocket\r\nconnection: upgrade\r\n" if "session" in target else ""
        writer.write(f"{target} HTTP/1.1\r\nhost: x\r\n{shown}{upgrade}content-length: 0\r\n\r\n".encode())
        async with asyncio.timeout(60):
            status = int((await reader.readline()).split()[1])
        writer.close()
    let_in = "between us" in shown or (not closed and "/-/" not in target)
    assert (status != 401) == let_in
    assert bool(received) == (let_in and ("left" in target or "ended" in target))


async def test_the_secret_is_checked_on_each_request_of_a_connection() -> None:
    table = TableService()
    listener = door_for_peers(table)
    await listener.open("127.0.0.1", 0)
    async with contextlib.aclosing(_Closing(listener)):
        reader, writer = await asyncio.open_connection(*listener.address)
        for shown, status in (("peer-secret: between us\r\n", 200), ("", 401)):
            writer.write(f"GET / HTTP/1.1\r\nhost: x\r\n{shown}\r\n".encode())
            async with asyncio.timeout(60):
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                await reader.readexactly(int(head.partition(b"content-length: ")[2].split()[0]))
            assert int(head.split()[1]) == status
        writer.close()


@pytest.mark.parametrize("ends", ["dead", "answers", "silent"])
async def test_a_peer_is_dead_once_its_listener_is_gone_not_when_a_connection_breaks(
    ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed process closes its connections before its listener, or after it."""
    monkeypatch.setattr("brayx.cluster.peers._PROBE_TIMEOUT_S", 0.5)
    connections, over = 0, asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.readline()
        if connections == 1:
            pass  # the request's own connection breaks while the listener is still open
        elif ends == "dead":
            server.close()
        elif ends == "answers":
            writer.write(b"HTTP/1.1 401 Unauthorized\r\n\r\n")
        else:
            await over.wait()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        address = "http://{}:{}".format(*server.sockets[0].getsockname())
        with pytest.raises(PeerDied if ends == "dead" else Overloaded):
            await Peers(secret).forward(address, StepRequest(StepKind.TICK, "s", b"x"), 60.0)
        over.set()
    assert connections == 2
