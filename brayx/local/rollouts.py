"""A rollout on the local host: one thread steps the environments and feeds a replay buffer of this process.

Several workers take turns in it. Environments that fail are replaced, as often as the rollout allows. Knows nothing of
learning.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Mapping

import numpy as np

from brayx.engines.scaling import Scaling
from brayx.errors import BrayxError, ConfigError, DeadlineExceeded, ModelError
from brayx.local.buffer import LocalBuffer
from brayx.metrics import Recorder
from brayx.rollout.collector import Collector
from brayx.rollout.moments import AllMoments, MomentsStore, from_arrays, obs_scalings, to_arrays
from brayx.rollout.spec import RolloutSpec, make_collector, naming
from brayx.rollout.worker import START_S, Failures, Newest, Worker, WorkerProgress
from brayx.threads import NativeThread

log = logging.getLogger(__name__)

_TURN_S = 1.0
"""Longest wait of a worker's turn."""
_FINAL = (ConfigError, ModelError)
"""Errors that restarting the environments would not fix."""


class LocalMoments:
    """Moments that all rollouts of a process normalise by. For a learner: `brayx.trainer.checkpoint.Normaliser`."""

    def __init__(self) -> None:
        self._store = MomentsStore()
        self._lock = threading.Lock()

    def scalings(self) -> dict[str, Scaling]:
        """As `Collector.scalings`."""
        with self._lock:
            return obs_scalings(self._store.get())

    def state_dict(self) -> dict[str, np.ndarray]:
        """As `Collector.state_dict`."""
        with self._lock:
            return to_arrays(self._store.get())

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Restores a `state_dict`."""
        with self._lock:
            self._store.restore(from_arrays(state))

    def exchange(self, collector: Collector, fresh: AllMoments) -> None:
        """Adds ``fresh``, and gives ``collector`` the moments of all."""
        with self._lock:
            merged = self._store.exchange(fresh, known=0)
            assert merged is not None, "nothing is less than 0"
            collector.adopt_moments(merged)


class _Exchange:
    """A worker's end of `LocalMoments`."""

    def __init__(self, moments: LocalMoments, collector: Collector) -> None:
        self._moments, self._collector = moments, collector

    def catch_up(self) -> None:
        self._moments.exchange(self._collector, {})

    def turn(self) -> None:
        self._moments.exchange(self._collector, self._collector.drain_moments())


class LocalRollout:
    """Runs a rollout in a thread; a context manager.

    Args:
        spec: the rollout; its workers take turns in the thread.
        newest: weights to act with.
        buffer: gets the fragments.
        numbers: counts episodes, waits, failures and lost steps.
        moments: moments shared by the rollouts of the process; None: this one normalises nothing.

    Attributes:
        collected: total progress of its workers.
        failures: number of failures of the environments.
        messages: newest messages about failures, for display.
    """

    def __init__(
        self,
        spec: RolloutSpec,
        *,
        newest: Newest,
        buffer: LocalBuffer,
        numbers: Recorder,
        moments: LocalMoments | None = None,
    ) -> None:
        self._spec, self._newest, self._buffer, self._numbers = spec, newest, buffer, numbers
        self._moments = moments
        self._who = f"rollout {spec.name!r} ({spec.env_name})"
        self._num_workers = spec.config.num_workers
        self._stopping = threading.Event()
        self._error: BrayxError | None = None
        self._turn_began = 0.0
        self.collected = WorkerProgress()
        self.failures = 0
        self.messages: deque[str] = deque(maxlen=20)
        self._thread = NativeThread(self._run, f"brayx-rollout-{spec.name}", self._stopping.set)

    def __enter__(self) -> LocalRollout:
        self._turn_began = time.monotonic()
        self._thread.start()
        self._numbers.add("rollout_workers", self._num_workers, label=self._spec.name)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def running(self) -> bool:
        """Whether it runs and has collected something."""
        return self._thread.is_alive() and self.collected.fragments > 0

    @property
    def error(self) -> BrayxError | None:
        """The error that ended or blocks it: its environments failed too often, or hang."""
        late_s = _TURN_S + self._spec.config.fragment_timeout_s + (0.0 if self.collected.fragments else START_S)
        if self._error is None and self._thread.is_alive() and time.monotonic() - self._turn_began > late_s:
            return DeadlineExceeded(
                f"{self._who} hangs: a fragment has taken longer than fragment_timeout_s, "
                f"{self._spec.config.fragment_timeout_s:g} s"
            )
        return self._error

    def stop(self, timeout_s: float = 3.0) -> None:
        """Ends it after its current fragment; one that takes longer than ``timeout_s`` is counted as lost."""
        self._stopping.set()
        if not self._thread.is_alive():
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._numbers.add("rollout_steps_lost", self._spec.fragment_steps, label="stopped")

    def _run(self) -> None:
        config, failures = self._spec.config, Failures()
        while not self._stopping.is_set():
            try:
                with naming(self._who):
                    self._work()
            except BrayxError as error:
                if self._stopping.is_set():  # Ctrl-C ends the processes of environments too
                    return
                log.warning("%s", error.message)
                self.failures += 1
                self.messages.append(error.message)
                self._numbers.add("rollout_workers_lost", 1, label="failed")
                self._numbers.add("rollout_steps_lost", self._spec.fragment_steps, label="failed")
                if failures.add(time.monotonic()) > config.max_failures or isinstance(error, _FINAL):
                    self._error = error
                    return

    def _work(self) -> None:
        """Collects until it has to stop.

        Raises:
            BrayxError: the environments or the model failed.
        """
        with contextlib.ExitStack() as stack:
            workers = [self._worker(index, stack) for index in range(self._num_workers)]
            for worker in itertools.cycle(workers):
                self._turn_began = time.monotonic()
                self.collected += worker.turn(self._turn_began + _TURN_S, self._num_workers)
                if self._stopping.is_set():
                    break
            for worker in workers:
                worker.finish()

    def _worker(self, index: int, stack: contextlib.ExitStack) -> Worker:
        """Makes a worker; ``stack`` closes its environments."""
        collector = make_collector(self._spec, index=index, past=self.failures)
        stack.callback(collector.close)
        return Worker(
            self._spec,
            collector,
            newest=self._newest,
            buffer=self._buffer,
            sink=self._numbers,
            moments=None if self._moments is None else _Exchange(self._moments, collector),
            stopping=self._stopping,
        )
