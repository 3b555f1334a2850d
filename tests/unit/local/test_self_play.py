"""Self-play by teams: which weights play which team, what is learned from, and which results count."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from brayx.actor.agent import Services
from brayx.actor.agent_actor import AgentActor, AgentActorFactory
from brayx.actor.config import ActorConfig, AgentConfig
from brayx.actor.players import LearningPlayer, Seating
from brayx.errors import TrackingError
from brayx.gamecore.contract import Contract
from brayx.league import self_plays
from brayx.league.config import MAIN, SelfPlayConfig
from brayx.league.league import League
from brayx.league.ledger import Ledger
from brayx.league.member import Member
from brayx.league.rivals import Rivals
from brayx.league.teams import TeamPlayers
from brayx.local import self_play as module
from brayx.local.self_play import LocalSelfPlays, RivalGroup, RivalsLeague, SidesLeague
from brayx.metrics import Recorder
from brayx.replay.buffer import NullBuffer
from tests.clocks import Clock
from tests.unit.actor.test_contract_agent import Fixed
from tests.unit.replay.made import Box

CONTRACT = {
    "contract": 1,
    "observations": {"side": {"shape": [1]}},
    "actions": {"go": {"kind": "discrete", "size": 3}},
}
LEARNER, PAST = 2, 0
"""What the learner and its past version choose."""


def choosing(action: int, version: int) -> Fixed:
    model = Fixed(logits=np.where(np.arange(3) == action, np.float32(50), np.float32(0)))
    model.version = version
    return model


class Playing:
    """A behaviour's self-play, with one past version that is always the opponent."""

    def __init__(self, **options: int) -> None:
        always = {"against": {"uniform": 1}, "gate": {"share": 0.0}, "team_every": 1000}
        config = SelfPlayConfig.model_validate({**always, **options})
        self.learner, self.past, self.buffer = choosing(LEARNER, 7), choosing(PAST, 1), Box()
        self.numbers = Recorder()
        services = Services({"model": self.learner}, {"buffer": self.buffer}, self.numbers)
        self.players = TeamPlayers(config, services)
        self.league = League(config.league("model"), Ledger(":memory:"))
        self.league.freeze(MAIN, 1, "digest", 10)
        self.open(SidesLeague(self.league, self.players.sides, self.numbers))
        agent = AgentConfig.model_validate({"module": "brayx.actor.contract_agent", "class": "ContractAgent"})
        job = {"seed": 0, "mode": "train", "agent": {"options": {}}, "contract": CONTRACT}
        actor = ActorConfig(agents=["agent"], serialize="contract", episode_length=4)
        self.factory = AgentActorFactory.of(actor, {"agent": agent}, ".", job, services, players=self.players)

    def open(self, running: SidesLeague) -> None:
        self.running = running
        seating = Seating("model", lambda version: self.past, {}, {}, self.numbers, {"buffer": NullBuffer()})
        seating.learn(self.players.name, LearningPlayer(self.learner, {"buffer": self.buffer}, self.numbers))
        running.open(seating)

    async def start(self, session: str, team: int, **options: Any) -> AgentActor:
        return await start(self.factory, session, team, **options)

    def begin(self) -> None:
        self.players.league = self.running

    def pair(self) -> tuple[int, int, int]:
        """Wins, draws and losses of the learner."""
        pair = self.league.payoff.pair(Member(MAIN), Member(MAIN, 1))
        return pair.wins, pair.draws, pair.losses


@pytest.fixture
def playing() -> Playing:
    return Playing()


async def start(factory: AgentActorFactory, session: str, team: int, **options: Any) -> AgentActor:
    actor = factory()
    await actor.start(session, json.dumps({**CONTRACT, "team": team, **options}).encode())
    return actor


async def tick(actor: AgentActor, **body: Any) -> Any:
    return json.loads(await actor.tick(json.dumps({"obs": [0.0], "reward": 0.0, **body}).encode()))["go"]


async def finish(actor: AgentActor, **body: Any) -> None:
    await actor.stop(json.dumps({"terminated": True, **body}).encode())
    await actor.on_end("stop")


async def test_until_there_are_past_versions_all_teams_learn(playing: Playing) -> None:
    for team in (0, 1):
        actor = await playing.start(f"{team}", team)
        assert await tick(actor) == LEARNER
        await finish(actor, reward=1.0)
    assert len(playing.buffer.fragments) == 2
    assert playing.players.sides.teams == {0, 1}
    assert playing.pair() == (0, 0, 0)


async def test_a_session_moves_unless_it_plays_a_counted_game(playing: Playing) -> None:
    early, rows = await playing.start("early", 0), await playing.start("rows", 1, rows=True)
    playing.begin()
    seated = await playing.start("seated", 1)
    moves = [await actor.snapshot() is not None for actor in (early, rows, seated)]
    assert moves == [True, True, False]
    for actor in (early, rows, seated):
        await actor.on_end("stop")


@pytest.mark.parametrize("options", [{}, {"rows": True}])
async def test_the_team_of_a_session_is_forgotten_when_it_ends(playing: Playing, options: dict[str, Any]) -> None:
    sides = playing.players.sides
    before = await playing.start("before", 0, **options)
    playing.begin()
    after = await playing.start("after", 1, **options)
    assert sides.running_teams == {0, 1}
    await before.stop(b"")
    await before.on_end("stop")
    assert sides.running_teams == {1}
    await after.on_end("lost")
    assert sides.running_teams == set()


@pytest.mark.parametrize("options", [{}, {"rows": True}])
@pytest.mark.parametrize("team", [0, 1])
async def test_the_games_wait_for_the_learner_in_self_play_too(
    playing: Playing, team: int, options: dict[str, Any]
) -> None:
    waits = []

    async def caught_up() -> None:
        waits.append(team)

    playing.players.services = replace(playing.players.services, caught_up=caught_up)
    playing.begin()
    playing.players.sides.name_team("", 1 - team)
    actor = await playing.start("a", team, **options)
    await (rows(actor, [1], [0], [False]) if options else tick(actor))
    assert waits == [team]


async def test_one_team_learns_and_the_other_is_played_by_other_weights(playing: Playing) -> None:
    playing.begin()
    playing.players.sides.name_team("", 1)
    learning, opponent = await playing.start("a", 0), await playing.start("b", 1)
    for _ in range(3):
        assert await tick(learning) == LEARNER
        assert await tick(opponent) == PAST
    await finish(learning, reward=1.0)
    await finish(opponent, reward=-1.0)
    (fragment,) = playing.buffer.fragments
    assert fragment.action.tolist() == [LEARNER] * 3
    assert playing.players.sides.steps == 6, "of both teams"
    assert playing.pair() == (1, 0, 0)
    numbers = playing.numbers.summary()
    assert numbers["league_win_rate.past"] == 1.0
    assert numbers["episode_return"] == 1.0, "the opponent's is not recorded"


async def test_a_result_of_the_game_s_own_counts_instead_of_the_last_reward_s_sign(playing: Playing) -> None:
    playing.begin()
    playing.players.sides.name_team("", 1)
    for session, body in {"a": {"reward": 1.0, "result": "loss"}, "b": {"reward": -1.0, "result": "draw"}}.items():
        actor = await playing.start(session, 0)
        await tick(actor)
        await finish(actor, **body)
    broken_off = await playing.start("c", 0)
    await tick(broken_off)
    await broken_off.on_end("lost")
    assert playing.pair() == (0, 1, 1)


async def rows(actor: AgentActor, agents: list[int], reward: list[float], ended: list[bool]) -> Any:
    body = {"agent": agents, "obs": [[0.0]] * len(agents), "reward": reward, "terminated": ended}
    return json.loads(await actor.tick(json.dumps(body).encode())).get("go")


async def test_a_session_of_several_agents_changes_its_player_when_a_stretch_ends(playing: Playing) -> None:
    first, second = await playing.start("a", 0, rows=True), await playing.start("b", 1, rows=True)
    for actor in (first, second):
        assert await rows(actor, [1, 2], [0, 0], [False] * 2) == [LEARNER] * 2
    playing.begin()
    assert await rows(first, [1, 2], [0, 0], [False] * 2) == [LEARNER] * 2
    assert await rows(second, [1, 2], [0, 0], [False] * 2) == [PAST] * 2
    assert await rows(first, [1, 1, 2], [1, 0, 0], [True, False, False]) == [LEARNER] * 2
    assert playing.pair() == (0, 0, 0), "an episode that began before"
    assert await rows(first, [1, 1, 2], [-0.5, 0, 0], [True, False, False]) == [LEARNER] * 2
    assert playing.pair() == (0, 0, 1)
    playing.players.sides.env_steps = 1000
    assert await rows(first, [1, 2], [0, 0], [False] * 2) == [PAST] * 2, "now the other team learns"
    assert await rows(second, [1, 2], [0, 0], [False] * 2) == [LEARNER] * 2
    for actor in (first, second):
        await actor.stop(b"")
        await actor.on_end("stop")
    assert playing.buffer.fragments
    for fragment in playing.buffer.fragments:
        assert set(fragment.action.tolist()) == {LEARNER}
        assert fragment.policy_version.min() == 7, "fragments with other weights' actions are dropped"


async def test_only_returns_of_episodes_that_the_learner_has_played_are_recorded(playing: Playing) -> None:
    playing.begin()
    first, second = await playing.start("a", 0, rows=True), await playing.start("b", 1, rows=True)
    await rows(first, [1], [0], [False])
    await rows(second, [1], [0], [False])
    await rows(first, [1, 1], [1, 0], [True, False])
    await rows(second, [1, 1], [-1, 0], [True, False])
    playing.players.sides.env_steps = 1000  # now the other team learns, and agents hand over what went before
    await rows(first, [1, 1], [3, 0], [True, False])
    await rows(second, [1, 1], [-3, 0], [True, False])
    await rows(first, [1], [5], [True])
    await rows(second, [1], [-5], [True])
    for actor in (first, second):
        await actor.stop(b"")
        await actor.on_end("stop")
        assert actor.facts()["result"] is not None
    numbers = playing.numbers.summary()
    assert numbers["episode_return"] == pytest.approx((1 + 3 - 5) / 3)
    assert numbers["episode_length"] == 1.0


async def test_a_stretch_waits_for_the_episodes_of_several_agents() -> None:
    playing = Playing(swap_every=1)
    playing.begin()
    first, second = await playing.start("a", 0, rows=True), await playing.start("b", 1, rows=True)
    for _ in range(3):
        for is_over in (False, False, True):
            assert await rows(first, [1, 2], [1, 1], [is_over] * 2) == ([] if is_over else [LEARNER] * 2)
            assert await rows(second, [1, 2], [0, 0], [is_over] * 2) == ([] if is_over else [PAST] * 2)
    assert playing.pair() == (6, 0, 0)
    assert playing.players.sides.steps == 24, "of both teams, though the agents have not handed over all of them"


def rivals(*teams: int) -> tuple[list[Playing], Rivals]:
    """Behaviours that play these teams, with one past version each, which always plays."""
    behaviours = {name: Playing() for name, _ in zip(("striker", "keeper", "defender"), teams, strict=False)}
    config = SelfPlayConfig.model_validate({"against": {"uniform": 1}, "team_every": 1000})
    league = Rivals({name: config.league("model", name) for name in behaviours}, Ledger(":memory:"))
    group: Any = RivalGroup(cast("Any", None), config)
    for team, (name, playing) in zip(teams, behaviours.items(), strict=True):
        league.freeze(name, 1, name, 10)
        playing.players.name = name
        playing.players.sides.name_team("", team)
        for _ in range(2):  # the second time after an error
            group.take_in(playing.players)
        playing.open(RivalsLeague(league, playing.players.sides, playing.numbers, name, group.lock))
        playing.begin()
    assert group.teams == {0, 1}
    return list(behaviours.values()), league


async def test_behaviours_that_play_different_teams_learn_in_turns_against_each_other_s_past() -> None:
    (striker, keeper), league = rivals(0, 1)
    for learns, other, env_steps in ((striker, keeper, 0), (keeper, striker, 1000)):
        striker.players.sides.env_steps = env_steps
        actors = {
            playing: await playing.start(playing.players.name, int(playing is keeper)) for playing in (striker, keeper)
        }
        for _ in range(3):
            assert await tick(actors[learns]) == LEARNER
            assert await tick(actors[other]) == PAST
        await finish(actors[learns], reward=1.0)
        await finish(actors[other], reward=-1.0)
        (fragment,) = learns.buffer.fragments
        assert fragment.action.tolist() == [LEARNER] * 3
        assert not other.buffer.fragments or env_steps, "what its past did is not learned from"
        assert league.payoff.pair(Member(learns.players.name), Member(other.players.name, 1)).wins == 1
        assert learns.numbers.summary()["league_win_rate.past"] == 1.0
    assert len(striker.buffer.fragments) == 1
    assert striker.players.sides.steps == 12, "of both"
    assert striker.running.candidates() == [Member("striker", 1)]
    assert striker.running.crown(Member("striker", 1)).passed
    assert (striker.running.champion(), keeper.running.champion()) == (Member("striker", 1), None)
    actor = await keeper.start("keeper again", 1)
    await finish(actor, reward=1.0)
    assert keeper.numbers.summary()["league_win_rate.champion"] == 1.0


async def test_a_game_s_result_is_in_the_trial_of_each_behaviour_of_the_team_that_learns() -> None:
    (striker, keeper, defender), _ = rivals(0, 1, 0)
    actors = [
        await playing.start(f"game-agent-{playing.players.name}", team)
        for playing, team in ((striker, 0), (keeper, 1), (defender, 0))
    ]
    for actor, reward in zip(actors, (1.0, -1.0, 1.0), strict=True):
        await tick(actor)
        await finish(actor, reward=reward)
    rates = [playing.numbers.summary().get("league_win_rate.past") for playing in (striker, keeper, defender)]
    assert rates == [1.0, None, 1.0]


def test_a_rival_whose_start_failed_begins_among_its_rivals_with_its_team(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    started: list[str] = []
    requests: list[Future[str]] = []

    def request(*_: object) -> Future[str]:
        requests.append(Future())
        return requests[-1]

    def start_play(
        job: Any, trainee: Any, players: TeamPlayers, say: Any, project: str, group: RivalGroup | None
    ) -> Any:
        assert group is not None, "it plays one team"
        group.take_in(players)
        started.append(players.name)
        if len(started) == 2:
            raise TrackingError("MLflow does not answer")
        return SimpleNamespace(look=list)

    monkeypatch.setattr(module, "SelfPlay", start_play)
    monkeypatch.setattr(self_plays, "_RETRY_S", 0.0)
    monkeypatch.setattr("brayx.clock.now", clock := Clock())
    plays = LocalSelfPlays(said.append)
    clerk = SimpleNamespace(may_resume=False, opened=lambda: clock.now > 9.0, request=request)
    job, trainee = SimpleNamespace(self_plays={"self_play": SelfPlayConfig()}), SimpleNamespace(clerk=clerk)
    for team, name in enumerate(("striker", "keeper")):
        players = plays.players(name, cast("Any", job), cast("Any", trainee), Playing().players.services)
        assert players is not None
        asyncio.run(players.seat(name, {"contract": Contract.parse({**CONTRACT, "team": team})}))
    for clock.now in (0.0, 9.0, 9.5):
        plays.look()
    assert said == []
    for clock.now in (10.0, 20.0):
        plays.look()
    late = [f"behaviour {name!r} waits with its self-play until MLflow answers" for name in ("striker", "keeper")]
    assert said == late, "once"
    assert (started, len(requests)) == ([], 2), "however long MLflow takes, its queue has each request once"
    for future in requests:
        future.set_result("project")
    plays.look()
    plays.look()
    requests[-1].set_result("project")
    plays.look()
    assert started == ["striker", "keeper", "keeper"]
    assert [line for line in said if "has team" in line] == [
        f"behaviour {name!r} has team {team}: while another team learns, past versions of its model play"
        for team, name in enumerate(("striker", "keeper"))
    ]


@pytest.mark.parametrize(
    ("behaviour", "name"), [("Striker?team=1", "Striker_team_1"), ("2nd", "_2nd"), ("past", "past_"), ("a", "a_")]
)
def test_a_behaviour_is_a_player_by_a_plain_name_of_its_own(behaviour: str, name: str) -> None:
    assert self_plays.player_name(behaviour, ["a"]) == name
