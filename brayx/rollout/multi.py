"""PettingZoo's parallel games as a Gymnasium vector environment: each agent of each game is a row.

Rows of one game are adjacent, and their episodes end together. With ``state``, an observation is
``{"obs": the agent's observation, "state": the game's state}``, for algorithms with a value of the whole game. Knows
nothing of policies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array

from brayx.errors import ConfigError
from brayx.nets.central import OWN, STATE
from brayx.spaces import MASK


class AgentsAsRows(VectorEnv):
    """Steps games one after the other; a game that has ended is reset at the next step, which ignores actions.

    Args:
        make: makes a game, a PettingZoo `ParallelEnv`. All agents must have the same spaces and stay until the end.
        games: number of games.
        state: observations also have the game's state.
        ids: append the row's agent, one-hot, to the state; a value needs it if the agents' rewards differ.

    Raises:
        ConfigError: the agents' spaces differ, the game has no state, or ``ids`` cannot be appended to it.
    """

    def __init__(self, make: Callable[[], Any], games: int = 1, *, state: bool = False, ids: bool = False) -> None:
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self._games = [make() for _ in range(games)]
        first = self._games[0]
        self.agents = list(first.possible_agents)
        self.num_envs = games * len(self.agents)
        self._with_state = state
        self._ids: np.ndarray | None = None
        spaces = {agent: (first.observation_space(agent), first.action_space(agent)) for agent in self.agents}
        observation, self.single_action_space = spaces[self.agents[0]]
        for agent, (observed, acted) in spaces.items():
            if (observed, acted) != (observation, self.single_action_space):
                raise ConfigError(
                    f"agents as rows need the same spaces: {self.agents[0]!r} observes {observation} and acts in "
                    f"{self.single_action_space}, {agent!r} {observed} and {acted}"
                )
        self.single_observation_space = observation
        if state:
            space = getattr(first, "state_space", None)
            if not isinstance(space, gymnasium.Space):
                raise ConfigError(f"{first} has no state_space, which state=True needs")
            if ids:
                space = self._with_ids(space)
            self.single_observation_space = gymnasium.spaces.Dict({OWN: observation, STATE: space})
        elif ids:
            raise ConfigError("ids are part of the state: expected state=True", key="ids")
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self._ended = [False] * games

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Resets every game, each with a different seed."""
        rows, infos = [], []
        for index, game in enumerate(self._games):
            obs, info = game.reset(seed=None if seed is None else int(seed) + index, options=options)
            rows += self._rows(game, obs)
            infos += [info[agent] for agent in self.agents]
        self._ended = [False] * len(self._games)
        return self._joined(rows), _masks(infos)

    def step(self, actions: Any) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """One step of every game.

        Raises:
            ConfigError: an agent has left a running game.
        """
        size = len(self.agents)
        rows: list[Any] = []
        infos: list[Mapping[str, Any]] = []
        reward = np.zeros(self.num_envs)
        terminated, truncated = np.zeros(self.num_envs, np.bool_), np.zeros(self.num_envs, np.bool_)
        for index, game in enumerate(self._games):
            if self._ended[index]:
                obs, info = game.reset()
                rows += self._rows(game, obs)
                infos += [info[agent] for agent in self.agents]
                self._ended[index] = False
                continue
            acts = {agent: actions[index * size + row] for row, agent in enumerate(self.agents)}
            obs, rewards, ends, cuts, info = game.step(acts)
            infos += [info[agent] for agent in self.agents]
            for offset, agent in enumerate(self.agents):
                row = index * size + offset
                reward[row], terminated[row], truncated[row] = rewards[agent], ends[agent], cuts[agent]
            over = (terminated | truncated)[index * size : (index + 1) * size]
            if over.any() and not over.all():
                leavers = [agent for agent, left in zip(self.agents, over, strict=True) if left]
                raise ConfigError(f"{leavers} left a running game, but agents as rows must end together")
            self._ended[index] = bool(over.all())
            rows += self._rows(game, obs)
        return self._joined(rows), reward, terminated, truncated, _masks(infos)

    def close_extras(self, **_: Any) -> None:
        """Closes the games."""
        for game in self._games:
            game.close()

    def _with_ids(self, space: gymnasium.Space[Any]) -> gymnasium.Space[Any]:
        """The space of a state with the row's agent appended."""
        if not isinstance(space, gymnasium.spaces.Box) or len(space.shape) != 1 or space.dtype.kind != "f":
            raise ConfigError(f"ids are appended to a flat state, but this one is {space}", key="ids")
        self._ids = np.eye(len(self.agents), dtype=space.dtype)
        low, high = np.append(space.low, self._ids[0] * 0), np.append(space.high, self._ids[0] * 0 + 1)
        return gymnasium.spaces.Box(low, high, dtype=space.dtype.type)

    def _rows(self, game: Any, obs: dict[str, Any]) -> list[Any]:
        if not self._with_state:
            return [obs[agent] for agent in self.agents]
        state = game.state()
        states = [state] * len(self.agents) if self._ids is None else [np.append(state, row_id) for row_id in self._ids]
        return [{OWN: obs[agent], STATE: seen} for agent, seen in zip(self.agents, states, strict=True)]

    def _joined(self, rows: list[Any]) -> Any:
        space = self.single_observation_space
        whole: Any = create_empty_array(space, self.num_envs)
        return concatenate(space, rows, whole)


def _masks(infos: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The masks in each row's info, in the layout of Gymnasium's vector environments."""
    has_mask = np.array([MASK in info for info in infos])
    if not has_mask.any():
        return {}
    masks = np.empty(len(infos), object)
    masks[:] = [info.get(MASK) for info in infos]
    return {MASK: masks, f"_{MASK}": has_mask}
