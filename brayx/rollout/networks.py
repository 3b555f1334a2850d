"""Ready-made networks for an environment's observation and action space and an algorithm's needs.

Knows nothing of training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import gymnasium
import numpy as np
from torch import nn

from brayx.actions import ActionSpec
from brayx.algorithms.config import AlgorithmConfig
from brayx.errors import ConfigError
from brayx.nets.central import central_policy_for
from brayx.nets.policy import NetworkConfig, policy_for
from brayx.nets.soft import soft_policy_for
from brayx.spaces import limits_of
from brayx.types import NestedArray

Model: TypeAlias = tuple[nn.Module, tuple[NestedArray, ...]]
"""A module and example arguments."""


def observation_of(envs: Any) -> NestedArray:
    """An example observation for a model: zeros, or the first value of a discrete space; float64 becomes float32.

    Raises:
        ConfigError: observations are not arrays of one shape.
    """
    return _example(envs.single_observation_space)


def ready_made(
    network: NetworkConfig | None, envs: Any, algorithm: AlgorithmConfig | None = None
) -> Callable[[NestedArray, ActionSpec], Model]:
    """Returns a function that makes a network from an observation and an action space.

    The network is an actor-critic, or a policy with the separate critic that the algorithm needs. Discrete observations
    are encoded one-hot; those of a MultiDiscrete are numbers, relative to its start.

    Raises:
        ConfigError: there is no ready-made network for the observation space.
    """
    space = envs.single_observation_space
    if any(isinstance(part, gymnasium.spaces.Tuple) for part in _parts(space)):
        raise ConfigError(
            f"observation space is {space}: ready-made networks take an array, or a Dict of arrays. Expected a Dict "
            "instead of the Tuple (gymnasium.wrappers.TransformObservation makes one), or a model of your own, which "
            "gets each part of a Tuple as an argument",
            key="observation_space",
        )
    categories: Any = limits_of(space)
    takes = algorithm.critic.takes if algorithm is not None and algorithm.critic is not None else ()

    def make(obs: NestedArray, spec: ActionSpec) -> Model:
        sizes: Any = spec.sizes[0] if spec.kind == "discrete" else list(spec.sizes) if spec.sizes else None
        size = spec.shape[0] if spec.kind == "box" else None
        try:
            build: Any = (
                soft_policy_for if "action" in takes else central_policy_for if "state" in takes else policy_for
            )
            module, example = build(obs, num_actions=sizes, action_size=size, categories=categories, network=network)
            return module, example
        except ValueError as error:
            raise ConfigError(f"no ready-made network for observation space {space}: {error}") from error

    return make


def _parts(space: Any) -> list[Any]:
    """A space and all spaces inside it."""
    inner = getattr(space, "spaces", ())
    members = inner.values() if isinstance(inner, Mapping) else inner
    return [space, *(part for member in members for part in _parts(member))]


def _example(space: Any) -> NestedArray:
    if isinstance(space, gymnasium.spaces.Dict):
        return {name: _example(part) for name, part in space.spaces.items()}
    if isinstance(space, gymnasium.spaces.Tuple):
        return tuple(_example(part) for part in space.spaces)
    if space.shape is None:
        raise ConfigError(
            f"observation space is {space}, which has no single shape: expected Box, Discrete, MultiDiscrete or "
            "MultiBinary, or a Dict or Tuple of them",
            key="observation_space",
        )
    dtype = np.dtype(np.float32) if space.dtype == np.float64 else np.dtype(space.dtype)
    return np.full(space.shape, getattr(space, "start", 0), dtype)
