"""What every algorithm is to the trainer, and the ranks that learn together. Torch only.

Knows nothing of any loss, nor of how ranks are started.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from brayx.algorithms.forward import Forward
from brayx.algorithms.optimise import Optimise, OptimiseConfig


class Across(Protocol):
    """The ranks that share one model; `ALONE` when there is one.

    A rank's loss is its share of the sum over all ranks' steps, times ``size``: the gradients that a
    `DistributedDataParallel` module averages are then those of one rank with the steps of all.
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


class Algorithm:
    """Updates a module from learner batches. Derive from it and write `update`.

    Args:
        module: called with the observations, ``[N, ...]`` (a tuple is several arguments); returns a policy's outputs
            (`brayx.nets.distributions`), and the algorithm's other ones (`AlgorithmConfig.outputs`).
        optimizer: over the module's parameters; its learning rates at construction are the ones annealed from.
        config: options.
        across: the ranks that learn together.

    Attributes:
        forward: calls the module on learner data, with or without a memory.
        optimise: takes gradient steps.
        priorities: ``[B]`` of the columns of the last batch, when that had an ``index``; None otherwise.
        learned: the last batch led to learning. False: it was only kept for later ones, and nothing has changed.
        counts: the last batch's transitions count as training. False: others were learned from, kept before.
    """

    priorities: Tensor | None = None
    learned: bool = True
    counts: bool = True

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, config: OptimiseConfig, across: Across = ALONE
    ) -> None:
        self.module = module
        self.config: Any = config
        self.across = across
        self.forward = Forward(module)
        self.optimise = Optimise(optimizer, config, module)

    def update(self, batch: Mapping[str, Any], progress: float) -> dict[str, float]:
        """Learns from one batch and returns its metrics, ``loss`` among them.

        Args:
            batch: tensors ``[B, T + 1, ...]`` as `brayx.replay.packing` lays them out, with the observation as a
                nest of tensors under ``obs`` (a tuple is several arguments of the module) and the stored state of a
                recurrent module as a nest under ``state``. Not changed.
            progress: how far training has come, 0 to 1; the learning rate falls with it.

        Raises:
            ValueError: the batch or the outputs do not fit the algorithm; names the field.
        """
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """What it has learned besides the module and the optimiser."""
        return {"optimise": self.optimise.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a `state_dict`."""
        self.optimise.load_state_dict(state["optimise"])
