"""Faster PPO updates of plain MLPs on a CPU: gradients in closed form, and Adam on all parameters as one tensor.

For a small network, the cost of an update is the number of torch operations. Autograd starts several times as many as
the derivative needs, and Adam several for each parameter. `accelerate` replaces both if the result stays the same, and
otherwise does nothing. Knows nothing of batches, epochs or ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import optree
import torch
from torch import Tensor, nn
from torch.optim.adam import adam

from brayx.actions import MASKED, kl_divergence
from brayx.algorithms.adam import Adam
from brayx.algorithms.base import Algorithm
from brayx.algorithms.mappo import MAPPO
from brayx.algorithms.optimise import Optimise
from brayx.algorithms.ppo import PPO, PPOConfig
from brayx.nets.mlp import Towers


class _Layer(NamedTuple):
    """A linear layer ``x @ weight.T + bias``, and where its gradients are written."""

    weight: np.ndarray
    bias: np.ndarray
    d_weight: np.ndarray
    d_bias: np.ndarray


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
    """The gradient of `brayx.algorithms.ppo.ppo_loss`, without value clipping, for two MLPs.

    In NumPy: with a minibatch and layers of a hundred numbers its calls take half the time of torch's.
    """

    def __init__(self, towers: Towers, config: PPOConfig) -> None:
        self._towers = towers
        self._value_coef = config.value_coef
        self._entropy_coef = config.entropy_coef
        self._magnet_coef = config.magnet_coef
        # Kept, since a module looks its parameters up by name.
        self._parameters = towers.parameters()
        self._dtype = np.dtype(str(self._parameters[0].dtype).removeprefix("torch."))
        self._tanh = towers.activation == "tanh"
        self._addresses: list[int] = []

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
        with np.errstate(all="ignore"):  # the loop refuses losses that are not finite
            parts, log_ratio = self._gradient(steps, clip_param)
        return torch.from_numpy(np.array(parts, self._dtype)), torch.from_numpy(log_ratio)

    def _gradient(self, steps: Mapping[str, Any], clip_param: float) -> tuple[list[Any], np.ndarray]:
        self._look()
        action, magnet = steps["action"].numpy(), steps["magnet"]
        weight, weighted_advantage, target, old_log_prob = (
            self._array(steps[name]) for name in ("weight", "weighted_advantage", "target", "log_prob")
        )
        towers, obs = self._towers, steps["obs"]
        leaves: list[Any] = optree.tree_leaves(obs)
        seen: Any = obs[0] if isinstance(obs, tuple) else obs
        if towers.encode is not None:
            leaves = [towers.encode(seen)]
        inputs, hidden = self._forward(self._policy, self._array(leaves[0]))
        value_inputs, value_hidden = self._forward(self._value, self._array(leaves[-1]))
        error = _linear(self._value_head, value_hidden)[:, 0] - target
        heads: list[tuple[_Layer, _Categories | _Gaussian]] = []
        if self._logits is not None:
            chosen = action[:, np.newaxis] if action.ndim == 1 else action[:, : len(towers.choices)]
            mask = None if towers.mask is None else seen[towers.mask].numpy()
            logits = _linear(self._logits, hidden)
            heads.append((self._logits, _Categories(logits, towers.choices, chosen.astype(np.intp), mask)))
        if self._mean is not None:
            (log_std, d_log_std), values = self._log_std, action[:, len(towers.choices) :].astype(self._dtype)
            heads.append((self._mean, _Gaussian(_linear(self._mean, hidden), log_std, d_log_std, values)))
        log_ratio = _sum([head.log_prob for _, head in heads]) - old_log_prob
        ratio = np.exp(log_ratio)
        free = ratio * weighted_advantage
        clipped = np.minimum(np.maximum(ratio, 1 - clip_param), 1 + clip_param) * weighted_advantage
        # The loss takes the smaller surrogate. A clipped one has derivative 0; equal ones are not clipped.
        gain = np.where(free <= clipped, free, 0)
        bonus = self._entropy_coef * weight if self._entropy_coef else None
        reference: Any = None
        if magnet is not None:
            reference = optree.tree_map(self._array, magnet), self._magnet_coef * weight
        entropies, magnet_kls, d_hidden = [], [], None
        for layer, head in heads:
            d_out = head.derivative(gain, bonus, reference)
            d_hidden = _layer_backward(layer, hidden, d_out, d_hidden, further=bool(self._policy))
            entropies.append(head.entropy(weight))
            magnet_kls += head.magnet_kls
        self._backward(self._policy, inputs, hidden, d_hidden)
        weighted_error = weight * error
        d_value = (self._value_coef * weighted_error)[:, np.newaxis]
        d_hidden = _layer_backward(self._value_head, value_hidden, d_value, further=bool(self._value))
        self._backward(self._value, value_inputs, value_hidden, d_hidden)
        parts = [-np.minimum(free, clipped).sum(), 0.5 * np.dot(weighted_error, error), _sum(entropies)]
        if magnet is not None:
            parts.append(np.dot(weight, _sum(magnet_kls)))
        return parts, log_ratio

    def _array(self, x: Tensor) -> np.ndarray:
        return x.numpy().astype(self._dtype, copy=False)

    def _look(self) -> None:
        """Takes views of the parameters and their gradients, unless they are where they were."""
        for p in self._parameters:
            if p.grad is None:
                p.grad = torch.empty_like(p)
        addresses = [address for p in self._parameters for address in (p.data_ptr(), p.grad.data_ptr())]  # type: ignore[union-attr]
        if addresses == self._addresses:
            return
        self._addresses = addresses

        def views(*parameters: Tensor) -> list[np.ndarray]:
            return [x.detach().numpy() for x in (*parameters, *(p.grad for p in parameters))]  # type: ignore[union-attr]

        def layer(linear: nn.Linear) -> _Layer:
            return _Layer(*views(linear.weight, linear.bias))

        towers = self._towers
        self._policy = [*map(layer, towers.policy)]
        *self._value, self._value_head = map(layer, towers.value)
        self._logits, self._mean = (None if head is None else layer(head) for head in (towers.logits, towers.mean))
        self._log_std = [] if towers.log_std is None else views(towers.log_std)

    def _forward(self, layers: _Layers, x: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
        """Returns the input of each layer, and the output of the last one, after the activation."""
        inputs = []
        for layer in layers:
            inputs.append(x)
            x = _linear(layer, x)
            if self._tanh:
                np.tanh(x, out=x)
            else:
                np.maximum(x, 0, out=x)
        return inputs, x

    def _backward(
        self, layers: _Layers, inputs: Sequence[np.ndarray], output: np.ndarray, d: np.ndarray | None
    ) -> None:
        """Writes the gradients of the layers, given the loss's by their last output; None: there are no layers."""
        for index in range(len(layers) - 1, -1, -1):
            assert d is not None
            slope = 1 - output * output if self._tanh else output > 0
            output = inputs[index]
            d = _layer_backward(layers[index], output, d * slope, further=index > 0)


def _linear(layer: _Layer, x: np.ndarray) -> np.ndarray:
    out: np.ndarray = np.dot(x, layer.weight.T)
    out += layer.bias
    return out


def _layer_backward(
    layer: _Layer, x: np.ndarray, d: np.ndarray, d_x: np.ndarray | None = None, *, further: bool
) -> np.ndarray | None:
    """Writes a layer's gradients; returns that of its input, added to ``d_x``, if it is needed ``further``."""
    np.dot(d.T, x, out=layer.d_weight)
    np.add.reduce(d, 0, out=layer.d_bias)
    if not further:
        return None
    d_input: np.ndarray = np.dot(d, layer.weight)
    return d_input if d_x is None else d_x + d_input


def _sum(parts: Sequence[Any]) -> Any:
    return parts[0] if len(parts) == 1 else sum(parts[1:], parts[0])


def _first_axis_last(x: np.ndarray) -> np.ndarray:
    """``[N, A]`` as a contiguous ``[A, N]``: NumPy reduces a short last axis row by row."""
    return np.ascontiguousarray(x.T)


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    """``[A, N]``, of ``[N, A]``."""
    columns: np.ndarray = _first_axis_last(logits)
    columns = columns - np.maximum.reduce(columns)
    columns -= np.log(np.add.reduce(np.exp(columns)))
    return columns


_Reference = tuple[Mapping[str, Any], np.ndarray]
"""The outputs of the reference policy, and the weight ``[N]`` of the divergence from it."""


class _Categories:
    """The discrete actions of a minibatch: log-probability, and the loss's derivative by the logits.

    Args:
        logits: ``[N, sum of choices]``.
        choices: number of categories of each action.
        chosen: ``[N, H]`` int64.
        mask: ``[N, sum of choices]``; None: all categories are allowed.
    """

    def __init__(self, logits: np.ndarray, choices: Sequence[int], chosen: np.ndarray, mask: np.ndarray | None) -> None:
        self._allowed = None if mask is None else mask > 0
        if self._allowed is not None:
            logits = np.where(self._allowed, logits, logits.dtype.type(MASKED))
        ends, rows = accumulate(choices), len(logits)
        self._log_probs = [_log_softmax(logits[:, end - size : end]) for size, end in zip(choices, ends, strict=True)]
        self._places = [chosen[:, head] * rows + np.arange(rows) for head in range(len(choices))]
        heads = zip(self._log_probs, self._places, strict=True)
        self.log_prob = _sum([log_probs.reshape(-1)[places] for log_probs, places in heads])
        self._minus_entropies: list[np.ndarray] = []
        self.magnet_kls: list[np.ndarray] = []

    def derivative(self, gain: np.ndarray, bonus: np.ndarray | None, reference: _Reference | None) -> np.ndarray:
        """``[N, sum of choices]``, before `entropy` and `magnet_kls`.

        Args:
            gain: ``[N]`` factor of the derivative of the log-probability.
            bonus: ``[N]`` weight of the entropy; None: 0.
            reference: the magnet; None: there is none.
        """
        parts = []
        for index, (log_probs, places) in enumerate(zip(self._log_probs, self._places, strict=True)):
            probability = np.exp(log_probs)
            minus_entropy = np.add.reduce(probability * log_probs)
            self._minus_entropies.append(minus_entropy)
            d = probability * gain
            d.reshape(-1)[places] -= gain
            if bonus is not None:
                d += bonus * probability * (log_probs - minus_entropy)
            if reference is not None:
                magnet, pull = reference
                logits = magnet["logits"]
                further = log_probs - _log_softmax(logits if isinstance(logits, np.ndarray) else logits[index])
                magnet_kl = np.add.reduce(probability * further)
                d += pull * probability * (further - magnet_kl)
                self.magnet_kls.append(magnet_kl)
            parts.append(d)
        d_logits: np.ndarray = parts[0].T if len(parts) == 1 else np.concatenate(parts).T
        return d_logits if self._allowed is None else d_logits * self._allowed

    def entropy(self, weight: np.ndarray) -> Any:
        """The weighted sum over the steps."""
        return -np.dot(weight, _sum(self._minus_entropies))


class _Gaussian:
    """The continuous actions of a minibatch: log-probability, and the loss's derivatives by mean and deviation.

    Args:
        mean: ``[N, D]``.
        log_std, d_log_std: ``[D]``, and where its gradient is written.
        action: ``[N, D]``.
    """

    def __init__(self, mean: np.ndarray, log_std: np.ndarray, d_log_std: np.ndarray, action: np.ndarray) -> None:
        self._mean, self._log_std, self._d_log_std = mean, log_std, d_log_std
        self._inverse_std = np.exp(-log_std)[:, np.newaxis]
        self._scaled = _first_axis_last(action - mean) * self._inverse_std
        self._square = self._scaled * self._scaled
        self.log_prob = -0.5 * np.add.reduce(self._square) - (log_std + _HALF_LOG_TAU).sum()
        self.magnet_kls: list[np.ndarray] = []

    def derivative(self, gain: np.ndarray, bonus: np.ndarray | None, reference: _Reference | None) -> np.ndarray:
        """By the mean, ``[N, D]``; writes that by the deviation. Arguments as for `_Categories.derivative`."""
        d_mean: np.ndarray = self._scaled * gain * -self._inverse_std
        d_log_std = np.dot(1 - self._square, gain)
        if bonus is not None:
            d_log_std -= bonus.sum()
        if reference is not None:
            magnet, pull = reference
            reference_policy = {name: magnet[name] for name in ("mean", "log_std")}
            divergence = kl_divergence({"mean": self._mean, "log_std": self._log_std}, reference_policy)
            self.magnet_kls.append(divergence.astype(pull.dtype))
            ratio = _first_axis_last((self._mean - magnet["mean"]) * np.exp(-2 * magnet["log_std"]))
            d_mean += pull * ratio
            wider = np.exp(2 * (self._log_std - magnet["log_std"])) - 1
            d_log_std += np.dot(pull, np.broadcast_to(wider, self._mean.shape))
        self._d_log_std[...] = d_log_std
        return d_mean.T

    def entropy(self, weight: np.ndarray) -> Any:
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
