"""The networks of soft actor-critic: a policy, and twin critics for training only. Torch only.

The critics are the submodule ``critic``, which `forward` never calls: engines and exports leave them out, checkpoints
include them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from brayx.nets.encoders import features_of
from brayx.nets.policy import (
    ACTIVATIONS,
    Categories,
    Encoders,
    NetworkConfig,
    check_mask,
    declare_limits,
    example_of,
    head_for,
    leaf_encoders,
    observation_for,
    refuse_options,
    refuse_unused,
    trunk_for,
)
from brayx.spaces import MASK
from brayx.types import NestedArray

NETWORK = NetworkConfig(hidden=[256, 256], activation="relu")
"""The paper's choices."""


class Critics(nn.Module):
    """Several critics of the same size, computed in one batch: ``[N, features], [N, D] -> [N, count]``.

    Those of discrete actions have a value for each choice of all heads instead of one, ``[N, count, choices]``.

    Args:
        encoder: observation to ``[N, features]``; shared by the critics.
        action_size: length of the continuous action, ``D``; 0: there is none.
        hidden: sizes of the hidden layers.
        count: number of critics.
        activation: makes the activation module.
        choices: number of discrete choices of all heads; 0: there are none.
    """

    def __init__(
        self,
        encoder: nn.Module,
        action_size: int,
        hidden: Sequence[int],
        count: int = 2,
        activation: Callable[[], nn.Module] = nn.ReLU,
        choices: int = 0,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.activation = activation()
        self.count, self.choices = count, choices
        sizes = [features_of(encoder) + action_size, *hidden, choices or 1]
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for index, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
            weight = torch.empty(count, inputs, outputs)
            for matrix in weight:
                nn.init.orthogonal_(matrix, 1.0 if index == len(sizes) - 2 else math.sqrt(2))
            self.weights.append(nn.Parameter(weight))
            self.biases.append(nn.Parameter(torch.zeros(count, 1, outputs)))

    def forward(self, obs: Any, action: Tensor) -> Tensor:
        """Each critic's estimates; ``action`` is the continuous one, ``[N, D]``."""
        x = torch.cat([self.encoder(obs), action], -1)
        x = x.expand(self.count, *x.shape)
        last = len(self.weights) - 1
        for index, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = torch.baddbmm(bias, x, weight)
            x = x if index == last else self.activation(x)
        return x.transpose(0, 1) if self.choices else x.squeeze(-1).T


class SoftActorCritic(nn.Module):
    """A policy over choices, and over numbers in (-1, 1), with the critics for its training.

    Args:
        obs: one observation without batch axis, for its shapes and dtypes: an array, or a dict of arrays.
        action_size: length of a continuous action; None: there is none.
        network: options; the default ``activation`` is that of `NETWORK`, continuous actions are ``squashed``.
        num_actions, categories, encoders: as for `policy_for`.

    Raises:
        ValueError: options that do not apply: a memory, layers shared with a value, several values, another
            distribution, and those of `policy_for`.
    """

    def __init__(
        self,
        obs: NestedArray,
        action_size: int | None,
        network: NetworkConfig = NETWORK,
        categories: Categories = None,
        encoders: Encoders | None = None,
        num_actions: int | Sequence[int] | None = None,
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
        options = {} if action_size is None else {"distribution": "squashed"}
        if "activation" not in network.model_fields_set:
            options["activation"] = NETWORK.activation
        network = network.model_copy(update=options)
        self.encoder = observation_for(obs, categories, network, encoders=encoders)
        refuse_unused(network, leaf_encoders(self.encoder), continuous=action_size is not None)
        check_mask(obs, num_actions)
        features = features_of(self.encoder)
        self.trunk = trunk_for(features, network)
        self.head = head_for(num_actions, action_size, network)(network.hidden[-1] if network.hidden else features)
        self._masked = self.encoder.masked and num_actions is not None
        self.critic = Critics(
            observation_for(obs, categories, network, encoders=encoders),
            action_size or 0,
            network.hidden,
            activation=ACTIVATIONS[network.activation],
            choices=int(np.sum(num_actions or 0)),
        )
        declare_limits(self, categories)

    def forward(self, obs: Any) -> dict[str, Any]:
        """Observations ``[N, ...]`` -> ``logits`` of discrete actions, and ``tanh_mean`` and ``tanh_log_std``
        ``[N, D]`` of continuous ones."""
        x = self.trunk(self.encoder(obs))
        outputs: dict[str, Any] = self.head(x, obs[MASK]) if self._masked else self.head(x)
        return outputs


def soft_policy_for(
    obs: NestedArray,
    *,
    num_actions: int | Sequence[int] | None = None,
    action_size: int | None = None,
    categories: Categories = None,
    network: NetworkConfig | None = None,
    encoders: Encoders | None = None,
) -> tuple[SoftActorCritic, tuple[NestedArray, ...]]:
    """A `SoftActorCritic`, and example arguments for acting, to build an engine with.

    Args:
        obs, num_actions, action_size, categories, network, encoders: as for `SoftActorCritic`.
    """
    network = network or NETWORK
    return SoftActorCritic(obs, action_size, network, categories, encoders, num_actions), (example_of(obs),)
