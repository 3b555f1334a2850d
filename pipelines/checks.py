"""What is looked at before a training starts anything: the job's code, and whether its model can be learned.

Loads Ray only for a job with rollouts. Starts nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from deployments.code import check_code
from deployments.job import JobConfig, only
from pipelines.fitting import check_algorithm
from pipelines.sources import check_sources

if TYPE_CHECKING:
    from brayx.replay.files import Dataset
    from brayx.replay.packing import Layout
    from brayx.types import Fragment


def check_job(job: JobConfig) -> tuple[str, Layout]:
    """The name of the job's one actor, and what its model observes and does: to be known before anything starts.

    The name is empty for a job without one, whose data come from rollouts or sources alone.

    Raises:
        ConfigError, ModelError: names what is missing or wrong, or what fits what is there.
    """
    name = actor_of(job)
    check_code(job, [name] if name else [], mode="train")
    return name, check_learning(job)


def check_learning(job: JobConfig) -> Layout:
    """Makes sure that the model can be learned, and from what the job's rollouts and sources give.

    Returns:
        What the model observes and does.

    Raises:
        ConfigError, ModelError: names what is wrong, or what fits what is there.
    """
    from brayx.trainer.fits import layout_of

    config = job.trainers[only("trainer", job.trainers)]
    played: Mapping[str, tuple[str, set[str]]] = {}
    if job.rollouts:
        from pipelines.environments import check_rollouts  # loads Ray

        played = check_rollouts(job)
    opened: dict[str, tuple[Dataset, Fragment]] = {}
    check_algorithm(job, played, check_sources(job, opened=opened))
    layout, memory = layout_of(config, config.model, job.models[config.model].module, job.folder, job.as_dict())
    check_sources(job, layout, opened, memory)
    return layout


def actor_of(job: JobConfig) -> str:
    """Name of the job's one actor; empty for a job whose data come from rollouts or sources alone."""
    return "" if not job.actors and (job.rollouts or job.sources) else only("actor", job.actors)


def ports_of(job: JobConfig, actor: str) -> dict[str, tuple[str, int]]:
    """Host and number of each port that a job's actor opens, by the option that chooses it; of 0 any free one."""
    config = job.actors[actor]
    doors = [
        ("port", config.host, config.port),
        ("native_port", config.native_host, config.native_port),
        ("tcp_port", config.native_host, config.tcp_port),
        ("grpc_port", config.native_host, config.grpc_port),
    ]
    return {f"{actor}.{option}": (host, port) for option, host, port in doors if port}
