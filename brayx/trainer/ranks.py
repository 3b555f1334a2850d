"""The learners that share one model: their interface, a single learner, and a group of processes.

Knows nothing of how processes are started; `brayx.cluster.learner` and tests do that.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from brayx.algorithms.base import Across, Group
from brayx.errors import ConfigError


class Ranks(Across, Protocol):
    """The learners that share one model; `Alone` when there is one."""

    rank: int
    device: torch.device

    def wrap(self, module: nn.Module) -> nn.Module:
        """Wraps a module, already on its device, so that its gradients are means over the ranks."""
        ...


class Alone:
    """One learner.

    Args:
        use_gpu: learn on a GPU of this process instead of the CPU.

    Raises:
        ConfigError: there is no GPU.
    """

    rank = 0
    size = 1
    device = torch.device("cpu")

    def __init__(self, use_gpu: bool = False) -> None:
        if use_gpu:
            if not torch.cuda.is_available():
                raise ConfigError("trainer.use_gpu is true, but torch finds no GPU here", key="use_gpu")
            self.device = torch.device("cuda")

    def wrap(self, module: nn.Module) -> nn.Module:
        """The module itself."""
        return module

    def sum(self, x: Tensor) -> Tensor:
        """``x`` itself, without gradient."""
        return x.detach()


class Processes(Group):
    """The ranks of the default process group of `torch.distributed`, which must be initialised; gradients by DDP.

    Args:
        device: device of this rank.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__()
        self.rank = torch.distributed.get_rank()
        self.device = device or torch.device("cpu")

    def wrap(self, module: nn.Module) -> nn.Module:
        """The module under DDP."""
        return DistributedDataParallel(module, device_ids=[self.device] if self.device.type == "cuda" else None)


def agree(ranks: Ranks, steps: int, stop: bool) -> tuple[int, bool]:
    """Sum of ``steps``, and whether any rank wants to stop. Every rank calls it equally often."""
    if ranks.size == 1:
        return steps, stop
    both = ranks.sum(torch.tensor([steps, int(stop)], dtype=torch.int64, device=ranks.device))
    return int(both[0]), bool(both[1])
