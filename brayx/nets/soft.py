"""The networks of soft actor-critic: a squashed policy, and twin critics for training only. Torch only.

The critics are the submodule ``critic``, which `forward` never calls: engines and exports leave them out, checkpoints
include them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from brayx.nets.encoders import features_of
from brayx.nets.heads import Squashed
from brayx.nets.policy import (
    ACTIVATIONS,
    Categories,
    Encoders,
    NetworkConfig,
    declare_limits,
    example_of,
    leaf_encoders,
    observation_for,
    refuse_options,
    refuse_unused,
    trunk_for,
)
from brayx.types import NestedArray

NETWORK = NetworkConfig(hidden=[256, 256], activation="relu", distribution="squashed")
"""The paper's choices."""


class Critics(nn.Module):
    """Several critics of the same size, computed in one batch: ``[N, features], [N, D] -> [N, count]``.

    Args:
        encoder: observation to ``[N, features]``; shared by the critics.
        action_size: length of an action, ``D``.
        hidden: sizes of the hidden layers.
        count: number of critics.
        activation: makes the activation module.
    """

    def __init__(
        self,
        encoder: nn.Module,
        action_size: int,
        hidden: Sequence[int],
        count: int = 2,
        activation: Callable[[], nn.Module] = nn.ReLU,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.activation = activation()
        self.count = count
        sizes = [features_of(encoder) + action_size, *hidden, 1]
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for index, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
            weight = torch.empty(count, inputs, outputs)
            for matrix in weight:
                nn.init.orthogonal_(matrix, 1.0 if index == len(sizes) - 2 else math.sqrt(2))
            self.weights.append(nn.Parameter(weight))
            self.biases.append(nn.Parameter(torch.zeros(count, 1, outputs)))

    def forward(self, obs: Any, action: Tensor) -> Tensor:
        """Each critic's estimate of the action's value, ``[N, count]``."""
        x = torch.cat([self.encoder(obs), action], -1)
        x = x.expand(self.count, *x.shape)
        last = len(self.weights) - 1
        for index, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = torch.baddbmm(bias, x, weight)
            x = x if index == last else self.activation(x)
        return x.squeeze(-1).T


class SoftActorCritic(nn.Module):
    """A policy over actions in (-1, 1), with the critics for its training.

    Args:
        obs: one observation without batch axis, for its shapes and dtypes: an array, or a dict of arrays.
        action_size: length of an action.
        network: options; the default ``distribution`` and ``activation`` are those of `NETWORK`.
        categories, encoders: as for `policy_for`.

    Raises:
        ValueError: options that do not apply: a memory, layers shared with a value, several values, another
            distribution, and those of `policy_for`.
    """

    def __init__(
        self,
        obs: NestedArray,
        action_size: int,
        network: NetworkConfig = NETWORK,
        categories: Categories = None,
        encoders: Encoders | None = None,
    ) -> None:
        super().__init__()
        refuse_options(
            network,
            "soft actor-critic",
            lstm="has no memory",
            shared="has critics with layers of their own",
            value_heads="has critics instead of a value",
            uniform_init="has critics with orthogonal initial weights",
        )
        if network.distribution == "sde":
            raise ValueError("network.distribution is sde: soft actor-critic needs squashed, its default")
        options: dict[str, str] = {"distribution": NETWORK.distribution}
        if "activation" not in network.model_fields_set:
            options["activation"] = NETWORK.activation
        network = network.model_copy(update=options)
        self.encoder = observation_for(obs, categories, network, encoders=encoders)
        refuse_unused(network, leaf_encoders(self.encoder), continuous=True)
        features = features_of(self.encoder)
        self.trunk = trunk_for(features, network)
        self.head = Squashed(network.hidden[-1] if network.hidden else features, action_size)
        self.critic = Critics(
            observation_for(obs, categories, network, encoders=encoders),
            action_size,
            network.hidden,
            activation=ACTIVATIONS[network.activation],
        )
        declare_limits(self, categories)

    def forward(self, obs: Any) -> dict[str, Tensor]:
        """Observations ``[N, ...]`` -> ``tanh_mean`` and ``tanh_log_std`` ``[N, D]``."""
        outputs: dict[str, Tensor] = self.head(self.trunk(self.encoder(obs)))
        return outputs


def soft_policy_for(
    obs: NestedArray,
    *,
    action_size: int,
    network: NetworkConfig = NETWORK,
    categories: Categories = None,
    encoders: Encoders | None = None,
) -> tuple[SoftActorCritic, tuple[NestedArray, ...]]:
    """A `SoftActorCritic`, and example arguments for acting, to build an engine with.

    Args:
        obs, action_size, network, categories, encoders: as for `SoftActorCritic`.
    """
    return SoftActorCritic(obs, action_size, network, categories, encoders), (example_of(obs),)
