"""A policy on one agent's observation, with a critic on the game's state that only training uses. Torch only.

The critic is the submodule ``critic``, which `forward` never calls: engines and exports leave it out, checkpoints
include it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

from brayx.nets.encoders import Numbers, features_of
from brayx.nets.heads import Value, plain_layers
from brayx.nets.mlp import Towers, linears
from brayx.nets.policy import (
    NetworkConfig,
    declare_limits,
    encoder_for,
    example_of,
    head_for,
    leaf_encoders,
    observation_for,
    refuse_options,
    refuse_unused,
    start_layers,
    trunk_for,
)
from brayx.spaces import MASK, Limits
from brayx.types import NestedArray

OWN, STATE = "obs", "state"
"""Keys of the agent's own observation and of the game's state in a combined observation."""


class Central(nn.Module):
    """The value of a state of the game: ``[N, ...] -> [N]``."""

    def __init__(self, state: NestedArray, network: NetworkConfig, categories: int | Limits | None = None) -> None:
        super().__init__()
        if isinstance(state, Mapping):
            raise ValueError(f"{STATE} is a dict of {sorted(state)}, expected one array for a central value")
        self.encoder = encoder_for(np.asarray(state), categories, network, STATE)
        self.flat = isinstance(self.encoder, Numbers) and self.encoder.dims == 1
        features = features_of(self.encoder)
        self.trunk = trunk_for(features, network)
        self.value = Value(network.hidden[-1] if network.hidden else features)

    def forward(self, state: Tensor) -> Tensor:
        """``[N, ...] -> [N]``."""
        value: Tensor = self.value(self.trunk(self.encoder(state)))
        return value


class CentralisedPolicy(nn.Module):
    """A policy shared by agents, with the critic for its training.

    Args:
        own: one agent's observation without batch axis, for its shapes and dtypes: an array, or a dict of arrays.
            A leaf ``action_mask`` masks the logits.
        state: one state of the game.
        num_actions: number of discrete actions; a sequence for several heads; None: there are none.
        action_size: length of a continuous action; with ``num_actions``, too, actions are hybrid.
        categories: for ``obs`` and ``state``, each as for `policy_for`.
        network: options; in ``entities`` the state's name is ``state``.

    Raises:
        ValueError: no kind of action, or options that do not apply: a memory, layers shared with the
            value, several values, and those of `policy_for`.
    """

    def __init__(
        self,
        own_obs: NestedArray,
        state: NestedArray,
        *,
        num_actions: int | Sequence[int] | None = None,
        action_size: int | None = None,
        categories: Mapping[str, Any] | None = None,
        network: NetworkConfig | None = None,
    ) -> None:
        super().__init__()
        network, categories = network or NetworkConfig(), categories or {}
        refuse_options(
            network,
            "a policy with a central value",
            lstm="has no memory",
            shared="shares no layers with its value, which has another input",
            value_heads="has a single value",
        )
        self.activation = network.activation
        self.encoder = observation_for(own_obs, categories.get(OWN), network)
        features = features_of(self.encoder)
        self.trunk = trunk_for(features, network)
        self.head = head_for(num_actions, action_size, network)(network.hidden[-1] if network.hidden else features)
        self.critic = Central(state, network, categories.get(STATE))
        seen = [*leaf_encoders(self.encoder), (STATE, self.critic.encoder)]
        refuse_unused(network, seen, continuous=action_size is not None)
        start_layers(self, network)
        declare_limits(self, categories)

    def towers(self) -> Towers | None:
        """The layers of policy and critic if both are plain MLPs on flat arrays; else None. See `Policy.towers`."""
        heads, critic = plain_layers(self.head), self.critic
        flat = type(self) is CentralisedPolicy and self.encoder.flat and critic.flat
        if not flat or heads is None or self.activation not in ("tanh", "relu"):
            return None
        return Towers(
            linears(self.trunk),
            (*linears(critic.trunk), critic.value.value),
            "tanh" if self.activation == "tanh" else "relu",
            **heads,
        )

    def forward(self, obs: Mapping[str, Any]) -> dict[str, Any]:
        """``{"obs": [N, ...]}`` -> the head's outputs."""
        own_obs = obs[OWN]
        y = self.trunk(self.encoder(own_obs))
        mask = own_obs.get(MASK) if isinstance(own_obs, Mapping) else None
        outputs: dict[str, Any] = self.head(y) if mask is None else self.head(y, mask)
        return outputs


def central_policy_for(
    obs: Mapping[str, NestedArray], **options: Any
) -> tuple[CentralisedPolicy, tuple[NestedArray, ...]]:
    """A `CentralisedPolicy`, and example arguments for acting, to build an engine with.

    Args:
        obs: ``{"obs": ..., "state": ...}`` without batch axis.
        **options: of `CentralisedPolicy`.

    Raises:
        ValueError: the observation lacks one of the two, or options that do not apply.
    """
    if not isinstance(obs, Mapping) or not {OWN, STATE} <= set(obs):
        keys = sorted(obs) if isinstance(obs, Mapping) else type(obs).__name__
        raise ValueError(f"an observation for a central value holds {OWN!r} and {STATE!r}, got {keys}")
    return CentralisedPolicy(obs[OWN], obs[STATE], **options), ({OWN: example_of(obs[OWN])},)
