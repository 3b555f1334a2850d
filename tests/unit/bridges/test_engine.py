"""The agents of an engine's game as the rows of sessions, over a real TCP door."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from brayx.bridges.clients import ClientSessions
from brayx.bridges.engine import AgentStep, EngineAgents, EngineRun
from brayx.errors import AgentError, BadBody, BrayxError, ConfigError, ConnectFailed
from brayx.gamecore import StepKind
from brayx.gamecore.contract import Contract
from brayx.gamecore.games import GameResult, GamesRun
from brayx.gamecore.protocol import StepRequest
from brayx.ports import free_port
from tests.unit.gamecore.echo_server import EchoApp, serving_tcp

CONTRACT = Contract.parse(
    {
        "contract": 1,
        "observations": {"vector": {"shape": [2]}},
        "actions": {"move": {"kind": "discrete", "size": 3, "mask": True}},
    }
)


def step(agent: int, value: float, reward: float = 0.0, **more: Any) -> AgentStep:
    return AgentStep(agent, {"vector": [value, 0.0]}, reward, **more)


async def exchange(agents: EngineAgents, *steps: AgentStep) -> dict[int, dict[str, Any]]:
    return await agents.exchange([(CONTRACT, list(steps))])


class Door:
    """A TCP door whose agents do what their observation says; with the errors that are to come."""

    def __init__(self) -> None:
        self.app = EchoApp(self._answer)
        self.errors: list[BrayxError] = []
        self.start_errors: list[BrayxError] = []
        self.start_reply = json.dumps({"contract": 1, "id": CONTRACT.id}).encode()

    async def answered(self, request: StepRequest) -> bytes:
        if request.kind is StepKind.START and self.start_errors:
            raise self.start_errors.pop(0)
        if request.kind is StepKind.TICK and self.errors:
            self.app.running.discard(request.session)
            raise self.errors.pop(0)
        reply = self.app.step(request)
        return self.start_reply if request.kind is StepKind.START else reply

    def _answer(self, body: bytes) -> bytes:
        tick = json.loads(body)
        no_end = [False] * len(tick["agent"])
        ended = zip(tick.get("terminated", no_end), tick.get("truncated", no_end), strict=True)
        moves = [int(row[0]) for row, ends in zip(tick["obs"]["vector"], ended, strict=True) if not any(ends)]
        return json.dumps({"move": moves}).encode()

    def bodies(self, *kinds: StepKind) -> list[tuple[str, Any]]:
        """Kind and body of the requests."""
        return [
            (request.kind.value, json.loads(request.body) if request.body else None)
            for request in self.app.requests
            if request.kind in kinds
        ]


@pytest.fixture
def door() -> Door:
    return Door()


@pytest.fixture
def url(door: Door) -> Iterator[str]:
    with serving_tcp(door.answered) as address:
        yield f"tcp://{address}"


@asynccontextmanager
async def agents_at(url: str, **options: Any) -> AsyncIterator[EngineAgents]:
    run: GamesRun[GameResult] = GamesRun(**{"url": url, "games": None, "give_up_after_s": 20.0, **options})
    async with ClientSessions(run) as sessions:
        yield EngineAgents(EngineRun(run, sessions.ask))


async def test_the_agents_of_a_contract_are_the_rows_of_a_session(door: Door, url: str) -> None:
    results: list[GameResult] = []
    async with agents_at(url, on_game=results.append) as agents:
        assert await exchange(agents, step(7, 1, 9.0), step(8, 2, mask={"move": [0, 0, 1]})) == {
            7: {"move": 1},
            8: {"move": 2},
        }
        assert await exchange(agents, step(8, 0, 0.5, info={"speed": 2.0}, group=4)) == {8: {"move": 0}}
        ends = [step(7, 2, 1.0, ended="terminated"), step(8, 2, -1.0, ended="truncated")]
        assert await exchange(agents, *ends, step(7, 0)) == {7: {"move": 0}}
        assert len(agents) == 1
        await agents.break_off()
        assert not door.app.running
        assert (agents.episodes, agents.broken_off) == (2, 1)
        assert results == [GameResult(1.0, 1, "terminated"), GameResult(-0.5, 2, "truncated")]
        assert [body for _, body in door.bodies(StepKind.START)] == [{**CONTRACT.as_dict(), "rows": True}]
        assert [body for _, body in door.bodies(StepKind.TICK)] == [
            {
                "agent": [7, 8],
                "obs": {"vector": [[1.0, 0.0], [2.0, 0.0]]},
                "reward": [9.0, 0.0],
                "mask": {"move": [[1, 1, 1], [0, 0, 1]]},
            },
            {"agent": [8], "obs": {"vector": [[0.0, 0.0]]}, "reward": [0.5], "info": [{"speed": 2.0}], "group": [4]},
            {
                "agent": [7, 8, 7],
                "obs": {"vector": [[2.0, 0.0], [2.0, 0.0], [0.0, 0.0]]},
                "reward": [1.0, -1.0, 0.0],
                "terminated": [True, False, False],
                "truncated": [False, True, False],
            },
        ]
        assert [body for _, body in door.bodies(StepKind.STOP)] == [None]


async def test_agents_with_several_contracts_are_as_many_sessions(door: Door, url: str) -> None:
    other = dataclasses.replace(CONTRACT, team=1)
    async with agents_at(url) as agents:
        here, there = (CONTRACT, [step(7, 1), step(9, 0)]), (other, [step(8, 2)])
        assert await agents.exchange([here, there]) == {7: {"move": 1}, 9: {"move": 0}, 8: {"move": 2}}
        assert await agents.exchange([there, here]) == {8: {"move": 2}, 7: {"move": 1}, 9: {"move": 0}}
        assert sorted(body["team"] for _, body in door.bodies(StepKind.START)) == [0, 1]
        rows = [body["agent"] for _, body in door.bodies(StepKind.TICK)]
        assert sorted(rows[:2]) == sorted(rows[2:]) == [[7, 9], [8]]
        await agents.break_off()


async def test_the_end_of_an_agent_without_an_episode_is_nothing(door: Door, url: str) -> None:
    async with agents_at(url) as agents:
        assert await exchange(agents, step(7, 1, ended="terminated")) == {}
        assert not door.app.requests


async def test_a_lost_session_is_followed_by_another(door: Door, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    async with agents_at(url) as agents:
        await exchange(agents, step(7, 1), step(8, 1))
        door.errors = [AgentError("broken")]
        rows = [step(7, 2, 0.5, ended="terminated"), step(7, 0), step(8, 2, 0.5)]
        assert await exchange(agents, *rows) == {7: {"move": 0}, 8: {"move": 2}}
        assert len(door.bodies(StepKind.START)) == 2
        assert [body["agent"] for _, body in door.bodies(StepKind.TICK)] == [[7, 8], [7, 8]]
        assert agents.broken_off == 2
        assert "agent_error" in capsys.readouterr().err


async def test_a_refused_contract_and_a_value_that_does_not_fit(door: Door, url: str) -> None:
    async with agents_at(url) as agents:
        door.start_errors = [BadBody("actions.move.size is 3, expected 2")]
        with pytest.raises(BadBody, match=r"refuses the game's agents: actions\.move\.size is 3"):
            await exchange(agents, step(7, 1))
        await agents.break_off()
        with pytest.raises(BadBody, match=r"agent 7: obs\.vector\[0\] is nan"):
            await exchange(agents, step(7, float("nan")))
        await agents.break_off()
        assert not len(agents)


async def test_a_door_that_is_gone_is_given_up() -> None:
    async with agents_at(f"tcp://127.0.0.1:{free_port()}", give_up_after_s=0.0) as agents:
        with pytest.raises(ConnectFailed):
            await exchange(agents, step(7, 1))
    with pytest.raises(ConfigError, match="max_ticks"):
        async with agents_at("tcp://127.0.0.1:8101", max_ticks=3):
            pass


async def test_agents_of_a_game_with_a_fault_are_stopped(door: Door, url: str) -> None:
    async with agents_at(url) as agents:
        await exchange(agents, step(7, 1), step(8, 1))
        with pytest.raises(BadBody, match="agent 8"):
            await exchange(agents, step(7, 1), step(8, float("inf")))
        await agents.break_off()
        assert not door.app.running
        assert [body for _, body in door.bodies(StepKind.STOP)] == [None]


@pytest.mark.parametrize("reply", [b"Game Started", b"{}", b"[]", b'{"id": "sha256:0"}'])
async def test_a_service_that_takes_no_contracts_is_told_from_one_that_does(door: Door, url: str, reply: bytes) -> None:
    door.start_reply = reply
    async with agents_at(url) as agents:
        with pytest.raises(ConfigError) as refused:
            await exchange(agents, step(7, 1))
    assert refused.value.details["url"] == url
