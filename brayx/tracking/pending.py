"""Queues checkpoints until MLflow has saved them, so that training never waits for MLflow.

Keeps the newest checkpoints and the best. Knows nothing of trials.
"""

from __future__ import annotations

import contextlib
import logging
import math
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Protocol

from brayx.errors import TrackingError, first_line
from brayx.metrics import BEST_METRIC
from brayx.temporary import temporary_folder

log = logging.getLogger(__name__)

_CLOSE_S, _CLOSE_AFTER_ERROR_S = 120.0, 10.0


class Pending(NamedTuple):
    """A checkpoint to save."""

    folder: Path
    step: int
    metrics: dict[str, float]


class PendingCheckpoints:
    """Copies of checkpoints to save: the ``kept`` newest and the best, as the trial keeps them. Thread-safe.

    Attributes:
        folder: the folder of the copies.
        error: why the last checkpoint could not be saved; None: it was, or none was tried.
    """

    def __init__(self, kept: int) -> None:
        self._kept = max(kept, 1)
        folders = contextlib.ExitStack()
        self.folder = folders.enter_context(temporary_folder("checkpoints"))
        self._remove = weakref.finalize(self, folders.close)  # also at the end of Python
        self._waiting: list[Pending] = []
        self._ended = False
        self.error: TrackingError | None = None
        self._lock = threading.Lock()

    def add(self, folder: Path, step: int, metrics: Mapping[str, float]) -> None:
        """Copies a checkpoint, and drops checkpoints that are neither among the newest nor the best.

        Raises:
            TrackingError: after `end`.
        """
        copy = Path(tempfile.mkdtemp(prefix=f"{step:012d}-", dir=self.folder))  # a step may be saved twice
        try:
            shutil.copytree(folder, copy, dirs_exist_ok=True)
            with self._lock:
                if self._ended:
                    raise TrackingError("a checkpoint came too late: its trial ends")
                self._put([*self._waiting, Pending(copy, step, dict(metrics))])
        except BaseException:
            shutil.rmtree(copy, ignore_errors=True)  # it would only make a full disk fuller
            raise

    def save(
        self,
        save: Callable[[Pending], None],
        on_lost: Callable[[TrackingError], None],
        *,
        may_retry: Callable[[], bool] = lambda: False,
    ) -> None:
        """Saves all checkpoints, the oldest first. Call it from one thread only.

        Args:
            save: saves one checkpoint; raises an error if it cannot.
            on_lost: called with the error of each lost checkpoint.
            may_retry: called after an error; True keeps the checkpoint for the next call.
        """
        while True:
            with self._lock:
                if not self._waiting:
                    return
                pending = self._waiting.pop(0)
            try:
                save(pending)
                self.error = None
            except Exception as caught:  # any error, because training goes on without the thread
                message = f"cannot save a checkpoint: {first_line(caught)}"
                self.error = caught if isinstance(caught, TrackingError) else TrackingError(message)
                if may_retry():
                    with self._lock:
                        self._put([pending, *self._waiting])
                    return
                on_lost(self.error)
            shutil.rmtree(pending.folder, ignore_errors=True)

    def end(self) -> None:
        """Takes no more checkpoints, so that the next `save` is the last."""
        with self._lock:
            self._ended = True

    def check(self) -> None:
        """Raises `error`. A checkpoint that still waits is no error: the next `save` writes it."""
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """Removes the copies."""
        self._remove()

    def _put(self, waiting: list[Pending]) -> None:
        best = max(waiting, key=lambda pending: pending.metrics.get(BEST_METRIC, -math.inf))
        self._waiting = [pending for pending in waiting if pending is best or pending in waiting[-self._kept :]]
        for pending in waiting:
            if pending not in self._waiting:
                shutil.rmtree(pending.folder, ignore_errors=True)


class Keeper(Protocol):
    """Keeps checkpoint folders."""

    def save(self, folder: Path, step: int, metrics: Mapping[str, float]) -> None:
        """Copies ``folder``; drops checkpoints that are neither new nor the best."""
        ...

    def latest(self) -> Path | None:
        """Folder of the newest checkpoint."""
        ...


class BackgroundKeeper:
    """A keeper that saves in a thread, so that its `save` never waits. A context manager, whose exit waits for it.

    Args:
        keeper: saves checkpoints; `save` raises an error if it cannot.
        kept: maximum number of newest checkpoints to queue; the same as ``keeper`` keeps.
        failed: called by the thread for each lost checkpoint.
    """

    def __init__(self, keeper: Keeper, kept: int, failed: Callable[[], None]) -> None:
        self._keeper, self._failed = keeper, failed
        self._pending = PendingCheckpoints(kept)
        self._wake, self._ended = threading.Event(), False
        self._thread: threading.Thread | None = None

    def save(self, folder: Path, step: int, metrics: Mapping[str, float]) -> None:
        """As `Keeper.save`, but later. A failure is counted and logged; `close` raises the error of the last one."""
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
        """Waits until all checkpoints are saved.

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
        self._pending.check()

    def _work(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            ended = self._ended
            self._pending.save(lambda pending: self._keeper.save(*pending), self._on_lost)
            if ended:
                return

    def _on_lost(self, error: TrackingError) -> None:
        self._failed()
        log.warning("a checkpoint is not kept, training continues: %s", error)
