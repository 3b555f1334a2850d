"""A door for a job that has only environments in Python, so that its model can be served to their games.

Games play by the contract of the environment's spaces, as `brayx gamecore gym` does. Knows nothing of serving.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from brayx.errors import ConfigError
from brayx.jobs.config import JobConfig, only

if TYPE_CHECKING:
    from brayx.gamecore.contract import Contract, ObservationSpec


def with_door(job: JobConfig) -> JobConfig:
    """A job with an actor, and an agent for the environment of its rollout; as it is if it has an actor or no rollout.

    Raises:
        ConfigError: the environment cannot be made, or its spaces have no contract.
    """
    if job.actors or not job.rollouts:
        return job
    from brayx.bridges.env_bodies import BEHAVIOUR, SpacesBodies
    from brayx.rollout.envs import make_envs
    from brayx.rollout.spec import env_source

    name = only("rollout", job.rollouts)
    rollout, options = job.rollouts[name], job.as_dict()
    envs = make_envs(
        env_source(name, rollout, options, job.folder),
        rollout.num_envs if rollout.func else 1,  # a function may make them all at once
        vectorization=rollout.vectorization,
        options=rollout.env_options,
    )
    envs.close()
    space = envs.single_observation_space
    contract = SpacesBodies(space, envs.single_action_space, False, BEHAVIOUR).bodies.contract
    agent = {
        "kind": "agent",
        "module": "brayx.actor.env_agent",
        "class": "EnvAgent",
        "options": {"model": rollout.model, "obs": _places(space, contract)},
    }
    actor = {"kind": "actor", "agents": ["agent"], "serialize": "contract"}
    return JobConfig.of({**options, "contract": contract.as_dict(), "agent": agent, "actor": actor}, job.folder)


def job_of_version(
    reference: str, uri: str, overrides: Sequence[str] = (), trust: bool = False
) -> tuple[JobConfig, str]:
    """The job that made a registered version, with a door, and the name of its model that the version is of.

    Args:
        reference: ``models:/NAME@ALIAS`` or ``models:/NAME/VERSION``.
        uri: tracking URI.
        overrides: options of the job, as of `JobConfig.load`.
        trust: run the code that the version names, see `brayx.jobs.stored_models.stored_model`.

    Raises:
        ConfigError: the version does not name its job, or its code is not trusted; or as `with_door`.
        ModelNotFound, TrackingError: there is no such version, or it cannot be read.
    """
    from brayx.jobs.stored_models import stored_model

    with stored_model(reference, uri, trust) as stored:
        job = with_door(stored.job())
    trainer = job.trainers[only("trainer", job.trainers)]
    return JobConfig.of(job.as_dict(), job.folder, overrides), trainer.model


def _places(space: Any, contract: Contract) -> dict[str, Any]:
    """The places of `brayx.actor.env_agent.env_observation`."""
    return {spec.name: _place(space, spec) for spec in contract.observations}


def _place(space: Any, spec: ObservationSpec) -> dict[str, Any]:
    path = spec.name.split(".") if hasattr(space, "spaces") or spec.name != "obs" else []
    try:
        for key in path:
            space = space.spaces[key]
    except (AttributeError, KeyError, TypeError):
        raise ConfigError(
            f"observation {spec.name!r} is a part of a space that cannot be served: expected Dicts of Box, Discrete, "
            "MultiBinary, and MultiDiscrete with equal sizes",
            key="observation_space",
        ) from None
    start = spec.start if spec.kind == "category" else 0
    return {"path": path, "shape": [*(space.shape or ())], "rank": len(spec.shape), "start": start}
