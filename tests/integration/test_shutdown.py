"""Shutdown of Serve, or deletion of an application, with running sessions: each gets its end once, on every door.

The application is this file's alone: each test ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import ray
from ray import serve

from brayx.cluster import NAMESPACE
from brayx.cluster.directory import stop_directory
from brayx.errors import ServiceFull, SessionLost, TransportError
from brayx.gamecore.client import AsyncClient
from brayx.ports import free_port
from tests.chaos.ledger import APPLICATION, PLAIN, Entry, LedgerArgs, app, chained, events
from tests.integration.conftest import Ingress
from tests.waiting import until_awaited as until

WAIT_S = 60.0
DIRECTORY = f"{APPLICATION}/sessions"


@pytest.mark.parametrize(
    ("way", "keeps_proxy"),
    [pytest.param(serve.shutdown, False, marks=pytest.mark.cluster), (lambda: serve.delete(APPLICATION), True)],
    ids=["shutdown", "delete"],
)
async def test_running_sessions_finish_or_end_as_drained(
    start_serve: Callable[[bool | None], Ingress], tmp_path: Path, way: Callable[[], None], keeps_proxy: bool
) -> None:
    """Serve that is shut down ends its proxy at once, and with it the connections through it."""
    native, tcp = free_port(), free_port()
    (tmp_path / "events").mkdir()
    ingress = start_serve(None)
    args = LedgerArgs(folder=tmp_path / "events", native_port=native, tcp_port=tcp, drain_timeout_s=4.0)
    await asyncio.to_thread(serve.run, app(args), name=APPLICATION, route_prefix="/")
    proxy = ingress.http.replace("http", "ws", 1)
    doors = [proxy, *(f"{what}://127.0.0.1:{native}" for what in ("ws", "http"))]
    doors.append(f"tcp://127.0.0.1:{tcp}")
    async with contextlib.AsyncExitStack() as stack, asyncio.timeout(3 * WAIT_S):
        digests: dict[AsyncClient, str] = {}

        async def opened(url: str) -> AsyncClient:
            client = AsyncClient(url, timeout_s=WAIT_S)
            stack.push_async_callback(client.close)
            return client

        async def tick(client: AsyncClient) -> None:
            body = uuid.uuid4().hex.encode()
            digests[client] = chained(digests[client], body)
            assert Entry.decode(await client.tick(body)).digest == digests[client]

        async def finish(client: AsyncClient) -> None:
            await tick(client)
            assert Entry.decode(await client.stop()).digest == digests[client], "a running session may finish"

        async def play_on(client: AsyncClient) -> Exception:
            try:
                while True:
                    await tick(client)
                    await asyncio.sleep(0.05)
            except (SessionLost, TransportError) as error:
                return error

        for url in doors:
            for body in (b"", PLAIN, b""):
                client = await opened(url)
                await client.start(body)
                digests[client] = str(client.session)
                await tick(client)
        finishing = [client for client in list(digests)[::3] if keeps_proxy or client.url != proxy]
        staying = [client for client in digests if client not in finishing]
        names = {client: str(client.session) for client in digests}
        newcomer = await opened(f"tcp://127.0.0.1:{tcp}")
        await newcomer.start()  # over a connection that stays open: new ones will not be accepted
        await newcomer.stop()

        ending = asyncio.create_task(asyncio.to_thread(way))
        playing = {client: asyncio.create_task(play_on(client)) for client in staying}

        async def refused() -> bool:
            with contextlib.suppress(ServiceFull):
                await newcomer.start()
                await newcomer.stop()
                return False
            return True

        while not await refused():  # noqa: ASYNC110 (the service is asked)
            await asyncio.sleep(0.05)
        await asyncio.gather(*map(finish, finishing))  # together, as they have 4 s for it
        outcomes = {client: await task for client, task in playing.items()}
        await ending
    for client, error in outcomes.items():
        # Between two requests its connection may end before the client gets the reason.
        surely = client.url.startswith("ws") and (keeps_proxy or client.url != proxy)
        assert isinstance(error, SessionLost) or not surely, f"{client.url}: {error!r}"
        if isinstance(error, SessionLost):
            assert error.details == {"reason": "drained"}, client.url
    ends: Counter[tuple[str, str]] = Counter()

    def ended() -> bool:
        ends.clear()
        ends.update((e.session, e.reason) for e in events(tmp_path / "events") if e.what == "end")
        return len(ends) >= len(digests)

    await until(ended, "the end of every session")
    broken = {names[client] for client in staying if client.url == proxy and not keeps_proxy}
    for session in broken & {session for session, reason in ends if reason == "disconnect"}:
        ends[session, "drained"] = ends.pop((session, "disconnect"))
    expected = {(names[client], "stop") for client in finishing} | {(names[client], "drained") for client in staying}
    starts_of_newcomer = {key for key in ends if key[0] not in names.values()}
    assert {reason for _, reason in starts_of_newcomer} <= {"stop"}
    assert ends == Counter(expected | starts_of_newcomer), "each session ended once"
    directory = ray.get_actor(DIRECTORY, namespace=NAMESPACE)
    assert ray.get(directory.addresses.remote()) == []
    stop_directory(DIRECTORY)
    serve.shutdown()
