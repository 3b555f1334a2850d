"""How many of the machine's cores a learner computes on."""

from __future__ import annotations

import os
import time
import weakref
from typing import Any

import numpy as np
import optree
import torch

from brayx import systems

_PIXELS = 1024
"""Numbers of an observation with three axes that count as a picture: 32 x 32."""
_learners: weakref.WeakSet[Cores] = weakref.WeakSet()


class Cores:
    """Sets the number of torch's threads of a learner, in its own thread.

    By default it is 1, since threads wait for each other longer than a small layer computes. Learners of pictures share
    all cores; but while games play, each takes one fewer: an operation waits for its slowest thread, and so for one
    that shares its core with a game. Games at doors wait for the learner once they have played a batch, so they play
    for the first part of an update, about as long as for the last batch.

    Args:
        forward_args: example arguments of the module.
        threads: number of threads at all times; None: the default.

    Attributes:
        changes: the number changes, so `choose` must be called before each forward.
    """

    def __init__(self, forward_args: tuple[Any, ...], threads: int | None) -> None:
        self.changes = threads is None and _has_picture(forward_args)
        self._most = threads or 1
        self._played_until = self._began = 0.0
        if self.changes:
            chosen = os.environ.get("OMP_NUM_THREADS", "")
            self._most = int(chosen) if chosen.isdecimal() else systems.cores()
            _learners.add(self)
        self.choose()

    def begin(self, ready_at_s: float | None) -> None:
        """An update begins with a batch that became ready then, as a Unix time; None: nothing was played meanwhile."""
        now = time.time()
        played_s = 0.0 if ready_at_s is None else max(ready_at_s - self._began, 0.0)
        self._began, self._played_until = now, now + played_s

    def choose(self) -> None:
        """Sets the number for now."""
        threads = self._most
        if self.changes:
            threads = threads // max(1, len(_learners)) - (time.time() < self._played_until)
        torch.set_num_threads(max(1, threads))

    def close(self) -> None:
        """Leaves its cores to other learners."""
        _learners.discard(self)


def _has_picture(forward_args: tuple[Any, ...]) -> bool:
    arrays = map(np.asarray, optree.tree_leaves(forward_args))  # type: ignore[arg-type]
    return any(array.ndim > 3 and array[0].size >= _PIXELS for array in arrays)
