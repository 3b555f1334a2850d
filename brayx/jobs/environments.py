"""Checks a job's rollout components, and makes their workers' settings.

Knows nothing of what a worker does with an environment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from brayx.algorithms.mappo import STATE
from brayx.errors import BrayxError, ConfigError
from brayx.model.build import build_model
from brayx.rollout.collector import seed_after
from brayx.rollout.spec import RolloutSpec, check_rollout
from brayx.trainer.fits import check_model

if TYPE_CHECKING:
    from brayx.actions import ActionSpec
    from brayx.jobs.config import JobConfig
    from brayx.replay.config import BufferConfig
    from brayx.rollout.component import RolloutComponent


def check_rollouts(job: JobConfig) -> dict[str, tuple[ActionSpec, set[str]]]:
    """Takes one step in an environment of each rollout, and checks that its options fit the trainer's.

    Returns:
        Actions and keys of batches, by component.

    Raises:
        BrayxError: the environment does not exist, cannot be made or raises; the model does not fit it, or its value
            takes other states; or the workers would wait for each other. Names the file and the component.
    """
    checked = {}
    for name, config in job.rollouts.items():
        place = f"{job.file}: {name}"
        (trainer,) = job.trainers.values()
        if config.model != trainer.model:
            raise ConfigError(f"{place}.model: is {config.model!r}, but {trainer.model!r} is what learns")
        if config.buffer not in trainer.buffers:
            raise ConfigError(f"{place}.buffer: is {config.buffer!r}, but the trainer reads {trainer.buffers}")
        try:
            spec = spec_of(job, name)
            acts, batch = check_rollout(spec)
            checked[name] = acts, set(batch)
            critic = trainer.algorithm.critic
            if critic is not None and "state" in critic.takes and STATE in batch:
                module, example = build_model(job.folder, spec.model.module, spec.model_name, dict(spec.job))
                check_model(trainer.algorithm, module, example, name=spec.model_name, state=batch[STATE][0, 0])
        except BrayxError as error:
            raise type(error)(f"{job.file}: {error.message}", **error.details) from error
    return checked


def normalises(config: RolloutComponent) -> bool:
    """Whether a rollout's workers share moments."""
    return config.normalise_obs or config.normalise_reward


def update_columns(job: JobConfig, buffer: BufferConfig) -> int:
    """Columns per publish: one batch per rank, times the learner's updates between two publishes."""
    (trainer,) = job.trainers.values()
    return buffer.batch_size * trainer.num_workers * trainer.weights_publish_interval


def policy_lag(job: JobConfig, name: str) -> int | None:
    """The ``max_policy_lag`` of a buffer: the job's value, or by default 0 for a purely blocking setup, else None.

    The default is 0 if the learner reads only this buffer, in order, and a single blocking rollout fills it. Its
    workers collect one update's data with each version, and extra data when a wait for the next version times out.
    Without a limit, that extra data would stay in front of all later data, and each batch would be one version old. In
    other setups, data of the newest version may be too rare for such a limit.
    """
    buffer = job.buffers[name]
    unbounded = buffer.max_policy_lag is None and buffer.sampler == "fifo"
    if unbounded and "blocking" in _modes(job, name) and not _besides(job, name):
        return 0
    return buffer.max_policy_lag


def lag_notes(job: JobConfig) -> list[str]:
    """Notes for the user on blocking rollouts with data that may stay old after a timed-out wait, see `policy_lag`."""
    notes = []
    for name, rollout in job.rollouts.items() if len(job.trainers) == 1 else ():
        buffer = job.buffers[rollout.buffer]
        beside = _besides(job, rollout.buffer)
        if rollout.mode == "blocking" and buffer.max_policy_lag is None and beside:
            fed = any(source.buffer == rollout.buffer for source in job.sources.values())  # a limit would drop its data
            way_out = "" if fed else f"; {rollout.buffer}.max_policy_lag: 1 drops older data"
            notes.append(
                f"{name}.mode is blocking, but {' and '.join(beside)}: {rollout.buffer}.max_policy_lag is not 0 then. "
                f"Once a worker has waited for longer than wait_s ({rollout.wait_s:g} s), the learned data stays a "
                f"version older{way_out}"
            )
    return notes


def _modes(job: JobConfig, name: str) -> list[str]:
    """Modes of the rollouts that fill a buffer."""
    return [rollout.mode for rollout in job.rollouts.values() if rollout.buffer == name]


def _besides(job: JobConfig, name: str) -> list[str]:
    """Reasons why the buffer is not filled by one rollout only and read by one rank in order."""
    buffer, (trainer,) = job.buffers[name], job.trainers.values()
    conditions = {
        "several rollouts fill the buffer": len(_modes(job, name)) > 1,
        "a source fills the buffer, too": any(source.buffer == name for source in job.sources.values()),
        "games play through the door, too": bool(job.actors),
        "the trainer reads several buffers": trainer.buffers != [name],
        f"the buffer has {buffer.num_workers} shards": buffer.num_workers > 1,
        f"the trainer has {trainer.num_workers} ranks": trainer.num_workers > 1,
        f"prefetch is {trainer.prefetch}": trainer.prefetch > 0,
    }
    return [what for what, there in conditions.items() if there]


def spec_of(job: JobConfig, name: str, env_steps: int = 0) -> RolloutSpec:
    """The settings of a rollout component's workers.

    Args:
        job: the job.
        name: name of the component.
        env_steps: env steps that the resumed trial has learned from.
    """
    config = job.rollouts[name]
    buffer = job.buffers[config.buffer]
    return RolloutSpec(
        name=name,
        config=config,
        model_name=config.model,
        model=job.models[config.model],
        buffer_config=buffer,
        folder=job.folder,
        job=job.as_dict(),
        gamma=next(iter(job.trainers.values())).algorithm.discount,
        seed=seed_after(job.seed, env_steps),
        update_columns=update_columns(job, buffer),
    )
