"""The hub of a trial: collects all samples, and writes their numbers to MLflow in a thread.

The local host runs it in a separate process (`brayx.tracking.clerk`), the cluster in a named actor
(`brayx.cluster.hub`). Knows nothing of Ray, nor of the recording code.
"""

from __future__ import annotations

import contextlib
import logging
import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from brayx.errors import TrackingError
from brayx.metrics import Drained, XAxis
from brayx.metrics.charts import NUMBERS_FILE, charted, sums_of
from brayx.metrics.totals import Totals
from brayx.tracking.pictures import log_shapes
from brayx.tracking.tensorboard import events_of, writing_events
from brayx.tracking.trial import Trial

log = logging.getLogger(__name__)

HISTOGRAMS_FILE = "histograms.json"
"""Artifact with the bars of every histogram, of all samples since the hub started; written when it closes."""

_UNWRITTEN = 256
"""Maximum number of intervals that wait for MLflow. One comes for each failed write, which takes two minutes at a
server."""
_NUMBERS_EVERY_S = 5.0
_RETRY_S = 5.0
"""Seconds after which intervals that could not be written are tried again, although no metrics come."""
_SUM_TAG = "brayx.sum."
"""Prefix of the tags that name an application's own metrics that are sums; a resumed trial counts on."""
_ROOM = 64
"""Limit on waiting requests, and on answers that were not fetched."""


class Inbox:
    """Requests to a running job from outside, and their answers. Thread safe; beyond 64 of either, the oldest goes.

    The job's owner polls for requests (`take`, `answer`), and the caller polls for the answer until a deadline.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._now = clock
        self._requests: dict[str, tuple[Any, float]] = {}
        self._answers: dict[str, Any] = {}
        self._at_inbox = threading.Lock()

    def ask(self, request: Any, within_s: float) -> str:
        """Adds a request that expires after ``within_s``; returns the key of its answer."""
        key = secrets.token_hex(8)  # random, so that it differs from keys of an earlier process
        with self._at_inbox:
            self._requests[key] = (request, self._now() + within_s)
            _keep_newest(self._requests)
        return key

    def take(self) -> list[tuple[str, Any]]:
        """Removes and returns all waiting requests, oldest first, each with the key for its answer."""
        with self._at_inbox:
            taken, self._requests = self._requests, {}
            now = self._now()
        return [(key, request) for key, (request, until) in taken.items() if now <= until]

    def answer(self, key: str, answer: Any) -> None:
        """Stores the answer to a request."""
        with self._at_inbox:
            self._answers[key] = answer
            _keep_newest(self._answers)

    def answered(self, key: str) -> Any:
        """Removes and returns the answer to a request; None while there is none."""
        with self._at_inbox:
            return self._answers.pop(key, None)


class Hub(Inbox):
    """A trial's `Totals`, which a thread writes to MLflow as they come, at most every ``interval_s``. Thread safe.

    A write that fails is not fatal: its numbers are kept, and written first by the next write. Beyond `_UNWRITTEN` such
    intervals the oldest is dropped, with its means; sums are totals, so the next interval has them. The snapshot counts
    failures as ``hub_write_failures`` and dropped intervals as ``hub_intervals_lost``; the log has one line until
    writing works again.

    It is also the inbox for requests to the trial's job, since other processes find it by the trial's id.

    Args:
        trial: trial to write to; None: keep the metrics in memory only.
        interval_s: least seconds from the start of a write to that of the next.
        x_axis: x axis of the written metrics.
    """

    def __init__(self, trial: Trial | None, *, interval_s: float = 1.0, x_axis: XAxis = "env_steps") -> None:
        super().__init__()
        self._trial = trial
        self._totals = Totals(totals_of(trial), x_axis=x_axis)
        self._tagged_sums: set[str] = set()
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._unwritten: deque[tuple[dict[str, float], int, float]] = deque()
        self._failures = self._intervals_lost = 0
        self._failing = False
        self._numbers_written = 0.0
        self._stopped, self._pushed = threading.Event(), threading.Event()
        self._interval_s = interval_s
        self._writer = threading.Thread(target=self._write_until_stopped, name="brayx-hub-writer", daemon=True)
        self._writer.start()

    def push(self, part: Drained) -> None:
        """Merges the metrics that one process has recorded."""
        with self._lock:
            self._totals.merge(part)
        self._pushed.set()

    def snapshot(self) -> dict[str, float]:
        """The newest number of every metric, by summary name; sums count from the trial's start.

        Also ``episode_return.last100``, ``episode_length.last100`` (means of the last 100 games),
        ``games_in_window`` (how many those are), ``games``, ``seconds``, ``ticks_per_s``, ``env_steps_per_s``
        (of the last 5 s), ``hub_write_failures``, ``hub_intervals_lost``; and since this hub started:
        ``ticks_this_run``, and ``.run.p50`` and ``.run.p99`` of every metric with percentiles.
        """
        with self._lock:
            counts = {"hub_write_failures": self._failures, "hub_intervals_lost": self._intervals_lost}
            return {**self._totals.snapshot(), **{name: float(count) for name, count in counts.items()}}

    def notes(self) -> dict[str, str]:
        """The newest note of each metric that has one, by summary name; of samples since this hub started."""
        with self._lock:
            return dict(self._totals.notes)

    def flush(self) -> None:
        """Writes the metrics since the last write now."""
        with self._writing:
            with self._lock:
                fresh, step = self._totals.take_interval(), self._totals.step
                numbers = charted(fresh, self._totals.sums, self._totals.own)
                own_sums = self._totals.own_sums - self._tagged_sums
                shapes = self._totals.take_shapes()
            if self._trial is None or not (numbers or shapes or self._unwritten):
                return
            if numbers:
                self._unwritten.append((numbers, step, time.time()))
            if len(self._unwritten) > _UNWRITTEN:
                self._unwritten.popleft()
                self._intervals_lost += 1
            try:
                while self._unwritten:
                    interval = self._unwritten[0]
                    self._trial.log_metrics(*interval)
                    self._unwritten.popleft()
                    if self._trial.tensorboard:
                        with writing_events(self._trial):
                            events_of(self._trial.tensorboard).scalars(*interval)
                if shapes:
                    log_shapes(self._trial, shapes, step)
                for name in sorted(own_sums):
                    self._trial.set_tag(f"{_SUM_TAG}{name}", "1")
                    self._tagged_sums.add(name)
                if time.monotonic() - self._numbers_written >= _NUMBERS_EVERY_S:
                    self._write_numbers(self._trial)
                self._failing = False
            except TrackingError as error:
                self._failures += 1
                if not self._failing:
                    log.warning("metrics are not written for now: %s", error)
                self._failing = True

    def close(self) -> dict[str, float]:
        """Stops the writer after one last write, and returns the last snapshot; safe to call twice."""
        self._stopped.set()
        self._pushed.set()
        self._writer.join(timeout=30)
        self.flush()
        with self._lock:
            histograms = self._totals.histograms()
        if self._trial is not None:
            with contextlib.suppress(TrackingError):  # the metrics have most of it
                self._write_numbers(self._trial)
                if histograms:
                    self._trial.log_dict(histograms, HISTOGRAMS_FILE)
        return self.snapshot()

    def _write_numbers(self, trial: Trial) -> None:
        self._numbers_written = time.monotonic()
        numbers = {name: value for name, value in self.snapshot().items() if math.isfinite(value)}
        trial.log_dict(numbers, NUMBERS_FILE)

    def _write_until_stopped(self) -> None:
        due = time.monotonic() + self._interval_s
        while not self._stopped.wait(max(0.0, due - time.monotonic())):
            # A separate period would be out of step with the pushes' period, and add a second wait to theirs.
            self._pushed.wait(_RETRY_S)
            self._pushed.clear()
            due = time.monotonic() + self._interval_s
            self.flush()


def totals_of(trial: Trial | None) -> dict[str, float]:
    """The sums that an interrupted trial, or a hub that died, had written."""
    if trial is None:
        return {}
    sums = [name.removeprefix(_SUM_TAG) for name in trial.tags() if name.startswith(_SUM_TAG)]
    return sums_of(trial.metrics(), sums)


def _keep_newest(entries: dict[str, Any]) -> None:
    while len(entries) > _ROOM:
        del entries[next(iter(entries))]
