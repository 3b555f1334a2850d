"""PPO's gradient for two plain MLPs in closed form: what autograd computes, at a third of its time. Torch only.

Small networks learn as fast as operations can be started, and autograd starts several times as many as the derivative
has. Here are only those: forward, the derivative of the surrogate by the outputs, and backward through the layers, into
``.grad`` of the parameters. What is measured is computed once for all minibatches of an update. Knows nothing of
batches, epochs or ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import optree
import torch
from torch import Tensor, nn

from brayx.nets.mlp import Towers

_HALF_LOG_TAU = 0.5 * math.log(2 * math.pi)


@dataclass(frozen=True)
class Sample:
    """What a gradient is computed from, ``N`` steps.

    Attributes:
        obs: ``[N, D]`` that the policy sees, of the parameters' dtype.
        state: ``[N, S]`` that the value sees; the same, unless the two are apart.
        action: ``[N]`` int64; of a Gaussian ``[N, A]``.
        old_log_prob: ``[N]`` at acting time.
        weight: ``[N]`` of each step.
        weighted_advantage: ``[N]``, times ``weight``.
        target: ``[N]`` of the value.
    """

    obs: Tensor
    state: Tensor
    action: Tensor
    old_log_prob: Tensor
    weight: Tensor
    weighted_advantage: Tensor
    target: Tensor


@dataclass(frozen=True)
class Seen:
    """What a gradient found on its way, ``N`` steps.

    Attributes:
        log_ratio: ``[N]`` of learning to acting policy.
        log_probs: ``[N, A]`` of all actions; of a Gaussian its ``log_std``.
        error: ``[N]`` of the value.
    """

    log_ratio: Tensor
    log_probs: Tensor
    error: Tensor


class ClosedForm:
    """Computes gradients of PPO's loss (`brayx.algorithms.ppo.ppo_loss` without value clipping).

    Args:
        towers: the layers.
        clip_param, value_coef, entropy_coef: as there; ``clip_param`` is given with each gradient.
    """

    def __init__(self, towers: Towers, value_coef: float, entropy_coef: float) -> None:
        self._towers = towers
        self._value_coef = value_coef
        self._entropy_coef = entropy_coef
        self._parameters = towers.parameters()
        self._tanh = towers.activation == "tanh"

    @staticmethod
    def of(module: nn.Module, value_coef: float, entropy_coef: float) -> ClosedForm | None:
        """For a module that says it is two plain MLPs (``towers``), on the CPU with all parameters learning."""
        describe = getattr(module, "towers", None)
        towers = describe() if callable(describe) else None
        if not isinstance(towers, Towers):
            return None
        parameters = towers.parameters()
        plain = all(p.requires_grad and p.device.type == "cpu" and p.dtype == parameters[0].dtype for p in parameters)
        whole = {id(p) for p in module.parameters()} == {id(p) for p in parameters}
        exact = parameters[0].dtype in (torch.float32, torch.float64)
        return ClosedForm(towers, value_coef, entropy_coef) if plain and whole and exact else None

    def takes(self, obs: Any) -> bool:
        """Whether observations ``[B, T + 1, ...]`` are what this computes with."""
        towers, leaves = self._towers, optree.tree_leaves(obs)
        return len(leaves) == 1 + towers.apart and all(
            leaf.dtype == layer.weight.dtype and leaf.shape[2:] == layer.weight.shape[1:]
            for leaf, layer in zip(self.seen(obs), (towers.policy[0], towers.value[0]), strict=True)
        )

    @staticmethod
    def seen(obs: Any) -> tuple[Tensor, Tensor]:
        """What the policy and what the value sees of observations."""
        leaves: list[Any] = optree.tree_leaves(obs)
        return leaves[0], leaves[-1]

    @torch.no_grad()
    def gradient(self, sample: Sample, clip_param: float) -> Seen:
        """Sets ``.grad`` of every parameter; what was there is overwritten."""
        for p in self._parameters:
            if p.grad is None:
                p.grad = torch.empty_like(p)
        towers = self._towers
        hidden, out = self._forward(towers.policy, sample.obs)
        hidden_value, value = self._forward(towers.value, sample.state)
        error = value.squeeze(-1) - sample.target
        if towers.log_std is None:
            log_probs, log_prob = self._log_softmax(out, sample.action)
        else:
            log_probs = towers.log_std.clone()
            scaled = (sample.action - out) * (-log_probs).exp()
            log_prob = -0.5 * scaled.square().sum(-1) - (log_probs + _HALF_LOG_TAU).sum()
        log_ratio = log_prob - sample.old_log_prob
        ratio = log_ratio.exp()
        free = ratio * sample.weighted_advantage
        held = ratio.clamp(1 - clip_param, 1 + clip_param) * sample.weighted_advantage
        # Of the smaller of the two, the clipped one has no derivative; where they are equal nothing was clipped.
        gain = torch.where(free <= held, free, 0.0).unsqueeze(-1)
        if towers.log_std is None:
            d_out = self._by_logits(log_probs, sample, gain)
        else:
            assert towers.log_std.grad is not None
            d_out = scaled * gain * -(-log_probs).exp()
            d_log_std = (gain * (1 - scaled.square())).sum(0) - self._entropy_coef * sample.weight.sum()
            towers.log_std.grad.copy_(d_log_std)
        d_value = (self._value_coef * sample.weight * error).unsqueeze(-1)
        self._backward(towers.policy, hidden, d_out)
        self._backward(towers.value, hidden_value, d_value)
        return Seen(log_ratio, log_probs, error)

    def parts(self, samples: Sequence[Sample], seen: Sequence[Seen], clip_param: float) -> Tensor:
        """``[3]``: policy loss, value loss and entropy, summed over gradients."""
        weight, weighted_advantage = (
            torch.cat([getattr(each, name) for each in samples]) for name in ("weight", "weighted_advantage")
        )
        ratio = torch.cat([each.log_ratio for each in seen]).exp()
        clipped = ratio.clamp(1 - clip_param, 1 + clip_param)
        policy = -torch.minimum(ratio * weighted_advantage, clipped * weighted_advantage).sum()
        value = 0.5 * torch.dot(weight, torch.cat([each.error for each in seen]).square())
        if self._towers.log_std is None:
            log_probs = torch.cat([each.log_probs for each in seen])
            entropy = -torch.dot(weight, (log_probs.exp() * log_probs).sum(-1))
        else:
            spread = torch.stack([(each.log_probs + _HALF_LOG_TAU + 0.5).sum() for each in seen])
            entropy = torch.dot(spread, torch.stack([each.weight.sum() for each in samples]))
        return torch.stack([policy, value, entropy])

    def _forward(self, layers: Sequence[nn.Linear], x: Tensor) -> tuple[list[Tensor], Tensor]:
        """What goes into each layer, and what comes out of the last."""
        inputs = []
        for index, layer in enumerate(layers):
            if index:
                x = x.tanh_() if self._tanh else x.relu_()
            inputs.append(x)
            x = torch.addmm(layer.bias, x, layer.weight.t())
        return inputs, x

    def _backward(self, layers: Sequence[nn.Linear], inputs: Sequence[Tensor], d: Tensor) -> None:
        for index in range(len(layers) - 1, -1, -1):
            layer, x = layers[index], inputs[index]
            assert layer.weight.grad is not None
            assert layer.bias.grad is not None
            torch.mm(d.t(), x, out=layer.weight.grad)
            torch.sum(d, 0, out=layer.bias.grad)
            if index:
                d = torch.mm(d, layer.weight)
                d = torch.ops.aten.tanh_backward(d, x) if self._tanh else torch.ops.aten.threshold_backward(d, x, 0)

    def _log_softmax(self, logits: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        log_probs = logits.log_softmax(-1)
        return log_probs, log_probs.gather(-1, action.unsqueeze(-1)).squeeze(-1)

    def _by_logits(self, log_probs: Tensor, sample: Sample, gain: Tensor) -> Tensor:
        """Derivative of the policy's loss and the entropy bonus by the logits."""
        probability = log_probs.exp()
        d = probability * gain
        d.scatter_add_(-1, sample.action.unsqueeze(-1), -gain)
        if self._entropy_coef:
            minus_entropy = (probability * log_probs).sum(-1, keepdim=True)
            weight = (self._entropy_coef * sample.weight).unsqueeze(-1)
            d += weight * probability * (log_probs - minus_entropy)
        return d
