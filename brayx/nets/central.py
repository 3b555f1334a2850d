"""A policy of an agent's own observation, and a critic of the whole game that only learns. Torch only.

The critic is a submodule named ``critic``, which `forward` never calls: no engine computes it and no export holds it;
checkpoints do, as they do the rest of the module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

from brayx.nets.encoders import MASK, Numbers, features_of
from brayx.nets.heads import Categorical, Gaussian, Value
from brayx.nets.mlp import Towers, linears
from brayx.nets.policy import (
    NetworkConfig,
    encoder_for,
    example_of,
    head_for,
    observation_for,
    refuse_options,
    refuse_unused,
    start_layers,
    trunk_for,
)
from brayx.types import NestedArray

OWN, STATE = "obs", "state"
"""Names of the two in an observation of both."""


class Central(nn.Module):
    """A value of states: ``[N, ...] -> [N]``."""

    def __init__(self, state: NestedArray, network: NetworkConfig, categories: int | None = None) -> None:
        super().__init__()
        self.encoder = encoder_for(np.asarray(state), categories, network, STATE)
        self.flat = isinstance(self.encoder, Numbers) and self.encoder.dims == 1
        features = features_of(self.encoder)
        self.trunk = trunk_for(features, network)
        self.value = Value(network.hidden[-1] if network.hidden else features)

    def forward(self, state: Tensor) -> Tensor:
        """What the rest of the game is worth."""
        value: Tensor = self.value(self.trunk(self.encoder(state)))
        return value


class CentralisedPolicy(nn.Module):
    """A policy that agents share, and the critic it learns with.

    Args:
        own: one agent's own observation without batch axis, for its shapes and dtypes: an array, or a dict of arrays,
            of which ``action_mask`` masks the logits.
        state: one state of the game.
        num_actions: of a discrete action; several numbers for several at once; None: continuous.
        action_size: length of a continuous action.
        categories: of ``obs`` and ``state``, as `policy_for` has them.
        network: options; ``entities`` knows the state as ``state``.

    Raises:
        ValueError: neither kind of action, or options that do not apply: a memory, layers shared with the value,
            several values, and as `policy_for`.
    """

    def __init__(
        self,
        own: NestedArray,
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
            shared="sees something else than its value, and shares no layers with it",
            value_heads="has a single value",
        )
        if (num_actions is None) == (action_size is None):
            raise ValueError(f"give num_actions or action_size, got {num_actions} and {action_size}")
        self.activation = network.activation
        self.encoder = observation_for(own, categories.get(OWN), network)
        features = features_of(self.encoder)
        self.trunk = trunk_for(features, network)
        self.head = head_for(num_actions, action_size, network)(network.hidden[-1] if network.hidden else features)
        self.critic = Central(state, network, categories.get(STATE))
        seen = zip(self.encoder.names, self.encoder.encoders, strict=True)
        refuse_unused(network, [*seen, (STATE, self.critic.encoder)], continuous=action_size is not None)
        start_layers(self, network)

    def towers(self) -> Towers | None:
        """Its layers with the critic's, if both are nothing but MLPs on flat arrays; as `Policy.towers`."""
        head, critic = self.head, self.critic
        flat = type(self) is CentralisedPolicy and self.encoder.flat and critic.flat
        if not flat or not isinstance(head, Categorical | Gaussian) or self.activation not in ("tanh", "relu"):
            return None
        return Towers(
            (*linears(self.trunk), head.logits if isinstance(head, Categorical) else head.mean),
            (*linears(critic.trunk), critic.value.value),
            "tanh" if self.activation == "tanh" else "relu",
            head.log_std if isinstance(head, Gaussian) else None,
            apart=True,
        )

    def forward(self, obs: Mapping[str, Any]) -> dict[str, Any]:
        """``{"obs": [N, ...]}`` -> the head's outputs."""
        own = obs[OWN]
        y = self.trunk(self.encoder(own))
        mask = own.get(MASK) if isinstance(own, Mapping) else None
        outputs: dict[str, Any] = self.head(y) if mask is None else self.head(y, mask)
        return outputs


def central_policy_for(
    obs: Mapping[str, NestedArray], **options: Any
) -> tuple[CentralisedPolicy, tuple[NestedArray, ...]]:
    """The networks for an observation of both, and an example of what acting takes, as an engine is built from.

    Args:
        obs: ``{"obs": ..., "state": ...}`` without batch axis.
        **options: as of `CentralisedPolicy`.

    Raises:
        ValueError: the observation is not of both, or the network is to have what this one has no use for.
    """
    if not isinstance(obs, Mapping) or not {OWN, STATE} <= set(obs):
        held = sorted(obs) if isinstance(obs, Mapping) else type(obs).__name__
        raise ValueError(f"an observation for a central value holds {OWN!r} and {STATE!r}, got {held}")
    return CentralisedPolicy(obs[OWN], obs[STATE], **options), ({OWN: example_of(obs[OWN])},)
