"""Joins the collector and the learner of `brayx.local.train.train_local`: batches flow one way, weights the other.

Knows nothing of algorithms, nor of how options are chosen.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from brayx import clock
from brayx.engines.base import check_finite, load_weights
from brayx.errors import Diverged
from brayx.jobs.watching import Losses
from brayx.local.demonstrations import Demonstrations
from brayx.metrics import Drained, Recorder
from brayx.metrics.totals import FRAGMENTS_IN_WINDOW, LOST_IN_WINDOW, Totals
from brayx.replay.packing import Batch, check_columns
from brayx.replay.samplers import Importance
from brayx.replay.table import Table
from brayx.replay.unfit import without_unfit
from brayx.rollout.collector import Collector, Episode, record_episodes, seed_after
from brayx.threads import NativeThread
from brayx.tracking.pending import Keeper
from brayx.trainer.config import TrainerConfig
from brayx.trainer.loop import GAMES_METRIC, RETURN_METRIC
from brayx.types import Columns, Weights

logger = logging.getLogger(__name__)

_STEPS = "rollout_env_steps"
_IMITATED = "imitated"
"""Key in a checkpoint's ``meta.json``: the number of demonstration batches learned from."""
_MAX_LOST_SHARE = TrainerConfig.model_fields["max_lost_share"].default
_END_S = 30.0
"""Deadline for the collector's thread to finish its current run."""


class TrialKeeper(Keeper, Protocol):
    """Keeps the metrics and checkpoints of a trial while it trains."""

    def push(self, part: Drained) -> None:
        """Adds drained metrics to the trial."""

    def check(self) -> None:
        """Raises the keeper's pending error, if any."""

    def best(self) -> Path | None:
        """Folder of the checkpoint with the best return; None: it is the newest one, or none has a return."""


class CurvePoint(NamedTuple):
    """One point of the learning curve: seconds since the first step, env steps, finished episodes, and the mean return
    of the last hundred episodes."""

    seconds: float
    env_steps: int
    episodes: int
    return_mean: float


class Run:
    """State shared by collector and learner: the newest weights, the table, metrics and checkpoints.

    Implements the loop's `Publisher`, `LearnerNumbers` and `Keeper`; the learner's thread calls all three. The learner
    takes the batches of `imitation` once, then those of `iteration` and `after_update` again and again, and at last
    `close`.

    Args:
        collector: collects runs.
        table: columns are sampled from it; None: each run is learned from once.
        num_steps: transitions to collect.
        blocking: collect only after the learner has used the last run; otherwise a thread is at most one run ahead.
        cloning: learn from demonstrations only.
        on_update, clerk, stop: as for `brayx.local.train.train_local`.
        seed: seed of the training.
        importance: weights of sampled columns.
        demonstrations: recorded episodes to imitate.
        imitation_updates: minimum number of their batches before the first run.
        resume: checkpoint to resume from, without a clerk.
    """

    def __init__(
        self,
        collector: Collector,
        table: Table | None,
        num_steps: int,
        *,
        blocking: bool,
        cloning: bool,
        on_update: Callable[[int, int, Mapping[str, float]], None] | None,
        clerk: TrialKeeper | None,
        stop: threading.Event,
        seed: int,
        importance: Importance,
        demonstrations: Demonstrations | None = None,
        imitation_updates: int = 0,
        resume: Path | None = None,
    ) -> None:
        self.env_steps = 0
        self.dropped = 0
        self._unfit = ""
        self._losses = Losses(_MAX_LOST_SHARE, clock.now)
        self.about: dict[str, Any] = {}
        self._steps_before = 0
        self._begun_at = 0
        self.curve: list[CurvePoint] = []
        self._collector = collector
        self._table = table
        self._total = num_steps
        self._on_update = on_update
        self._clerk = clerk
        self._stop = stop
        self._seed = seed
        self._importance = importance
        self._batches_before = 0
        self._demonstrations = demonstrations
        self._cloning = cloning
        beside = demonstrations is not None and not cloning
        self._first = max(imitation_updates, demonstrations.rounds) if beside and demonstrations is not None else 0
        self._next_run = self._recorded if cloning else self._collect if blocking else self._collected_ahead
        self._resume = resume
        self._runs = 0
        self._thread: threading.Thread | None = None
        self._ahead: queue.Queue[tuple[Batch, list[Episode]] | BaseException] = queue.Queue(maxsize=1)
        self._stopped = threading.Event()
        self._weights: tuple[Weights, int] = ({}, 0)
        self._recorder = Recorder()
        self.add, self.add_shapes = self._recorder.add, self._recorder.add_shapes
        self._totals = Totals()
        self.began = self._ended = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds from `begin` to the newest batch that the learner requested."""
        return self._ended - self.began

    @property
    def steps_per_s(self) -> float:
        """Env steps per second; steps from before a resume do not count."""
        return (self.env_steps - self._steps_before) / max(self.seconds, 1e-9)

    def progress(self) -> float:
        """Training progress from 0 to 1, as a share of ``num_steps``, at the start of the current run.

        It counts collected steps, not updates: the number of samples per insert is only an average.
        """
        return min(self._begun_at / self._total, 1.0)

    @property
    def is_complete(self) -> bool:
        """Whether all steps are collected."""
        return self.env_steps >= self._total

    def finish(self) -> None:
        """Ends the training with the current run, as if it had all its steps; may be called from any thread."""
        self._total = max(1, min(self._total, self.env_steps))

    def begin(self) -> None:
        """Starts the clock."""
        self.began = self._ended = time.monotonic()

    def publisher(self, newest: int) -> Run:
        """Returns itself as the loop's publisher; the next version is ``newest + 1``."""
        self._weights = ({}, newest)
        return self

    def publish(self, weights: Weights, step: int) -> int:
        """As `loop.Publisher.publish`."""
        check_finite(weights)
        self._weights = (weights, self._weights[1] + 1)
        return self._weights[1]

    def newest_weights(self) -> tuple[Weights, int]:
        """The newest published weights, and their version."""
        return self._weights

    def feedback(self, index: np.ndarray, priorities: np.ndarray) -> None:
        """Passes the learner's new priorities of sampled columns to the table."""
        if self._table is not None:
            self._table.update_priorities(index, priorities)

    def resumed(self, learned: int) -> None:
        """Continues the schedule of importance weights after the ``learned`` batches of the resumed trial."""
        self._batches_before = learned

    def newest(self) -> Mapping[str, float]:
        """As `loop.Numbers.newest`; exact, since all metrics come from this process.

        Means are over the current run, or over the previous run while the current one has no value yet.
        """
        part = self._recorder.drain()
        self._totals.merge(part)
        if self._clerk is not None:
            self._clerk.push(part)
        return self._totals.snapshot()

    def save(self, folder: Path, step: int, metrics: Mapping[str, float]) -> None:
        """As `loop.Keeper.save`; saves nothing without a clerk."""
        if self._clerk is not None:
            self._clerk.save(folder, step, metrics)

    def latest(self) -> Path | None:
        """As `loop.Keeper.latest`; also restores the env step count, and reseeds the collector for new episodes."""
        folder = self._resume if self._clerk is None else self._clerk.latest()
        if folder is not None:
            about = json.loads((folder / "meta.json").read_text())
            self.env_steps = self._begun_at = self._steps_before = self.about[_STEPS] = about.get(_STEPS, 0)
            self.about[_IMITATED] = about.get(_IMITATED, 0)
            self._collector.begin_again(seed_after(self._seed, self.env_steps))
            if self._demonstrations is not None and not self._cloning:
                # Skip the imitation updates that were done before the resume.
                self._first = max(self._first - self.about[_IMITATED], self._demonstrations.rounds)
        self.begin()
        return folder

    def act_as_registered(self) -> None:
        """Gives the collector the weights and moments of the checkpoint that is registered, if they are not the newest.

        Raises:
            TrackingError: it cannot be read.
        """
        folder = None if self._clerk is None else self._clerk.best()
        if folder is not None:
            self.publish(load_weights(folder / "weights.npz"), self.env_steps)
            if (moments := folder / "normaliser.npz").exists():
                self._collector.load_state_dict(load_weights(moments))

    def goes_on(self) -> bool:
        """Whether more steps are wanted, and nothing stopped the training; raises the clerk's pending error, if any."""
        if self._clerk is not None:
            self._clerk.check()
        return not self.is_complete and not self._stop.is_set()

    def imitation(self) -> Iterator[Batch]:
        """Batches of demonstrations before the first run; none without demonstrations."""
        return self._to_imitate(self._first)

    def iteration(self) -> Iterator[Batch]:
        """Batches of the next run, then one of demonstrations."""
        yield from self._batches(self._next_run())
        if not self._cloning:
            yield from self._to_imitate(1)

    def close(self, timeout_s: float | None = _END_S) -> None:
        """Ends the collector's thread after its current run.

        Args:
            timeout_s: longest wait. None for one that is to be evaluated: its environments may be slow, and are used
                again.
        """
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def check_learned(self) -> None:
        """Fails a training that dropped every run.

        Raises:
            Diverged: names the first field that was not finite.
        """
        collected = self.env_steps - self._steps_before
        if self._unfit and self.dropped == collected:
            raise self._diverged(f"nothing was learned: all {collected:,} transitions were dropped")

    def _diverged(self, why: str) -> Diverged:
        message = f"{why}; {self._unfit}, expected finite float32 numbers: mend that, and run the same command again"
        return Diverged(message, fields=[self._unfit.partition(":")[0]])

    @property
    def notes(self) -> dict[str, str]:
        """As `Totals.notes`."""
        return dict(self._totals.notes)

    def _to_imitate(self, count: int) -> Iterator[Batch]:
        """Up to ``count`` batches of demonstrations; none without demonstrations or after the end of training."""
        for _ in range(count):
            if self._demonstrations is None or not self.goes_on():
                return
            self.about[_IMITATED] = self.about.get(_IMITATED, 0) + 1
            self._batches_before += 1
            yield self._demonstrations.draw()

    def _collect(self) -> tuple[Batch, list[Episode]]:
        weights, version = self._weights
        if version != self._collector.policy.version:
            self._collector.load(weights, version)
        columns = self._collector.collect()
        return dict(columns.arrays), self._collector.episodes()

    def _recorded(self) -> tuple[Batch, list[Episode]]:
        assert self._demonstrations is not None
        return self._demonstrations.draw(), []

    def _collected_ahead(self) -> tuple[Batch, list[Episode]]:
        """A run that a separate thread collected."""
        if self._thread is None:
            self._thread = NativeThread(self._work, "brayx-collector", self._stopped.set)
            self._thread.start()
        run = self._ahead.get()
        if isinstance(run, BaseException):
            raise run
        return run

    def _work(self) -> None:
        try:
            while not self._stopped.is_set():
                _put(self._ahead, self._collect(), self._stopped)
        except BaseException as error:  # raised again in the learner's thread
            _put(self._ahead, error, self._stopped)

    def _batches(self, run: tuple[Batch, list[Episode]]) -> Iterator[Batch]:
        arrays, episodes = run
        count = int(arrays["mask"].sum())
        self._begun_at = self.env_steps
        self.env_steps += count
        self.about[_STEPS] = self.env_steps
        self._recorder.add("env_steps", count)
        record_episodes(self._recorder, episodes)
        self._ended = time.monotonic()
        good, lost, note = without_unfit(arrays, self._recorder, keep_shape=self._table is None)
        if note and not self._unfit:
            logger.warning("not learned from: %s", note)
        self.dropped, self._unfit = self.dropped + lost, note or self._unfit
        if good is None:
            return
        check_columns(Columns(good), good["mask"].shape[1] - 1, None)
        self._recorder.add("fragments_pushed", 1)
        if self._table is None:
            yield good
        else:
            yield from self._sampled(self._table, Columns(good))
        self._ended = time.monotonic()

    def _sampled(self, table: Table, left: Columns | None) -> Iterator[Batch]:
        """Alternates between inserting and sampling, as far as the table's rate limiter allows, until all columns are
        inserted.

        Inserting all at once would drop the columns that exceed the limit, always those of the same environments.
        """
        while left is not None:
            room, rows = table.room, len(left.arrays["mask"])
            if room is None or room >= rows:
                table.insert(dict(left.arrays))
                left = None
            elif room:
                table.insert({key: array[:room] for key, array in left.arrays.items()})
                left = left.after(room)
            while (batch := table.sample()) is not None:
                yield self._importance.weigh(batch, self._batches_before)
                self._batches_before += 1

    def after_update(self) -> Mapping[str, float]:
        """Adds a point to the learning curve and calls ``on_update``, after the updates of each run; returns the
        newest metrics."""
        numbers = self.newest()
        lost, total = (numbers.get(name, 0.0) for name in (LOST_IN_WINDOW, FRAGMENTS_IN_WINDOW))
        if self._losses.is_over({LOST_IN_WINDOW: lost, FRAGMENTS_IN_WINDOW: total}):
            raise self._diverged(f"{lost / total:.0%} of the newest steps were dropped")
        self._totals.take_interval()  # the next means cover the next run only
        if numbers.get(GAMES_METRIC):
            mean = numbers.get(RETURN_METRIC, float("nan"))
            self.curve.append(CurvePoint(self.seconds, self.env_steps, int(numbers[GAMES_METRIC]), mean))
        self._runs += 1
        if self._on_update is not None:
            self._on_update(self._runs, self.env_steps, numbers)
        return numbers


def _put(runs: queue.Queue[Any], item: Any, stopped: threading.Event) -> None:
    """Puts ``item`` into the queue, waiting for room until ``stopped`` is set."""
    while not stopped.is_set():
        try:
            runs.put(item, timeout=0.2)
            return
        except queue.Full:
            pass
