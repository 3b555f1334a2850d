"""What an algorithm is to the trainer, and what the ranks that learn together are to an algorithm. Torch only.

Knows nothing of any algorithm, nor of how ranks are started.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """An algorithm's default source and size of batches; the options of a training override them.

    Attributes:
        unroll_length: transitions in a column.
        batch_steps: transitions in a batch.
        sampler: ``fifo``: each run is learned from once, in order. Otherwise batches are sampled from a table.
        updates_per_step: batches sampled from a table for each transition added to it.
    """

    unroll_length: int
    batch_steps: int
    sampler: Literal["fifo", "uniform", "prioritised"] = "fifo"
    updates_per_step: float = 0.0

    def batch_size(self, unroll_length: int) -> int:
        """Columns in a batch."""
        return max(1, self.batch_steps // unroll_length)

    def samples_per_insert(self, unroll_length: int, batch_size: int) -> float:
        """How often a column of a table is sampled on average."""
        return self.updates_per_step * unroll_length * batch_size


class Algorithm(Protocol):
    """Updates a module from learner batches.

    Attributes:
        priorities: ``[B]`` of the columns of the last batch, when that had an ``index``; None otherwise.
        learned: the last batch led to learning. False: it was only kept for later ones, and nothing has changed.
        counts: its own transitions were learned from, and training is so much longer. False: what was kept before was.
    """

    priorities: Tensor | None
    learned: bool
    counts: bool

    def update(self, batch: Mapping[str, Any], progress: float) -> dict[str, float]:
        """Learns from one batch and gives what it measured.

        Args:
            batch: tensors ``[B, T + 1, ...]`` as `brayx.replay.packing` lays them out, with the observation as a
                nest of tensors under ``obs`` (a tuple is several arguments of the module) and the stored state of a
                recurrent module as a nest under ``state``. Not changed.
            progress: how far training has come, 0 to 1.

        Raises:
            ValueError: the batch or the module's outputs are not what the algorithm takes; says which and how.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """What it has learned beside the module and the optimiser: targets, temperatures, moments."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` gave."""
        ...


class Across(Protocol):
    """The ranks that share one model; `ALONE` when there is one.

    A rank's loss is its share of the sum over all ranks' steps, times ``size``: the gradients that a
    `DistributedDataParallel` module averages are then those of one rank with everybody's steps.
    """

    size: int

    def sum(self, x: Tensor) -> Tensor:
        """``x`` added over the ranks, without gradient. Every rank calls it equally often, in the same order."""
        ...


class _Alone:
    size = 1

    def sum(self, x: Tensor) -> Tensor:
        return x.detach()


ALONE: Across = _Alone()
"""One rank."""


class Group:
    """The ranks of a process group of `torch.distributed`.

    Args:
        group: None: the default one, which must be initialised.
    """

    def __init__(self, group: Any = None) -> None:
        self._group = group
        self.size = torch.distributed.get_world_size(group)

    def sum(self, x: Tensor) -> Tensor:
        """A fresh tensor, the same on every rank."""
        total = x.detach().clone()
        torch.distributed.all_reduce(total, group=self._group)
        return total
