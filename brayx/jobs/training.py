"""Runs a training job from start to end, the same way on every host.

A host checks the job, opens the trial and makes the parts: `brayx.local.job`, `brayx.cluster.job`. Then `JobTraining`
opens the doors, starts the learner and, once its weights act, the gamecores, rollouts and sources. It shows progress.
It ends all parts in an order that loses no data: games and rollouts, learner (an interrupted one saves a last
checkpoint), sessions and doors, trial. A job without an actor has no door. Knows nothing of where the parts run.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from brayx.errors import BrayxError, DeadlineExceeded
from brayx.jobs.champion import drawn_curve
from brayx.jobs.config import JobConfig, only
from brayx.jobs.environments import lag_notes
from brayx.jobs.gamecores import Gamecores, gamecores_of
from brayx.jobs.inner_bridge import JobDoors
from brayx.jobs.progress import Progress, error_lines, tracebacks
from brayx.jobs.result import LATE, STEPS_THIS_RUN, Ending, TrainResult, end_reason, keep_recordings, training_facts
from brayx.jobs.sources import Sources
from brayx.jobs.watching import Watch, Watched, WatchedGamecores, last_of
from brayx.logs import one_line
from brayx.shutdown import INTERRUPTED_S, Deadline, JobPart, running_parts, wait_to_save
from brayx.tracking import Trial
from brayx.tracking.mlflow_page import NOTE_TAG

if TYPE_CHECKING:
    from brayx.jobs.trainee import Trainees
    from brayx.metrics import Recorder
    from brayx.replay.packing import Layout
    from brayx.rollout.worker import WorkerProgress as Collected
    from brayx.tracking.clerk import Clerk
    from brayx.tracking.in_process import InProcessClerk
    from brayx.trainer.config import TrainerConfig
    from brayx.trainer.loop import TrainingSummary

LOOK_S = 0.25
_END_S = 20.0
"""Deadline for all parts together to end, apart from the learner of a finished training."""
_INTERRUPTED_START_TIMEOUT_S = 1.0
"""Share of `_END_S` for a learner that has not begun to learn."""
_KEEP_AFTER_ERROR_S = 10.0
"""Time limit for copying recordings of a training that an error ended."""
_OPENED_S = 2.0
"""Share of `_END_S` to wait for MLflow if it is still starting."""
_OPENED_ON_ERROR_S = 60.0
"""Time to wait for MLflow after an error: otherwise the trial would stay marked as running."""

Snapshot = tuple[Mapping[str, float], Mapping[str, str]]
"""The newest value of each metric, and the newest note of those that have notes."""


class Rollout(JobPart, Watched, Protocol):
    """Environments that play without a door."""

    @property
    def error(self) -> BrayxError | None:
        """A permanent error."""

    @property
    def collected(self) -> Collected:
        """Its total progress."""


@dataclass
class JobTraining(abc.ABC):
    """One training; `run` does it once. A host makes the parts, and says how they start and end.

    Attributes:
        job: the job.
        actor: name of its actor; empty: it has none.
        layout: layout of the model's observations and actions.
        name: name of the trial.
        uri: tracking URI.
        clerk: writes the trial.
        log_interval: as for `Progress`.
        notes: lines about the job at the top of the display.
        save_s: share of the shutdown for an interrupted learner and its last checkpoint.
        copy_s: share of the shutdown to copy recordings of an interrupted training to its trial.
        progress: the open display.
        stack: ends what `make_parts` starts.
        learning: the models in training.
        numbers: the job's recorder.
        buffers: buffers that sources feed, by name.
        rollouts: environments that play without a door.
        urls: URL of each open door by name.
        end: deadline for all parts to end, apart from the learner of a finished training.
        finished: the learner has ended, and was not interrupted.
        ending: how the training ends, for the console.
    """

    job: JobConfig
    actor: str
    layout: Layout
    name: str
    uri: str
    clerk: Clerk | InProcessClerk
    log_interval: int | None
    notes: Sequence[str] = ()

    save_s: ClassVar[float]
    copy_s: ClassVar[float]
    learning: Trainees[Any] = field(init=False)
    numbers: Recorder = field(init=False)

    def __post_init__(self) -> None:
        self.config = config = self.job.trainers[only("trainer", self.job.trainers)]
        self._resumed = bool(self.clerk.totals().get("updates"))
        self.progress = Progress(
            f"{self.job.project} / {self.name}{' (resumed)' * self._resumed}",
            num_steps=config.num_steps,
            target=config.target_return,
            log_interval=self.log_interval,
        )
        self.stack = contextlib.ExitStack()
        self.buffers: Mapping[str, Any] = {}
        self.rollouts: Sequence[Rollout] = ()
        self.urls: Mapping[str, str] = {}
        self.end = Deadline(_END_S)
        self.finished = self._has_begun = False
        self.ending = Ending()
        self._finishing = threading.Event()
        self._keep = functools.partial(keep_recordings, self.job, time.time(), self.progress.say, self.clerk.call)

    @abc.abstractmethod
    def make_parts(self) -> None:
        """Makes the models in training, the recorder, buffers and rollouts, and whatever else the host needs."""

    @abc.abstractmethod
    def open_doors(self) -> None:
        """Opens the doors, if they need not wait for the learner."""

    @abc.abstractmethod
    def wait_for_weights(self) -> None:
        """Waits until the learner's first weights act behind open doors; returns also if the learner has failed."""

    @abc.abstractmethod
    def close_doors(self) -> None:
        """Ends sessions and doors, also those that never opened."""

    @abc.abstractmethod
    def newest(self) -> Snapshot | None:
        """The newest numbers; None: they cannot be read now."""

    @abc.abstractmethod
    def settle(self) -> Snapshot:
        """Makes all parts write their last metrics; returns the last numbers."""

    @abc.abstractmethod
    def console(self, facts: Callable[[], dict[str, Any]]) -> contextlib.AbstractContextManager[object]:
        """The console, until it has shown `ending`; ``facts`` returns what it shows of the training before."""

    def gamecores(self, doors: JobDoors | None = None) -> Gamecores:
        """The job's gamecores; ``doors`` as for `Gamecores`."""
        configs = gamecores_of(self.job, self.actor)
        keys_file = self.job.actors[self.actor].keys_file if self.actor else None
        given = self.job.files_folder, self._game_failed, self.progress.say, doors
        return Gamecores(configs, self.urls, *given, keys_file)

    def facts(self) -> Mapping[str, Any]:
        """What else the console shows of the job."""
        return {}

    def carry_out_requests(self) -> Iterable[str]:
        """Carries out other processes' requests to the job; returns lines for the user."""
        return ()

    def end_waits(self) -> None:  # noqa: B027  # most hosts need not
        """Ends this process's waits for room in a buffer, which end with the buffer otherwise."""

    def finish(self) -> None:
        """Ends the training as if it had all its steps; may be called from any thread."""
        self._finishing.set()

    def run(self) -> TrainResult:
        """Trains; returns the result.

        Raises:
            BrayxError: a part could not start, or failed for good.
            KeyboardInterrupt: before the trial was open, or while the results were written; with a note.
        """
        say = self.progress.say
        with self.stack:
            self.stack.push(lambda _, error, __: self._mark_unfinished(error))
            self.stack.enter_context(self.progress)
            for note in (*self.notes, *lag_notes(self.job)):
                say(note)
            self.stack.enter_context(tracebacks(say))
            self.make_parts()
            return self._run(Sources(self.job, self.buffers, self.layout.env))

    def _run(self, sources: Sources) -> TrainResult:
        from brayx.actor.doors.ports import OPEN, open_to_all  # with the doors, whose parts load slowly

        say, learning = self.progress.say, self.learning
        actor = self.job.actors[self.actor] if self.actor else None
        began, seconds, summary = time.monotonic(), 0.0, None
        with contextlib.ExitStack() as served:
            served.push(self._keep_after_error)
            served.callback(self.close_doors)
            try:
                self.open_doors()
                self.stack.enter_context(self.console(self._facts))
                self.stack.push(self._say_failed)
                served.callback(self._keep_facts)  # before the doors close
                learning.start()
                self.wait_for_weights()
                began, self._has_begun = time.monotonic(), True
                games = self.gamecores()
                with running_parts((sources, *self.rollouts, games), self.end, stopping=self.end_waits):
                    if actor is not None:
                        say(f"{games}; the door is {self.urls['http']}")
                        if open_to_all(actor):
                            say(OPEN)
                    self.watch(sources, games)
                    seconds = time.monotonic() - began
                with self.end.paused():
                    summary = last_of(learning)
                self.finished = True
            except KeyboardInterrupt as error:
                self.end.shorten(INTERRUPTED_S)
                seconds = seconds or (time.monotonic() - began if self._has_begun else 0.0)
                learner_note = ": the learner saves a last checkpoint" if self._has_begun else " before training began"
                trial_note = (
                    "the same command resumes this trial" if self.clerk.opened() else "MLflow is still starting"
                )
                if self.clerk.opened() or self._numbers()[0].get("updates"):  # otherwise the error's note says all
                    say(f"interrupted{learner_note}; {trial_note}")
                if self.clerk.opened():  # at once: after Ctrl-C the console has little time
                    self._say_interrupted()
                self._stop_learner()
                if not self._has_opened():
                    error.add_note("before MLflow had started: nothing is kept")
                    raise
                self._say_interrupted()
            except BaseException:
                self._stop_learner()
                if self._has_begun:  # record the error in MLflow even if it is still starting
                    self.clerk.opened(_OPENED_ON_ERROR_S)
                raise
        try:
            result = self._result(began, seconds, summary)
        except KeyboardInterrupt as error:
            error.add_note(LATE)
            self.ending.say("interrupted", LATE)
            raise
        if self.finished:
            self.ending.say("finished", result.conclusion())
        return result

    def watch(self, sources: Sources, games: WatchedGamecores) -> None:
        """Watches until the learner's stream is over; ends the stream when no more data can arrive.

        Raises:
            BrayxError: a source failed, a gamecore or rollout failed permanently; or as `Watch.look`.
        """
        learning = self.learning
        plays = not self.job.rollouts and all(source.demonstration for source in self.job.sources.values())
        must_connect = [*self.urls.values()] if plays else []
        steps = max(_batch_steps(self.job, trainee.config) for trainee in learning.trainees.values())
        share = self.config.max_lost_share
        gamecores = gamecores_of(self.job, self.actor)
        by_hand = bool(must_connect) and all(config.by_hand for config in gamecores) and self.job.contract is not None
        given = self.progress, learning, games, self.rollouts, steps, share, must_connect
        watch = Watch(*given, by_hand=by_hand, resumed=self._resumed)
        while not learning.wait(LOOK_S):
            if self._finishing.is_set():
                learning.stop()
                return
            self.clerk.check()
            games.check()
            for error in (*sources.errors, *(rollout.error for rollout in self.rollouts)):
                if error is not None:
                    raise error
            with contextlib.suppress(DeadlineExceeded):  # a buffer or the league is slow, or being restarted
                if learning.is_over(read=sources.done and not self.rollouts, games_play=games.num > 0):
                    return
                learning.look()
            for line in self.carry_out_requests():
                self.progress.say(line)
            if (newest := self.newest()) is not None:
                watch.look(*newest)

    def _result(self, began: float, seconds: float, summary: TrainingSummary | None) -> TrainResult:
        config = self.config
        if self.finished:
            self.progress.say("writing results to MLflow")
        last, notes = self.settle()
        if self.ending.facts:
            self.ending.facts["numbers"] = dict(last)
        numbers = {**last, STEPS_THIS_RUN: float(sum(rollout.collected.steps for rollout in self.rollouts))}
        trial = self.clerk.trial()
        version, outcome, curve = None, "", []
        if self.finished:
            version, outcome = self.learning.register(self.progress.say)
            self._keep()
            curve = self.clerk.call(drawn_curve, self.job.project, config.target_return, config.x_axis)
        elif self._has_begun:  # after Ctrl-C there is no time to draw the curve
            with contextlib.suppress(BrayxError):  # the league may be gone
                outcome = self.learning.standings()
        self.learning.close(self.finished)
        if self._has_begun and not self.finished:
            self._keep_recordings_in_time()
        self.clerk.close("FINISHED" if self.finished else "KILLED")
        return TrainResult(
            trial,
            numbers,
            self.finished,
            self.learning.pool,
            version,
            seconds,
            curve,
            outcome,
            reason="" if summary is None else summary.reason,
            began=began,
            errors=tuple(error_lines(numbers, notes)),
            ended=self._end_reason(summary, numbers),
        )

    def _end_reason(self, summary: TrainingSummary | None, numbers: Mapping[str, float]) -> str:
        trainer, on_request = only("trainer", self.job.trainers), self._finishing.is_set()
        return end_reason(self.config, summary, numbers, trainer=trainer, on_request=on_request)

    def _keep_facts(self) -> None:
        """Keeps the last facts for the console: later the parts that know them are gone."""
        with contextlib.suppress(BrayxError):
            self.ending.facts = self._own_facts() | {"waits_for": "", "sessions": 0, "silent": 0, "can_stop": False}

    def _say_interrupted(self) -> None:
        self.ending.say("interrupted", self._end_reason(None, self._numbers()[0]))

    def _say_failed(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, Exception):  # Ctrl-C is none
            self.ending.say("failed", one_line(str(error)))

    def _keep_after_error(self, _: object, error: BaseException | None, __: object) -> None:
        """Copies recordings of a training that an error ended, since they show the cause; the doors are closed."""
        if self._has_begun and isinstance(error, Exception):  # Ctrl-C is no Exception: it has its own time limit
            self._keep(time.time() + _KEEP_AFTER_ERROR_S)

    def _keep_recordings_in_time(self) -> None:
        """Copies recordings of an interrupted training to its trial, which it ends first: slow copies are killed."""
        if self.job.recording is None or not self.job.recording.to_trial:
            return
        self.clerk.call(Trial.finish, "KILLED")
        try:
            self._keep(time.time() + self.end.left(self.copy_s))
        except KeyboardInterrupt:
            self.clerk.end()  # it is still copying, and the training does not wait for that
            raise

    def _has_opened(self) -> bool:
        """Whether MLflow has started. If an interrupted training has learned something, this waits for MLflow."""
        if self.clerk.opened(self.end.left(_OPENED_S)) or not self._numbers()[0].get("updates"):
            return self.clerk.opened()
        with self.end.paused():
            return wait_to_save(self.clerk.opened, self.progress.say)

    def _stop_learner(self) -> None:
        """Stops the learner and waits, within the deadline, for the last checkpoint of one that has begun to learn."""
        with contextlib.suppress(BrayxError):
            self.learning.stop()
            self.learning.result(self.end.left(self.save_s if self._has_begun else _INTERRUPTED_START_TIMEOUT_S))

    def _game_failed(self, line: str) -> None:
        self.numbers.add("gamecores_failed", 1.0, note=one_line(line))

    def _numbers(self) -> Snapshot:
        return self.newest() or ({}, {})

    def _facts(self) -> dict[str, Any]:
        """What the console shows of the training."""
        return {**self._own_facts(), **self.facts()}

    def _own_facts(self) -> dict[str, Any]:
        facts = training_facts(self.job.project, self.name, self.clerk, self.config, *self._numbers())
        waits_for = f"the learner {self.learning.state()}"
        return {**facts, "league": bool(self.job.leagues), "waits_for": waits_for, "doors": dict(self.urls)}

    def _mark_unfinished(self, error: BaseException | None) -> None:
        """Records in MLflow that an error or Ctrl-C ended the trial, if the trial exists by now."""
        if error is None or not self.clerk.opened():
            return
        has_failed = not isinstance(error, KeyboardInterrupt)
        with contextlib.suppress(BrayxError):  # the error itself says more
            if has_failed:
                self.clerk.call(Trial.set_tag, NOTE_TAG, one_line(str(error)))
        with contextlib.suppress(BrayxError):
            self.clerk.close("FAILED" if has_failed else "KILLED")


def _batch_steps(job: JobConfig, config: TrainerConfig) -> int:
    """Transitions of the largest batch that an update may need."""
    buffers = [job.buffers[name] for name in config.buffers]
    return max(buffer.batch_size * buffer.unroll_length for buffer in buffers) * config.num_workers
