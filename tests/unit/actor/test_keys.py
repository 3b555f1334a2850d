"""Keys with several replicas: a client that one replica accepts is accepted by the session's owner, on every door."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.typing import Subprotocol

from brayx.errors import Unauthorized
from brayx.gamecore.auth import Keys, sign
from brayx.gamecore.client import AsyncClient
from brayx.gamecore.protocol import WS_SUBPROTOCOL, encode_numbered
from brayx.gamecore.v1 import gamecore_pb2 as pb
from tests.unit.cluster.test_replica import DirectoryHandle, Replica
from tests.waiting import until_awaited as until

SECRET = b"a secret that is long enough for one"
OTHER = b"another secret, as long as the one before"


def credentials(session: str, seconds: float | None = None) -> dict[str, str]:
    now = str(int(time.time() if seconds is None else seconds))
    return {"key": "studio", "time": now, "token": sign(SECRET, "studio", session, now)}


@pytest.fixture
async def replicas(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Replica, Replica]]:
    """Two replicas that require keys."""
    handle = DirectoryHandle()
    async with contextlib.AsyncExitStack() as stack:
        made = [Replica(name, handle, getattr(request, "param", "none"), 8, Keys({"studio": SECRET})) for name in "ab"]
        for replica in made:
            replica.closed = False
            await replica.open()
            stack.push_async_callback(replica.close)
        yield made[0], made[1]


def url(replica: Replica, scheme: str = "http") -> str:
    return "{}://{}:{}".format(scheme, *replica.listener.address)


@contextlib.asynccontextmanager
async def started(replica: Replica, session: str) -> AsyncIterator[AsyncClient]:
    """A session that runs on ``replica``."""
    async with AsyncClient(url(replica), key="studio", secret=SECRET) as client:
        await client.start(session=session)
        yield client
        client._session = None  # the client that took it over has stopped it


def websocket(replica: Replica, session: str, *subprotocols: str, seconds: float | None = None) -> connect:
    headers = {"session": session, **credentials(session, seconds)}
    named = [Subprotocol(name) for name in subprotocols]
    return connect(f"{url(replica, 'ws')}/session", additional_headers=headers, subprotocols=named or None, proxy=None)


async def reply(connection: ClientConnection) -> Any:
    async with asyncio.timeout(60):
        return await connection.recv()


@pytest.mark.parametrize("wrong", [{}, {"key": "studio", "secret": OTHER}, {"key": "unknown", "secret": SECRET}])
async def test_every_replica_refuses_a_client_without_a_valid_key(
    replicas: tuple[Replica, Replica], wrong: dict[str, Any]
) -> None:
    owner, other = replicas
    async with started(owner, "s") as right:
        for replica in (owner, other):
            async with AsyncClient(url(replica), **wrong) as client:
                with pytest.raises(Unauthorized):
                    await client.start(session="mine")
                client._session = "s"  # another client's
                for ask in (client.tick, client.stop):
                    with pytest.raises(Unauthorized):
                        await ask(b"x")
                client._session = None
        assert await right.tick(b"on") == b"on"
        assert (owner.sessions, other.sessions) == (["s"], [])


async def test_a_tick_over_http_is_passed_on_to_its_session(replicas: tuple[Replica, Replica]) -> None:
    owner, other = replicas
    async with started(owner, "s"), AsyncClient(url(other), key="studio", secret=SECRET) as client:
        client._session = "s"
        assert await client.tick(b"x") == b"x"
        await client.stop()
    assert owner.sessions == []


async def test_a_websocket_is_authorized_once_for_all_its_requests(replicas: tuple[Replica, Replica]) -> None:
    """Its session is on another replica, which gets each request separately; it also plays a second session."""
    owner, other = replicas
    async with started(owner, "s"), websocket(other, "s", WS_SUBPROTOCOL) as connection:
        for number in range(3):
            await connection.send(encode_numbered(number, b"x"))
            assert await reply(connection) == b"Rx"
        for replica in (owner, other):  # a request that needs a key now is refused
            replica.use_keys(Keys({"studio": OTHER}))
        await connection.send(b"Pbye")
        assert await reply(connection) == b"Rbye"
        assert owner.sessions == []
        await connection.send(b"Sagain")
        assert await reply(connection) == b"Ragain"
        assert other.sessions == ["s"]


async def test_a_websocket_with_old_credentials_is_refused(replicas: tuple[Replica, Replica]) -> None:
    owner, _ = replicas
    async with websocket(owner, "s", seconds=time.time() - 3600) as connection:
        assert json.loads(await reply(connection))["error"] == "unauthorized"
    assert owner.sessions == []


@pytest.mark.parametrize("replicas", ["game"], indirect=True)
async def test_the_end_of_a_bare_websocket_stops_its_session_elsewhere(replicas: tuple[Replica, Replica]) -> None:
    owner, other = replicas
    async with websocket(owner, "g-agent-left"):
        async with websocket(other, "g-agent-right"):
            assert owner.sessions == ["g-agent-left", "g-agent-right"]
        await until(lambda: owner.sessions == ["g-agent-left"])
    assert owner.runtime.recorder.summary()["sessions_ended.stop"] >= 1


async def test_a_grpc_stream_is_authorized_once_for_all_its_requests(replicas: tuple[Replica, Replica]) -> None:
    owner, other = replicas

    async def requests() -> AsyncIterator[pb.StepRequest]:
        yield pb.StepRequest(session="s", kind=pb.STEP_KIND_TICK, seq=0, body=b"0", **credentials("s"))
        for number in (1, 2):
            yield pb.StepRequest(kind=pb.STEP_KIND_TICK, seq=number, body=b"%d" % number)
        yield pb.StepRequest(kind=pb.STEP_KIND_STOP, body=b"bye")

    async with started(owner, "s"):
        replies = [reply async for reply in other.Play(requests(), SimpleNamespace())]
    assert [(reply.body, reply.error) for reply in replies] == [(b"0", b""), (b"1", b""), (b"2", b""), (b"bye", b"")]
    assert owner.sessions == []
