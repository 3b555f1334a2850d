"""`brayx.rollout.multi`: agents of PettingZoo's parallel games as rows, and MAPPO's columns from them."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from pettingzoo import ParallelEnv

from brayx.errors import ConfigError
from brayx.nets.central import central_policy_for
from brayx.nets.policy import NetworkConfig
from brayx.rollout.collector import Collector
from brayx.rollout.multi import AgentsAsRows
from brayx.rollout.policy import RolloutPolicy


class Count(ParallelEnv):
    """Ends after three steps; an agent observes its number and the time, and its reward is its action."""

    metadata = {"name": "count_v0"}
    possible_agents = ["a", "b"]
    state_space = Box(0, 99, (1,), np.float64)

    def observation_space(self, agent):
        return Box(0, 99, (2,), np.float32)

    def action_space(self, agent):
        return Discrete(3)

    def reset(self, seed=None, options=None):
        self.agents = list(self.possible_agents)
        self.time = 0
        return self.seen(), {agent: {} for agent in self.agents}

    def seen(self):
        return {agent: np.array([index, self.time], np.float32) for index, agent in enumerate("ab")}

    def state(self):
        return np.array([self.time * 10.0])

    def step(self, actions):
        self.time += 1
        over = self.time == 3
        rewards = {agent: float(actions[agent]) for agent in "ab"}
        flags = dict.fromkeys("ab", over), dict.fromkeys("ab", False)
        return self.seen(), rewards, *flags, {agent: {} for agent in "ab"}


class Leaves(Count):
    def step(self, actions):
        seen, rewards, _, cuts, infos = super().step(actions)
        return seen, rewards, {"a": True, "b": False}, cuts, infos


def test_rows_are_agents_and_games_restart():
    envs = AgentsAsRows(Count, games=2)
    assert envs.num_envs == 4
    obs, _ = envs.reset(seed=0)
    assert obs.tolist() == [[0, 0], [1, 0], [0, 0], [1, 0]]
    for time in (1, 2, 3):
        obs, reward, terminated, truncated, _ = envs.step(np.array([0, 1, 2, 1]))
        assert obs[:, 1].tolist() == [time] * 4
        assert reward.tolist() == [0, 1, 2, 1]
        assert terminated.tolist() == [time == 3] * 4
        assert not truncated.any()
    obs, reward, terminated, *_ = envs.step(np.array([2, 2, 2, 2]))
    assert obs[:, 1].tolist() == [0] * 4
    assert not reward.any()
    assert not terminated.any()


def test_columns_have_the_state_for_the_value():
    envs = AgentsAsRows(Count, games=2, state=True)
    first = {"obs": np.zeros(2, np.float32), "state": np.zeros(1, np.float32)}
    module, example = central_policy_for(first, num_actions=3, network=NetworkConfig(hidden=[8]))
    collector = Collector(envs, RolloutPolicy(module, example), 5)
    arrays = collector.collect().arrays
    assert arrays["obs/obs"].shape == (4, 6, 2)
    assert arrays["obs/state"][0, :, 0].tolist() == [0, 10, 20, 30, 0, 10]
    assert arrays["mask"][0].tolist() == [1, 1, 1, 0, 1, 0]


@pytest.mark.filterwarnings("error")
def test_ids_mark_the_agent_in_the_state():
    class Single(Count):
        state_space = Box(0, 99, (1,), np.float32)

        def state(self):
            return super().state().astype(np.float32)

    envs = AgentsAsRows(Single, games=2, state=True, ids=True)
    obs, _ = envs.reset(seed=0)
    assert obs["state"].tolist() == [[0, 1, 0], [0, 0, 1]] * 2
    obs, *_ = envs.step(np.zeros(4, np.int64))
    assert obs["state"].tolist() == [[10, 1, 0], [10, 0, 1]] * 2
    assert obs["obs"].tolist() == [[0, 1], [1, 1]] * 2
    assert obs in envs.observation_space
    assert envs.single_observation_space["state"] == Box(np.zeros(3, np.float32), np.array([99, 1, 1], np.float32))


def test_ids_without_a_flat_state_are_refused():
    class Picture(Count):
        state_space = Box(0, 255, (8, 8, 3), np.uint8)

    with pytest.raises(ConfigError, match=r"ids .*state=True"):
        AgentsAsRows(Count, ids=True)
    with pytest.raises(ConfigError, match="a flat state, but this one is Box"):
        AgentsAsRows(Picture, state=True, ids=True)


def test_games_with_unequal_agents_or_no_state_are_refused():
    class Unlike(Count):
        def action_space(self, agent):
            return Discrete(3 if agent == "a" else 4)

    class Stateless(Count):
        state_space = None

    with pytest.raises(ConfigError, match="the same spaces"):
        AgentsAsRows(Unlike)
    with pytest.raises(ConfigError, match="state_space"):
        AgentsAsRows(Stateless, state=True)
    envs = AgentsAsRows(Leaves)
    envs.reset()
    with pytest.raises(ConfigError, match=r"\['a'\] left"):
        envs.step(np.array([0, 0]))


def test_it_is_a_vector_environment():
    assert isinstance(AgentsAsRows(Count), gymnasium.vector.VectorEnv)
