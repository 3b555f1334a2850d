"""Multilayer perceptrons, and an actor-critic made of two of them. Torch only; knows nothing of training.

Weights start orthogonal and biases at zero. The gain is sqrt(2) in hidden layers, 0.01 in a policy's last layer and 1
in a value's. These details decide whether PPO learns (Andrychowicz et al. 2021, "What matters in on-policy
reinforcement learning?", and Huang et al. 2022, "The 37 implementation details of PPO").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn


class MLP(nn.Module):
    """Linear layers with an activation between them, and optionally after the last.

    ``[..., sizes[0]] -> [..., sizes[-1]]``

    Args:
        sizes: sizes of the input, the hidden layers and the output.
        activation: makes the activation module.
        gain: gain of the orthogonal initialisation of hidden layers.
        last_gain: gain of the last layer; ``gain`` if absent.
        last_activation: an activation follows the last layer too.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        activation: Callable[[], nn.Module] = nn.Tanh,
        gain: float = math.sqrt(2),
        last_gain: float | None = None,
        last_activation: bool = False,
    ) -> None:
        super().__init__()
        if len(sizes) < 2 or min(sizes) < 1:
            raise ValueError(f"sizes must have at least an input and an output, each positive, got {list(sizes)}")
        layers: list[nn.Module] = []
        last = len(sizes) - 2
        for index in range(last + 1):
            linear = nn.Linear(sizes[index], sizes[index + 1])
            nn.init.orthogonal_(linear.weight, last_gain if index == last and last_gain is not None else gain)
            nn.init.zeros_(linear.bias)
            layers.append(linear)
            if index < last or last_activation:
                layers.append(activation())
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., sizes[0]] -> [..., sizes[-1]]``."""
        y: torch.Tensor = self.layers(x)
        return y


@dataclass(frozen=True)
class Towers:
    """The layers of an actor-critic that consists of two plain MLPs, for closed-form gradients.

    Attributes:
        policy: the policy's hidden layers in order; the activation follows each.
        value: the value's layers in order; the same activation follows each but the last.
        activation: ``tanh`` or ``relu``.
        logits: makes the logits of all categories from the policy's hidden layers; None: there are none.
        choices: number of categories of each discrete action, which share ``logits``.
        mean: makes the means of a Gaussian from them; None: there is none.
        log_std: ``[D]`` of the Gaussian.
        encode: makes the input of both from the observation, without parameters; None: the policy's input is the
            observation's first leaf, the value's the last.
        mask: name of the part of the observation that says which categories are allowed, ``[N, sum of choices]``; None:
            all are.
    """

    policy: tuple[nn.Linear, ...]
    value: tuple[nn.Linear, ...]
    activation: Literal["tanh", "relu"]
    logits: nn.Linear | None = None
    choices: tuple[int, ...] = ()
    mean: nn.Linear | None = None
    log_std: nn.Parameter | None = None
    encode: Callable[[Any], torch.Tensor] | None = None
    mask: str | None = None

    def parameters(self) -> list[nn.Parameter]:
        """All parameters."""
        heads = (head for head in (self.logits, self.mean) if head is not None)
        layers = [p for layer in (*self.policy, *heads, *self.value) for p in layer.parameters()]
        return layers if self.log_std is None else [*layers, self.log_std]


def linears(module: nn.Module) -> tuple[nn.Linear, ...]:
    """The linear layers of a module, in order."""
    return tuple(layer for layer in module.modules() if isinstance(layer, nn.Linear))


class ActorCritic(nn.Module):
    """A policy over discrete actions and a value, as two MLPs that share no layers.

    Args:
        obs_dim: length of the flat observation.
        num_actions: number of discrete actions.
        hidden: sizes of the hidden layers of each MLP.
    """

    def __init__(self, obs_dim: int, num_actions: int, hidden: Sequence[int] = (64, 64)) -> None:
        super().__init__()
        self.policy = MLP([obs_dim, *hidden, num_actions], last_gain=0.01)
        self.value = MLP([obs_dim, *hidden, 1], last_gain=1.0)

    def forward(self, obs: torch.Tensor) -> dict[str, torch.Tensor]:
        """``[..., obs_dim]`` float32 -> ``{"logits": [..., num_actions], "value": [...]}``."""
        return {"logits": self.policy(obs), "value": self.value(obs).squeeze(-1)}

    def towers(self) -> Towers | None:
        """The layers; None in a subclass, which may compute something else with them."""
        if type(self) is not ActorCritic:
            return None
        *hidden, logits = linears(self.policy)
        return Towers(tuple(hidden), linears(self.value), "tanh", logits, (logits.out_features,))
