"""Small PettingZoo environments with predictable rewards; importable as ``module:factory``.

They follow PettingZoo's rules; test_pettingzoo.py checks that with its API tests.
"""

from __future__ import annotations

import functools
from typing import Any

import gymnasium
import numpy as np
from pettingzoo import AECEnv, ParallelEnv


class Turns(AECEnv):
    """Red, blue and grey take turns; each turn earns the others 1. Grey dies in its first; the others play two more."""

    metadata = {"name": "turns_v0"}
    possible_agents = ["red", "blue", "grey"]
    render_mode = None

    @functools.cache  # noqa: B019
    def observation_space(self, agent: str) -> gymnasium.Space[Any]:
        mask = gymnasium.spaces.Box(0, 1, (2,), np.int8)
        seen = gymnasium.spaces.Box(0, 9, (1,), np.float32)
        return gymnasium.spaces.Dict({"observation": seen, "action_mask": mask})

    @functools.cache  # noqa: B019
    def action_space(self, agent: str) -> gymnasium.Space[Any]:
        return gymnasium.spaces.Discrete(2)

    def observe(self, agent: str) -> dict[str, Any]:
        return {"observation": np.array([self.turns[agent]], np.float32), "action_mask": np.ones(2, np.int8)}

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        self.agents = list(self.possible_agents)
        self.turns = dict.fromkeys(self.agents, 0)
        self.rewards: dict[str, float] = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos: dict[str, dict[str, Any]] = {agent: {} for agent in self.agents}
        self.agent_selection = "red"
        self._skip_agent_selection = None

    def step(self, action: Any) -> None:
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            self._was_dead_step(action)
            return
        assert self.action_space(agent).contains(action)
        self._clear_rewards()
        self._cumulative_rewards[agent] = 0.0
        self.turns[agent] += 1
        for other in self.agents:
            self.rewards[other] = float(other != agent)
        self.terminations[agent] = agent == "grey"
        if agent == "blue" and self.turns["blue"] == 3:
            self.truncations = dict.fromkeys(self.agents, True)
        order = self.agents[self.agents.index(agent) + 1 :] + self.agents
        self.agent_selection = next(candidate for candidate in order if not self.terminations[candidate])
        self._accumulate_rewards()
        self._deads_step_first()


class Race(ParallelEnv):
    """x and y start; at step 2 x drops out and z enters; step 4 truncates the game. An action is its reward."""

    metadata = {"name": "race_v0"}
    possible_agents = ["x", "y", "z"]
    render_mode = None

    @functools.cache  # noqa: B019
    def observation_space(self, agent: str) -> gymnasium.Space[Any]:
        return gymnasium.spaces.Box(0, 9, (2,), np.float32)

    @functools.cache  # noqa: B019
    def action_space(self, agent: str) -> gymnasium.Space[Any]:
        return gymnasium.spaces.Discrete(3)

    def _see(self, agents: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        seen = {agent: np.array([self.steps, ord(agent) - ord("x")], np.float32) for agent in agents}
        return seen, {agent: {"action_mask": np.array([1, 0, 1], np.int8)} if agent == "z" else {} for agent in agents}

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        self.steps = 0
        self.agents = ["x", "y"]
        return self._see(self.agents)

    def step(self, actions: dict[str, Any]) -> tuple[Any, Any, Any, Any, Any]:
        assert set(actions) == set(self.agents)
        self.steps += 1
        if self.steps == 2:
            self.agents.append("z")
        terminations = {agent: self.steps == 2 and agent == "x" for agent in self.agents}
        truncations = dict.fromkeys(self.agents, self.steps == 4)
        rewards = {agent: float(actions.get(agent, 0)) for agent in self.agents}
        seen, infos = self._see(self.agents)
        self.agents = [agent for agent in self.agents if not (terminations[agent] or truncations[agent])]
        return seen, rewards, terminations, truncations, infos


class Numbers:
    """What an agent sees and does is a number."""

    render_mode = None
    ROUNDS = 5

    @functools.cache  # noqa: B019
    def observation_space(self, agent: str) -> gymnasium.Space[Any]:
        return gymnasium.spaces.Discrete(1000)

    action_space = observation_space


class Secrets(Numbers, ParallelEnv):
    """Each of two agents sees its own number and earns 1 for the other's, so it needs a message to know it."""

    metadata = {"name": "secrets_v0"}
    possible_agents = ["left", "right"]

    def _see(self) -> tuple[dict[str, int], dict[str, Any]]:
        self.secret = {agent: int(self.random.integers(1000)) for agent in self.possible_agents}
        return dict(self.secret), {agent: {} for agent in self.possible_agents}

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        self.random = np.random.default_rng(seed)
        self.rounds = 0
        self.agents = list(self.possible_agents)
        return self._see()

    def step(self, actions: dict[str, Any]) -> tuple[Any, Any, Any, Any, Any]:
        self.rounds += 1
        left, right = self.possible_agents
        rewards = {
            left: float(actions[left] == self.secret[right]),
            right: float(actions[right] == self.secret[left]),
        }
        over = dict.fromkeys(self.agents, self.rounds == self.ROUNDS)
        if self.rounds == self.ROUNDS:
            self.agents = []
        seen, infos = self._see()
        return seen, rewards, over, dict.fromkeys(over, False), infos


class Whispers(Numbers, AECEnv):
    """``first`` and ``second`` take five turns each: the first sees a number, the second earns 1 for naming it."""

    metadata = {"name": "whispers_v0"}
    possible_agents = ["first", "second"]

    def observe(self, agent: str) -> np.int64:
        return np.int64(self.secret if agent == "first" else 0)

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        self.random = np.random.default_rng(seed)
        self.secret = int(self.random.integers(1000))
        self.rounds = 0
        self.agents = list(self.possible_agents)
        self.rewards: dict[str, float] = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos: dict[str, dict[str, Any]] = {agent: {} for agent in self.agents}
        self.agent_selection = "first"

    def step(self, action: Any) -> None:
        agent = self.agent_selection
        if self.terminations[agent]:
            self._was_dead_step(action)
            return
        self._clear_rewards()
        self._cumulative_rewards[agent] = 0.0
        if agent == "second":
            self.rewards[agent] = float(action == self.secret)
            self.secret = int(self.random.integers(1000))
            self.rounds += 1
            self.terminations = dict.fromkeys(self.agents, self.rounds == self.ROUNDS)
        self.agent_selection = "first" if agent == "second" else "second"
        self._accumulate_rewards()


def turns() -> Turns:
    return Turns()


def race() -> Race:
    return Race()


def neither() -> object:
    return object()


def broken() -> Turns:
    raise RuntimeError("no board today")
