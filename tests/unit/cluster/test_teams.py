"""Self-play in a replica, with the real league behind calls that get lost: sessions never wait for it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import RpcError

from brayx.actor.agent import Services
from brayx.actor.agent_actor import AgentActor, AgentActorFactory
from brayx.actor.config import ActorConfig, AgentConfig
from brayx.cluster import teams as module
from brayx.cluster.league import Learning, Rival, _LeagueActor, _RivalsActor
from brayx.cluster.teams import GroupInReplica, SelfPlaySpec, TeamsInReplica
from brayx.jobs.progress import error_lines
from brayx.league.config import MAIN, SelfPlayConfig
from brayx.league.member import Member
from brayx.metrics import Recorder
from tests.unit.cluster.test_league_seats import Actor
from tests.unit.local.test_self_play import CONTRACT, LEARNER, PAST, choosing, finish, rows, start, tick
from tests.unit.replay.made import Box
from tests.waiting import until_awaited

LEARNING = {MAIN: Learning({"buffer": "buffer"}, "hub")}
CONFIG = SelfPlayConfig.model_validate({"against": {"uniform": 1}, "gate": {"share": 0.0}, "team_every": 1000})


class Behaviour:
    """A behaviour's self-play in a replica."""

    def __init__(self, name: str, group: GroupInReplica) -> None:
        self.buffer, self.numbers = Box(), Recorder()
        services = Services({"model": choosing(LEARNER, 7)}, {"buffer": self.buffer}, self.numbers)
        self.teams = TeamsInReplica(SelfPlaySpec("league", "rivals", CONFIG, "model"), name, group, services, _past)
        agent = AgentConfig.model_validate({"module": "brayx.actor.contract_agent", "class": "ContractAgent"})
        job = {"seed": 0, "mode": "train", "agent": {"options": {}}, "contract": CONTRACT}
        actor = ActorConfig(agents=["agent"], serialize="contract", episode_length=4)
        self.factory = AgentActorFactory.of(actor, {"agent": agent}, ".", job, services, players=self.teams.players)

    async def start(self, session: str, team: int, **options: Any) -> AgentActor:
        return await start(self.factory, session, team, **options)


async def _past(fetch: Any) -> Any:
    return choosing(PAST, 1)


class Replica(Behaviour):
    """A behaviour that plays itself; its league's actor can be found once ``is_started``."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        config = CONFIG.league("model")
        parts = (config, str(folder / "books.sqlite"), str(folder / "weights"), 0, LEARNING)
        self.actor, self.is_started = Actor(lambda: _LeagueActor(*parts)), False
        monkeypatch.setattr(module, "find_actor", lambda name: self.actor if self.is_started else None)
        monkeypatch.setattr(module, "SnapshotModel", lambda snapshots, version: snapshots)
        super().__init__("agent", GroupInReplica(CONFIG))

    async def begin(self) -> None:
        """Begins the league, with one past version."""
        self.is_started = True
        self.actor.league.freeze(MAIN, 1, "digest", 10)
        await self.teams.look()

    def wins(self) -> int:
        """Those of the learner that the league has counted."""
        return self.actor.league.payoff.pair(Member(MAIN), Member(MAIN, 1)).wins


@pytest.fixture
async def replica(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Replica]:
    made = Replica(tmp_path, monkeypatch)
    yield made
    await made.teams.close()


async def test_all_teams_learn_until_the_league_has_begun_and_the_job_sees_the_teams(replica: Replica) -> None:
    actors = [await replica.start(str(team), team) for team in (0, 1)]
    await replica.teams.look()
    assert {"self_play_teams.0", "self_play_teams.1"} <= replica.numbers.summary().keys()
    for actor in actors:
        assert await tick(actor) == LEARNER
        await finish(actor, reward=1.0)
    assert len(replica.buffer.fragments) == 2
    replica.is_started = True
    await replica.teams.look()
    assert replica.teams.players.league is None, "no session runs"


async def test_one_team_learns_and_the_other_is_played_by_past_weights(replica: Replica) -> None:
    waiting = [await replica.start(f"early {team}", team) for team in (0, 1)]
    await replica.begin()
    learning, opponent = await replica.start("a", 0), await replica.start("b", 1)
    for _ in range(3):
        assert await tick(learning) == LEARNER
        assert await tick(opponent) == PAST
    replica.actor.unanswered = ["finish"]
    await finish(learning, reward=1.0)
    await finish(opponent, reward=-1.0)
    await until_awaited(lambda: "league_win_rate.past" in replica.numbers.summary(), "the result is recorded")
    assert replica.wins() == 1, "once, though the first answer was lost"
    (fragment,) = replica.buffer.fragments
    assert fragment.action.tolist() == [LEARNER] * 3
    for actor in waiting:
        await actor.on_end("lost")


async def test_it_is_looked_after_again_if_ray_s_head_was_away(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def find_actor(name: str) -> Actor:
        asked.append(name)
        if len(asked) == 1:
            raise RpcError("the head is away", rpc_code=14)
        return replica.actor

    monkeypatch.setattr(module, "find_actor", find_actor)
    actors = [await replica.start(str(team), team) for team in (0, 1)]
    await until_awaited(lambda: replica.teams.players.league, "self-play begins")
    assert asked == ["league", "league"]
    for actor in actors:
        await actor.on_end("lost")


async def test_options_by_which_no_result_counts_are_said(replica: Replica) -> None:
    replica.teams.players.sides.warning = "raise self_play.swap_every"
    for _ in range(2):
        await replica.teams.look()
    numbers = replica.numbers.summary()
    assert numbers["self_play_without_results"] == 1.0
    assert error_lines(numbers, replica.numbers.notes()) == [
        "self-play has no results; the newest: raise self_play.swap_every"
    ]


async def test_the_next_team_learns_at_its_turn_also_if_the_league_restarts(replica: Replica) -> None:
    first, second = await replica.start("a", 0, rows=True), await replica.start("b", 1, rows=True)
    await replica.begin()
    for learns in (first, second):
        for actor in (first, second):
            assert await rows(actor, [1, 2], [0, 0], [False] * 2) == [LEARNER if actor is learns else PAST] * 2
        replica.actor.league.due_of(MAIN, 1000, LEARNING)
        await replica.teams.look()
    replica.actor.restart()  # it does not know the env steps until the job tells it
    await replica.teams.look()
    assert await rows(first, [1, 2], [0, 0], [False] * 2) == [PAST] * 2
    for actor in (first, second):
        await actor.stop(b"")
        await actor.on_end("stop")


async def test_behaviours_of_different_teams_learn_in_turns_against_each_other_s_past_in_one_league(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learning = {
        name: Rival(
            {"buffer": "buffer"}, "hub", behaviour=f"the {name}", config=CONFIG.league("model", name), weights=""
        )
        for name in ("striker", "keeper")
    }
    parts = str(tmp_path / "books.sqlite"), 0, {"striker": learning["striker"]}
    actor = Actor(lambda: _RivalsActor(*parts, restarted=True))
    monkeypatch.setattr(module, "find_actor", lambda name: actor if name == "rivals" else None)
    monkeypatch.setattr(module, "SnapshotModel", lambda snapshots, version: snapshots)
    group = GroupInReplica(CONFIG)
    striker, keeper = behaviours = [Behaviour(f"the {name}", group) for name in learning]
    waiting = [await behaviour.start(f"early {team}", team) for team, behaviour in enumerate(behaviours)]
    actor.league.freeze("striker", 1, "striker's", 10)
    await striker.teams.look()
    await keeper.teams.look()
    assert striker.teams.players.league is keeper.teams.players.league is None, "the keeper has not joined"
    actor.league.due_of("striker", 0, learning)
    actor.league.freeze("keeper", 1, "keeper's", 10)
    for learns, other, env_steps in ((striker, keeper, 0), (keeper, striker, 1000)):
        actor.league.due_of("striker", env_steps, learning)
        for behaviour in (*behaviours, *behaviours):
            await behaviour.teams.look()
        playing = {
            behaviour: await behaviour.start(f"{env_steps} {team}", team) for team, behaviour in enumerate(behaviours)
        }
        for _ in range(3):
            assert await tick(playing[learns]) == LEARNER
            assert await tick(playing[other]) == PAST
        before = len(other.buffer.fragments)
        await finish(playing[learns], reward=1.0)
        await finish(playing[other], reward=-1.0)
        await until_awaited(lambda n=learns.numbers: "league_win_rate.past" in n.summary(), "the result is recorded")
        assert learns.buffer.fragments[-1].action.tolist() == [LEARNER] * 3
        assert len(other.buffer.fragments) == before, "what its past did is not learned from"
        names = [behaviour.teams.players.name for behaviour in (learns, other)]
        assert actor.league.payoff.pair(Member(names[0]), Member(names[1], 1)).wins == 1
    learning["striker"] = replace(learning["striker"], done=True)
    actor.league.due_of("keeper", 0, learning)
    actor.restart()
    assert actor.league.players() == {"the striker": "striker", "the keeper": "keeper"}
    assert actor.league.meet("game", ["keeper"], ["striker"]).members[0] == Member("keeper")
    await keeper.teams.look()
    assert striker.teams.players.sides.done == {"striker"}
    for session in waiting:
        await session.on_end("lost")
    for behaviour in behaviours:
        await behaviour.teams.close()
