"""A ready-made model for the environment of a job's rollout: ``module: brayx.jobs.models``.

Its options are the job's ``network`` (`kind: config`), those of `brayx.nets.policy.NetworkConfig`. The algorithm of the
trainer that learns it says which networks: SAC and MAPPO have critics in addition to the policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from brayx.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

NETWORK = "network"


def build_model(name: str, config: Mapping[str, Any]) -> tuple[nn.Module, tuple[Any, ...]]:
    """The networks for the environment of the rollout that acts with model ``name``, and for its trainer.

    Args:
        name: name of the model component.
        config: the whole job as plain dicts.

    Raises:
        ConfigError: the job has no such rollout, its environment cannot be made, has no ready-made network, or is none
            to learn with the algorithm.
    """
    from pydantic import ValidationError

    from brayx.actions import ActionSpec
    from brayx.algorithms.build import check_space
    from brayx.nets.policy import NetworkConfig
    from brayx.rollout.component import RolloutComponent
    from brayx.rollout.envs import make_envs
    from brayx.rollout.networks import observation_of, ready_made
    from brayx.rollout.spec import env_source
    from brayx.trainer.config import TrainerConfig

    parts = {key: part for key, part in config.items() if isinstance(part, Mapping)}
    rollouts = {key: part for key, part in parts.items() if part.get("kind") == "rollout"}
    rollout_name = next((key for key, part in rollouts.items() if part["model"] == name), None)
    if rollout_name is None:
        raise ConfigError(f"model {name!r}: brayx.jobs.models makes a network for a rollout, but no rollout uses it")
    rollout = RolloutComponent.model_validate(rollouts[rollout_name])
    try:
        options = {key: value for key, value in config.get(NETWORK, {}).items() if key != "kind"}
        network = NetworkConfig.model_validate(options) if options else None  # none given: what suits the algorithm
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, (NETWORK, *first["loc"])))
        raise ConfigError(f"{place}: {first['msg']}", key=place) from error
    trainers = [TrainerConfig.model_validate(part) for part in parts.values() if part.get("kind") == "trainer"]
    algorithm = next((trainer.algorithm for trainer in trainers if trainer.model == name), None)
    num_envs = 1 if rollout.func is None else rollout.num_envs  # a function may make them all at once
    envs = make_envs(
        env_source(rollout_name, rollout, config),
        num_envs,
        vectorization=rollout.vectorization,
        options=rollout.env_options,
    )
    try:
        spec = ActionSpec.of(envs.single_action_space)
        if algorithm is not None:
            check_space(algorithm, spec.kind)
        return ready_made(network, envs, algorithm)(observation_of(envs), spec)
    finally:
        envs.close()
