"""A job's rollout components: checks before anything starts, and their workers during the training.

Knows nothing of what a worker does with an environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from brayx.algorithms.mappo import STATE
from brayx.errors import BrayxError, ConfigError
from brayx.model.build import build_model
from brayx.rollout.collector import seed_after
from brayx.rollout.spec import RolloutSpec, check_rollout
from brayx.rollout.worker import Progress
from brayx.trainer.fits import check_model
from deployments.document import nearest
from pipelines.shutdown import side_by_side

if TYPE_CHECKING:
    from brayx.actions import ActionSpec
    from brayx.cluster.rollout_worker import WorkerSpec
    from brayx.metrics import Recorder
    from brayx.replay.config import BufferConfig
    from brayx.rollout.component import RolloutComponent
    from deployments.job import JobConfig


def check_rollouts(job: JobConfig) -> dict[str, tuple[ActionSpec, set[str]]]:
    """Takes one step in an environment of each rollout, and checks that its options fit the trainer's.

    Returns:
        Actions and keys of batches, by component.

    Raises:
        BrayxError: the environment does not exist, cannot be made or raises; the model does not fit it, or its value
            takes other states; or the workers would wait for each other. Names the file and the component.
    """
    found = {}
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
            found[name] = acts, set(batch)
            critic = trainer.algorithm.critic
            if critic is not None and "state" in critic.takes and STATE in batch:
                module, example = build_model(job.folder, spec.model.module, spec.model_name, dict(spec.job))
                check_model(trainer.algorithm, module, example, name=spec.model_name, state=batch[STATE][0, 0])
        except BrayxError as error:
            raise type(error)(f"{job.file}: {error.message}", **error.details) from error
    return found


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
    found = {
        "several rollouts fill the buffer": len(_modes(job, name)) > 1,
        "a source fills the buffer, too": any(source.buffer == name for source in job.sources.values()),
        "games play through the door, too": bool(job.actors),
        "the trainer reads several buffers": trainer.buffers != [name],
        f"the buffer has {buffer.num_workers} shards": buffer.num_workers > 1,
        f"the trainer has {trainer.num_workers} ranks": trainer.num_workers > 1,
        f"prefetch is {trainer.prefetch}": trainer.prefetch > 0,
    }
    return [what for what, there in found.items() if there]


class Rollouts:
    """Runs the workers of all rollouts of a job; a context manager.

    Args:
        job: the job.
        names: Ray actors by part: ``hub``, ``weights``, ``moments``, and ``buffer/NAME`` of each buffer.
        namespace: Ray namespace of these actors.
        recorder: of this process, for metrics about the workers.
        env_steps: env steps that the resumed trial has learned from.
    """

    def __init__(
        self, job: JobConfig, names: Mapping[str, str], namespace: str, recorder: Recorder, env_steps: int = 0
    ) -> None:
        from brayx.cluster.rollout import Workers

        self._recorder = recorder
        self._all = {
            name: Workers(worker_spec(job, name, names, namespace, env_steps), on_event=self._count)
            for name in job.rollouts
        }

    def __enter__(self) -> Rollouts:
        for name, workers in self._all.items():
            workers.__enter__()
            self._count("rollout_workers", workers.num, name)
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Ends all workers, see `Workers.stop`."""
        side_by_side([workers.stop for workers in self._all.values()], timeout_s)

    @property
    def num(self) -> int:
        """The wanted number of workers."""
        return sum(workers.num for workers in self._all.values())

    @property
    def running(self) -> int:
        """Number of workers that run now."""
        return sum(workers.running for workers in self._all.values())

    @property
    def failures(self) -> int:
        """Number of workers that ended by themselves."""
        return sum(workers.failures for workers in self._all.values())

    @property
    def error(self) -> BrayxError | None:
        """A permanent error, after which workers are not replaced."""
        return next((workers.error for workers in self._all.values() if workers.error is not None), None)

    @property
    def messages(self) -> list[str]:
        """The newest messages about ended workers."""
        return [line for workers in self._all.values() for line in workers.messages]

    @property
    def collected(self) -> Progress:
        """The total progress of all workers."""
        return sum((workers.collected for workers in self._all.values()), Progress())

    def scale(self, name: str | None, count: int) -> tuple[str, int, int]:
        """Changes the number of a rollout's workers; an error changes nothing.

        Args:
            name: name of the component; None: the only one.
            count: at least 1, because without workers the learner would wait forever.

        Returns:
            The component's name, and its wanted number of workers before and now.

        Raises:
            ConfigError: the rollout does not exist, or cannot have so many workers, see `Workers.scale`.
        """
        if not self._all:
            raise ConfigError("the job has no rollout: no worker steps environments for it", key="rollout")
        if name is None and len(self._all) > 1:
            raise ConfigError(f"the job has several rollouts, {', '.join(self._all)}: say which", key="rollout")
        name = next(iter(self._all)) if name is None else name
        if name not in self._all:
            raise ConfigError(f"the job has no rollout {name!r}{nearest(name, self._all)}", key="rollout")
        if type(count) is not int or count < 1:
            said = f"rollout {name!r} cannot go on with {count!r} workers: end the job, and the same command resumes it"
            raise ConfigError(said, key="num_workers")
        workers = self._all[name]
        before = workers.num
        workers.scale(count)
        self._count("rollout_workers", count, name)
        return name, before, count

    def answer(self, inbox: Any) -> list[str]:
        """Carries out requests of other processes to the job, see `pipelines.scale`.

        Args:
            inbox: the trial's hub.

        Returns:
            Lines for the user about the changes.
        """
        from brayx.cluster.hub import take_requests

        said = []
        for key, request in take_requests(inbox):
            try:
                name, before, now = done = self.scale(request["rollout"], request["num_workers"])
                said.append(f"rollout {name!r} gets {now} workers; it had {before}")
            except BrayxError as error:
                inbox.answer.remote(key, error)
            else:
                inbox.answer.remote(key, done)
        return said

    def _count(self, name: str, value: float, label: str) -> None:
        self._recorder.add(name, value, label=label)


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


def worker_spec(job: JobConfig, name: str, names: Mapping[str, str], namespace: str, env_steps: int = 0) -> WorkerSpec:
    """As `spec_of`, for workers on a cluster; ``names`` and ``namespace`` as for `Rollouts`."""
    from brayx.cluster.rollout_worker import WorkerSpec

    config = job.rollouts[name]
    return WorkerSpec(
        **vars(spec_of(job, name, env_steps)),
        namespace=namespace,
        buffer=names[f"buffer/{config.buffer}"],
        weight_store=names["weights"],
        hub=names["hub"],
        moments=names["moments"] if normalises(config) else "",
    )
