"""The rollout workers of a training on Ray. Knows nothing of what a worker does with its environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from brayx.cluster.hub import take_requests
from brayx.cluster.rollout import Workers
from brayx.cluster.rollout_worker import WorkerSpec
from brayx.errors import BrayxError, ConfigError
from brayx.jobs.config import JobConfig
from brayx.jobs.document import nearest
from brayx.jobs.environments import normalises, spec_of
from brayx.metrics import Recorder
from brayx.rollout.worker import Progress
from brayx.shutdown import side_by_side


class Rollouts:
    """Runs the workers of all rollouts of a job; a context manager.

    Args:
        job: the job.
        names: Ray actors by part: ``hub``, ``weights``, ``moments``, and ``buffer/NAME`` of each buffer.
        recorder: of this process, for metrics about the workers.
        env_steps: env steps that the resumed trial has learned from.
    """

    def __init__(self, job: JobConfig, names: Mapping[str, str], recorder: Recorder, env_steps: int = 0) -> None:
        self._recorder = recorder
        self._all = {
            name: Workers(worker_spec(job, name, names, env_steps), on_event=self._count) for name in job.rollouts
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
        """Carries out requests of other processes to the job, see `brayx.cluster.scale`.

        Args:
            inbox: the trial's hub.

        Returns:
            Lines for the user about the changes.
        """
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


def worker_spec(job: JobConfig, name: str, names: Mapping[str, str], env_steps: int = 0) -> WorkerSpec:
    """As `spec_of`, for workers on a cluster; ``names`` as for `Rollouts`."""
    config = job.rollouts[name]
    return WorkerSpec(
        **vars(spec_of(job, name, env_steps)),
        buffer=names[f"buffer/{config.buffer}"],
        weight_store=names["weights"],
        hub=names["hub"],
        moments=names["moments"] if normalises(config) else "",
    )
