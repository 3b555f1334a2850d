"""Proximal policy optimisation for discrete actions: options, loss, metrics and update. Torch only.

Schulman et al. 2017, "Proximal policy optimization algorithms", https://arxiv.org/abs/1707.06347. Works on the
learner batches of `brayx.replay.packing` (as tensors), and knows nothing of where they come from, of publishing or
of checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import optree
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from brayx.algorithms import returns

METRICS = (
    "loss", "policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "grad_norm", "explained_variance"
)  # fmt: skip
"""What `PPO.update` measures, beside ``learning_rate``."""


class PPOConfig(BaseModel):
    """Options of PPO."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Literal["ppo"] = "ppo"
    gamma: Annotated[float, Field(ge=0, le=1)] = 0.98
    """Discount per transition."""
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 0.8
    """Decay of the advantage trace."""
    clip_param: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Ratios beyond 1 +- this gain nothing."""
    value_coef: Annotated[float, Field(ge=0)] = 0.5
    """Weight of the value loss."""
    entropy_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the entropy bonus."""
    epochs: Annotated[int, Field(ge=1, le=1000)] = 20
    """Passes over a learner batch."""
    minibatch_size: Annotated[int, Field(ge=1)] = 256
    """Steps of one gradient, masked ones included, so that every rank takes equally many gradients."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 0.5
    """Gradients are scaled down to this norm; null: never."""
    normalise_advantage: bool = True
    """Shift and scale the advantages of a minibatch to mean 0 and deviation 1."""
    learning_rate_final: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the learning rate left at the end of training; it falls linearly."""
    clip_final: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of ``clip_param`` left at the end of training; it falls linearly."""


def log_softmax_at(logits: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability of ``action`` and entropy in nats of the categorical distribution.

    Args:
        logits: ``[N, A]``.
        action: ``[N]`` int64.

    Returns:
        ``[N]`` and ``[N]``.
    """
    log_probs = logits.float().log_softmax(-1) if logits.dtype != torch.float64 else logits.log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return log_probs.gather(-1, action.long().unsqueeze(-1)).squeeze(-1), entropy


def ppo_loss(
    log_prob: Tensor,
    old_log_prob: Tensor,
    entropy: Tensor,
    value: Tensor,
    advantage: Tensor,
    target: Tensor,
    mask: Tensor,
    *,
    clip_param: float,
    value_coef: float,
    entropy_coef: float,
) -> tuple[Tensor, Tensor]:
    """The clipped surrogate of equation 7 with value loss and entropy bonus (equation 9), as means over ``mask``.

    Args:
        log_prob: ``[N]`` of the actions under the policy that learns.
        old_log_prob: ``[N]`` at acting time.
        entropy: ``[N]``.
        value: ``[N]`` predictions.
        advantage: ``[N]``, already normalised if wanted.
        target: ``[N]`` of the value.
        mask: ``[N]``, 1 to learn from a step and 0 not to; all zeros give loss 0.
        clip_param: epsilon.
        value_coef: weight of half the squared error.
        entropy_coef: weight of the entropy bonus.

    Returns:
        The loss, and ``[6]`` detached: loss, policy loss, value loss, entropy, KL(acting || learning) by the k3
        estimate (Schulman, http://joschu.net/blog/kl-approx.html), share of ratios clipped.
    """
    weight = mask / mask.sum().clamp(min=1)
    log_ratio = torch.where(mask > 0, log_prob - old_log_prob, torch.zeros_like(log_prob))
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip_param, 1 + clip_param)
    policy_loss = -(weight * torch.minimum(ratio * advantage, clipped * advantage)).sum()
    value_loss = 0.5 * (weight * (value - target).square()).sum()
    mean_entropy = (weight * entropy).sum()
    loss = policy_loss + value_coef * value_loss - entropy_coef * mean_entropy
    with torch.no_grad():
        kl = (weight * (ratio - 1 - log_ratio)).sum()
        outside = (weight * (ratio != clipped)).sum()
    return loss, torch.stack([x.detach() for x in (loss, policy_loss, value_loss, mean_entropy, kl, outside)])


def normalise(advantage: Tensor, mask: Tensor) -> Tensor:
    """``advantage`` with mean 0 and deviation 1 over ``mask``; fewer than two steps stay as they are."""
    count = mask.sum()
    weight = mask / count.clamp(min=1)
    centred = advantage - (weight * advantage).sum()
    deviation = (weight * centred.square()).sum().sqrt()
    return torch.where(count > 1, centred / (deviation + 1e-8), advantage)


class PPO:
    """Updates a module from learner batches.

    Args:
        module: called with the observations, ``[N, ...]``; gives ``{"logits": [N, A], "value": [N]}``. Observations
            that are a tuple are passed as several arguments.
        optimizer: over the module's parameters; its learning rates at construction are the ones annealed from.
        config: options.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, config: PPOConfig) -> None:
        self.module = module
        self.optimizer = optimizer
        self.config = config
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def update(self, batch: Mapping[str, Any], progress: float) -> dict[str, float]:
        """Learns from one batch: ``epochs`` passes in minibatches.

        Args:
            batch: tensors ``[B, T + 1, ...]`` as `brayx.replay.packing` lays them out, with the observation as a
                nest of tensors under ``obs``. Not changed.
            progress: how far training has come, 0 to 1; learning rate and clip fall with it.

        Returns:
            Means over the minibatches, by the names in `METRICS` and ``learning_rate``.
        """
        config = self.config
        progress = min(max(progress, 0.0), 1.0)
        learning_rate = self._anneal(progress)
        clip_param = max(config.clip_param * (1 - progress * (1 - config.clip_final)), 1e-6)
        obs, action, old_log_prob, advantage, target, mask, explained = self._prepare(batch)
        size = len(mask)
        count = max(1, round(size / config.minibatch_size))
        measured: list[Tensor] = []
        for _ in range(config.epochs):
            # One minibatch is the whole batch: shuffling it would only cost time.
            # Shuffled by the CPU's generator: a checkpoint has its state, and every device draws the same minibatches.
            chunks = [slice(None)] if count == 1 else torch.randperm(size).to(mask.device).tensor_split(count)
            for chunk in chunks:
                part = mask[chunk]
                outputs = self._forward(optree.tree_map(lambda x, at=chunk: x[at], obs))
                log_prob, entropy = log_softmax_at(outputs["logits"], action[chunk])
                loss, parts = ppo_loss(
                    log_prob,
                    old_log_prob[chunk],
                    entropy,
                    outputs["value"].float(),
                    normalise(advantage[chunk], part) if config.normalise_advantage else advantage[chunk],
                    target[chunk],
                    part,
                    clip_param=clip_param,
                    value_coef=config.value_coef,
                    entropy_coef=config.entropy_coef,
                )
                self.optimizer.zero_grad(set_to_none=True)
                loss.backward()  # type: ignore[no-untyped-call]
                norm = nn.utils.clip_grad_norm_(self._parameters, config.max_grad_norm or float("inf"))
                self.optimizer.step()
                measured.append(torch.cat([parts, norm.detach().reshape(1)]))
        means = torch.cat([torch.stack(measured).mean(0), explained.reshape(1)]).tolist()
        return {**dict(zip(METRICS, means, strict=True)), "learning_rate": learning_rate}

    @torch.no_grad()
    def _prepare(self, batch: Mapping[str, Any]) -> tuple[Any, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Flat ``[T * B, ...]`` learning data, time-major: values and advantages by the current module."""
        mask = batch["mask"]
        if mask.ndim != 2 or mask.shape[1] < 2:
            raise ValueError(f"mask: expected [B, T + 1] with T >= 1, got shape {tuple(mask.shape)}")
        columns, steps = mask.shape
        obs = optree.tree_map(lambda x: x.transpose(0, 1).reshape(steps * columns, *x.shape[2:]), batch["obs"])
        time_major = {
            key: batch[key][:, :-1].transpose(0, 1)
            for key in ("action", "log_prob", "reward", "terminated", "truncated", "mask")
        }
        values = self._forward(obs)["value"].float().reshape(steps, columns)
        discount_t, lambda_t = returns.discounts(
            time_major["terminated"], time_major["truncated"], gamma=self.config.gamma, lam=self.config.gae_lambda
        )
        advantage = returns.gae(time_major["reward"], discount_t, lambda_t, values)
        target = advantage + values[:-1]
        learn = time_major["mask"].reshape(-1)
        size = len(learn)
        flat_target, flat_value = target.reshape(-1), values[:-1].reshape(-1)
        return (
            optree.tree_map(lambda x: x[:size], obs),
            time_major["action"].reshape(-1),
            time_major["log_prob"].reshape(-1),
            advantage.reshape(-1),
            flat_target,
            learn,
            _explained_variance(flat_value, flat_target, learn),
        )

    def _forward(self, obs: Any) -> Mapping[str, Tensor]:
        outputs: Mapping[str, Tensor] = self.module(*obs) if isinstance(obs, tuple) else self.module(obs)
        return outputs

    def _anneal(self, progress: float) -> float:
        share = 1 - progress * (1 - self.config.learning_rate_final)
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * share
        return float(self.optimizer.param_groups[0]["lr"])


def _explained_variance(value: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    weight = mask / mask.sum().clamp(min=1)

    def variance(x: Tensor) -> Tensor:
        return (weight * (x - (weight * x).sum()).square()).sum()

    return 1 - variance(target - value) / variance(target).clamp(min=1e-8)
