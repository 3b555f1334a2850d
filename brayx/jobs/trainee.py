"""The models that a job trains, on any host: one model, the players of a league (`brayx.league.training`), or the
behaviours of its games (`brayx.local.behaviours`).

A host makes a `Trainee` for each of them. Knows nothing of doors, games or progress.
"""

from __future__ import annotations

import abc
import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from brayx.errors import BrayxError, StartupError, first_line
from brayx.jobs.config import pool_name
from brayx.jobs.result import promote
from brayx.threads import NativeThread

if TYPE_CHECKING:
    from brayx.jobs.config import JobConfig
    from brayx.tracking.clerk import Clerk
    from brayx.tracking.in_process import InProcessClerk
    from brayx.tracking.trial import Status
    from brayx.trainer.config import TrainerConfig
    from brayx.trainer.loop import LearnerNumbers, TrainingSummary
    from brayx.types import Weights

log = logging.getLogger(__name__)

T = TypeVar("T", bound="Trainee")


class RunningLearner(Protocol):
    """A learner in the background, or several as one."""

    @property
    def running(self) -> bool:
        """Whether it is still learning."""

    def start(self) -> object:
        """Starts it."""

    def wait(self, timeout_s: float) -> bool:
        """Waits for its end; False: not within ``timeout_s``."""

    def state(self) -> str:
        """The learner's state, in a few words."""

    def stop(self) -> None:
        """Ends its stream, so that it saves a last checkpoint and ends. Does not wait."""

    def result(self, timeout_s: float | None = None) -> TrainingSummary | None:
        """The learner's summary; None if it has not ended within ``timeout_s``. Raises its error."""


class LearnerThread(abc.ABC):
    """A learner in a background thread, from `start` on: a `RunningLearner`.

    Args:
        stop: called when the interpreter exits while the thread runs.
    """

    def __init__(self, stop: Callable[[], object] = lambda: None) -> None:
        self._summary: TrainingSummary | None = None
        self._error: BaseException | None = None
        self._thread = NativeThread(self._run, "brayx-learner", stop)

    @abc.abstractmethod
    def learn(self) -> TrainingSummary:
        """Learns until training ends; runs in the thread."""

    def ended(self) -> None:  # noqa: B027 (most learners need nothing here)
        """Called in the thread when `learn` has returned or raised."""

    def failure(self, error: BaseException) -> BrayxError:
        """What `result` raises for an error of `learn`."""
        return learner_failed(error)

    def start(self) -> None:
        """See `RunningLearner.start`."""
        self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """See `RunningLearner.wait`."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def running(self) -> bool:
        """See `RunningLearner.running`."""
        return self._thread.is_alive()

    def result(self, timeout_s: float | None = None) -> TrainingSummary | None:
        """See `RunningLearner.result`.

        Raises:
            BrayxError: the learner's error; `StartupError` for other exceptions, with the cause chained.
        """
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        if self._error is not None:
            raise self.failure(self._error) from self._error
        return self._summary

    def _run(self) -> None:
        try:
            self._summary = self.learn()
        except BaseException as error:  # `result` raises it
            self._error = error
        finally:
            self.ended()


def learner_failed(error: BaseException) -> BrayxError:
    """A learner's error in one line."""
    if isinstance(error, BrayxError):
        return type(error)(f"the learner failed: {error.message}", **error.details)
    return StartupError(f"the learner failed: {type(error).__name__}: {first_line(error)}")


class Trainee(Protocol):
    """One model in training: options of its trainer, the clerk of its trial, its recorder, learner and buffers."""

    @property
    def config(self) -> TrainerConfig: ...

    @property
    def clerk(self) -> Clerk | InProcessClerk: ...

    @property
    def numbers(self) -> LearnerNumbers: ...

    @property
    def learner(self) -> RunningLearner: ...

    @property
    def buffers(self) -> Mapping[str, Any]: ...

    @property
    def published(self) -> bool:
        """Whether the learner's first weights were published."""

    def newest_weights(self) -> Weights | None:
        """The newest published weights; None: there are none yet, or they cannot be read now."""

    def start(self, timeout_s: float) -> bool:
        """Starts the learner, and waits for its first weights; False: they did not come in time."""

    def end(self, status: Status) -> None:
        """Ends its trial."""

    def is_over(self, no_more: bool) -> bool:
        """Whether its stream of batches is over.

        Args:
            no_more: no more data will come, so the stream ends with the data that is there.

        Raises:
            DeadlineExceeded: a buffer is slow or restarts; ask again.
        """


def fills_buffers(job: JobConfig) -> bool:
    """Whether games add to what is learned from: with ``buffer: null`` of all agents they only show how a clone
    plays."""
    return any(agent.options.get("buffer", "") is not None for agent in job.agents.values())


class Trainees(Generic[T]):
    """All models that a job trains, as one `RunningLearner`, which ends when all main players have ended.

    This class holds one model, whose trial is the job's. Its subclasses hold the players of a league
    (`LeagueTraining`), or the behaviours of the job's games (`brayx.local.behaviours.BehaviourTraining`).

    Attributes:
        trainees: the models in training, by player or behaviour.
        mains: names of the main players, or of all behaviours.
    """

    trainees: dict[str, T]
    mains: list[str]

    def __init__(self, job: JobConfig, trainee: T) -> None:
        self._job, self._trainee = job, trainee
        self.trainees, self.mains = {"": trainee}, [""]

    def start(self) -> None:
        for learner in self._learners.values():
            learner.start()

    def wait(self, timeout_s: float) -> bool:
        until, learners = time.monotonic() + timeout_s, self._learners
        for name in self.mains:
            if name in learners and not learners[name].wait(max(0.0, until - time.monotonic())):
                return False
        for name, learner in learners.items():
            if name not in self.mains:
                learner.stop()
        return all(learner.wait(max(0.0, until - time.monotonic())) for learner in learners.values())

    @property
    def running(self) -> bool:
        return any(learner.running for learner in self._learners.values())

    def state(self) -> str:
        states = {name: learner.state() for name, learner in self._learners.items()}
        if len(states) == 1:
            return next(iter(states.values()))
        return ", ".join(f"of {name} {state}" for name, state in states.items())

    def stop(self) -> None:
        for learner in self._learners.values():
            learner.stop()

    def result(self, timeout_s: float | None = None) -> TrainingSummary | None:
        """The summary of the first main player once all have ended; None if that takes longer than ``timeout_s``.

        Raises:
            BrayxError: a main player's error.
        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        summaries = {}
        for name, learner in self._learners.items():
            left_s = None if until is None else max(0.0, until - time.monotonic())
            try:
                summaries[name] = learner.result(left_s)
            except BrayxError as error:  # the league does not fail with another player as it ends
                if name in self.mains:
                    raise
                log.warning("player %r failed as the league ended: %s", name, error.message)
        first = next(name for name in self.mains if name in self.trainees)
        return None if None in summaries.values() else summaries[first]

    def look(self) -> None:
        """Does regular work, such as a league's snapshots; called repeatedly, also after `DeadlineExceeded`."""

    def is_over(self, *, read: bool, games_play: bool) -> bool:
        """Whether the stream of batches is over.

        Args:
            read: the sources are read, and no rollout is left.
            games_play: games may still add to it.

        Raises:
            DeadlineExceeded: as for `Trainee.is_over`.
        """
        return self._trainee.is_over(read and not (games_play and fills_buffers(self._job)))

    def register(self, say: Callable[[str], None]) -> tuple[int | None, str]:
        """Registers what was learned; returns the version, None if there is none, and a message for the user."""
        return promote(self._job, self._trainee.config, say, self._trainee.clerk.call, self.pool)

    @property
    def pool(self) -> str:
        """Name in the registry of the version that `register` returns."""
        return pool_name(self._job, self._trainee.config.model)

    def standings(self) -> str:
        """The table of a league; empty: there is no league."""
        return ""

    def close(self, finished: bool) -> None:
        """Ends the trials of a league's players, or of further behaviours."""

    @property
    def _learners(self) -> dict[str, RunningLearner]:
        return {name: trainee.learner for name, trainee in list(self.trainees.items())}
