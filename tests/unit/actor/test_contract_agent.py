"""`ContractAgent` behind an actor: what it answers, what it pushes, and a designer's limits."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from brayx.actor.agent import Services
from brayx.actor.agent_actor import AgentActor, AgentActorFactory
from brayx.actor.config import ActorConfig, AgentConfig
from brayx.actor.host import LocalHost
from brayx.actor.ownership import SessionSnapshot
from brayx.actor.players import SeatedPlayer
from brayx.actor.service import into
from brayx.actor.serving import Runtime
from brayx.errors import BadBody, BadLimits, ConfigError
from brayx.gamecore.contract import Contract
from brayx.gamecore.contract_bodies import ContractBodies
from brayx.gamecore.contract_ticks import Tick
from brayx.gamecore.protocol import StepKind, StepRequest
from brayx.metrics import Recorder
from brayx.recording import open as open_recordings
from brayx.recording.config import RecordingConfig
from brayx.recording.recorder import SessionRecorder
from brayx.types import Forward
from tests.unit.replay.made import Box

DISCRETE = {
    "contract": 1,
    "observations": {"side": {"shape": [2]}},
    "actions": {"go": {"kind": "discrete", "size": 3, "start": 1, "mask": True}},
}
CONTINUOUS = {
    "contract": 1,
    "observations": {"side": {"shape": [2]}},
    "actions": {"throttle": {"kind": "continuous", "low": 0, "high": 1}, "steer": {"kind": "continuous", "size": 2}},
    "rewards": {"win": 1.0, "style": 0.1},
}
HYBRID = {
    "contract": 1,
    "observations": {"side": {"shape": [2]}},
    "actions": {
        "steer": {"kind": "continuous", "size": 1, "low": -2, "high": 2},
        "dash": {"kind": "discrete", "size": 2},
        "go": {"kind": "discrete", "size": 3, "start": 1},
    },
}


class Fixed:
    """A model with constant outputs, which keeps its observations."""

    version = 7

    def __init__(self, **outputs: Any) -> None:
        self.outputs = {**outputs, "value": np.float32(0.5)}
        self.seen: list[Any] = []

    async def forward(self, obs: Any, *, deadline_s: float | None = None) -> Forward:
        self.seen.append(obs)
        return Forward(self.outputs, self.version)

    def pinned(self, version: int | None = None) -> Fixed:
        return self


class Game:
    """A session of an actor with the agent, and what it left."""

    def __init__(
        self,
        contract: Mapping[str, Any],
        model: Fixed,
        mode: str = "train",
        parts: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.contract, self.model, self.buffer, self.recorder = dict(contract), model, Box(), Recorder()
        agent = AgentConfig(module="brayx.actor.contract_agent", class_name="ContractAgent")
        job = {"mode": mode, "seed": 0, "agent": {"options": {}}, "contract": Contract.parse(contract).as_dict()}
        job.update(parts or {})
        config = ActorConfig(agents=["agent"], serialize="contract", **options)
        services = Services({"model": model}, {"buffer": self.buffer}, self.recorder)  # type: ignore[dict-item]
        self.make_actor = AgentActorFactory.of(config, {"agent": agent}, "", job, services)
        self.actor: AgentActor = self.make_actor()

    async def start(self, **more: Any) -> Any:
        return json.loads(await self.actor.start("session", json.dumps({**self.contract, **more}).encode()))

    async def tick(self, **body: Any) -> Any:
        return json.loads(await self.actor.tick(json.dumps({"obs": [1, 2], **body}).encode()))

    async def end(self, **body: Any) -> None:
        await self.actor.stop(json.dumps(body).encode())
        await self.actor.on_end("stop")


def logits(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


async def test_a_start_is_answered_with_the_contract_s_id_and_the_policy_version() -> None:
    game = Game(DISCRETE, Fixed(logits=logits(0, 9, 0)), "serve")
    expected = Contract.parse(DISCRETE).id
    assert await game.start() == {"contract": 1, "id": expected, "policy_version": 7, "encoding": "json"}
    assert await game.tick() == {"go": 2}, "the game counts from 1"
    game.contract = {"contract": expected}
    game.actor = game.make_actor()
    assert (await game.start())["id"] == expected, "the id alone stands for the job's contract"


async def test_a_start_that_comes_again_is_that_of_a_session_of_its_own() -> None:
    game = Game(HYBRID, Fixed(logits=(logits(0, 9), logits(9, 5, 0)), mean=logits(0.5), log_std=logits(0)), "serve")
    for limits, chosen in (({"forbidden": {"go": [1]}}, 2), ({}, 1), ({"forbidden": {"go": [1]}}, 2)):
        game.actor = game.make_actor()
        await game.start(**limits)
        assert (await game.tick())["go"] == chosen


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"observations": {"side": {"shape": [5]}}}, r"observations\.side\.shape is \[5\], expected \[2\]"),
        ({"behaviour": "other"}, 'behaviour is "other", expected "agent"'),
        ({"contract": "sha256:0"}, "contract is 'sha256:0', not the one of this service: expected the whole"),
    ],
)
async def test_a_game_with_another_contract_is_refused_by_field(change: Mapping[str, Any], message: str) -> None:
    game = Game({**DISCRETE}, Fixed(logits=logits(0, 9, 0)))
    with pytest.raises(BadBody, match=message):
        await game.start(**change)


@pytest.mark.parametrize("body", [b"", b"{}", b"[1]"])
async def test_a_start_without_a_contract_is_told_where_to_find_one(body: bytes) -> None:
    game = Game({**DISCRETE}, Fixed(logits=logits(0, 9, 0)))
    with pytest.raises(BadBody, match=r"`GET /` of this service .* `brayx check JOB.yaml --env ID`"):
        await game.actor.start("session", body)


async def test_bodies_are_read_as_the_session_s_contract_encodes_them() -> None:
    game = Game(HYBRID, Fixed(logits=(logits(0, 9), logits(9, 0, 0)), mean=logits(0.5), log_std=logits(0)), "serve")
    await game.start(encoding="packed")
    bodies = ContractBodies(Contract.parse({**HYBRID, "encoding": "packed"}))
    reply = bodies.decode_reply(await game.actor.tick(bodies.encode_tick([1, 2])))
    assert reply == {"steer": np.float32(1.0), "dash": 1, "go": 1}, "half of the way to its bound, 2"
    with pytest.raises(BadBody, match="expected at least"):
        await game.actor.tick(b"")


async def test_numbers_are_in_the_game_s_bounds_and_fragments_have_the_policy_s() -> None:
    game = Game(CONTINUOUS, Fixed(mean=logits(0, 9, -0.5), log_std=logits(-9, -9, -9)))
    await game.start()
    reply = await game.tick()
    np.testing.assert_allclose([*reply["throttle"], *reply["steer"]], [0.5, 1.0, -0.5], atol=1e-3)
    await game.tick(reward={"win": 0, "style": 5}, info={"hp": 3, "map": "desert", "seed": 10**400})
    await game.end(reward={"win": 1}, truncated=True, obs=[3, 4])
    (fragment,) = game.buffer.fragments
    np.testing.assert_allclose(fragment.action, [[0, 9, -0.5]] * 2, atol=1e-2)
    np.testing.assert_allclose(fragment.reward, [0.5, 1.0])
    np.testing.assert_array_equal(fragment.obs["side"], [[1, 2], [1, 2], [3, 4]])
    assert (fragment.terminated, fragment.truncated) == (False, True)
    numbers = game.recorder.summary()
    assert numbers["episode_return"] == pytest.approx(1.5)
    assert (numbers["reward_sum.win"], numbers["reward_sum.style"], numbers["info.hp"]) == (1.0, 5.0, 3.0)
    assert not {"info.map", "info.seed"} & set(numbers), "no text, and no number that a float cannot hold"


def halved(tick: Tick) -> float:
    """A reward of the user's own."""
    return tick.reward / 2 + tick.info.get("bonus", 0)


async def test_a_function_of_the_tick_replaces_the_reward() -> None:
    game = Game(CONTINUOUS, Fixed(mean=logits(0, 9, -0.5), log_std=logits(-9, -9, -9)), reward=f"{__name__}.halved")
    await game.start()
    await game.tick()
    await game.tick(reward={"win": 1, "style": 10}, info={"bonus": 5})
    await game.end(reward={"win": 1}, terminated=True)
    (fragment,) = game.buffer.fragments
    np.testing.assert_allclose(fragment.reward, [6.0, 0.5])
    numbers = game.recorder.summary()
    assert (numbers["episode_return"], numbers["reward_sum.win"]) == (6.5, 2.0), "the game's parts stay its own"


async def test_a_game_that_says_not_how_it_ended_has_no_return() -> None:
    game = Game(DISCRETE, Fixed(logits=logits(0, 9, 0)))
    await game.start()
    await game.tick()
    await game.end(reward=1.0)
    (fragment,) = game.buffer.fragments
    assert (fragment.terminated, fragment.truncated) == (False, True)
    numbers = game.recorder.summary()
    assert "episode_return" not in numbers
    assert numbers["games_without_return"] == 1.0


async def test_a_game_that_ended_by_its_rules_at_its_time_limit_is_terminated() -> None:
    game = Game(DISCRETE, Fixed(logits=logits(0, 9, 0)))
    await game.start()
    await game.tick()
    await game.end(obs=[1, 2], reward=1.0, terminated=True, truncated=True)
    (fragment,) = game.buffer.fragments
    assert (fragment.terminated, fragment.truncated) == (True, False)


async def test_a_bad_stop_is_the_game_s_fault_and_can_be_sent_again() -> None:
    game = Game(DISCRETE, Fixed(logits=logits(0, 9, 0)))
    await game.start()
    await game.tick()
    with pytest.raises(BadBody, match="reward"):
        await game.end(reward="much", terminated=True)
    await game.end(reward=2.0, terminated=True)
    (fragment,) = game.buffer.fragments
    assert (fragment.terminated, fragment.truncated) == (True, False)
    assert fragment.reward.tolist() == [2.0]


async def test_limits_of_a_served_model_come_with_the_session_and_with_a_tick(tmp_path: Path) -> None:
    model = Fixed(logits=(logits(0, 9), logits(9, 5, 0)), mean=logits(0.5), log_std=logits(0))
    game = Game(HYBRID, model, "serve")
    recorder = SessionRecorder(RecordingConfig(folder=str(tmp_path)), game.recorder)
    game.actor = replace(game.make_actor, recorders=[recorder])()
    await game.start(forbidden={"go": [1]})
    assert await game.tick() == {"steer": [1.0], "dash": 1, "go": 2}
    limits = {"forbidden": {"go": [2], "dash": [0]}, "forced": {"steer": [-2], "dash": 0}}
    forced = await game.tick(**limits)
    assert forced == {"steer": [-2.0], "dash": 0, "go": 3}
    assert (await game.tick())["go"] == 2, "a tick's limits end with it"
    with pytest.raises(BadLimits, match=r"^forbidden\.go leaves no choice"):
        await game.tick(forbidden={"go": [2, 3]})
    await game.end()
    await asyncio.to_thread(recorder.close, 60.0)
    (episode,) = open_recordings(str(tmp_path))
    assert json.loads(episode.start)["forbidden"] == {"go": [1]}
    assert json.loads(episode.inputs()[1]) == {"obs": [1, 2], **limits}
    assert json.loads(episode.outputs()[1]) == forced


async def test_a_model_that_learns_sees_the_limits_in_its_mask() -> None:
    model = Fixed(logits=logits(0, 9, 0))
    game = Game(DISCRETE, model)
    await game.start(forbidden={"go": [1]})
    await game.tick(mask=[1, 1, 0])
    assert model.seen[-1]["action_mask"].tolist() == [0, 1, 0]
    with pytest.raises(BadLimits, match=r"^forbidden\.go and mask leave no choice"):
        await game.tick(mask=[1, 0, 0])
    with pytest.raises(BadLimits, match=r"^forced\.go and mask leave no choice"):
        await game.tick(mask=[1, 0, 0], forced={"go": 2})
    without = Game(HYBRID, Fixed(logits=(logits(0, 9), logits(9, 5, 0)), mean=logits(0.5), log_std=logits(0)))
    await without.start()
    with pytest.raises(BadLimits, match=r"forbidden\.dash limits an action .* expected \"mask\": true"):
        await without.tick(forbidden={"dash": [0]})


@pytest.mark.parametrize(
    "contract", [CONTINUOUS, {**HYBRID, "actions": {**HYBRID["actions"], "steer": {"kind": "continuous", "size": 2}}}]
)
async def test_a_model_that_learns_may_not_be_forced_to_numbers(contract: Mapping[str, Any]) -> None:
    game = Game(contract, Fixed(mean=logits(0, 0, 0), log_std=logits(0, 0, 0)))
    with pytest.raises(BadLimits, match=r"forced\.steer .*: numbers can be forced only while a model is served"):
        await game.start(forced={"steer": [0, 0]})
    game.actor = game.make_actor()
    await game.start()
    with pytest.raises(BadLimits, match=r"forced\.steer .*: numbers can be forced only while a model is served"):
        await game.tick(forced={"steer": [0, 0]})
    assert not game.recorder.summary(), "a mistake of the game, not of its agent"


async def test_a_stop_has_the_result_of_the_seat() -> None:
    game, results = Game(DISCRETE, Fixed(logits=logits(0, 9, 0)), "serve"), list[Any]()

    class Seats:
        async def seat(self, session: str, start: Any = None) -> SeatedPlayer:
            services = game.actor._factory.services
            return SeatedPlayer("main", services, None, results.append, lambda reason: None)

    game.actor = replace(game.actor._factory, players=Seats())()
    await game.start()
    await game.tick()
    await game.end(reward=1.0, terminated=True, result="win")
    assert results == ["win"]


async def test_a_game_that_is_ahead_of_its_learner_waits_before_it_gets_an_action() -> None:
    game, may_go_on = Game(DISCRETE, Fixed(logits=logits(0, 0, 0))), asyncio.Event()
    game.make_actor = replace(game.make_actor, services=replace(game.make_actor.services, caught_up=may_go_on.wait))
    game.actor = game.make_actor()
    await game.start()
    ahead = asyncio.create_task(game.tick())
    await asyncio.sleep(0)
    assert not ahead.done()
    assert not game.model.seen, "it acts with the weights that are the newest after the wait"
    may_go_on.set()
    await ahead
    assert len(game.model.seen) == 1


async def test_a_session_goes_on_from_a_snapshot() -> None:
    game, moved = (Game(DISCRETE, Fixed(logits=logits(0, 0, 0))) for _ in range(2))
    await game.start()
    await game.tick()
    await game.tick(reward=1.0)
    snapshot = await game.actor.snapshot()
    assert snapshot is not None
    await moved.actor.restore("session", snapshot)
    assert [await game.tick(reward=1.0) for _ in range(20)] == [await moved.tick(reward=1.0) for _ in range(20)]
    await moved.end(reward=1.0, terminated=True)
    assert moved.recorder.summary()["episode_return"] == 21.0, "less the transition during which it moved"


def test_a_session_that_moves_goes_on_at_the_door_with_its_numbered_ticks() -> None:
    game = Game(DISCRETE, Fixed(logits=logits(0, 0, 0)))
    config = ActorConfig(agents=["agent"], port=0, native_port=None, tcp_port=None)  # type: ignore[call-arg]
    old, new, stays = (LocalHost(config, Runtime(game.make_actor)) for _ in range(3))
    with contextlib.ExitStack() as stack:
        connections = {}
        for host in (old, new, stays):
            host.open()
            stack.callback(host.close)
            connections[host] = http.client.HTTPConnection(host.url.removeprefix("http://"), timeout=60)
            stack.callback(connections[host].close)

        def step(host: LocalHost, kind: str, body: Mapping[str, Any], seq: int) -> Any:
            headers = {"session": "session", "step_kind": kind, "seq": str(seq)}
            connections[host].request("POST", "/step", json.dumps(body), headers)
            return json.loads(connections[host].getresponse().read())

        async def move() -> SessionSnapshot:
            parked: asyncio.Future[SessionSnapshot] = asyncio.get_running_loop().create_future()

            async def park(session: str, snapshot: SessionSnapshot) -> None:
                parked.set_result(snapshot)

            old.table.move(park)
            return await parked

        async def resume(snapshot: SessionSnapshot, tick: Mapping[str, Any]) -> Any:
            reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
            request = StepRequest(StepKind.TICK, "session", json.dumps(tick).encode(), seq=snapshot.seq)
            new.table.resume("session", snapshot, request, into(reply))
            return json.loads(await reply)

        ticks = [{"obs": [number, 2], "reward": 1.0} for number in range(20)]
        step(stays, "start", DISCRETE, 0)
        expected = [step(stays, "tick", tick, seq) for seq, tick in enumerate(ticks)]
        step(old, "start", DISCRETE, 0)
        assert [step(old, "tick", tick, seq) for seq, tick in enumerate(ticks[:9])] == expected[:9]
        assert new.run(resume(old.run(move(), 60), ticks[9]), 60) == expected[9]
        assert step(new, "tick", ticks[9], 9) == expected[9], "the repeat of a tick whose reply was lost is not applied"
        assert step(new, "tick", ticks[10], 12)["error"] == "out_of_sequence"
        assert [step(new, "tick", tick, seq) for seq, tick in enumerate(ticks) if seq > 9] == expected[10:]


FOGGY: dict[str, Any] = {
    **DISCRETE,
    "observations": {
        "side": {"shape": [2]},
        "fog": {"shape": [2, 1], "dtype": "uint8"},
        "card": {"kind": "category", "size": 3, "start": 4},
    },
}


async def test_a_served_game_may_lack_observations_that_have_a_value() -> None:
    model = Fixed(logits=np.float32([0, 0, 1]))
    game = Game(FOGGY, model, "serve", missing={"fog": 7, "card": 5})
    game.contract = DISCRETE
    assert (await game.start())["id"] == Contract.parse(DISCRETE).id, "the game's own"
    assert await game.tick() == {"go": 3}
    await game.end(terminated=True)
    (seen,) = model.seen
    assert {name: array.tolist() for name, array in seen.items()} == {
        "side": [1, 2],
        "fog": [[7], [7]],
        "card": 1,
        "action_mask": [1, 1, 1],
    }
    assert seen["fog"].dtype == np.float32

    whole = Game(FOGGY, model, "serve", missing={"fog": 7})
    await whole.start()
    await whole.tick(obs={"side": [1, 2], "fog": [1, 2], "card": 4})
    assert model.seen[-1]["fog"].tolist() == [[1], [2]], "what the game sees comes first"
    lacks = Game(FOGGY, model, "serve", missing={"fog": 7})
    lacks.contract = DISCRETE
    with pytest.raises(BadBody, match=r"observations\.card is missing.*--set 'actor.missing=\{card: 0\}'"):
        await lacks.start()
    lacks.contract = {**FOGGY, "behaviour": "other"}
    with pytest.raises(BadBody, match=r'^behaviour is "other", expected "agent": send "behaviour": "agent"'):
        await lacks.start()
    learns = Game(FOGGY, model, missing={"fog": 7, "card": 5})
    learns.contract = DISCRETE
    with pytest.raises(BadBody, match=r"observations\.fog is missing"):
        await learns.start()


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ({"fogg": 0}, "actor.missing: fogg is unknown; nearest is 'fog'"),
        ({"card": 7}, "actor.missing: obs.card is 7, expected a whole number from 4 to 6"),
        ({"fog": [1, 2, 3]}, r"actor.missing: obs.fog has shape \[3\], expected \[2, 1\]"),
    ],
)
def test_values_of_missing_observations_are_checked_at_the_start(missing: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Game(FOGGY, Fixed(), "serve", missing=missing)
