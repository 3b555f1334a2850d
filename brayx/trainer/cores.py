"""How many of the machine's cores a learner's module computes on."""

from __future__ import annotations

import os
import time

import torch
from torch import nn

from brayx import systems


class Cores:
    """Sets the number of torch's threads of a learner.

    By default smaller layers get one, since threads wait for each other longer than such a layer computes. Convolutions
    get all cores; but while games play, one fewer, because each operation waits for its slowest thread, and so for one
    that shares its core with a game. Games wait for the learner once they have played a batch, so they play for the
    first part of an update, about as long as for the last batch.

    Args:
        module: the learner's.
        threads: number of threads at all times; None: the default.
    """

    def __init__(self, module: nn.Module, threads: int | None) -> None:
        self._most = threads or _most(module)
        self._played_until = self._began = 0.0
        torch.set_num_threads(self._most)
        if threads is None and self._most > 1:
            module.register_forward_pre_hook(self._choose)

    def begin(self, ready_at_s: float | None) -> None:
        """An update begins with a batch that became ready then, as a Unix time; None: it is not known when."""
        now = time.time()
        played_s = 0.0 if ready_at_s is None else max(ready_at_s - self._began, 0.0)
        self._began, self._played_until = now, now + played_s

    def _choose(self, *_: object) -> None:
        if not torch.compiler.is_compiling():  # an export
            torch.set_num_threads(self._most - (time.time() < self._played_until))


def _most(module: nn.Module) -> int:
    if not any(isinstance(part, nn.Conv2d) for part in module.modules()):
        return 1
    chosen = os.environ.get("OMP_NUM_THREADS", "")
    return max(1, int(chosen)) if chosen.isdecimal() else systems.cores()
