"""Small environments that each show one thing, with a known best return."""

from __future__ import annotations

import functools
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete
from pettingzoo import ParallelEnv


def blind_cartpole() -> gymnasium.Env:
    """CartPole that shows positions and no velocities: only a memory can tell where the pole is going."""
    env = gymnasium.make("CartPole-v1")
    high = env.observation_space.high[[0, 2]]
    return gymnasium.wrappers.TransformObservation(env, lambda obs: obs[[0, 2]], Box(-high, high, dtype=np.float32))


class Locks(gymnasium.Env):
    """Three dials to be set as the observation says; each earns 1/3, and all of them together another 1. 20 steps."""

    SIZES = (3, 4, 5)
    BEST = 40.0

    def __init__(self) -> None:
        self.observation_space = Box(0, 1, (sum(self.SIZES),), np.float32)
        self.action_space = MultiDiscrete(self.SIZES)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._left = 20
        return self._next(), {}

    def _next(self) -> np.ndarray:
        self._goal = np.array([self.np_random.integers(size) for size in self.SIZES])
        return np.concatenate(
            [np.eye(size, dtype=np.float32)[at] for size, at in zip(self.SIZES, self._goal, strict=True)]
        )

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        right = np.asarray(action) == self._goal
        self._left -= 1
        return self._next(), float(right.mean() + right.all()), self._left == 0, False, {}


class Offers(gymnasium.Env):
    """Of eight offers with prices on show three may be taken, and taking another one ends the game. 20 steps.

    A step earns the price's rank among those allowed: 1, 1/2 or 0.
    """

    BEST = 20.0

    def __init__(self) -> None:
        self.observation_space = Dict({"prices": Box(0, 1, (8,), np.float32), "action_mask": Box(0, 1, (8,), np.int8)})
        self.action_space = Discrete(8)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        super().reset(seed=seed)
        self._left = 20
        return self._next(), {}

    def _next(self) -> dict[str, np.ndarray]:
        self._prices = self.np_random.random(8).astype(np.float32)
        self._allowed = self.np_random.permutation(8)[:3]
        mask = np.zeros(8, np.int8)
        mask[self._allowed] = 1
        return {"prices": self._prices, "action_mask": mask}

    def step(self, action: int) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        if action not in self._allowed:
            return self._next(), -20.0, True, False, {}
        earned = float((self._prices[self._allowed] < self._prices[action]).mean() * 1.5)
        self._left -= 1
        return self._next(), earned, self._left == 0, False, {}


class Rowers(ParallelEnv):
    """Three rowers each hear a call of their own out of four, and answer it; a step earns the share that are right.

    A current, drawn for each game and felt by none of them, adds to every step's reward: the game's state has it, so a
    value that sees the state knows what was luck. 10 steps; the best score, without the current, is 10.
    """

    metadata = {"name": "rowers_v0"}
    possible_agents = ["bow", "middle", "stroke"]
    CALLS, STEPS, BEST = 4, 10, 10.0

    def __init__(self, current: float = 2.0) -> None:
        self._current = current
        self._random = np.random.default_rng()
        self.state_space = Box(-np.inf, np.inf, (len(self.possible_agents) * self.CALLS + 2,), np.float32)

    @functools.cache  # noqa: B019
    def observation_space(self, agent: str) -> gymnasium.Space[Any]:
        return Box(0, 1, (self.CALLS,), np.float32)

    @functools.cache  # noqa: B019
    def action_space(self, agent: str) -> gymnasium.Space[Any]:
        return Discrete(self.CALLS)

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        if seed is not None:
            self._random = np.random.default_rng(seed)
        self.agents = list(self.possible_agents)
        self._left = self.STEPS
        self._flow = self._current * self._random.normal()
        return self._called(), {agent: {} for agent in self.agents}

    def _called(self) -> dict[str, np.ndarray]:
        self._calls = self._random.integers(self.CALLS, size=len(self.possible_agents))
        return {
            agent: np.eye(self.CALLS, dtype=np.float32)[call]
            for agent, call in zip(self.possible_agents, self._calls, strict=True)
        }

    def state(self) -> np.ndarray:
        calls = np.eye(self.CALLS, dtype=np.float32)[self._calls].reshape(-1)
        return np.append(calls, [self._flow, self._left / self.STEPS]).astype(np.float32)

    def step(self, actions: dict[str, int]) -> tuple[Any, Any, Any, Any, Any]:
        right = [actions[agent] == call for agent, call in zip(self.possible_agents, self._calls, strict=True)]
        self._left -= 1
        reward = dict.fromkeys(self.agents, float(np.mean(right)) + self._flow)
        over = dict.fromkeys(self.agents, self._left == 0)
        if self._left == 0:
            self.agents = []
        return self._called(), reward, over, dict.fromkeys(over, False), {agent: {} for agent in over}
