"""Faster PPO updates of plain MLPs on a CPU: gradients in closed form, and Adam on all parameters as one tensor.

For a small network, the cost of an update is the number of torch operations. Autograd starts several times as many as
the derivative needs, and Adam several for each parameter. `accelerate` replaces both if the result stays the same, and
otherwise does nothing. Knows nothing of batches, epochs or ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import optree
import torch
from torch import Tensor, nn
from torch.optim.adam import adam

from brayx.algorithms.adam import Adam
from brayx.algorithms.base import Algorithm
from brayx.algorithms.mappo import MAPPO
from brayx.algorithms.optimise import Optimise
from brayx.algorithms.ppo import PPO, PPOConfig
from brayx.nets.distributions import kl_divergence
from brayx.nets.mlp import Towers

_Layers = Sequence[tuple[Tensor, Tensor]]
"""The weight and bias of each linear layer."""
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
        self._policy, self._value = (
            [(layer.weight, layer.bias) for layer in layers] for layers in (towers.policy, towers.value)
        )
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
        towers = self._towers
        obs = steps["obs"]
        leaves: list[Any] = optree.tree_leaves(obs)
        if towers.encode is not None:
            leaves = [towers.encode(obs[0] if isinstance(obs, tuple) else obs)]
        hidden, out = self._forward(self._policy, leaves[0].to(self._dtype))
        hidden_value, value = self._forward(self._value, leaves[-1].to(self._dtype))
        error = value.squeeze(-1) - steps["target"]
        if towers.log_std is None:
            log_probs = out.log_softmax(-1)
            log_prob = log_probs.gather(-1, action.unsqueeze(-1)).squeeze(-1)
        else:
            inverse_std = (-towers.log_std).exp()
            scaled = (action - out) * inverse_std
            log_prob = -0.5 * scaled.square().sum(-1) - (towers.log_std + _HALF_LOG_TAU).sum()
        log_ratio = log_prob - steps["log_prob"]
        ratio = log_ratio.exp()
        free = ratio * weighted_advantage
        clipped = ratio.clamp(1 - clip_param, 1 + clip_param) * weighted_advantage
        # The loss takes the smaller surrogate. A clipped one has derivative 0; equal ones are not clipped.
        gain = torch.where(free <= clipped, free, 0.0).unsqueeze(-1)
        if towers.log_std is None:
            probability = log_probs.exp()
            minus_entropy = (probability * log_probs).sum(-1, keepdim=True)
            d_out = probability * gain
            d_out.scatter_add_(-1, action.unsqueeze(-1), -gain)
            if self._entropy_coef:
                pull = (self._entropy_coef * weight).unsqueeze(-1)
                d_out += pull * probability * (log_probs - minus_entropy)
            if magnet is not None:
                further = log_probs - magnet["logits"].log_softmax(-1)
                magnet_kl = (probability * further).sum(-1)
                pull = (self._magnet_coef * weight).unsqueeze(-1)
                d_out += pull * probability * (further - magnet_kl.unsqueeze(-1))
            entropy = -torch.dot(weight, minus_entropy.squeeze(-1))
        else:
            assert towers.log_std.grad is not None
            d_out = scaled * gain * -inverse_std
            d_log_std = (gain * (1 - scaled.square())).sum(0) - self._entropy_coef * weight.sum()
            if magnet is not None:
                magnet_kl = kl_divergence({"mean": out, "log_std": towers.log_std}, magnet)
                pull = (self._magnet_coef * weight).unsqueeze(-1)
                d_out += pull * (out - magnet["mean"]) * (-2 * magnet["log_std"]).exp()
                d_log_std += (pull * ((2 * (towers.log_std - magnet["log_std"])).exp() - 1)).sum(0)
            towers.log_std.grad.copy_(d_log_std)
            entropy = (towers.log_std + _HALF_LOG_TAU + 0.5).sum() * weight.sum()
        weighted_error = weight * error
        self._backward(self._policy, hidden, d_out)
        self._backward(self._value, hidden_value, (self._value_coef * weighted_error).unsqueeze(-1))
        value_loss = 0.5 * torch.dot(weighted_error, error)
        parts = [-torch.minimum(free, clipped).sum(), value_loss, entropy]
        if magnet is not None:
            parts.append(torch.dot(weight, magnet_kl))
        return torch.stack(parts), log_ratio

    def _forward(self, layers: _Layers, x: Tensor) -> tuple[list[Tensor], Tensor]:
        """Returns the input of each layer, and the output of the last one."""
        inputs = []
        for index, (weight, bias) in enumerate(layers):
            if index:
                x = x.tanh_() if self._tanh else x.relu_()
            inputs.append(x)
            x = torch.addmm(bias, x, weight.t())
        return inputs, x

    def _backward(self, layers: _Layers, inputs: Sequence[Tensor], d: Tensor) -> None:
        for index in range(len(layers) - 1, -1, -1):
            (weight, bias), x = layers[index], inputs[index]
            torch.mm(d.t(), x, out=weight.grad)
            torch.sum(d, 0, out=bias.grad)
            if index:
                d = torch.mm(d, weight)
                d = torch.ops.aten.tanh_backward(d, x) if self._tanh else torch.ops.aten.threshold_backward(d, x, 0)


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
