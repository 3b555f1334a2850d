"""`ContractAgent` with several agents in a session: each is played and learned from as in a session of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import optree
import pytest

import brayx.actions as actions
from brayx.actor.contract_agent import ContractAgent
from brayx.actor.decode import sample_action
from brayx.actor.players import SeatedPlayer
from brayx.engines.base import ModelSpec, StateSpec
from brayx.errors import BadBody, BadLimits, LeagueError, ModelError
from brayx.gamecore.contract_ticks import Tick
from brayx.types import Forward, Fragment
from tests.unit.actor.test_contract_agent import CONTINUOUS, DISCRETE, HYBRID, Fixed, Game

Script = list[tuple[int, list[float], float, str]]
"""Agent, observation, reward and end of each row."""


class Seeing(Fixed):
    """A model whose outputs follow from its observation, for one or for several."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    async def forward(self, obs: Any, *, deadline_s: float | None = None) -> Forward:
        self.seen.append(obs)
        side = obs["side"]
        third = side[..., :1] - side[..., 1:]
        logits = np.concatenate([side, third], -1)
        log_std = np.full(side.shape, -1, np.float32)
        outputs: dict[str, Any] = {
            DISCRETE_KIND: {"logits": logits},
            "continuous": {"mean": logits * 0.1, "log_std": np.full(logits.shape, -1, np.float32)},
            "hybrid": {"logits": (side, logits), "mean": third * 0.1, "log_std": log_std[..., :1]},
        }[self.kind]
        return Forward({**outputs, "value": side.sum(-1)}, self.version)


DISCRETE_KIND = "discrete"


class SeeingRows(Seeing):
    """The same with a method for several at once."""

    async def forward_rows(self, obs: Any) -> Forward:
        outputs, version = await self.forward(obs)
        return Forward(outputs, np.full(len(obs["side"]), version))


async def start_rows(game: Game, **more: Any) -> None:
    await game.start(rows=True, **more)


async def tick_rows(game: Game, rows: Script, **more: Any) -> Any:
    body = {
        "agent": [agent for agent, *_ in rows],
        "obs": [obs for _, obs, *_ in rows],
        "reward": rewards_of(game, [reward for *_, reward, _ in rows]),
        "terminated": [end == "terminated" for *_, end in rows],
        "truncated": [end == "truncated" for *_, end in rows],
    }
    return json.loads(await game.actor.tick(json.dumps({**body, **more}).encode()))


def rewards_of(game: Game, rewards: Any) -> Any:
    return {"win": rewards} if "rewards" in game.contract else rewards


def by_content(fragments: list[Fragment]) -> list[Fragment]:
    return sorted(fragments, key=lambda fragment: fragment.obs["side"].tolist())


SCRIPT: list[Script] = [
    [(4, [0, 1], 9.0, ""), (5, [1, 0], 9.0, "")],
    [(5, [2, 0], 0.5, ""), (4, [0, 2], 0.25, "")],
    [(4, [0, 3], 1.0, "terminated"), (4, [0, 4], 7.0, ""), (5, [3, 0], 0.125, "")],
    [(5, [4, 0], 2.0, "truncated"), (4, [0, 5], 3.0, "")],  # agent 5 does not come back, agent 6 does
    [(6, [6, 6], 0.0, ""), (4, [0, 6], 4.0, "")],
    [(6, [7, 6], 1.0, "terminated")],  # no row wants an action
    [(4, [0, 7], 5.0, "")],
]


async def played(contract: Mapping[str, Any], model: Fixed, script: list[Script], **options: Any) -> Game:
    game = Game(contract, model, **options)
    await start_rows(game)
    for rows in script:
        await tick_rows(game, rows)
    await game.actor.stop(b"")
    await game.actor.on_end("stop")
    return game


async def played_alone(contract: Mapping[str, Any], model: Fixed, **options: Any) -> list[Fragment]:
    """The fragments of the same agents, each of whose episodes is a session."""
    fragments: list[Fragment] = []
    games: dict[int, Game] = {}
    for rows in SCRIPT:
        for agent, obs, reward, end in rows:
            game = games.get(agent)
            if game is None:
                game = games[agent] = Game(contract, model, **options)
                await game.start()
            body = {"obs": obs, "reward": rewards_of(game, reward)}
            if end:
                await game.end(**{**body, end: True})
                fragments += games.pop(agent).buffer.fragments
            else:
                await game.tick(**body)
    for game in games.values():
        await game.actor.stop(b"")
        await game.actor.on_end("stop")
        fragments += game.buffer.fragments
    return fragments


@pytest.mark.parametrize("model", [Seeing, SeeingRows])
@pytest.mark.parametrize(
    ("kind", "contract"), [(DISCRETE_KIND, DISCRETE), ("continuous", CONTINUOUS), ("hybrid", HYBRID)]
)
async def test_fragments_are_those_of_sessions_of_one_agent(kind: str, contract: Any, model: Any) -> None:
    together = (await played(contract, model(kind), SCRIPT)).buffer.fragments
    alone = await played_alone(contract, model(kind))
    assert len(together) == len(alone)
    for ours, theirs in zip(by_content(together), by_content(alone), strict=True):
        outputs = (await model(kind).forward({name: leaf[:-1] for name, leaf in ours.obs.items()})).outputs
        del outputs["value"]
        for name, leaf in theirs.obs.items():
            np.testing.assert_array_equal(ours.obs[name], leaf)
            assert ours.obs[name].dtype == leaf.dtype
        np.testing.assert_array_equal(ours.reward, theirs.reward)
        assert (ours.terminated, ours.truncated) == (theirs.terminated, theirs.truncated)
        assert (ours.action.shape, ours.action.dtype) == (theirs.action.shape, theirs.action.dtype)
        np.testing.assert_array_equal(ours.policy_version, theirs.policy_version)
        np.testing.assert_allclose(ours.log_prob, actions.log_prob(outputs, ours.action), rtol=1e-5)
        np.testing.assert_allclose(theirs.log_prob, actions.log_prob(outputs, theirs.action), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("length", [1, 2, 3])
async def test_episodes_are_cut_at_their_length_without_losing_a_transition(length: int) -> None:
    whole = await played(DISCRETE, SeeingRows(DISCRETE_KIND), SCRIPT)
    cut = await played(DISCRETE, SeeingRows(DISCRETE_KIND), SCRIPT, episode_length=length)

    def transitions(game: Game) -> list[Any]:
        return sorted(
            [*before, *after, action, reward, fragment.terminated and step == len(fragment) - 1]
            for fragment in game.buffer.fragments
            for step, (before, after, action, reward) in enumerate(
                zip(fragment.obs["side"].tolist(), fragment.obs["side"][1:].tolist(), fragment.action.tolist(),
                    fragment.reward.tolist(), strict=False)
            )
        )  # fmt: skip

    assert transitions(cut) == transitions(whole)
    assert cut.recorder.summary()["episode_return"] == whole.recorder.summary()["episode_return"]
    assert max(map(len, cut.buffer.fragments)) <= length + 1


async def test_the_most_probable_actions_are_those_of_one_agent() -> None:
    rows = Game(HYBRID, SeeingRows("hybrid"), "serve")
    await start_rows(rows)
    reply = await tick_rows(rows, [(1, [0, 5], 0.0, ""), (9, [5, 1], 0.0, "")])
    for index, obs in enumerate(([0, 5], [5, 1])):
        alone = Game(HYBRID, Seeing("hybrid"), "serve")
        await alone.start()
        answer = await alone.tick(obs=obs)
        assert answer.pop("steer") == pytest.approx(reply["steer"][index], rel=1e-6)
        assert answer == {name: reply[name][index] for name in ("dash", "go")}


async def test_returns_and_infos_are_of_episodes() -> None:
    script = [[*rows] for rows in SCRIPT]
    game = await played(CONTINUOUS, SeeingRows("continuous"), script)
    numbers = game.recorder.summary()
    assert numbers["episode_return"] == pytest.approx((1.25 + 2.625 + 1.0) / 3)
    assert numbers["episode_length"] == pytest.approx((2 + 3 + 1) / 3)
    assert numbers["reward_sum.win"] == pytest.approx((1.25 + 2.625 + 1.0) / 3)
    game = Game(DISCRETE, SeeingRows(DISCRETE_KIND))
    await start_rows(game)
    await tick_rows(game, SCRIPT[0], info={"hp": 100})
    await tick_rows(game, SCRIPT[1], info=[{"hp": 2}, {"hp": 4}])
    await tick_rows(game, SCRIPT[1], info={"hp": 3})
    await game.actor.on_end("disconnect")
    assert game.recorder.summary()["info.hp"] == 3.0, "not what came before an action"
    assert "episode_return" not in game.recorder.summary()


async def test_the_reward_may_be_shaped_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tick] = []

    def reward(self: ContractAgent, tick: Tick) -> float:
        seen.append(tick)
        return 10 * tick.reward + float(tick.obs["side"][0])

    class Shaped(ContractAgent):
        pass

    Shaped.reward = reward  # type: ignore[method-assign]
    monkeypatch.setattr("brayx.actor.contract_agent.Shaped", Shaped, raising=False)
    game = Game(DISCRETE, SeeingRows(DISCRETE_KIND))
    game.make_actor = type(game.make_actor)(
        **{**vars(game.make_actor), "agents": {"agent": Shaped}}  # type: ignore[arg-type]
    )
    game.actor = game.make_actor()
    await start_rows(game)
    for rows in SCRIPT[:2]:
        await tick_rows(game, rows)
    await game.actor.on_end("disconnect")
    assert sorted(fragment.reward.tolist() for fragment in game.buffer.fragments) == [[2.5], [7.0]]
    assert all(tick.agents is None for tick in seen)


async def test_limits_hold_for_all_rows() -> None:
    model = SeeingRows("hybrid")
    game = Game(HYBRID, model, "serve")
    await start_rows(game, forbidden={"go": [1]})
    rows: Script = [(1, [9, 5], 0.0, ""), (2, [9, 4], 0.0, "")]
    assert (await tick_rows(game, rows))["go"] == [2, 3]
    forced = await tick_rows(game, rows, forced={"steer": [-2], "dash": 1}, forbidden={"go": [3]})
    assert forced == {"steer": [[-2.0], [-2.0]], "dash": [1, 1], "go": [2, 2]}
    learns = Game(DISCRETE, Fixed(logits=np.float32([0, 9, 0])))
    await start_rows(learns, forbidden={"go": [1]})
    masks = [[1, 1, 0], [1, 0, 0], [0, 1, 1]]
    ends: Script = [(1, [9, 5], 0.0, ""), (2, [9, 4], 0.0, "terminated"), (3, [9, 4], 0.0, "")]
    await tick_rows(learns, ends, mask=masks)
    assert [seen["action_mask"].tolist() for seen in learns.model.seen] == [[0, 1, 0], [0, 1, 1]]
    with pytest.raises(BadLimits, match=r"^forbidden\.go and mask leave no choice"):
        await tick_rows(learns, [(1, [9, 5], 0.0, ""), (3, [9, 4], 0.0, "")], mask=masks[:2])


class Counting(Fixed):
    """A recurrent model that counts an agent's ticks in its state."""

    spec = ModelSpec((), (), optree.tree_structure((0, 0)), optree.tree_structure(0), StateSpec(1, (), (), np.zeros(1)))

    async def forward(self, obs: Any, state: Any = None, *, deadline_s: float | None = None) -> Forward:
        self.seen.append(float(state[..., 0]))
        side = obs["side"]
        return Forward({"logits": np.append(side, 0), "value": side[0], "state": state + 1}, self.version)


async def test_a_recurrent_model_has_a_state_for_each_agent_s_episode() -> None:
    model = Counting()
    game = await played(DISCRETE, model, SCRIPT)
    assert model.seen == [0, 0, 1, 1, 0, 2, 1, 0, 2, 3]
    states = [fragment.extras["state"][:, 0].tolist() for fragment in game.buffer.fragments]
    assert sorted(states) == [[0], [0, 1], [0, 1, 2], [0, 1, 2]]


async def test_agents_go_on_from_a_snapshot() -> None:
    game, moved = (Game(DISCRETE, SeeingRows(DISCRETE_KIND)) for _ in range(2))
    await start_rows(game)
    for rows in SCRIPT[:2]:
        await tick_rows(game, rows)
    snapshot = await game.actor.snapshot()
    assert snapshot is not None
    await moved.actor.restore("session", snapshot)
    assert await tick_rows(game, SCRIPT[2]) == await tick_rows(moved, SCRIPT[2])
    assert await tick_rows(game, SCRIPT[3]) == await tick_rows(moved, SCRIPT[3])
    await moved.actor.on_end("disconnect")
    assert moved.recorder.summary()["episode_return"] == pytest.approx((0.25 + 2.5) / 2), "less the moved transition"


async def test_a_lost_part_costs_the_returns_of_its_episodes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    game = Game(DISCRETE, SeeingRows(DISCRETE_KIND), episode_length=1)
    await start_rows(game)
    failures = [RuntimeError("a bug")]
    push = game.buffer.push

    def failing(*fragments: Fragment) -> None:
        if failures:
            raise failures.pop()
        push(*fragments)

    monkeypatch.setattr(game.buffer, "push", failing)
    for rows in SCRIPT[:4]:
        await tick_rows(game, rows)
    await tick_rows(game, [(4, [0, 0], 6.0, "terminated")])
    await game.actor.on_end("stop")
    assert game.recorder.summary()["episode_return"] == 9.0, "of agent 4's second episode"


async def test_agents_that_never_end_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("brayx.actor.contract_agent.MAX_ROWS", 3)
    game = Game(DISCRETE, SeeingRows(DISCRETE_KIND))
    await start_rows(game)
    await tick_rows(game, [(agent, [0, 0], 0.0, "") for agent in range(3)])
    with pytest.raises(BadBody, match="agent has 4 agents whose episodes have not ended"):
        await tick_rows(game, [(7, [0, 0], 0.0, "")])


async def test_a_player_that_reacts_late_plays_one_agent() -> None:
    game, left = Game(DISCRETE, SeeingRows(DISCRETE_KIND), "serve"), list[str]()

    class Seats:
        async def seat(self, session: str, start: Any = None) -> SeatedPlayer:
            services = game.actor._factory.services
            return SeatedPlayer("slow", services, None, None, left.append, delay=2)

    game.actor = replace(game.actor._factory, players=Seats())()
    with pytest.raises(LeagueError, match="player 'slow' reacts late"):
        await start_rows(game)
    assert left == ["error"]


async def test_a_start_says_rows_by_true_or_false() -> None:
    with pytest.raises(BadBody, match="rows is 3, expected true or false"):
        await Game(DISCRETE, Seeing(DISCRETE_KIND)).start(rows=3)


@pytest.mark.parametrize("wrong", [np.nan, -np.inf])
def test_rows_that_allow_nothing_are_the_model_s_fault(wrong: float) -> None:
    logits = np.zeros((2, 3), np.float32)
    logits[1] = wrong
    with pytest.raises(ModelError, match="allow no action"):
        sample_action({"logits": logits}, np.random.default_rng(0))
    with pytest.raises(ModelError, match="allow no action"):
        sample_action({"mean": np.zeros((2, 1)), "log_std": np.full((2, 1), wrong)}, np.random.default_rng(0))
