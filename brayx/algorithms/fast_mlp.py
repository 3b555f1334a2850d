"""Faster PPO updates of plain MLPs on a CPU: gradients in closed form, and Adam on all parameters as one tensor.

For a small network, the cost of an update is the number of torch operations. Autograd starts several times as many as
the derivative needs, and Adam several for each parameter. `accelerate` replaces both if the result stays the same, and
otherwise does nothing. Knows nothing of batches, epochs or ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import optree
import torch
from torch import Tensor, nn
from torch.optim.adam import adam

from brayx.actions import MASKED
from brayx.algorithms.adam import Adam
from brayx.algorithms.base import Algorithm
from brayx.algorithms.mappo import MAPPO
from brayx.algorithms.optimise import Optimise
from brayx.algorithms.ppo import PPO, PPOConfig
from brayx.nets.distributions import kl_divergence
from brayx.nets.mlp import Towers

_Layer = tuple[Tensor, Tensor]
"""The weight and bias of a linear layer."""
_Layers = Sequence[_Layer]
_HALF_LOG_TAU = 0.5 * math.log(2 * math.pi)


def accelerate(algorithm: Algorithm) -> None:
    """Gives PPO or MAPPO a closed-form gradient if its module and options allow it. Call it before the first update.

    The module must describe itself as two plain MLPs (``towers``) on the CPU, with all parameters trainable. The
    training needs one rank, full precision and the plain loss: no micro-batches, value clipping, reward heads or user's
    terms. A class derived from PPO keeps autograd, since it may change the loss.
    """
    if not isinstance(algorithm, PPO) or type(algorithm) not in (PPO, MAPPO):
        return
    config = algorithm.config
    plain_loss = config.clip_value is None and not config.reward_heads and not algorithm.optimise.adds
    if plain_loss and config.accumulate == 1 and config.precision == "fp32" and algorithm.across.size == 1:
        algorithm.closed_form = MLPGradient.of(algorithm.module, config)
        if algorithm.closed_form is not None and FlatAdam.fits(algorithm.optimise.optimizer):
            algorithm.optimise = FlatAdam(algorithm.optimise.optimizer, config)


class MLPGradient:
    """The gradient of `brayx.algorithms.ppo.ppo_loss`, without value clipping, for two MLPs."""

    def __init__(self, towers: Towers, config: PPOConfig) -> None:
        self._towers = towers
        self._value_coef = config.value_coef
        self._entropy_coef = config.entropy_coef
        self._magnet_coef = config.magnet_coef
        self._parameters = towers.parameters()
        # Keep the parameters: a module looks them up by name, which takes as long as a small operation.
        self._policy = [(layer.weight, layer.bias) for layer in towers.policy]
        self._logits, self._mean = (
            None if layer is None else (layer.weight, layer.bias) for layer in (towers.logits, towers.mean)
        )
        *hidden, last = towers.value
        self._value, self._value_head = [(layer.weight, layer.bias) for layer in hidden], (last.weight, last.bias)
        self._dtype = self._parameters[0].dtype
        self._tanh = towers.activation == "tanh"

    @staticmethod
    def of(module: nn.Module, config: PPOConfig) -> MLPGradient | None:
        """The gradient for a module with ``towers`` and only trainable CPU parameters of one dtype; otherwise None."""
        describe = getattr(module, "towers", None)
        towers = describe() if callable(describe) else None
        if not isinstance(towers, Towers):
            return None
        parameters = towers.parameters()
        plain = all(p.requires_grad and p.device.type == "cpu" and p.dtype == parameters[0].dtype for p in parameters)
        whole = {id(p) for p in module.parameters()} == {id(p) for p in parameters}
        exact = parameters[0].dtype in (torch.float32, torch.float64)
        return MLPGradient(towers, config) if plain and whole and exact else None

    @torch.no_grad()
    def gradient(self, steps: Mapping[str, Any], clip_param: float) -> tuple[Tensor, Tensor]:
        """As `brayx.algorithms.ppo.ClosedForm.gradient`."""
        action, weight, weighted_advantage = steps["action"], steps["weight"], steps["weighted_advantage"]
        magnet = steps["magnet"]
        for p in self._parameters:
            if p.grad is None:
                p.grad = torch.empty_like(p)
        towers, obs = self._towers, steps["obs"]
        leaves: list[Any] = optree.tree_leaves(obs)
        seen: Any = obs[0] if isinstance(obs, tuple) else obs
        if towers.encode is not None:
            leaves = [towers.encode(seen)]
        inputs, hidden = self._forward(self._policy, leaves[0].to(self._dtype))
        value_inputs, value_hidden = self._forward(self._value, leaves[-1].to(self._dtype))
        value = _linear(self._value_head, value_hidden)
        error = value.squeeze(-1) - steps["target"]
        heads: list[tuple[_Layer, _Categories | _Gaussian]] = []
        if self._logits is not None:
            chosen = action.unsqueeze(-1) if action.ndim == 1 else action[:, : len(towers.choices)]
            mask = None if towers.mask is None else seen[towers.mask]
            logits = _linear(self._logits, hidden)
            heads.append((self._logits, _Categories(logits, towers.choices, chosen.long(), mask)))
        if self._mean is not None:
            assert towers.log_std is not None
            means = _linear(self._mean, hidden)
            heads.append((self._mean, _Gaussian(means, towers.log_std, action[:, len(towers.choices) :])))
        log_ratio = _sum([head.log_prob for _, head in heads]) - steps["log_prob"]
        ratio = log_ratio.exp()
        free = ratio * weighted_advantage
        clipped = ratio.clamp(1 - clip_param, 1 + clip_param) * weighted_advantage
        # The loss takes the smaller surrogate. A clipped one has derivative 0; equal ones are not clipped.
        gain = torch.where(free <= clipped, free, 0.0).unsqueeze(-1)
        bonus = (self._entropy_coef * weight).unsqueeze(-1) if self._entropy_coef else None
        pull = None if magnet is None else (self._magnet_coef * weight).unsqueeze(-1)
        entropies, magnet_kls, d_hidden = [], [], None
        for layer, head in heads:
            d_out = head.derivative(gain, bonus, magnet, pull)
            d_hidden = _layer_backward(layer, hidden, d_out, d_hidden, further=bool(self._policy))
            entropies.append(head.entropy(weight))
            magnet_kls += head.magnet_kls
        self._backward(self._policy, inputs, hidden, d_hidden)
        weighted_error = weight * error
        d_value = (self._value_coef * weighted_error).unsqueeze(-1)
        d_hidden = _layer_backward(self._value_head, value_hidden, d_value, further=bool(self._value))
        self._backward(self._value, value_inputs, value_hidden, d_hidden)
        value_loss = 0.5 * torch.dot(weighted_error, error)
        parts = [-torch.minimum(free, clipped).sum(), value_loss, _sum(entropies)]
        if magnet is not None:
            parts.append(torch.dot(weight, _sum(magnet_kls)))
        return torch.stack(parts), log_ratio

    def _forward(self, layers: _Layers, x: Tensor) -> tuple[list[Tensor], Tensor]:
        """Returns the input of each layer, and the output of the last one, after the activation."""
        inputs = []
        for layer in layers:
            inputs.append(x)
            x = _linear(layer, x)
            x = _tanh_(x) if self._tanh else x.relu_()
        return inputs, x

    def _backward(self, layers: _Layers, inputs: Sequence[Tensor], output: Tensor, d: Tensor | None) -> None:
        """Writes the gradients of the layers, given the loss's by their last output; None: there are no layers."""
        for index in range(len(layers) - 1, -1, -1):
            assert d is not None
            if self._tanh:
                d = torch.ops.aten.tanh_backward(d, output)
            else:
                d = torch.ops.aten.threshold_backward(d, output, 0)
            output = inputs[index]
            d = _layer_backward(layers[index], output, d, further=index > 0)


def _linear(layer: _Layer, x: Tensor) -> Tensor:
    weight, bias = layer
    return torch.addmm(bias, x, weight.t())


def _tanh_(x: Tensor) -> Tensor:
    """In place. NumPy takes a tenth of torch's time, which was a fifth of a gradient's for layers of 64."""
    array = x.numpy()
    np.tanh(array, out=array)
    return x


def _layer_backward(layer: _Layer, x: Tensor, d: Tensor, d_x: Tensor | None = None, *, further: bool) -> Tensor | None:
    """Writes a layer's gradients; returns that of its input, added to ``d_x``, if it is needed ``further``."""
    weight, bias = layer
    torch.mm(d.t(), x, out=weight.grad)
    torch.sum(d, 0, out=bias.grad)
    if not further:
        return None
    return torch.mm(d, weight) if d_x is None else d_x.addmm_(d, weight)


def _sum(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.stack(list(parts)).sum(0)


class _Categories:
    """The discrete actions of a minibatch: log-probability, and the loss's derivative by the logits.

    Args:
        logits: ``[N, sum of choices]``.
        choices: number of categories of each action.
        chosen: ``[N, H]`` int64.
        mask: ``[N, sum of choices]``; None: all categories are allowed.
    """

    def __init__(self, logits: Tensor, choices: Sequence[int], chosen: Tensor, mask: Tensor | None) -> None:
        self._choices, self._chosen = choices, chosen
        self._allowed = mask if mask is None or mask.dtype == torch.bool else mask > 0
        if self._allowed is not None:
            logits = torch.where(self._allowed, logits, MASKED)
        heads = torch.split(logits, list(choices), -1) if len(choices) > 1 else (logits,)
        self._log_probs = [head.log_softmax(-1) for head in heads]
        each = [log_probs.gather(-1, chosen[:, i : i + 1]).squeeze(-1) for i, log_probs in enumerate(self._log_probs)]
        self.log_prob = _sum(each)
        self._minus_entropies: list[Tensor] = []
        self.magnet_kls: list[Tensor] = []

    def derivative(
        self, gain: Tensor, bonus: Tensor | None, magnet: Mapping[str, Any] | None, pull: Tensor | None
    ) -> Tensor:
        """``[N, sum of choices]``, before `entropy` and `magnet_kls`.

        Args:
            gain: ``[N, 1]`` factor of the derivative of the log-probability.
            bonus: ``[N, 1]`` weight of the entropy; None: 0.
            magnet: outputs of the reference policy; None: there is none.
            pull: ``[N, 1]`` weight of the divergence from it.
        """
        parts = []
        references: Any = None if magnet is None else magnet["logits"]
        for index, log_probs in enumerate(self._log_probs):
            probability = log_probs.exp()
            minus_entropy = (probability * log_probs).sum(-1, keepdim=True)
            self._minus_entropies.append(minus_entropy)
            d = probability * gain
            d.scatter_add_(-1, self._chosen[:, index : index + 1], -gain)
            if bonus is not None:
                d += bonus * probability * (log_probs - minus_entropy)
            if pull is not None:
                reference = references if isinstance(references, Tensor) else references[index]
                further = log_probs - reference.log_softmax(-1)
                magnet_kl = (probability * further).sum(-1)
                d += pull * probability * (further - magnet_kl.unsqueeze(-1))
                self.magnet_kls.append(magnet_kl)
            parts.append(d)
        d_logits = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        return d_logits if self._allowed is None else d_logits * self._allowed

    def entropy(self, weight: Tensor) -> Tensor:
        """The weighted sum over the steps."""
        return -torch.dot(weight, _sum(self._minus_entropies).squeeze(-1))


class _Gaussian:
    """The continuous actions of a minibatch: log-probability, and the loss's derivatives by mean and deviation.

    Args:
        mean: ``[N, D]``.
        log_std: ``[D]``.
        action: ``[N, D]``.
    """

    def __init__(self, mean: Tensor, log_std: nn.Parameter, action: Tensor) -> None:
        self._mean, self._log_std = mean, log_std
        self._inverse_std = (-log_std).exp()
        self._scaled = (action - mean) * self._inverse_std
        self.log_prob = -0.5 * self._scaled.square().sum(-1) - (log_std + _HALF_LOG_TAU).sum()
        self.magnet_kls: list[Tensor] = []

    def derivative(
        self, gain: Tensor, bonus: Tensor | None, magnet: Mapping[str, Any] | None, pull: Tensor | None
    ) -> Tensor:
        """By the mean, ``[N, D]``; writes that by the deviation. Arguments as for `_Categories.derivative`."""
        scaled, log_std = self._scaled, self._log_std
        assert log_std.grad is not None
        d_mean = scaled * gain * -self._inverse_std
        d_log_std = (gain * (1 - scaled.square())).sum(0)
        if bonus is not None:
            d_log_std -= bonus.sum()
        if magnet is not None and pull is not None:
            reference = {name: magnet[name] for name in ("mean", "log_std")}
            self.magnet_kls.append(kl_divergence({"mean": self._mean, "log_std": log_std}, reference))
            d_mean += pull * (self._mean - reference["mean"]) * (-2 * reference["log_std"]).exp()
            d_log_std += (pull * ((2 * (log_std - reference["log_std"])).exp() - 1)).sum(0)
        log_std.grad.copy_(d_log_std)
        return d_mean

    def entropy(self, weight: Tensor) -> Tensor:
        """The weighted sum over the steps."""
        return (self._log_std + _HALF_LOG_TAU + 0.5).sum() * weight.sum()


class FlatAdam(Optimise):
    """Adam on one flat tensor; all parameters, gradients and moments become views of flat tensors.

    So norm and step take a few operations, however many parameters there are. Gradients are written into ``.grad``, not
    computed by `backward`. Checkpoints still save and restore the torch optimiser.
    """

    optimizer: torch.optim.Adam

    def __init__(self, optimizer: torch.optim.Optimizer, config: PPOConfig) -> None:
        super().__init__(optimizer, config)
        self._sizes = [p.numel() for p in self.parameters]
        total = sum(self._sizes)
        self._flat, self._gradient, self._mean, self._square = (self.parameters[0].new_zeros(total) for _ in range(4))
        self._step = torch.zeros((), dtype=torch.float32)
        self._views = [self._split(x) for x in (self._flat, self._gradient, self._mean, self._square)]
        optimizer.register_state_dict_pre_hook(self._write_step)

    @staticmethod
    def fits(optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimiser is an Adam as the trainer makes it: one group of CPU parameters of one dtype."""
        if type(optimizer) not in (torch.optim.Adam, Adam) or len(optimizer.param_groups) != 1:
            return False
        group = optimizer.param_groups[0]
        parameters: list[Tensor] = group["params"]
        alike = all(p.device.type == "cpu" and p.dtype == parameters[0].dtype for p in parameters)
        known = not any(group[name] for name in ("amsgrad", "maximize", "capturable", "differentiable"))
        return alike and known and not isinstance(group["lr"], Tensor)

    def begin(self, progress: float) -> float:
        """As `Optimise.begin`."""
        learning_rate = super().begin(progress)
        self._adopt()
        return learning_rate

    @torch.no_grad()
    def step(self) -> Tensor:
        """As `Optimise.step`."""
        norm: Tensor = torch.linalg.vector_norm(self._gradient)
        limit = self._config.max_grad_norm
        if limit is not None:
            self._gradient.mul_((limit / (norm + 1e-6)).clamp_(max=1.0))
        group = self.optimizer.param_groups[0]
        beta1, beta2 = group["betas"]
        adam(
            [self._flat],
            [self._gradient],
            [self._mean],
            [self._square],
            [],
            [self._step],
            foreach=False,
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        return norm

    def _adopt(self) -> None:
        """Makes parameters and moments views of the flat tensors again after the optimiser was restored."""
        for p, flat, gradient, mean, square in zip(self.parameters, *self._views, strict=True):
            if p.data_ptr() != flat.data_ptr():
                flat.copy_(p.detach())
                p.data = flat
            p.grad = gradient
            state = self.optimizer.state[p]
            if state.get("exp_avg") is not mean:
                if state:
                    mean.copy_(state["exp_avg"])
                    square.copy_(state["exp_avg_sq"])
                    self._step.fill_(float(state["step"]))
                # One counter per parameter, as in torch: torch would increment a shared one once per parameter.
                state.update(step=self._step.clone(), exp_avg=mean, exp_avg_sq=square)

    def _write_step(self, _: torch.optim.Optimizer) -> None:
        """Writes the number of steps into the optimiser's state before it is saved."""
        for p, mean in zip(self.parameters, self._views[2], strict=True):
            state = self.optimizer.state[p]
            if state.get("exp_avg") is mean:
                state["step"].copy_(self._step)

    def _split(self, flat: Tensor) -> list[Tensor]:
        pieces = torch.split(flat, self._sizes)
        return [piece.view(p.shape) for piece, p in zip(pieces, self.parameters, strict=True)]
