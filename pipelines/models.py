"""A ready-made model for the environment of a job's rollout: what a job names as ``module: pipelines.models``.

Its options are the job's ``network`` (`kind: config`), those of `brayx.nets.policy.NetworkConfig`. Knows nothing of
training.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from brayx.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

NETWORK = "network"


def build_model(name: str, config: Mapping[str, Any]) -> tuple[nn.Module, tuple[Any, ...]]:
    """The actor-critic for what the rollout that acts with model ``name`` observes and does.

    Args:
        name: of the model component.
        config: the whole job as plain dicts.

    Raises:
        ConfigError: the job has no such rollout, its environment cannot be made, or has no ready-made network.
    """
    from pydantic import ValidationError

    from brayx.actions import ActionSpec
    from brayx.nets.policy import NetworkConfig
    from brayx.rollout.component import RolloutComponent
    from brayx.rollout.envs import make_envs
    from brayx.rollout.worker import env_source
    from pipelines.rollouts import observation_of, ready_made

    parts = {key: part for key, part in config.items() if isinstance(part, Mapping)}
    rollouts = {key: part for key, part in parts.items() if part.get("kind") == "rollout"}
    found = next((key for key, part in rollouts.items() if part["model"] == name), None)
    if found is None:
        raise ConfigError(f"model {name!r}: pipelines.models makes a network for a rollout, and none acts with it")
    rollout = RolloutComponent.model_validate(rollouts[found])
    try:
        options = {key: value for key, value in config.get(NETWORK, {}).items() if key != "kind"}
        network = NetworkConfig.model_validate(options)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, (NETWORK, *first["loc"])))
        raise ConfigError(f"{place}: {first['msg']}", key=place) from error
    num_envs = 1 if rollout.func is None else rollout.num_envs  # a function may make them all at once
    envs = make_envs(
        env_source(found, rollout, config), num_envs, vectorization=rollout.vectorization, options=rollout.env_options
    )
    try:
        return ready_made(network, envs)(observation_of(envs), ActionSpec.of(envs.single_action_space))
    finally:
        envs.close()
