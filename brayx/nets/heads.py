"""Action heads: they turn features into the outputs that `brayx.nets.distributions` reads. Torch only.

The network applies action masks here, from the observation, so acting and learning always use the same mask. Last
layers start orthogonal with gain 0.01, so that a new policy is nearly uniform.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from brayx.actions import MASKED

GAIN = 0.01
"""Initial gain of a policy's last layer (Andrychowicz et al. 2021, https://arxiv.org/abs/2006.05990)."""
_LOG_STD_MIN, _LOG_STD_MAX = -5.0, 2.0


def linear(inputs: int, outputs: int, gain: float = math.sqrt(2)) -> nn.Linear:
    """A linear layer with orthogonal initial weights and zero bias."""
    layer = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def masked(logits: Tensor, mask: Tensor) -> Tensor:
    """``logits`` where ``mask`` is positive or true, `MASKED` elsewhere.

    If no action is allowed, all logits are equal: the distribution is uniform, its log-probability and entropy are
    constant, and no gradient flows. This happens only for the observation after an episode's end: acting refuses such a
    mask.

    Args:
        logits: ``[..., A]``.
        mask: ``[..., A]``, bools or numbers.
    """
    allowed = mask if mask.dtype == torch.bool else mask > 0
    return torch.where(allowed, logits, torch.full_like(logits, MASKED))


class Categorical(nn.Module):
    """One discrete action: ``[..., features] -> {"logits": [..., A]}``."""

    def __init__(self, features: int, num_actions: int, gain: float = GAIN) -> None:
        super().__init__()
        self.logits = linear(features, num_actions, gain)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
        """``mask`` is ``[..., A]``."""
        logits = self.logits(x)
        return {"logits": logits if mask is None else masked(logits, mask)}


class MultiHead(nn.Module):
    """Several discrete actions at once: ``[..., features] -> {"logits": ([..., A_0], [..., A_1], ...)}``.

    All heads are one matrix, split afterwards, which is as fast as a single head.
    """

    def __init__(self, features: int, num_actions: Sequence[int], gain: float = GAIN) -> None:
        super().__init__()
        self.num_actions = tuple(num_actions)
        self.logits = linear(features, sum(self.num_actions), gain)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> dict[str, tuple[Tensor, ...]]:
        """``mask`` is ``[..., sum of A_h]``, the concatenated masks of the heads."""
        logits = self.logits(x)
        if mask is not None:
            logits = masked(logits, mask)
        return {"logits": tuple(logits.split(self.num_actions, -1))}


class Pointer(nn.Module):
    """Chooses one of several entities: ``query [..., features], entities [..., E, D] -> {"logits": [..., E]}``.

    Vinyals et al. 2015, "Pointer networks", with dot products, https://arxiv.org/abs/1506.03134.
    """

    def __init__(self, features: int, entity_features: int, size: int = 64) -> None:
        super().__init__()
        self.query = linear(features, size, GAIN)
        self.key = linear(entity_features, size, 1.0)
        self._scale = size**-0.5

    def forward(self, x: Tensor, entities: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
        """``mask`` is ``[..., E]``: which entities exist and may be chosen."""
        logits = (self.key(entities) @ self.query(x).unsqueeze(-1)).squeeze(-1) * self._scale
        return {"logits": logits if mask is None else masked(logits, mask)}


class Gaussian(nn.Module):
    """Continuous actions: ``[..., features] -> {"mean": [..., D], "log_std": [..., D]}``.

    The standard deviation is a parameter, independent of the observation.
    """

    def __init__(self, features: int, size: int, log_std: float = 0.0, gain: float = GAIN) -> None:
        super().__init__()
        self.mean = linear(features, size, gain)
        self.log_std = nn.Parameter(torch.full((size,), log_std))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Returns ``mean`` and ``log_std`` ``[..., D]``."""
        mean = self.mean(x)
        return {"mean": mean, "log_std": self.log_std.expand_as(mean)}


class Squashed(nn.Module):
    """Continuous actions in (-1, 1): ``[..., features] -> {"tanh_mean": [..., D], "tanh_log_std": [..., D]}``.

    The standard deviation depends on the observation; a smooth function keeps it between exp(-5) and exp(2).
    """

    def __init__(self, features: int, size: int) -> None:
        super().__init__()
        self.both = linear(features, 2 * size, 1.0)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Returns ``tanh_mean`` and ``tanh_log_std`` ``[..., D]``, the Gaussian before the tanh."""
        mean, spread = self.both(x).chunk(2, -1)
        half = 0.5 * (_LOG_STD_MAX - _LOG_STD_MIN)
        return {"tanh_mean": mean, "tanh_log_std": _LOG_STD_MIN + half * (spread.tanh() + 1)}


class StateDependent(nn.Module):
    """Continuous actions with state-dependent exploration: the noise is a smooth function of the state.

    Raffin et al. 2021, "Smooth exploration for robotic reinforcement learning", https://arxiv.org/abs/2005.05719:
    an action is ``mean + latent @ noise``, where ``noise [L, D]`` has standard deviation ``sde_std`` and is redrawn
    every few steps. For a given state this is a Gaussian; its ``log_std`` is an output too. No gradient of the
    exploration reaches the features.

    Args:
        features: size of the input. The input is also the latent, so it should follow an activation.
        size: length of an action.
        log_std: initial value.
    """

    def __init__(self, features: int, size: int, log_std: float = -2.0, gain: float = GAIN) -> None:
        super().__init__()
        self.mean = linear(features, size, gain)
        self.log_std = nn.Parameter(torch.full((features, size), log_std))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Returns ``mean`` and ``log_std`` ``[..., D]``, ``latent`` ``[..., L]`` and ``sde_std`` ``[..., L, D]``."""
        latent = x.detach()
        std = self.log_std.exp()
        variance = latent.square() @ std.square()
        return {
            "mean": self.mean(x),
            "log_std": 0.5 * (variance + 1e-6).log(),
            "latent": latent,
            "sde_std": std.expand(*x.shape[:-1], *std.shape),
        }


class Hybrid(nn.Module):
    """Discrete and continuous actions at once: the outputs of two heads.

    Args:
        discrete: `Categorical` or `MultiHead`.
        continuous: `Gaussian`, `StateDependent` or `Squashed`.
    """

    def __init__(self, discrete: nn.Module, continuous: nn.Module) -> None:
        super().__init__()
        self.discrete, self.continuous = discrete, continuous

    def forward(self, x: Tensor, mask: Tensor | None = None) -> dict[str, Any]:
        """``mask`` is that of the discrete head."""
        return {**self.discrete(x, mask), **self.continuous(x)}


def plain_layers(head: nn.Module) -> dict[str, Any] | None:
    """The parts of `brayx.nets.mlp.Towers` that are a head's; None: it is no linear layer for each kind of action."""
    discrete, continuous = (head.discrete, head.continuous) if type(head) is Hybrid else (head, head)
    layers: dict[str, Any] = {}
    if type(discrete) is Categorical:
        layers |= {"logits": discrete.logits, "choices": (discrete.logits.out_features,)}
    elif type(discrete) is MultiHead:
        layers |= {"logits": discrete.logits, "choices": discrete.num_actions}
    if type(continuous) is Gaussian:
        layers |= {"mean": continuous.mean, "log_std": continuous.log_std}
    return layers if len(layers) == (4 if type(head) is Hybrid else 2) else None


class Value(nn.Module):
    """``[..., features] -> [...]``, or ``[..., K]`` with ``K`` reward heads."""

    def __init__(self, features: int, heads: int | None = None) -> None:
        super().__init__()
        self.heads = heads
        self.value = linear(features, heads or 1, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        """The values."""
        value: Tensor = self.value(x)
        return value if self.heads else value.squeeze(-1)
