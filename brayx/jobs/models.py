"""A ready-made model for the environment of a job's rollout: ``module: brayx.jobs.models``.

Its options are the job's ``network`` (`kind: config`), those of `brayx.nets.policy.NetworkConfig`. The algorithm of the
trainer that learns it says which networks: SAC and MAPPO have critics in addition to the policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from brayx.errors import ConfigError
from brayx.jobs.document import nearest

if TYPE_CHECKING:
    from torch import nn

    from brayx.algorithms.config import AlgorithmConfig
    from brayx.nets.policy import NetworkConfig

NETWORK = "network"

Options = TypeVar("Options", bound="NetworkConfig")


def build_model(name: str, config: Mapping[str, Any]) -> tuple[nn.Module, tuple[Any, ...]]:
    """The networks for the environment of the rollout that acts with model ``name``, and for its trainer.

    Args:
        name: name of the model component.
        config: the whole job as plain dicts.

    Raises:
        ConfigError: the job has no such rollout, its environment cannot be made, has no ready-made network, or is none
            to learn with the algorithm.
    """
    from brayx.actions import ActionSpec
    from brayx.algorithms.build import check_space
    from brayx.nets.policy import NetworkConfig
    from brayx.rollout.component import RolloutComponent
    from brayx.rollout.envs import make_envs
    from brayx.rollout.networks import observation_of, ready_made
    from brayx.rollout.spec import env_source

    rollouts = parts_of(config, "rollout")
    rollout_name = next((key for key, part in rollouts.items() if part["model"] == name), None)
    if rollout_name is None:
        raise ConfigError(f"model {name!r}: brayx.jobs.models makes a network for a rollout, but no rollout uses it")
    rollout = RolloutComponent.model_validate(rollouts[rollout_name])
    network = network_options(config, NetworkConfig)
    algorithm = learned_by(name, config)
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


def network_options(config: Mapping[str, Any], model: type[Options]) -> Options | None:
    """The options in the job's ``network``; None: none are given.

    Raises:
        ConfigError: an option is unknown or wrong.
    """
    from pydantic import ValidationError

    options = {key: value for key, value in config.get(NETWORK, {}).items() if key != "kind"}
    try:
        return model.model_validate(options) if options else None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, (NETWORK, *first["loc"])))
        message = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden" and len(first["loc"]) == 1:
            message = f"unknown key{nearest(str(first['loc'][0]), model.model_fields)}"
        raise ConfigError(f"{place}: {message}", key=place) from error


def learned_by(name: str, config: Mapping[str, Any]) -> AlgorithmConfig | None:
    """Options of the algorithm of the trainer that learns model ``name``; None: there is no such trainer."""
    from brayx.trainer.config import TrainerConfig

    trainers = (TrainerConfig.model_validate(part) for part in parts_of(config, "trainer").values())
    return next((trainer.algorithm for trainer in trainers if trainer.model == name), None)


def parts_of(config: Mapping[str, Any], kind: str) -> dict[str, Mapping[str, Any]]:
    """The job's components of one kind, by name."""
    return {key: part for key, part in config.items() if isinstance(part, Mapping) and part.get("kind") == kind}
