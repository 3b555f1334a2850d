"""IMPALA: an actor-critic with V-trace, which corrects for actors that lag behind the learner. Torch only.

Espeholt et al. 2018, "IMPALA: scalable distributed deep-RL with importance weighted actor-learner architectures",
https://arxiv.org/abs/1802.01561. Each batch gives one gradient step. A batch with a ``turn`` (bool: the agent's own
move) is of a turn-based game: policy and entropy are learned from the agent's moves only, the value from all steps, and
targets do not use the values of others' turns (`returns.discounts`). Columns may have a ``weight``. Columns with an
``index`` get priorities: the mean absolute error of the value.

Input: the learner batches of `brayx.replay.packing`, as tensors. Knows nothing of where they come from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from brayx.algorithms import columns, returns
from brayx.algorithms.base import Across, Algorithm
from brayx.algorithms.config import Sampling
from brayx.algorithms.optimise import OptimiseConfig
from brayx.nets.distributions import log_prob_entropy

METRICS = (
    "loss", "policy_loss", "value_loss", "entropy", "approx_kl", "rho", "clip_fraction", "explained_variance",
    "grad_norm",
)  # fmt: skip
"""Metrics of `Impala.update`, besides ``learning_rate``; ``rho`` is the mean ratio before clipping."""


class ImpalaConfig(OptimiseConfig):
    """Options of IMPALA."""

    name: Literal["impala"] = "impala"
    gamma: Annotated[float, Field(ge=0, le=1)] = 0.99
    """Discount per transition."""
    clip_rho: Annotated[float, Field(gt=0)] | None = 1.0
    """Bound of the importance weights in the targets; null: none, the values of the policy that learns."""
    clip_pg_rho: Annotated[float, Field(gt=0)] | None = 1.0
    """Bound of the importance weights of the policy's gradient."""
    value_coef: Annotated[float, Field(ge=0)] = 0.5
    """Weight of the value loss."""
    entropy_coef: Annotated[float, Field(ge=0)] = 0.01
    """Weight of the entropy bonus."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 40.0
    """Gradients are scaled down to this norm; null: never."""

    needs_log_prob: ClassVar[bool] = True
    turns: ClassVar[bool] = True
    weighs_columns: ClassVar[bool] = True
    sets_priorities: ClassVar[bool] = True

    @property
    def sampling(self) -> Sampling:
        """The paper's batch size. From a table, each transition is learned from eight times."""
        return Sampling(unroll_length=20, batch_steps=640, updates_per_step=8 / 640)

    def build(self, module: nn.Module, optimizer: torch.optim.Optimizer, across: Across) -> Algorithm:
        """As `AlgorithmConfig.build`."""
        return Impala(module, optimizer, self, across)


def impala_loss(
    log_prob: Tensor,
    entropy: Tensor,
    value: Tensor,
    advantage: Tensor,
    target: Tensor,
    policy_weight: Tensor,
    value_weight: Tensor,
    *,
    value_coef: float,
    entropy_coef: float,
) -> tuple[Tensor, Tensor]:
    """The loss of the three gradients in section 4.2, as weighted sums over steps.

    Args:
        log_prob: ``[...]`` log-probability of the actions under the learning policy.
        entropy: ``[...]`` entropy of the learning policy.
        value: ``[...]`` predictions.
        advantage: ``[...]`` advantages of `returns.vtrace`, which include the importance weight.
        target: ``[...]`` value targets.
        policy_weight: ``[...]``, weight of each step in policy loss and entropy; 0 ignores the step.
        value_weight: ``[...]``, weight of each step in the value loss.
        value_coef: weight of half the squared error.
        entropy_coef: weight of the entropy bonus.

    Returns:
        The loss, and ``[4]`` detached: loss, policy loss, value loss, entropy.
    """
    # An ignored step may hold an action of probability 0, and 0 times infinity would be NaN.
    log_prob = torch.where(policy_weight > 0, log_prob, torch.zeros_like(log_prob))
    policy_loss = -(policy_weight * advantage * log_prob).sum()
    value_loss = 0.5 * (value_weight * (value - target).square()).sum()
    mean_entropy = (policy_weight * entropy).sum()
    loss = policy_loss + value_coef * value_loss - entropy_coef * mean_entropy
    return loss, torch.stack([x.detach() for x in (loss, policy_loss, value_loss, mean_entropy)])


class Impala(Algorithm):
    """Updates a module from learner batches; arguments as for `Algorithm`."""

    config: ImpalaConfig

    def update(self, batch: Mapping[str, Any], progress: float) -> dict[str, float]:
        """Takes one gradient step on a batch, as `Algorithm.update`; returns `METRICS` and ``learning_rate``."""
        columns.check(batch)
        learning_rate = self.optimise.begin(progress)
        policy_weight, value_weight = self._weights(batch)
        pieces = columns.parts(
            {**batch, "policy_weight": policy_weight, "value_weight": value_weight}, self.config.accumulate
        )
        measured, priorities = [], []
        for index, piece in enumerate(pieces):
            with self.optimise.shared(last=index == len(pieces) - 1):
                loss, numbers, errors = self._loss(piece)
                self.optimise.backward(loss, len(piece["mask"]) / len(batch["mask"]))
            measured.append(numbers)
            priorities.append(errors)
        norm = self.optimise.step()
        self.priorities = torch.cat(priorities) if "index" in batch else None
        total = torch.stack(measured).sum(0)
        explained = columns.explained_variance(total[7:])
        means = torch.cat([total[:7], explained.reshape(1), norm.reshape(1)]).tolist()
        return {**dict(zip(METRICS, means, strict=True)), "learning_rate": learning_rate}

    def _weights(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Weights ``[B, T + 1]`` of each step in the policy's and the value's loss. Apart from the columns' own
        weights, they add up to the number of ranks over all ranks."""
        mask = batch["mask"].clone()
        mask[:, -1] = 0
        moves = columns.own_moves({**batch, "mask": mask})
        counts = self.across.sum(torch.stack([moves.sum(), mask.sum()])).clamp(min=1)
        scale = self.across.size * columns.column_weight(batch).unsqueeze(-1)
        return scale * moves / counts[0], scale * mask / counts[1]

    def _loss(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        """The loss, the sums of the metrics ``[12]``, and the columns' mean errors."""
        config = self.config
        with self.optimise.autocast():
            outputs = columns.forward(self.forward, batch)
        action, old_log_prob, reward, terminated, truncated, mask, policy_weight, value_weight = (
            columns.transitions(batch, key)
            for key in (
                "action", "log_prob", "reward", "terminated", "truncated", "mask", "policy_weight", "value_weight"
            )
        )  # fmt: skip
        values = returns.full_precision(outputs["value"])
        log_prob, entropy = log_prob_entropy(columns.before_last(outputs), action)
        discount_t, lambda_t = returns.discounts(
            terminated,
            truncated,
            gamma=config.gamma,
            lam=1.0,
            own_turn_t=batch[columns.TURN][:, 1:].transpose(0, 1) if columns.TURN in batch else None,
            dtype=values.dtype,
        )
        # Steps where the agent did not act have a ratio of 1.
        log_rho = torch.where(policy_weight > 0, log_prob.detach() - old_log_prob, torch.zeros_like(log_prob))
        targets = returns.vtrace(
            reward,
            discount_t,
            lambda_t,
            values,
            log_rho,
            clip_rho=config.clip_rho,
            clip_pg_rho=config.clip_pg_rho,
        )
        self.advantages = (targets.advantage, policy_weight)
        loss, parts = impala_loss(
            log_prob,
            entropy,
            values[:-1],
            targets.advantage,
            targets.target,
            policy_weight,
            value_weight,
            value_coef=config.value_coef,
            entropy_coef=config.entropy_coef,
        )
        with torch.no_grad():
            rho = log_rho.exp()
            clipped = (rho > (config.clip_rho or math.inf)).to(rho.dtype)
            seen = torch.stack([(policy_weight * x).sum() for x in (rho - 1 - log_rho, rho, clipped)])
            error = (targets.target - values[:-1]).abs() * mask
            priorities = error.sum(0) / mask.sum(0).clamp(min=1)
            sums = columns.moments(values[:-1], targets.target, value_weight)
        return loss, torch.cat([parts, seen, sums]), priorities
