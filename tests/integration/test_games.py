"""Sessions of one game on two replicas of a real deployment: they meet on one, through any door."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray import serve

from brayx.bridges import pettingzoo
from brayx.cluster import NAMESPACE
from brayx.cluster.actor_app import actor_spec, application
from brayx.cluster.directory import Location, stop_directory
from brayx.gamecore.client import AsyncClient
from brayx.jobs.config import JobConfig
from tests.unit.bridges.zoo import Secrets

WAIT_S = 60.0
DIRECTORY = "secrets/sessions"
JOB = """
project: secrets
trial: main
teller: {kind: agent, module: secrets_agents, class: Teller}
actor: {kind: actor, agents: [teller], share: game, num_workers: 2, native_port: null, tcp_port: null}
"""
AGENTS = '''
from brayx import Agent


class Teller(Agent):
    """Shares its observation with the other, and answers with the one of the other."""

    async def on_tick(self, state):
        other = {"left": "right", "right": "left"}[state.agent]
        setattr(state, f"seen_by_{state.agent}", state.input["obs"])
        state.output = {"action": await state.wait(f"seen_by_{other}", 30.0)}
'''


@pytest.fixture
def replicas(ingress: object, tmp_path: Path) -> Iterator[list[str]]:
    """The two replicas' own URLs, so that a test chooses a client's replica."""
    (tmp_path / "secrets_agents.py").write_text(AGENTS)
    (tmp_path / "secrets.yaml").write_text(JOB)
    job = JobConfig.load(tmp_path / "secrets.yaml")
    app = application(actor_spec(job, "actor", mode="serve", weights={}), name="actor", directory=DIRECTORY)
    serve.run(app, name="secrets", route_prefix="/secrets")
    addresses = ray.get(directory().addresses.remote(), timeout=WAIT_S)
    assert len(addresses) == 2
    yield addresses
    serve.delete("secrets")
    stop_directory(DIRECTORY)


def directory() -> ray.actor.ActorHandle:
    return ray.get_actor(DIRECTORY, namespace=NAMESPACE)


def owner(session: str) -> str:
    location = ray.get(directory().locate.remote(session), timeout=WAIT_S)
    assert isinstance(location, Location)
    return location.address


async def test_sessions_of_a_game_exchange_values_through_any_replica_and_door(
    replicas: list[str],
) -> None:
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
