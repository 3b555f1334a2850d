"""Whether the algorithm of a job fits what it acts in and learns from, as far as the job tells. Starts nothing.

Rollouts and files are looked at; what agents behind a door and a source's own function give, only they know.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from brayx.algorithms.build import check_fits
from brayx.errors import ConfigError
from brayx.types import DEMONSTRATION

if TYPE_CHECKING:
    from deployments.job import JobConfig


def check_algorithm(
    job: JobConfig, played: Mapping[str, tuple[str, set[str]]], recorded: Mapping[str, set[str]]
) -> None:
    """Refuses a trainer whose algorithm cannot learn from its buffers.

    Args:
        job: with one trainer.
        played: what `pipelines.environments.check_rollouts` found.
        recorded: what `pipelines.sources.check_sources` found.

    Raises:
        ConfigError: names the file, the component, and what fits.
    """
    ((trainer_name, trainer),) = job.trainers.items()
    algorithm = trainer.algorithm
    feeding = {name: source for name, source in job.sources.items() if source.buffer in trainer.buffers}
    gives: set[str] | None = None
    if not job.actors and all(name in recorded for name in feeding):
        gives = set().union(*(keys for _, keys in played.values()), *(recorded[name] for name in feeding))
        if feeding and algorithm.name == "bc":
            gives.add(DEMONSTRATION)  # cloning imitates whatever was recorded
    try:
        for kind, _ in played.values():
            check_fits(algorithm, kind=kind, gives=gives)
        check_fits(algorithm, gives=gives)
        for name in trainer.buffers:
            check_fits(algorithm, unroll_length=job.buffers[name].unroll_length)
    except ConfigError as error:
        raise ConfigError(f"{job.file}: {trainer_name}.algorithm: {error.message}", **error.details) from error
