"""Checks a job's algorithm against its environments and data. Starts nothing.

It inspects rollouts and files. Data of agents behind a door, and of a source's own function, are not known in advance.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from brayx.algorithms.build import check_enough, check_fits
from brayx.algorithms.config import AlgorithmConfig
from brayx.errors import ConfigError
from brayx.types import DEMONSTRATION

if TYPE_CHECKING:
    from brayx.actions import ActionSpec
    from brayx.jobs.config import JobConfig
    from brayx.jobs.kinds import SourceConfig
    from brayx.trainer.config import TrainerConfig


def check_algorithm(
    job: JobConfig, played: Mapping[str, tuple[ActionSpec, set[str]]], recorded: Mapping[str, set[str]]
) -> None:
    """Refuses a trainer whose algorithm cannot learn from its buffers.

    Args:
        job: a job with one trainer.
        played: result of `brayx.jobs.environments.check_rollouts`.
        recorded: result of `brayx.jobs.sources.check_sources`.

    Raises:
        ConfigError: the algorithm cannot use the data, or a rollout normalises observations or rewards while other data
            stay raw. Names the file, the component, and what fits.
    """
    ((trainer_name, trainer),) = job.trainers.items()
    algorithm = trainer.algorithm
    _check_alike(job, trainer)
    feeding = {name: source for name, source in job.sources.items() if source.buffer in trainer.buffers}
    gives: set[str] | None = None
    if not job.actors and all(name in recorded for name in feeding):
        gives = set().union(*(keys for _, keys in played.values()), *(recorded[name] for name in feeding))
        if feeding and algorithm.imitates == "everything":
            gives.add(DEMONSTRATION)
    try:
        for acts, _ in played.values():
            check_fits(algorithm, kind=acts.kind, gives=gives)
        check_fits(algorithm, gives=gives)
        for name in trainer.buffers:
            buffer = job.buffers[name]
            fed = any(source.buffer == name for source in feeding.values())
            imitated = algorithm.imitates == "demonstrations" and fed
            played_into = bool(job.actors) or any(rollout.buffer == name for rollout in job.rollouts.values())
            # Imitated steps may be read any number of times.
            sampler = None if imitated or not (played_into or buffer.sampler != "fifo") else buffer.sampler
            check_fits(algorithm, unroll_length=buffer.unroll_length, sampler=sampler)
            steps = buffer.batch_size * buffer.unroll_length * trainer.num_workers
            check_enough(
                algorithm,
                num_steps=trainer.num_steps,
                batches=trainer.num_steps / steps,
                batch_steps=steps,
                change=f"more num_steps, or a smaller batch_size or unroll_length of {name}",
            )
    except ConfigError as error:
        raise ConfigError(f"{job.file}: {trainer_name}.algorithm: {error.message}", **error.details) from error


def _check_alike(job: JobConfig, trainer: TrainerConfig) -> None:
    """Refuses raw observations and rewards if a rollout normalises or clips its own."""
    read = (*trainer.buffers, *trainer.eval_buffers)
    raw = [name for name, source in job.sources.items() if source.buffer in read]
    raw += [name for name, rollout in job.rollouts.items() if not rollout.normalise_obs]
    rewarded = [
        name
        for name, source in job.sources.items()
        if source.buffer in trainer.buffers and not only_imitated(trainer.algorithm, source)
    ]
    for name, rollout in job.rollouts.items():
        changed = {"normalise_obs": raw, "normalise_reward": rewarded, "reward_clip": rewarded}
        for option, others in changed.items():
            if getattr(rollout, option) and others:
                what = "observations" if option == "normalise_obs" else "rewards"
                raise ConfigError(
                    f"{job.file}: {name}.{option}: the model would learn from {what} changed so, and from those of "
                    f"{others[0]!r} as they are: expected {option} off, or none of {', '.join(others)}",
                    key=option,
                )


def only_imitated(algorithm: AlgorithmConfig, source: SourceConfig) -> bool:
    """Whether the source's rewards are not learned from; a source's own function may mark steps as demonstrations."""
    marked = source.demonstration or source.path is None
    imitated = algorithm.imitates == "everything" or (algorithm.imitates == "demonstrations" and marked)
    return imitated and not algorithm.learns_demonstrated_rewards
