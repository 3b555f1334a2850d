"""Masks of actions that environments tell in ``info``, as part of what is observed. Knows nothing of networks.

An observation then is ``{"obs": the environment's own, "action_mask": ...}``, or, where it is a dict already, that with
the mask beside its leaves; where a game's state is beside what an agent observes, so is the agent's part of it. So
acting, learning and evaluating have the same mask, and it is recorded with the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv, VectorEnv, VectorWrapper
from gymnasium.vector.utils import batch_space

from brayx.actions import ActionSpec
from brayx.errors import ConfigError
from brayx.nets.central import OWN, STATE
from brayx.nets.encoders import MASK
from brayx.rollout.envs import failed


class InfoMasks(VectorWrapper):
    """Puts ``info["action_mask"]`` beside the observation, int8 ``[N, A]``: 1 for an action that is allowed.

    ``A`` is how many actions there are, of several heads one after the other. An environment that tells no mask at a
    step allows every action there.

    Args:
        env: discrete actions; its ``info`` is as Gymnasium lays out that of several environments.
        actions: ``A``.
    """

    def __init__(self, env: VectorEnv, actions: int) -> None:
        super().__init__(env)
        self.single_observation_space = _beside(env.single_observation_space, spaces.Box(0, 1, (actions,), np.int8))
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self._masks = np.ones((self.num_envs, actions), np.int8)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """As the environment's; one that is not reset keeps its mask."""
        obs, info = self.env.reset(seed=seed, options=options)
        reset = None if options is None else options.get("reset_mask")
        return self._with_masks(obs, info, reset), info

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """As the environment's.

        Raises:
            ConfigError: a mask has not one number for each action.
        """
        obs, reward, terminated, truncated, info = self.env.step(actions)
        return self._with_masks(obs, info, None), reward, terminated, truncated, info

    def _with_masks(self, obs: Any, info: Mapping[str, Any], rows: np.ndarray | None) -> Any:
        """The observation with the masks of ``rows``, or of all, as ``info`` has them."""
        fresh = np.ones_like(self._masks)
        if MASK in info:
            told = info.get(f"_{MASK}", np.ones(self.num_envs, np.bool_))
            fresh[told] = self._rows(np.asarray(info[MASK])[told])
        self._masks = fresh if rows is None else np.where(rows[:, None], fresh, self._masks)
        return _beside(obs, self._masks)

    def _rows(self, told: np.ndarray) -> np.ndarray:
        """Masks that environments told ``[n, A]``, whether as one array or as objects."""
        if told.dtype == object:  # lists; of several heads a tuple of arrays, as `spaces.MultiDiscrete.sample` has it
            found = [np.concatenate([np.ravel(part) for part in mask]) for mask in told]
        else:
            found = list(told.reshape(len(told), -1))
        expected = self._masks.shape[1]
        wrong = next((len(mask) for mask in found if len(mask) != expected), None)
        if wrong is not None:
            raise ConfigError(f"info's {MASK}: expected {expected} numbers, one for each action, got {wrong}", key=MASK)
        return np.array(found).reshape(-1, expected) > 0


def _beside(own: Any, mask: Any) -> Any:
    """An observation with a mask beside it; or their spaces."""
    if not isinstance(own, Mapping | spaces.Dict):
        found = {OWN: own, MASK: mask}
    elif {OWN, STATE} <= set(own):
        found = {**own, OWN: _beside(own[OWN], mask)}
    else:
        found = {**own, MASK: mask}
    return spaces.Dict(found) if isinstance(mask, spaces.Space) else found


def _observed(space: Any) -> bool:
    """Whether a mask is part of an observation already."""
    inner = space if isinstance(space, spaces.Dict) else {}
    return MASK in inner or (OWN in inner and _observed(inner[OWN]))


def with_masks(envs: VectorEnv) -> VectorEnv:
    """``envs`` with `InfoMasks` if their actions are discrete and the first reset tells of a mask that is not observed
    already. Resets one environment, or all where they cannot be had one by one.

    Raises:
        ConfigError: the action space is none that a policy could act in.
        EnvironmentFailed: the reset raised.
    """
    sizes = ActionSpec.of(envs.single_action_space).sizes
    if not sizes or _observed(envs.single_observation_space):
        return envs
    first = envs.envs[0] if isinstance(envs, SyncVectorEnv) else envs
    try:
        _, info = first.reset()
    except Exception as error:
        raise failed("reset", error) from error
    return InfoMasks(envs, sum(sizes)) if MASK in info else envs
