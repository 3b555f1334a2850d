"""The door of a job with environments only: its model gets the observations that the environment gave."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from brayx.actor.env_agent import env_observation
from brayx.bridges.env_bodies import SpacesBodies
from brayx.errors import ConfigError
from brayx.gamecore.contract import Contract
from brayx.gamecore.contract_bodies import ContractBodies
from brayx.jobs.config import JobConfig
from brayx.jobs.env_door import with_door

SPACES = {
    "vector": spaces.Box(-1, 1, (3,)),
    "number": spaces.Box(-1, 1, ()),
    "image": spaces.Box(0, 255, (40, 40), np.uint8),
    "category": spaces.Discrete(4, start=5),
    "categories": spaces.MultiDiscrete([3, 3], start=[1, 1]),
    "bits": spaces.MultiBinary((2, 2)),
    "dict": spaces.Dict(b=spaces.Dict(x=spaces.Box(-1, 1, (2,)), n=spaces.Discrete(3)), a=spaces.Box(-1, 1, (1, 2))),
    "masked": spaces.Dict(seen=spaces.Box(-1, 1, (2,)), action_mask=spaces.Box(0, 1, (2,), np.int8)),
}


class Seen(gymnasium.Env[Any, Any]):
    action_space = spaces.Discrete(2)

    def __init__(self, name: str) -> None:
        self.observation_space = SPACES[name]

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return self.observation_space.sample(), {}


def build(name: str, config: Any) -> Seen:
    return Seen(config["project"])


def job(name: str) -> JobConfig:
    parts = {
        "project": name,
        "trial": "t",
        "model": {"kind": "model", "module": "brayx.jobs.models"},
        "rollout": {
            "kind": "rollout", "module": __name__, "func": "build", "model": "model", "buffer": "buffer", "num_envs": 2,
        },
        "buffer": {"kind": "buffer", "unroll_length": 4, "batch_size": 2},
        "trainer": {"kind": "trainer", "model": "model", "buffers": ["buffer"]},
    }  # fmt: skip
    return JobConfig.of(parts, "")


@pytest.mark.parametrize("name", SPACES)
def test_the_model_gets_what_the_environment_gave(name: str) -> None:
    served = with_door(job(name))
    contract = Contract.parse(served.contract)
    space = SPACES[name]
    space.seed(0)
    obs: Any = space.sample()
    if name == "masked":
        obs["action_mask"] = np.array([1, 0], np.int8)
    body = SpacesBodies(space, Seen.action_space, False, "agent").tick(obs, 0.0, {})
    given = env_observation(ContractBodies(contract).decode(body).obs, served.agents["agent"].options["obs"])

    def same(part: Any, got: Any) -> None:
        if isinstance(part, dict):
            assert set(part) == set(got)
            for key in part:
                same(part[key], got[key])
        else:
            assert np.shape(got) == np.shape(part)
            np.testing.assert_array_equal(got, part)

    same(obs, given)


def test_what_has_a_door_keeps_it() -> None:
    served = with_door(job("vector"))
    assert with_door(served) is served


def test_a_space_that_cannot_be_served_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SPACES, "unequal", spaces.MultiDiscrete([2, 3]))
    with pytest.raises(ConfigError, match="cannot be served"):
        with_door(job("unequal"))
