"""The schedule of checkpoints. If one cannot be saved, the old one stays and training continues.

`checkpoint` has the contents, a `Keeper` the destination.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from brayx.errors import TrackingError
from brayx.metrics import BEST_METRIC, ERROR_OF_BEST, GAMES_OF_BEST, STEPS_OF_CHECKPOINT
from brayx.replay.packing import Batch
from brayx.temporary import temporary_folder
from brayx.tracking.pending import Keeper
from brayx.trainer.checkpoint import Counters

log = logging.getLogger(__name__)

_BETTER_BY = 0.05
"""Share by which an early checkpoint's return must exceed the best one saved so far."""
_BETTER_AFTER_S = 2.0
"""Least time between a checkpoint and an early one, because saving holds up learning."""
_SAMPLES = 256
"""Observations that a checkpoint keeps."""


class PolicyScore(NamedTuple):
    """A policy's mean return over its last games, the number of games, and the mean's standard error, if known."""

    mean: float
    games: int
    error: float | None = None


class Saver:
    """Saves checkpoints at intervals, and better ones early.

    Args:
        keeper: keeps them.
        write: writes one into an empty folder; takes JSON values for its ``meta.json``.
        counters: the training's counters, with the best return.
        interval_s: seconds between two checkpoints.
        every: also save after this many updates; None: only the seconds count.
        about: JSON values for ``meta.json``.
        failed: called for each checkpoint that could not be saved.
        played: returns the env steps that have been played; None: nothing was.
    """

    def __init__(
        self,
        keeper: Keeper,
        write: Callable[[Path, Mapping[str, Any]], None],
        counters: Counters,
        interval_s: float,
        about: Mapping[str, Any],
        failed: Callable[[], None],
        played: Callable[[], float | None],
        every: int | None = None,
    ) -> None:
        self._keeper = keeper
        self._write = write
        self._counters = counters
        self._interval_s = interval_s
        self._about = about
        self._failed = failed
        self._played = played
        self._every = every
        self._failing = False
        self._saved_at = time.monotonic()

    def save(self, score: PolicyScore | None) -> None:
        """Saves a checkpoint now.

        Args:
            score: the policy's score; None: too few games are finished.

        Raises:
            TrackingError, OSError: it cannot be written or kept; earlier ones stay.
        """
        counters, best = self._counters, self._counters.best_return
        if score is not None:
            counters.best_return = max(score.mean, best if best is not None else score.mean)
        metrics = {} if score is None else {BEST_METRIC: score.mean, GAMES_OF_BEST: float(score.games)}
        if score is not None and score.error is not None:
            metrics[ERROR_OF_BEST] = score.error
        if (played := self._played()) is not None:
            metrics[STEPS_OF_CHECKPOINT] = played
        try:
            with temporary_folder("checkpoint") as temporary:
                self._write(temporary, {**self._about, "metrics": metrics})
                self._keeper.save(temporary, counters.env_steps, metrics)
        except BaseException:
            counters.best_return = best
            raise

    def save_in_turn(self, score: PolicyScore | None) -> None:
        """Saves a checkpoint if it is time, or if the return has grown. A failure is counted, and the first of several
        in a row is logged."""
        age_s = time.monotonic() - self._saved_at
        best = self._counters.best_return
        better = score is not None and (best is None or score.mean > best + _BETTER_BY * abs(best))
        turn = self._every is not None and self._counters.updates % self._every == 0
        if age_s < self._interval_s and not turn and not (better and age_s >= _BETTER_AFTER_S):
            return
        try:
            self.save(score)
            self._failing = False
        except (TrackingError, OSError) as error:
            self._failed()
            if not self._failing:
                steps = self._counters.env_steps
                log.warning("no checkpoint at %d steps, training continues: %s", steps, error)
            self._failing = True
        self._saved_at = time.monotonic()


def samples_of(batch: Batch | None) -> dict[str, np.ndarray]:
    """Some observations of a batch by leaf, ``[N, ...]``, evenly spread over its steps."""
    if batch is None:
        return {}
    rows = np.flatnonzero(batch["mask"] > 0)
    rows = rows[np.linspace(0, len(rows) - 1, min(len(rows), _SAMPLES)).astype(int)]
    return {
        key: array.reshape(-1, *array.shape[2:])[rows]
        for key, array in batch.items()
        if key == "obs" or key.startswith("obs/")
    }
