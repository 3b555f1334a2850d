"""The interface of algorithms to the trainer, and the ranks that learn together. Torch only.

Knows nothing of any loss, nor of how ranks are started.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from brayx.algorithms.forward import LearnerForward
from brayx.algorithms.optimise import Optimise, OptimiseConfig


class Across(Protocol):
    """The ranks that train one model together; `ALONE` for a single rank.

    Each rank weights its loss by its share of all ranks' steps, times ``size``. `DistributedDataParallel` then averages
    the gradients to that of a single rank with all steps.
    """

    size: int

    def sum(self, x: Tensor) -> Tensor:
        """The sum of ``x`` over all ranks, without gradient. All ranks must make the same calls in the same order."""
        ...


class _Alone:
    size = 1

    def sum(self, x: Tensor) -> Tensor:
        return x.detach()


ALONE: Across = _Alone()
"""A single rank."""


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
            (`brayx.nets.distributions`), and the other outputs of the algorithm (`AlgorithmConfig.outputs`).
        optimizer: over the module's parameters; schedules start from its learning rates at construction.
        config: options.
        across: the ranks that learn together.

    Attributes:
        forward: calls the module on learner data, recurrent or not.
        optimise: takes gradient steps.
        priorities: ``[B]`` priorities of the last batch's columns, if it had an ``index``; otherwise None.
        advantages: advantages of the last update, or of a part of it, with weights that are 0 where they do not count,
            ``[...]`` each; None: the algorithm has none.
        learned: whether the last batch led to an update. False: it was only stored for later updates.
        counts: whether the last batch's transitions count as training. False: the update used stored ones instead.
    """

    priorities: Tensor | None = None
    advantages: tuple[Tensor, Tensor] | None = None
    learned: bool = True
    counts: bool = True

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, config: OptimiseConfig, across: Across = ALONE
    ) -> None:
        self.module = module
        self.config: Any = config
        self.across = across
        self.forward = LearnerForward(module)
        self.optimise = Optimise(optimizer, config, module)

    def update(self, batch: Mapping[str, Any], progress: float) -> dict[str, float]:
        """Learns from one batch and returns its metrics, ``loss`` among them.

        Args:
            batch: tensors ``[B, T + 1, ...]`` as `brayx.replay.packing` lays them out, with the observation as a
                nest of tensors under ``obs`` (a tuple is several arguments of the module) and the stored state of a
                recurrent module as a nest under ``state``. Not modified.
            progress: progress of the training, 0 to 1; the learning rate falls with it.

        Raises:
            ValueError: the batch or the outputs do not fit the algorithm; names the field.
        """
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """State to save besides the module's and the optimiser's."""
        return {"optimise": self.optimise.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a `state_dict`."""
        self.optimise.load_state_dict(state["optimise"])


def critic_of(module: nn.Module, shown: str) -> nn.Module:
    """The submodule ``critic`` of a module that may be wrapped for ranks or hooks.

    Args:
        module: the module; wrappers have the inner module as ``module``.
        shown: the critic's arguments, for the message.

    Raises:
        ValueError: the module has no critic.
    """
    inner: object = module
    while isinstance(inner, nn.Module):
        critic = inner._modules.get("critic")
        if critic is not None:
            return critic
        inner = inner._modules.get("module")
    raise ValueError(f"module: expected one with a submodule 'critic', {shown}; got {type(module).__name__}")
