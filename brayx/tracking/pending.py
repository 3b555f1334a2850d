"""Checkpoints that wait to be saved, so that training never waits for MLflow: the newest, and the best.

Knows nothing of trials.
"""

from __future__ import annotations

import logging
import math
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Protocol

from brayx.errors import TrackingError
from brayx.metrics import BEST_METRIC

log = logging.getLogger(__name__)

_CLOSE_S, _CLOSE_AFTER_ERROR_S = 120.0, 10.0


class Pending(NamedTuple):
    """A checkpoint that waits."""

    folder: Path
    step: int
    metrics: dict[str, float]


class PendingCheckpoints:
    """Copies of checkpoints: at most ``kept`` of the newest, and the best, as the trial itself keeps. Thread safe.

    Attributes:
        error: why the last one that was tried is lost; None: it is saved.
    """

    def __init__(self, kept: int) -> None:
        self._kept = max(kept, 1)
        self._folder = tempfile.TemporaryDirectory(prefix="brayx-clerk-", ignore_cleanup_errors=True)
        self._waiting: list[Pending] = []
        self.error: TrackingError | None = None
        self._lock = threading.Lock()

    @property
    def folder(self) -> Path:
        """The folder of the copies."""
        return Path(self._folder.name)

    def add(self, folder: Path, step: int, metrics: Mapping[str, float]) -> None:
        """Copies a checkpoint, and drops those that are neither new nor the best."""
        copy = Path(tempfile.mkdtemp(prefix=f"{step:012d}-", dir=self.folder))  # a step may be saved twice
        try:
            shutil.copytree(folder, copy, dirs_exist_ok=True)
        except BaseException:
            shutil.rmtree(copy, ignore_errors=True)  # it would only make a full disk fuller
            raise
        with self._lock:
            self._put([*self._waiting, Pending(copy, step, dict(metrics))])

    def save(
        self,
        save: Callable[[Pending], None],
        lost: Callable[[TrackingError], None],
        *,
        again: Callable[[], bool] = lambda: False,
    ) -> None:
        """Saves what waits, the oldest first. Only one thread may call it.

        Args:
            save: saves one; raises `TrackingError` if it cannot.
            lost: called with the error of each checkpoint that is lost.
            again: after an error: whether to keep that checkpoint for the next call instead.
        """
        while True:
            with self._lock:
                if not self._waiting:
                    return
                pending = self._waiting.pop(0)
            try:
                save(pending)
                self.error = None
            except TrackingError as error:
                if again():
                    with self._lock:
                        self._put([pending, *self._waiting])
                    return
                self.error = error
                lost(error)
            shutil.rmtree(pending.folder, ignore_errors=True)

    def close(self) -> None:
        """Removes the copies."""
        self._folder.cleanup()

    def _put(self, waiting: list[Pending]) -> None:
        best = max(waiting, key=lambda each: each.metrics.get(BEST_METRIC, -math.inf))
        self._waiting = [each for each in waiting if each is best or each in waiting[-self._kept :]]
        for each in waiting:
            if each not in self._waiting:
                shutil.rmtree(each.folder, ignore_errors=True)


class Keeper(Protocol):
    """As `brayx.trainer.saving.Keeper`."""

    def save(self, folder: Path, step: int, metrics: Mapping[str, float]) -> None: ...

    def latest(self) -> Path | None: ...


class BackgroundKeeper:
    """A keeper that saves in a thread, so that its `save` never waits. A context manager, whose end waits for the rest.

    Args:
        keeper: saves checkpoints; `save` raises `TrackingError` if it cannot.
        kept: the number of newest checkpoints that wait, as ``keeper`` keeps.
        failed: called by the thread for each checkpoint that is lost.
    """

    def __init__(self, keeper: Keeper, kept: int, failed: Callable[[], None]) -> None:
        self._keeper, self._failed = keeper, failed
        self._pending = PendingCheckpoints(kept)
        self._wake, self._ended = threading.Event(), False
        self._thread: threading.Thread | None = None

    def save(self, folder: Path, step: int, metrics: Mapping[str, float]) -> None:
        """As `Keeper.save`, later; a failure is counted and logged, and `close` raises the last one's."""
        self._pending.add(folder, step, metrics)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="brayx-checkpoints", daemon=True)
            self._thread.start()
        self._wake.set()

    def latest(self) -> Path | None:
        """As `Keeper.latest`."""
        return self._keeper.latest()

    def __enter__(self) -> BackgroundKeeper:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close(_CLOSE_S if error is None else _CLOSE_AFTER_ERROR_S)
        except TrackingError:
            if error is None:
                raise

    def close(self, timeout_s: float) -> None:
        """Waits until everything is saved.

        Raises:
            TrackingError: the last checkpoint could not be saved, or not in time.
        """
        self._ended = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise TrackingError(f"the last checkpoint was not saved within {timeout_s:g} s")
        self._pending.close()
        if self._pending.error is not None:
            raise self._pending.error

    def _work(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            ended = self._ended
            self._pending.save(lambda each: self._keeper.save(*each), self._is_lost)
            if ended:
                return

    def _is_lost(self, error: TrackingError) -> None:
        self._failed()
        log.warning("a checkpoint is not kept, training continues: %s", error)
