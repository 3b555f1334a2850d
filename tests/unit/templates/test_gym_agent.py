"""The template's agent behind an actor: its refusals, and the fragments that it pushes at any end of a game."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from brayx.actor.agent import Services
from brayx.actor.agent_actor import AgentActor, AgentActorFactory
from brayx.components import load
from brayx.errors import AgentError, BadBody
from brayx.metrics import Recorder
from brayx.types import Forward
from tests.unit.replay.made import Box

TEMPLATES = Path(__file__).parents[3] / "pipelines" / "templates"


class Policy:
    """A model handle that always takes action 1."""

    async def forward(self, *args: Any) -> Forward:
        return Forward({"logits": np.array([0.0, 50.0], np.float32), "value": np.float32(0)}, 7)


def make(episode_length: int | None = None) -> tuple[AgentActor, Box, Recorder]:
    box, recorder = Box(), Recorder()
    services = Services(models={"model": Policy()}, buffers={"buffer": box}, recorder=recorder)
    config = {"mode": "train", "seed": 0, "agent": {"options": {}}}
    agents = {"agent": load("gym_agent", "GymAgent", str(TEMPLATES))}
    return AgentActorFactory(agents, config, services, episode_length=episode_length)(), box, recorder


def tick(number: int) -> bytes:
    return json.dumps({"obs": [number, number], "reward": float(number)}).encode()


def stop(number: int, **ended: bool) -> bytes:
    return json.dumps({"obs": [number, number], "reward": float(number), **ended}).encode()


@dataclass(frozen=True)
class End:
    """How a game of three ticks ends, and what of it is pushed.

    Attributes:
        stop: body of the stop; None: there was none.
        reason: of the session's end.
        steps: transitions pushed.
        last_obs: the observation that the fragment bootstraps from, if it does.
        counted: the game's return is recorded.
    """

    stop: bytes | None
    reason: str
    steps: int
    last_obs: float
    terminated: bool
    truncated: bool
    counted: bool


ENDS = {
    "terminated": End(stop(3, terminated=True, truncated=False), "stop", 3, 3.0, True, False, True),
    "truncated": End(stop(3, terminated=False, truncated=True), "stop", 3, 3.0, False, True, True),
    "terminated at its limit": End(stop(3, terminated=True, truncated=True), "stop", 3, 3.0, True, False, True),
    "broken off by the game": End(stop(3, terminated=False, truncated=False), "stop", 3, 3.0, False, True, False),
    "stopped without a word": End(None, "stop", 2, 2.0, False, True, False),
    "connection lost": End(None, "disconnect", 2, 2.0, False, True, False),
    "idle": End(None, "idle", 2, 2.0, False, True, False),
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
async def test_the_fragment_says_how_the_game_ended(end: End) -> None:
    actor, box, recorder = make()
    await actor.start("s", b"")
    for number in range(3):
        assert json.loads(await actor.tick(tick(number))) == {"action": 1}
    if end.stop is not None:
        await actor.stop(end.stop)
    await actor.on_end(end.reason)
    (fragment,) = box.fragments
    assert (fragment.terminated, fragment.truncated) == (end.terminated, end.truncated)
    assert len(fragment) == end.steps
    assert fragment.obs[:, 0].tolist() == [*map(float, range(end.steps)), end.last_obs]
    assert fragment.reward.tolist() == [1.0, 2.0, 3.0][: end.steps], "what came of each action, not before it"
    assert fragment.action.tolist() == [1] * end.steps
    assert fragment.policy_version.tolist() == [7] * end.steps
    numbers = recorder.summary()
    assert numbers.get("episode_return") == (6.0 if end.counted else None)
    assert numbers.get("episode_length") == (3.0 if end.counted else None)
    assert numbers.get("games_without_return", 0) == (end.reason == "stop" and not end.counted)
    shown = "no body" if end.stop is None else "terminated: false, truncated: false besides obs, reward"
    assert recorder.notes().get("games_without_return", f"its stop had {shown}") == f"its stop had {shown}"


@pytest.mark.parametrize("count", [1, 3])
async def test_a_model_with_other_actions_than_the_game_is_refused_at_the_first_tick(count: int) -> None:
    actor, _, _ = make()
    await actor.start("s", json.dumps({"env_id": "Game-v0", "seed": None, "num_actions": count}).encode())
    with pytest.raises(AgentError) as refused:
        await actor.tick(tick(0))
    assert str(refused.value.__cause__) == f"the model has 2 actions, the game {count}"
    fitting, _, _ = make()
    await fitting.start("s", b'{"num_actions": 2}')
    assert json.loads(await fitting.tick(tick(0))) == {"action": 1}


async def test_replies_count_from_the_first_action_and_fragments_from_0() -> None:
    actor, box, _ = make()
    await actor.start("s", b'{"num_actions": 2, "first_action": 5}')
    assert json.loads(await actor.tick(tick(0))) == {"action": 6}
    await actor.stop(stop(1, terminated=True, truncated=False))
    await actor.on_end("stop")
    assert [fragment.action.tolist() for fragment in box.fragments] == [[1]]


async def test_a_cut_ends_nothing_and_the_pieces_fit_together() -> None:
    actor, box, recorder = make(episode_length=2)
    await actor.start("s", b"")
    for number in range(5):
        await actor.tick(tick(number))
    await actor.stop(stop(5, terminated=True, truncated=False))
    await actor.on_end("stop")
    assert [(f.terminated, f.truncated) for f in box.fragments] == [(False, False), (False, False), (True, False)]
    assert [f.obs[:, 0].tolist() for f in box.fragments] == [[0, 1, 2], [2, 3, 4], [4, 5]]
    assert [f.reward.tolist() for f in box.fragments] == [[1, 2], [3, 4], [5]]
    assert recorder.summary()["episode_return"] == 15.0


async def test_a_game_that_goes_on_elsewhere_keeps_what_it_earned_before() -> None:
    first, box, _ = make()
    await first.start("s", b"")
    for number in range(4):
        await first.tick(tick(number))
    data = await first.snapshot()
    assert data is not None
    second, rest, recorder = make()
    await second.restore("s", data)
    for number in range(4, 6):
        await second.tick(tick(number))
    await second.stop(stop(6, terminated=True))
    await second.on_end("stop")
    rewards = [fragment.reward.tolist() for fragment in (*box.fragments, *rest.fragments)]
    assert rewards == [[1, 2, 3], [5, 6]], "the move cuts the fragment: no state goes along"
    assert recorder.summary()["episode_return"] == 17.0


async def test_a_game_whose_piece_was_lost_has_failed_and_its_return_does_not_count() -> None:
    actor, box, recorder = make(episode_length=2)
    await actor.start("s", b"")
    for number in range(2):
        await actor.tick(tick(number))
    del actor._episodes.states[0].step  # as if on_episode had a bug
    for number in range(2, 5):
        await actor.tick(tick(number))
    await actor.stop(stop(5, terminated=True, truncated=False))
    await actor.on_end("stop")
    assert [fragment.reward.tolist() for fragment in box.fragments] == [[3, 4], [5]]
    numbers = recorder.summary()
    assert (numbers["agent_errors.on_episode"], numbers["games_failed.on_episode"]) == (1, 1)
    assert not {"episode_return", "episode_length"} & set(numbers)


async def test_a_cut_game_that_is_lost_is_truncated_where_it_was_seen_last() -> None:
    actor, box, _ = make(episode_length=2)
    await actor.start("s", b"")
    for number in range(4):
        await actor.tick(tick(number))
    await actor.on_end("disconnect")
    assert [(f.terminated, f.truncated) for f in box.fragments] == [(False, False), (False, True)]
    assert [f.obs[:, 0].tolist() for f in box.fragments] == [[0, 1, 2], [2, 3]]


async def test_a_lone_tick_is_nothing_to_learn_from() -> None:
    actor, box, recorder = make()
    await actor.start("s", b"")
    await actor.tick(tick(0))
    await actor.on_end("disconnect")
    assert box.fragments == []
    assert "episode_return" not in recorder.summary()


@pytest.mark.parametrize("reward", [None, "null", "[1.0]", '"much"', "NaN", "1e400", pytest.param(10**400, id="huge")])
async def test_a_tick_without_a_reward_is_refused_at_once_and_costs_nothing(reward: Any) -> None:
    actor, box, _ = make()
    await actor.start("s", b"")
    await actor.tick(tick(0))
    with pytest.raises(BadBody, match="reward"):
        await actor.tick(b'{"obs": [1, 1]}' if reward is None else f'{{"obs": [1, 1], "reward": {reward}}}'.encode())
    await actor.tick(tick(1))
    await actor.stop(stop(2, terminated=True))
    await actor.on_end("stop")
    (fragment,) = box.fragments
    assert fragment.reward.tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("obs", "says"),
    [
        ("[1, null]", r"obs\[1\] is null, expected a finite number"),
        ("[NaN, 1]", r"obs\[0\] is nan, expected a finite number"),
        ("[1, 1e999]", r"obs\[1\] is inf, expected a finite number"),
        ("[1, 1e39]", r"obs\[1\] is 1e\+39, expected a finite number"),
        ('[1, "two"]', r"obs\[1\] is 'two'"),
        ("[1, true]", r"obs\[1\] is true, expected a finite number"),
        ("[[1], [1, 2]]", "obs is lists of different lengths, expected numbers"),
        ("null", "obs is null, expected a finite number"),
    ],
)
async def test_an_observation_that_is_not_finite_is_refused_by_field_and_index(obs: str, says: str) -> None:
    actor, box, _ = make()
    await actor.start("s", b"")
    await actor.tick(tick(0))
    with pytest.raises(BadBody, match=says):
        await actor.tick(f'{{"obs": {obs}, "reward": 5}}'.encode())
    await actor.tick(tick(1))
    await actor.stop(stop(2, terminated=True))
    await actor.on_end("stop")
    assert [fragment.reward.tolist() for fragment in box.fragments] == [[1.0, 2.0]], "the refused tick never happened"


async def test_the_first_tick_and_a_stateless_call_need_no_reward() -> None:
    actor, _, _ = make()
    await actor.start("s", b"")
    assert json.loads(await actor.tick(b'{"obs": [0, 0]}')) == {"action": 1}
    stateless, _, _ = make()
    assert json.loads(await stateless.call(b'{"obs": [0, 0]}')) == {"action": 1}
    with pytest.raises(BadBody):
        await stateless.call(b'{"reward": 1.0}')
