"""One rollout worker: collects fragments with the newest weights and pushes them to a buffer.

A ``blocking`` worker collects its share of one update, then waits for the weights of that update. A ``non_blocking``
worker collects all the time, and waits only while the buffer is full. The worker keeps a fragment that the buffer
cannot take yet and offers it again, so a burst of fragments loses none. Knows nothing of threads, processes or other
workers; the host calls `Worker.turn`.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import Protocol

from brayx.errors import BadFragment, ReplayError
from brayx.metrics import Recorder
from brayx.replay.unfit import without_unfit
from brayx.rollout.collector import Collector, record_episodes
from brayx.rollout.spec import RolloutSpec, rounds
from brayx.types import Columns, Fragment, Weights

log = logging.getLogger(__name__)

START_S = 120.0
"""Deadline for a worker to start; it may wait for resources and the first weights."""
FAILURE_WINDOW_S = 3600.0
"""Seconds for which a failure counts towards ``max_failures``."""
_LOOK_S = 0.02
_ANSWER_S = 30.0
_OFFER_S = 0.5
"""Longest wait for room before a worker checks whether to stop."""


@dataclass(frozen=True)
class WorkerProgress:
    """The work that a worker has done; progress of several workers can be added.

    Attributes:
        fragments: runs collected and pushed, each of all the worker's environments.
        steps: transitions in them.
        overdue: waits that exceeded ``wait_s``.
        waited_s: seconds spent waiting for weights or room.
        version: version of the last weights that acted; a sum has the highest.
    """

    fragments: int = 0
    steps: int = 0
    overdue: int = 0
    waited_s: float = 0.0
    version: int = 0

    def __add__(self, other: WorkerProgress) -> WorkerProgress:
        return WorkerProgress(
            self.fragments + other.fragments,
            self.steps + other.steps,
            self.overdue + other.overdue,
            self.waited_s + other.waited_s,
            max(self.version, other.version),
        )


class Newest:
    """Hands the newest weights from the thread that receives them to the thread that acts."""

    def __init__(self) -> None:
        self._held: tuple[int, Weights] | None = None
        self._came = threading.Condition()

    def put(self, version: int, weights: Weights) -> None:
        """Sets a new version."""
        with self._came:
            self._held = (version, weights)
            self._came.notify_all()

    def get(self, than: int, timeout_s: float = 0.0) -> tuple[int, Weights] | None:
        """Waits for a version above ``than`` and returns it with its weights; None after ``timeout_s``."""
        with self._came:
            self._came.wait_for(lambda: self._held is not None and self._held[0] > than, timeout_s)
            return self._held if self._held is not None and self._held[0] > than else None


class Buffer(Protocol):
    """The part of a replay buffer that a worker uses."""

    def has_room(self, timeout_s: float) -> bool:
        """Whether a fragment can be stored without dropping one; ``timeout_s`` bounds the wait for the answer."""

    def offer(self, *replays: Fragment | Columns, timeout_s: float) -> list[Fragment | Columns]:
        """Stores as many as fit; returns the rest."""

    def push(self, *replays: Fragment | Columns) -> object:
        """Stores all; drops the oldest if the buffer is full."""


class Exchange(Protocol):
    """A worker's connection to the moments that all workers share."""

    def catch_up(self) -> None:
        """Gets the shared moments."""

    def turn(self) -> None:
        """Sends the worker's new moments and gets the shared ones."""


class Worker:
    """Collects and pushes one fragment per `turn`.

    Args:
        spec: the rollout.
        collector: the worker's environments and policy.
        newest: weights to act with.
        buffer: gets the fragments.
        sink: counts episodes, waits and drops.
        moments: moments shared with other workers; None: the collector has its own, or none.
        stopping: once set, waits end early.
    """

    def __init__(
        self,
        spec: RolloutSpec,
        collector: Collector,
        *,
        newest: Newest,
        buffer: Buffer,
        sink: Recorder,
        moments: Exchange | None,
        stopping: threading.Event,
    ) -> None:
        self._spec, self._collector = spec, collector
        self._newest, self._buffer, self._sink, self._moments = newest, buffer, sink, moments
        self._stopping = stopping
        self._version = 0
        self._made = 0  # fragments collected with this version, without refused ones
        self._left: list[Fragment | Columns] = []  # collected, waiting for room
        self._waiting_since = time.monotonic()

    def turn(self, until: float, workers: int) -> WorkerProgress:
        """Collects one fragment, or waits until ``until`` at the latest.

        Args:
            until: time on the monotonic clock; a started fragment is finished even if that takes longer.
            workers: current number of workers; blocking ones share the fragments of an update.

        Raises:
            BrayxError: an environment or the model failed.
        """
        began = time.monotonic()
        config = self._spec.config
        overdue = began - self._waiting_since > config.wait_s
        if self._left:
            return self._hand_over(began, until, overdue)
        enough = config.mode == "blocking" and self._made >= rounds(self._spec, workers)
        newer = self._newest.get(self._version)
        if newer is None and (self._version == 0 or (enough and not overdue)):
            newer = self._newest.get(self._version, max(0.0, min(until - began, _LOOK_S)))
            if newer is None:
                return WorkerProgress(waited_s=time.monotonic() - began)
        if newer is not None:
            if self._version == 0 and self._moments is not None:
                self._moments.catch_up()  # a learner restores its checkpoint's moments before its first publish
            self._version = newer[0]
            self._collector.load(newer[1], self._version)
            self._made = 0
        elif enough:
            self._made = 0
        if config.mode == "non_blocking" and not overdue and not self._buffer.has_room(_ANSWER_S):
            self._stopping.wait(min(_LOOK_S, max(0.0, until - time.monotonic())))
            return WorkerProgress(waited_s=time.monotonic() - began)
        waited_s = time.monotonic() - self._waiting_since
        columns = self._collector.collect()
        self._made += 1
        self._waiting_since = time.monotonic()
        self._push(columns, overdue, waited_s, until)
        return WorkerProgress(1, len(columns), int(overdue), 0.0, self._version)

    def finish(self) -> None:
        """Offers the remaining fragments once, and counts those without room as dropped. Does not close the
        collector."""
        self._offer(0.0)
        if self._left:
            self._sink.add("replay_dropped", sum(map(len, self._left)), label="closed")
            self._left = []
        if self._moments is not None:
            self._moments.turn()

    def _hand_over(self, began: float, until: float, overdue: bool) -> WorkerProgress:
        """A turn that waits for room for a collected fragment; with ``overdue`` it drops one instead."""
        if overdue:
            self._buffer.push(*self._left)
            self._left, self._waiting_since = [], began
            self._sink.add("rollout_waits_overdue", 1)
        else:
            self._offer(max(0.0, min(_OFFER_S, until - began)))
        return WorkerProgress(overdue=int(overdue), waited_s=time.monotonic() - began, version=self._version)

    def _offer(self, timeout_s: float) -> None:
        """Offers the waiting fragments to the buffer, and waits up to ``timeout_s`` for room."""
        left, self._left = self._left, []
        if not left:
            return
        try:
            self._left = self._buffer.offer(*left, timeout_s=timeout_s)
        except BadFragment:  # the buffer counts the transitions and keeps the message
            self._made -= 1  # collect another one: all workers wait for an update that needs it
        except ReplayError as error:  # counted too; the worker outlives a lost buffer, which the job reports
            if not error.details.get("ended"):  # a stream ends as soon as the training does
                log.warning("%s", error.message)

    def _push(self, columns: Columns, overdue: bool, waited_s: float, until: float) -> None:
        is_fifo = self._spec.buffer_config.sampler == "fifo"
        arrays, _, _ = without_unfit(dict(columns.arrays), self._sink, keep_shape=is_fifo)
        if arrays is None:
            self._made -= 1  # collect another one: all workers wait for an update that needs it
        elif overdue:  # the learner makes no room: keep the newest fragments for when it continues
            self._buffer.push(Columns(arrays))
        else:
            self._left = [Columns(arrays)]
            self._offer(max(0.0, min(_OFFER_S, until - time.monotonic())))
        if self._moments is not None:
            self._moments.turn()
        record_episodes(self._sink, self._collector.episodes())
        self._sink.add("rollout_wait_seconds", waited_s)
        self._sink.add("acting_version", self._version, label=self._spec.model_name)
        if overdue:
            self._sink.add("rollout_waits_overdue", 1)


class Failures:
    """Counts the environment errors of one worker and its successors within `FAILURE_WINDOW_S`."""

    def __init__(self) -> None:
        self.at: list[float] = []
        """Times of the errors that count."""

    def add(self, now: float) -> int:
        """Adds an error at ``now``, in seconds; returns the number of recent errors."""
        self.at = [failed_at for failed_at in self.at if now - failed_at < FAILURE_WINDOW_S] + [now]
        return len(self.at)
