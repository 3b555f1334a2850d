"""A policy on one agent's observation, with a critic on the game's state, or on the observations of the agent's group,
that only training uses. Torch only.

The critic is the submodule ``critic``, which `forward` never calls: engines and exports leave it out, checkpoints
include it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from brayx.nets.encoders import Numbers, Observation, features_of
from brayx.nets.heads import Value, plain_layers
from brayx.nets.mlp import Towers, linears
from brayx.nets.policy import (
    Encoders,
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
from brayx.nets.transformer import Entities
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


class GroupValue(nn.Module):
    """The value of an agent and its group, by attention over the members' observations.

    Args:
        encoder: of one agent's observation. It stays the policy's, as do its parameters.
        network: options.
    """

    def __init__(self, encoder: Observation, network: NetworkConfig) -> None:
        super().__init__()
        self._encoders = (encoder,)  # a tuple, since the weights would otherwise have a second name here
        features = features_of(encoder)
        self.members = Entities([1, features])
        joined = features + self.members.features
        self.trunk = trunk_for(joined, network)
        self.value = Value(network.hidden[-1] if network.hidden else joined)

    def forward(self, state: Mapping[str, Any]) -> Tensor:
        """``{"obs": observations [N, G, ...], "present": [N, G]} -> [N]``; the first observation is the agent's own,
        and members that are not ``present`` have no effect."""
        features = self._encoders[0](state["obs"])
        both = torch.cat([features[:, 0], self.members(features, state["present"])], -1)
        value: Tensor = self.value(self.trunk(both))
        return value


class _ActingPolicy(nn.Module):
    """The part of a policy that acts: encoder, hidden layers and head; arguments and errors as `CentralisedPolicy`."""

    def __init__(
        self,
        own_obs: NestedArray,
        num_actions: int | Sequence[int] | None,
        action_size: int | None,
        categories: Any,
        network: NetworkConfig,
        encoders: Encoders | None = None,
    ) -> None:
        super().__init__()
        refuse_options(
            network,
            "a policy with a central value",
            lstm="has no memory",
            shared="shares no layers with its value, which has another input",
            value_heads="has a single value",
        )
        self.activation = network.activation
        self.encoder = observation_for(own_obs, categories, network, encoders=encoders)
        features = features_of(self.encoder)
        self.trunk = trunk_for(features, network)
        self.head = head_for(num_actions, action_size, network)(network.hidden[-1] if network.hidden else features)

    def _act(self, own_obs: Any) -> dict[str, Any]:
        """One agent's observations ``[N, ...]`` -> the head's outputs."""
        y = self.trunk(self.encoder(own_obs))
        mask = own_obs.get(MASK) if isinstance(own_obs, Mapping) else None
        outputs: dict[str, Any] = self.head(y) if mask is None else self.head(y, mask)
        return outputs


class GroupedPolicy(_ActingPolicy):
    """A policy shared by the members of groups, with the critic for its training. It acts on one agent's observation.

    Args:
        obs: one agent's observation without batch axis, a dict of arrays.
        num_actions, action_size, categories, network, encoders: as for `policy_for`.

    Raises:
        ValueError: as for `CentralisedPolicy`.
    """

    def __init__(
        self,
        obs: NestedArray,
        *,
        num_actions: int | Sequence[int] | None = None,
        action_size: int | None = None,
        categories: Mapping[str, Any] | None = None,
        network: NetworkConfig | None = None,
        encoders: Encoders | None = None,
    ) -> None:
        network = network or NetworkConfig()
        super().__init__(obs, num_actions, action_size, categories, network, encoders)
        self.critic = GroupValue(self.encoder, network)
        refuse_unused(network, leaf_encoders(self.encoder), continuous=action_size is not None)
        start_layers(self, network)
        declare_limits(self, categories)

    def forward(self, obs: Mapping[str, Any]) -> dict[str, Any]:
        """Observations ``[N, ...]`` -> the head's outputs."""
        return self._act(obs)


class CentralisedPolicy(_ActingPolicy):
    """A policy shared by agents, with the critic for its training.

    Args:
        own_obs: one agent's observation without batch axis, for its shapes and dtypes: an array, or a dict of arrays.
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
        network, categories = network or NetworkConfig(), categories or {}
        super().__init__(own_obs, num_actions, action_size, categories.get(OWN), network)
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
        return self._act(obs[OWN])


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
