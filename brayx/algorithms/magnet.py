"""The reference policy that PPO's magnet pulls towards: a frozen copy of the learning module. Torch only.

Magnetic mirror descent (Sokota et al. 2023, "A unified approach to reinforcement learning, quantal response equilibria,
and two-player zero-sum games", https://arxiv.org/abs/2206.05825) adds KL(policy || magnet) to the loss. Self-play can
then converge in two-player zero-sum games where the policy gradient alone cycles: with a fixed magnet to a regularised
equilibrium, the further from a Nash equilibrium the larger the term's weight; with a magnet that slowly follows the
policy to a Nash equilibrium. The paper averages policies; this copy averages weights.

Rudolph et al. 2025, "Reevaluating policy gradient methods for imperfect-information games",
https://arxiv.org/abs/2502.08938, find that algorithms made for such games do not outperform policy gradients.

Knows nothing of losses and batches.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from brayx.algorithms.forward import LearnerForward


class Magnet:
    """A copy of ``module`` as it is now, in evaluation mode. It is the same on all ranks, as their weights are.

    Args:
        module: the learning module, without wrappers (`bare`).
        decay: share of itself that the copy keeps at each `follow`; None: it never changes.

    Attributes:
        forward: calls the copy on learner data.
    """

    def __init__(self, module: nn.Module, decay: float | None = None) -> None:
        self._learning = module
        self._copy = copy.deepcopy(module).requires_grad_(False).eval()
        self._decay = decay
        self.forward = LearnerForward(self._copy)

    @torch.no_grad()
    def follow(self) -> None:
        """Moves an averaging copy towards the learning module; buffers, such as a normalisation's moments, are
        copied."""
        if self._decay is None:
            return
        torch._foreach_lerp_(list(self._copy.parameters()), list(self._learning.parameters()), 1 - self._decay)
        for old, new in zip(self._copy.buffers(), self._learning.buffers(), strict=True):
            old.copy_(new)

    def state_dict(self) -> dict[str, Any]:
        """The copy's weights."""
        return self._copy.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a `state_dict`."""
        self._copy.load_state_dict(state)


def bare(module: nn.Module) -> nn.Module:
    """The module inside the wrappers for ranks and for the user's loss term."""
    while isinstance(module, DistributedDataParallel) or hasattr(module, "extra_loss"):
        inner = module._modules.get("module")
        if inner is None:
            break
        module = inner
    return module
