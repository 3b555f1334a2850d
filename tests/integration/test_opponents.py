"""A league on a real Serve: sessions of one game, opponents asked for, some not there, and a replica that is killed.

All tests share one application on two replicas.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import ray
from ray import serve
from ray.util import list_named_actors
from websockets.sync.client import connect

from brayx.bridges import pettingzoo
from brayx.cluster import NAMESPACE
from brayx.cluster.directory import Location, stop_directory
from brayx.cluster.serving import console_application, serving_application
from brayx.errors import BadBody, BrayxError, LeagueError, SessionResumed, VersionUnknown
from brayx.gamecore.client import AsyncClient, Client
from brayx.jobs.kinds import BoardConfig
from brayx.tracking import promote
from tests.end_to_end.console_jobs import Console
from tests.integration.conftest import Ingress
from tests.served_league import LEVELS, PROJECT, Pool, load
from tests.unit.bridges.zoo import Secrets
from tests.waiting import until

WAIT_S = 60.0
DIRECTORY = f"{PROJECT}/actor/sessions"
ACTOR = {
    "num_workers": 2, "share": "game", "snapshot_every": 1, "native_port": None, "tcp_port": None, "idle_timeout_s": 600
}  # fmt: skip


@pytest.fixture(scope="module")
def pool(new_tracking_db: Any, tmp_path_factory: pytest.TempPathFactory) -> Pool:
    folder = tmp_path_factory.mktemp("pool")
    pool = Pool(folder, new_tracking_db(folder))
    pool.fill()
    pool.books()
    return pool


@pytest.fixture(scope="module")
def url(grpc_ingress: Ingress, pool: Pool) -> Iterator[str]:
    """A service of the league on two replicas; no option of it is about opponents."""
    (pool.folder / "levels.yaml").write_text(LEVELS)
    job = load(pool.folder, league=True, engine="torch", **ACTOR)
    serve.run(serving_application(job, pool.uri), name=PROJECT, route_prefix=f"/{PROJECT}")
    yield f"{grpc_ingress.http}/{PROJECT}"
    serve.delete(PROJECT)
    stop_directory(DIRECTORY)
    for actor in list_named_actors(True):
        if actor["name"].startswith(f"{DIRECTORY}/pool/"):
            stop_directory(actor["name"])


@pytest.fixture(scope="module")
def replicas(url: str) -> list[str]:
    """The two replicas' own URLs, so that a test chooses a client's replica."""
    addresses: list[str] = ray.get(directory().addresses.remote(), timeout=WAIT_S)
    assert len(addresses) == 2
    return addresses


def directory() -> ray.actor.ActorHandle:
    return ray.get_actor(DIRECTORY, namespace=NAMESPACE)


def owner(session: str) -> str:
    """Address of the replica that owns a session."""
    location = ray.get(directory().locate.remote(session), timeout=WAIT_S)
    assert isinstance(location, Location)
    return location.address


async def test_sessions_of_a_game_exchange_values_through_any_replica_and_door(replicas: list[str]) -> None:
    first, other = replicas
    owners = set()
    async with contextlib.AsyncExitStack() as stack, asyncio.timeout(2 * WAIT_S):
        for game, urls in enumerate([(first, other), (other, first.replace("http", "ws", 1))]):
            left, right = (AsyncClient(url, timeout_s=WAIT_S) for url in urls)
            for client in (left, right):
                stack.push_async_callback(client.close)
            ids = [pettingzoo.session_id(f"game{game}", agent) for agent in Secrets.possible_agents]
            await left.start(session=ids[0])
            await right.start(session=ids[1])
            assert owner(ids[0]) == owner(ids[1]) == urls[0]
            owners.add(urls[0])
            replies = await asyncio.gather(left.tick(b'{"obs": 4}'), right.tick(b'{"obs": 2}'))
            assert [json.loads(reply)["action"] for reply in replies] == [2, 4]
            await asyncio.gather(left.stop(), right.stop())
        assert owners == set(replicas)

        # A whole PettingZoo game, whose sessions start at the same time on both replicas.
        urls = itertools.cycle(replicas)
        clients = pettingzoo.Clients(lambda: AsyncClient(next(urls), timeout_s=WAIT_S))
        stack.push_async_callback(clients.close)
        for seed in range(3):
            result = await pettingzoo.play_game(Secrets(), clients, seed=seed)
            assert result.returns == {"left": float(Secrets.ROUNDS), "right": float(Secrets.ROUNDS)}


def ticked(client: Client) -> list[Any]:
    """Value, version and mode of a tick."""
    return json.loads(client.tick(b"{}"))[:3]


def test_a_start_gets_the_opponent_that_its_header_or_body_asks_for(url: str) -> None:
    """More versions play at once than the four that a replica keeps; only the champion's was deployed."""
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(Client(url, timeout_s=WAIT_S)) for _ in range(13)]
        assert clients[0].start() == b"Game Started"
        for version, client in enumerate(clients[1:7], 1):
            reply = json.loads(client.start(opponent={"version": version}))
            assert reply["opponent"]["version"] == version
        for version, client in enumerate(clients[7:], 1):
            reply = json.loads(client.start(json.dumps({"opponent": {"version": version}})))
            assert reply["opponent"]["version"] == version
        for _ in range(2):
            assert ticked(clients[0]) == [2.0, 2, "serve"]
            asked = [*range(1, 7), *range(1, 7)]
            assert [ticked(client) for client in clients[1:]] == [[float(v), v, "train"] for v in asked]


def test_every_door_takes_levels_ratings_and_players(url: str, grpc_ingress: Ingress) -> None:
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"level": "easy"}, {"player": "main", "version": 1, "points": 700.0, "level": "easy"}),
        ({"rating": 1250}, {"player": "exploiter", "version": 3, "points": 1250.0}),
        ({"player": "main"}, {"player": "main", "version": 2, "points": 1100.0}),
        ({"player": "tactics"}, {"player": "tactics", "version": None, "points": 1450.0}),
    ]
    for door in (url, url.replace("http", "ws", 1), f"grpc://{grpc_ingress.grpc}/{PROJECT}"):
        for asked, expected in cases:
            with Client(door, timeout_s=WAIT_S) as client:
                assert json.loads(client.start(opponent=asked)) == {"opponent": expected}
                client.tick(b"{}")
    bare = f"{url.replace('http', 'ws', 1)}/session?opponent=level%3Dhard"
    with connect(bare, proxy=None, open_timeout=WAIT_S) as connection:
        connection.send("{}")
        assert json.loads(connection.recv(WAIT_S))[:2] == [4.0, 4]


def test_the_console_offers_levels_and_versions_to_a_human(url: str, pool: Pool) -> None:
    (pool.folder / "opponents_board.py").write_text("def board(opponent):\n    yield")
    job = load(pool.folder, league=True, engine="torch", **ACTOR)
    boards = {"board": BoardConfig(module="opponents_board")}
    job = job.model_copy(update={"boards": boards, "console_port": 0})
    serve.run(console_application(job, pool.uri), name="console", route_prefix=None)
    try:
        console = Console(serve.get_app_handle("console").remote().result(timeout_s=WAIT_S))
        opponents = console.get("/api/opponents")["opponents"]
    finally:
        serve.delete("console")
    assert [*opponents.items()][:3] == [
        ("level easy", {"level": "easy"}),
        ("level hard", {"level": "hard"}),
        ("version 6", {"version": 6}),
    ]


def test_a_wrong_name_is_a_typed_error_that_no_other_session_notices(url: str) -> None:
    refused: list[tuple[dict[str, Any], type[BrayxError], str]] = [
        ({"player": "mian"}, LeagueError, "nearest is 'main'; there are: exploiter, main, tactics"),
        ({"level": "hart"}, LeagueError, "nearest is 'hard'"),
        ({"version": 70}, VersionUnknown, "nearest is 6"),
        ({"levle": "hard"}, BadBody, "nearest is 'level'"),
    ]
    with Client(url, timeout_s=WAIT_S) as running:
        running.start(opponent={"version": 3})
        for asked, error, message in refused:
            for words in ({"opponent": asked}, {"body": json.dumps({"opponent": asked})}):
                with Client(url, timeout_s=WAIT_S) as client:
                    with pytest.raises(error, match=message):
                        client.start(session="refused", **words)  # type: ignore[arg-type]
                    assert client.start(session="refused") == b"Game Started", "the id is free again"
                    client.stop()
            assert ticked(running) == [3.0, 3, "train"]


def test_a_session_keeps_its_opponent_at_another_replica(url: str, pool: Pool) -> None:
    def newest() -> int:
        with Client(url, timeout_s=WAIT_S) as client:
            version: int = json.loads(client.start(opponent={"player": "main"}))["opponent"]["version"]
            return version

    with Client(url, timeout_s=WAIT_S, reconnect_s=WAIT_S) as client:
        reply = json.loads(client.start(opponent={"player": "main"}))
        assert reply["opponent"]["version"] == 2, "the champion"
        assert ticked(client) == [2.0, 2, "train"]
        promote(f"models:/{PROJECT}/4", pool.uri)
        until(lambda: {newest() for _ in range(8)} == {4}, "both replicas know the new champion", WAIT_S)
        os.kill(pid_of(str(client.session)), signal.SIGKILL)
        with pytest.raises(SessionResumed):
            client.tick(b"{}")
        assert ticked(client) == [2.0, 2, "train"]


def pid_of(session: str) -> int:
    """The replica that owns a session."""
    port = int(owner(session).rpartition(":")[2])
    (pid,) = {c.pid for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.laddr.port == port}
    return int(pid or 0)
