"""Behaviour cloning: maximises the likelihood of recorded actions. Torch only.

Pomerleau 1991, "Efficient training of artificial neural networks for autonomous navigation". The loss is the
cross-entropy for discrete actions, summed over heads, and the Gaussian negative log-likelihood for continuous ones.
Each batch gives one gradient step. Columns may have a ``weight``.

A share of the steps can be held out for validation. A hash of observation and action selects them, so the same steps
are held out in every batch and packing. Neighbouring steps of an episode are similar; to hold out whole episodes use
another buffer (the trainer's ``eval_buffers``).

Input: the learner batches of `brayx.replay.packing`, as tensors. Knows nothing of where they come from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import optree
import torch
from pydantic import Field
from torch import Tensor, nn

from brayx.algorithms import columns
from brayx.algorithms.base import Across, Algorithm
from brayx.algorithms.config import Sampling
from brayx.algorithms.optimise import OptimiseConfig
from brayx.nets.distributions import is_discrete, log_prob_entropy, mode
from brayx.types import DEMONSTRATION

METRICS = ("loss", "accuracy", "entropy", "grad_norm")
"""Metrics of `BC.update`, besides ``learning_rate``. For continuous and hybrid actions ``error``, see `mistaken`,
replaces ``accuracy``. Held-out steps add ``holdout_loss`` and ``holdout_accuracy`` or ``holdout_error``."""

_ODD, _BITS = 0x9E3779B97F4A7C15 - 2**64, 20


class BCConfig(OptimiseConfig):
    """Options of behaviour cloning."""

    name: Literal["bc"] = "bc"
    holdout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the steps that are measured and not learned from."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 10.0
    """Gradients are scaled down to this norm; null: never."""

    outputs: ClassVar[tuple[str, ...]] = ()
    imitates: ClassVar[Literal["everything"]] = "everything"
    data: ClassVar[Mapping[str, str]] = {
        DEMONSTRATION: "imitates recorded steps, but there are none: expected a job's `source`, or `demonstrations`"
    }
    turns: ClassVar[bool] = True
    weighs_columns: ClassVar[bool] = True

    @property
    def sampling(self) -> Sampling:
        """About a thousand recorded transitions for each gradient step."""
        return Sampling(unroll_length=32, batch_steps=1024)

    def build(self, module: nn.Module, optimizer: torch.optim.Optimizer, across: Across) -> Algorithm:
        """As `AlgorithmConfig.build`."""
        return BC(module, optimizer, self, across)


def clone_loss(log_prob: Tensor, weight: Tensor) -> Tensor:
    """Weighted sum of negative log-likelihoods, both ``[...]``; a step of weight 0 is ignored, whatever its action."""
    return -(weight * torch.where(weight > 0, log_prob, torch.zeros_like(log_prob))).sum()


@torch.no_grad()
def mistaken(outputs: Mapping[str, Any], action: Tensor) -> Tensor:
    """Error ``[...]`` of the policy's most likely action against ``action``: 0 or 1 for discrete actions, the mean
    absolute difference for continuous ones. For a hybrid action the mean over both, where a wrong category is 1."""
    chosen = mode(outputs)
    if is_discrete(outputs):
        wrong = chosen != action
        return (wrong.any(-1) if isinstance(outputs["logits"], tuple | list) else wrong).float()
    difference = (chosen - action).abs()
    if "logits" in outputs:
        heads = len(outputs["logits"]) if isinstance(outputs["logits"], tuple | list) else 1
        difference[..., :heads].clamp_(max=1)
    return difference.mean(-1)


@torch.no_grad()
def held_out(obs: Any, action: Tensor, share: float) -> Tensor:
    """Selects held-out steps by a hash of observation and action, bool ``[B, T]``.

    Args:
        obs: nest of ``[B, T, ...]``.
        action: ``[B, T, ...]``.
        share: about this share of distinct steps is held out, 0 to 1.
    """
    total = torch.zeros(action.shape[:2], dtype=torch.int64, device=action.device)
    for leaf in (*optree.tree_leaves(obs), action):
        bits = {torch.float32: torch.int32, torch.float64: torch.int64}.get(leaf.dtype)
        numbers = (leaf.contiguous().view(bits) if bits else leaf).long().reshape(*action.shape[:2], -1)
        factors = torch.randint(-(2**62), 2**62, numbers.shape[2:], generator=torch.Generator().manual_seed(1))
        total = (total + (numbers * (2 * factors + 1).to(leaf.device)).sum(-1)) * _ODD  # wraps around
    drawn = ((total ^ (total >> 31)) * _ODD >> 40) % 2**_BITS
    chosen: Tensor = drawn < share * 2**_BITS
    return chosen


class BC(Algorithm):
    """Updates a module from learner batches; arguments as for `Algorithm`."""

    config: BCConfig

    def update(self, batch: Mapping[str, Any], progress: float) -> dict[str, float]:
        """Takes one gradient step on a batch, as `Algorithm.update`; returns `METRICS` and ``learning_rate``.

        Rewards and log-probabilities are not used; ends only reset recurrent state. Moves of other players (``turn``)
        are not imitated.
        """
        columns.check(batch)
        learning_rate = self.optimise.begin(progress)
        mask = columns.own_moves(batch).clone()
        mask[:, -1] = 0
        hidden = torch.zeros_like(mask)
        if self.config.holdout:
            hidden = mask * held_out(batch["obs"], batch["action"], self.config.holdout)
        learned = mask - hidden
        counts = self.across.sum(torch.stack([learned.sum(), hidden.sum()])).clamp(min=1)
        weights = {
            "learned": learned * columns.column_weight(batch).unsqueeze(-1) * (self.across.size / counts[0]),
            "held_out": hidden * (self.across.size / counts[1]),
        }
        pieces = columns.parts({**batch, **weights}, self.config.accumulate)
        measured = []
        for index, piece in enumerate(pieces):
            with self.optimise.shared(last=index == len(pieces) - 1):
                loss, numbers = self._loss(piece)
                self.optimise.backward(loss, len(piece["mask"]) / len(batch["mask"]))
            measured.append(numbers)
        norm = self.optimise.step()
        totals = torch.cat([torch.stack(measured).sum(0), norm.reshape(1)]).tolist()
        loss, mistakes, entropy, held_loss, held_mistakes, discrete, grad_norm = totals
        result = {"loss": loss, "entropy": entropy, "grad_norm": grad_norm, "learning_rate": learning_rate}
        result |= {"accuracy": 1 - mistakes} if discrete else {"error": mistakes}
        if self.config.holdout:
            result |= {"holdout_loss": held_loss}
            result |= {"holdout_accuracy": 1 - held_mistakes} if discrete else {"holdout_error": held_mistakes}
        return result

    def _loss(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """The loss, and the sums of the metrics ``[6]``."""
        with self.optimise.autocast():
            outputs = columns.before_last(columns.forward(self.forward, batch))
        action, learned, hidden = (columns.transitions(batch, key) for key in ("action", "learned", "held_out"))
        log_prob, entropy = log_prob_entropy(outputs, action)
        loss = clone_loss(log_prob, learned)
        with torch.no_grad():
            mistakes = mistaken(outputs, action)
            discrete = torch.full_like(loss, float(is_discrete(outputs)))
            numbers = [(learned * x).sum() for x in (mistakes, entropy)]
            held_out = [clone_loss(log_prob, hidden), (hidden * mistakes).sum()]
        measured = torch.stack([loss.detach(), *numbers, *held_out, discrete])
        if self.across.size > 1:
            # Ranks synchronise the gradients of all parameters, so give those of the value a gradient of zero.
            loss = loss + 0 * torch.stack([parameter.sum() for parameter in self.optimise.parameters]).sum()
        return loss, measured
