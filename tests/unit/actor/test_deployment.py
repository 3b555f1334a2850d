"""The replica's connections to its peers. The replica itself is tested on Ray."""

from __future__ import annotations

from brayx.actor.deployment import Peers
from brayx.actor.doors.asgi import DoorApp
from brayx.gamecore.protocol import StepKind, StepRequest
from brayx.gamecore.transports.http import AsyncHttpTransport
from tests.unit.actor.doors.test_asgi import TableService
from tests.unit.gamecore.echo_server import serving


def is_open(transport: AsyncHttpTransport) -> bool:
    return transport._connection is not None


async def test_no_more_connections_are_kept_than_allowed_and_dropped_ones_are_closed() -> None:
    peers = Peers(max_idle=2)
    with serving(DoorApp(TableService())) as host:
        address = f"http://{host}"
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
