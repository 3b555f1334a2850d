"""Puts action masks from an environment's ``info`` into its observation. Knows nothing of networks.

The observation becomes ``{"obs": the environment's, "action_mask": ...}``. A dict gets ``action_mask`` as one more
leaf; if it has a game's state and an agent's observation, the mask goes into the agent's observation. So acting,
learning and evaluation use the same mask, and it is recorded with the observation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv, VectorEnv, VectorWrapper
from gymnasium.vector.utils import batch_space

from brayx.actions import ActionSpec
from brayx.errors import ConfigError
from brayx.nets.central import OWN, STATE
from brayx.rollout.envs import failed
from brayx.spaces import MASK


class InfoMasks(VectorWrapper):
    """Adds ``info["action_mask"]`` to the observation, int8 ``[N, A]``: 1 for an allowed action.

    ``A`` is the number of actions; the masks of several heads are concatenated. An environment without a mask at a step
    allows every action there.

    Args:
        env: has discrete actions, and an ``info`` in the layout of Gymnasium's vector environments.
        sizes: number of actions of each head; ``A`` is their sum.
    """

    def __init__(self, env: VectorEnv, sizes: Sequence[int]) -> None:
        super().__init__(env)
        self._sizes, actions = sizes, sum(sizes)
        self.single_observation_space = _beside(env.single_observation_space, spaces.Box(0, 1, (actions,), np.int8))
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self._masks = np.ones((self.num_envs, actions), np.int8)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Resets as ``env`` does; an environment that is not reset keeps its mask."""
        obs, info = self.env.reset(seed=seed, options=options)
        reset = None if options is None else options.get("reset_mask")
        return self._with_masks(obs, info, reset), info

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Steps as ``env`` does.

        Raises:
            ConfigError: a mask is not one number for each action.
        """
        obs, reward, terminated, truncated, info = self.env.step(actions)
        return self._with_masks(obs, info, None), reward, terminated, truncated, info

    def _with_masks(self, obs: Any, info: Mapping[str, Any], rows: np.ndarray | None) -> Any:
        """The observation with the masks; those of ``rows``, or of all environments, are updated from ``info``."""
        fresh = np.ones_like(self._masks)
        if MASK in info:
            masks = np.asarray(info[MASK])
            if masks.shape[:1] != (self.num_envs,):
                raise self._refused(repr(info[MASK]))
            has_mask = info.get(f"_{MASK}", np.ones(self.num_envs, np.bool_))
            fresh[has_mask] = self._rows(masks[has_mask])
        self._masks = fresh if rows is None else np.where(rows[:, None], fresh, self._masks)
        return _beside(obs, self._masks)

    def _rows(self, masks: np.ndarray) -> np.ndarray:
        """``masks``, an array or objects, as a bool array ``[n, A]``."""
        if masks.dtype == object:
            return np.array([self._row(mask) for mask in masks], np.bool_).reshape(-1, sum(self._sizes))
        count = math.prod(masks.shape[1:])
        if masks.dtype.kind not in "biuf" or count != sum(self._sizes):
            raise self._refused(str(count) if masks.dtype.kind in "biuf" else f"dtype {masks.dtype}")
        return masks.reshape(-1, count) > 0

    def _row(self, mask: Any) -> np.ndarray:
        """A list, or for several heads a tuple of arrays, as `spaces.MultiDiscrete.sample` takes: bool ``[A]``."""
        try:
            row = np.concatenate([np.ravel(part) for part in mask]) > 0
        except (TypeError, ValueError):
            raise self._refused(repr(mask)) from None
        if len(row) != sum(self._sizes):
            raise self._refused(str(len(row)))
        return row

    def _refused(self, got: str) -> ConfigError:
        expected = "one for each action"
        if len(self._sizes) > 1:
            sizes = " + ".join(map(str, self._sizes[:8])) + (" + ..." if len(self._sizes) > 8 else "")
            expected = f"one for each value of each part of {self.single_action_space} ({sizes})"
        return ConfigError(f"info's {MASK}: expected {sum(self._sizes)} numbers, {expected}, got {got[:80]}", key=MASK)


def _beside(observed: Any, mask: Any) -> Any:
    """An observation with its mask added; or an observation space with the mask's space."""
    if not isinstance(observed, Mapping | spaces.Dict):
        both = {OWN: observed, MASK: mask}
    elif {OWN, STATE} <= set(observed):
        both = {**observed, OWN: _beside(observed[OWN], mask)}
    else:
        both = {**observed, MASK: mask}
    return spaces.Dict(both) if isinstance(mask, spaces.Space) else both


def is_observed(space: Any) -> bool:
    """Whether an observation space already has a mask."""
    inner = space.spaces if isinstance(space, spaces.Dict) else {}  # `in` a space asks for a value of it
    return MASK in inner or (OWN in inner and is_observed(inner[OWN]))


def with_masks(envs: VectorEnv) -> VectorEnv:
    """``envs``, in `InfoMasks` if their actions are discrete and a reset gives a mask that is not yet observed.

    Resets one environment to find out, or all if they cannot be reset one by one.

    Raises:
        ConfigError: policies do not support the action space.
        EnvironmentFailed: the reset raised.
    """
    sizes = ActionSpec.of(envs.single_action_space).sizes
    if not sizes or is_observed(envs.single_observation_space):
        return envs
    first = envs.envs[0] if isinstance(envs, SyncVectorEnv) else envs
    try:
        _, info = first.reset()
    except Exception as error:
        raise failed("reset", error, envs) from error
    return InfoMasks(envs, sizes) if MASK in info else envs
