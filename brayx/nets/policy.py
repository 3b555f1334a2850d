"""Ready-made actor-critics for an observation and a kind of action: `policy_for`. Torch only.

Knows nothing of Gymnasium: observations come as an example, actions as sizes.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from brayx.nets.encoders import MASK, Numbers, Observation, OneHot, Spatial, features_of
from brayx.nets.heads import Categorical, Gaussian, MultiHead, Squashed, StateDependent, Value
from brayx.nets.lstm import LSTM, State
from brayx.nets.mlp import MLP, Towers, linears
from brayx.nets.transformer import Entities
from brayx.types import NestedArray

ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU, "silu": nn.SiLU, "elu": nn.ELU}


class NetworkConfig(BaseModel):
    """Options of a ready-made actor-critic."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    hidden: list[Annotated[int, Field(ge=1)]] = [64, 64]
    """Sizes of the hidden layers, after the convolutions if there are any."""
    activation: Literal["tanh", "relu", "silu", "elu"] = "tanh"
    """Between layers; SAC's are relu where none is chosen."""
    shared: bool | None = None
    """Policy and value share their hidden layers; null: they do where there are images or memory."""
    convolutions: Literal["small", "nature", "impala"] = "nature"
    """What sees images; ``small`` is a third of ``nature``."""
    entities: list[str] = []
    """Leaves ``[E, D]`` of the observation that are sets, which a transformer sees; a row of zeros is nobody. A bare
    array has the name ``""``."""
    lstm: Annotated[int, Field(ge=0)] = 0
    """Size of an LSTM after the hidden layers; 0: no memory."""
    distribution: Literal["gaussian", "sde", "squashed"] = "gaussian"
    """Of continuous actions: a Gaussian, one with state-dependent exploration, or one squashed into -1 to 1."""
    log_std: float | None = None
    """Logarithm of the deviation of continuous actions at the start; null: 0, with state-dependent exploration -2."""
    value_heads: Annotated[int, Field(ge=1)] | None = None
    """Values, one a reward head; null: a single one."""
    uniform_init: bool = False
    """Weights and biases start uniform within 1 / sqrt(inputs), as those of torch's own layers; else weights start
    orthogonal, those of the policy's last layer near zero, and biases at zero."""


_DEFAULT = NetworkConfig()


class Policy(nn.Module):
    """An actor-critic: encoder, hidden layers, heads.

    Args:
        encoder: observation to ``[..., features]``; has ``features``.
        head: makes the policy's head, given the number of features.
        config: options.
        shared: policy and value share their hidden layers.
    """

    def __init__(self, encoder: nn.Module, head: Any, config: NetworkConfig, shared: bool) -> None:
        super().__init__()
        features = features_of(encoder)
        self.activation = config.activation
        self.encoder = encoder
        self.shared = shared
        self.trunk = trunk_for(features, config)
        last = config.hidden[-1] if config.hidden else features
        self.value_trunk = None if shared else trunk_for(features, config)
        self.head = head(last)
        self.value = Value(last, config.value_heads)
        self._masks = "mask" in inspect.signature(self.head.forward).parameters

    def forward(self, obs: Any) -> dict[str, Any]:
        """Observations ``[..., ]`` -> the head's outputs and ``value``."""
        x = self.encoder(obs)
        y = self.trunk(x)
        return self.outputs(y, y if self.value_trunk is None else self.value_trunk(x), obs)

    def towers(self) -> Towers | None:
        """Its layers, if it is nothing but two MLPs on a flat observation with one discrete or a Gaussian action."""
        encoder, head = self.encoder, self.head
        if type(self) is not Policy or self.shared or not (isinstance(encoder, Observation) and encoder.flat):
            return None
        if not isinstance(head, Categorical | Gaussian) or self.value.heads or self.activation not in ("tanh", "relu"):
            return None
        assert self.value_trunk is not None
        return Towers(
            (*linears(self.trunk), head.logits if isinstance(head, Categorical) else head.mean),
            (*linears(self.value_trunk), self.value.value),
            "tanh" if self.activation == "tanh" else "relu",
            head.log_std if isinstance(head, Gaussian) else None,
        )

    def outputs(self, y: Tensor, for_value: Tensor, obs: Any) -> dict[str, Any]:
        """What the heads make of features."""
        mask = obs.get(MASK) if isinstance(obs, Mapping) else None
        outputs = self.head(y) if mask is None or not self._masks else self.head(y, mask)
        return {**outputs, "value": self.value(for_value)}


class RecurrentPolicy(Policy):
    """An actor-critic with memory: encoder, hidden layers, LSTM, heads.

    The state begins as zeros. Learning passes whole sequences, see `brayx.nets.lstm`.
    """

    is_recurrent = True

    def __init__(self, encoder: nn.Module, head: Any, config: NetworkConfig) -> None:
        super().__init__(encoder, lambda _: head(config.lstm), config, shared=True)
        last = config.hidden[-1] if config.hidden else features_of(encoder)
        self.memory = LSTM(last, config.lstm)
        self.value = Value(config.lstm, config.value_heads)

    def forward(self, obs: Any, state: State, carry: Tensor | None = None) -> dict[str, Any]:  # type: ignore[override]
        """One step ``[N, ...]``, or a sequence ``[T, N, ...]`` with ``carry`` ``[T, N]``; gives ``state`` as well."""
        y, after = self.memory(self.trunk(self.encoder(obs)), state, carry)
        return {**self.outputs(y, y, obs), "state": after}


def policy_for(
    obs: NestedArray,
    *,
    num_actions: int | Sequence[int] | None = None,
    action_size: int | None = None,
    categories: int | Mapping[str, int] | None = None,
    network: NetworkConfig | None = None,
) -> tuple[nn.Module, tuple[NestedArray, ...]]:
    """An actor-critic and an example of its arguments, batch axis first, as an engine is built from.

    An image is a leaf of bytes with three axes; everything else is flattened. A leaf ``action_mask`` (in the length of
    all actions of all heads) masks the logits.

    Args:
        obs: one observation without batch axis, for its shapes and dtypes: an array, or a dict of arrays.
        num_actions: of a discrete action; several numbers for several at once.
        action_size: length of a continuous action.
        categories: of observations that are whole numbers below this: by name of the leaf, or of a bare array.
        network: options.

    Raises:
        ValueError: not exactly one of ``num_actions`` and ``action_size``, an observation that fits no network, or
            options for what this one does not have.
    """
    network = network or NetworkConfig()
    if (num_actions is None) == (action_size is None):
        raise ValueError(f"give num_actions or action_size, got {num_actions} and {action_size}")
    encoder = observation_for(obs, categories, network)
    seen = list(zip(encoder.names, encoder.encoders, strict=True))
    refuse_unused(network, seen, continuous=action_size is not None)
    images = any(isinstance(each, Spatial) for _, each in seen)
    module: nn.Module
    if network.lstm:
        if network.shared is False:
            raise ValueError("network.shared is False: policy and value share a memory; fits: null or true, or lstm 0")
        module = RecurrentPolicy(encoder, head_for(num_actions, action_size, network), network)
    else:
        shared = images if network.shared is None else network.shared
        module = Policy(encoder, head_for(num_actions, action_size, network), network, shared)
    start_layers(module, network)
    if isinstance(obs, Mapping) and MASK in obs and num_actions is not None:
        expected = num_actions if isinstance(num_actions, int) else sum(num_actions)
        if np.shape(obs[MASK]) != (expected,):
            raise ValueError(f"{MASK}: expected shape ({expected},), one for each action, got {np.shape(obs[MASK])}")
    example = example_of(obs)
    return module, (example, module.memory.initial(2)) if isinstance(module, RecurrentPolicy) else (example,)


def start_layers(module: nn.Module, network: NetworkConfig) -> None:
    """Starts all linear and convolutional layers anew, if ``uniform_init`` asks for it."""
    for layer in module.modules() if network.uniform_init else ():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            layer.reset_parameters()


def example_of(obs: NestedArray) -> NestedArray:
    """Two observations of zeros, as networks take them: tensors, of float32 whatever floats an environment gives.

    Args:
        obs: one observation, without batch axis.
    """
    if isinstance(obs, Mapping):
        return {name: example_of(leaf) for name, leaf in obs.items()}
    leaf = np.asarray(obs)
    return torch.from_numpy(np.zeros((2, *leaf.shape), np.float32 if leaf.dtype.kind == "f" else leaf.dtype))


def observation_for(
    obs: NestedArray, categories: int | Mapping[str, int] | None, network: NetworkConfig
) -> Observation:
    """What sees a whole observation, ``action_mask`` left out; arguments as of `policy_for`."""
    if isinstance(obs, Mapping):
        leaves = {str(name): np.asarray(leaf) for name, leaf in obs.items()}
        counts = dict(categories) if isinstance(categories, Mapping) else {}
    else:
        leaves = {"": np.asarray(obs)}
        counts = {} if categories is None or isinstance(categories, Mapping) else {"": categories}
    return Observation(
        {name: encoder_for(leaf, counts.get(name), network, name) for name, leaf in leaves.items() if name != MASK}
    )


def refuse_options(network: NetworkConfig, who: str, **why: str) -> None:
    """Refuses options that networks do not have, where they say something.

    Args:
        network: options.
        who: has these networks.
        **why: by option.

    Raises:
        ValueError: names the first such option.
    """
    for name, reason in why.items():
        if getattr(network, name) not in (None, 0, False):
            raise ValueError(f"network.{name} is {getattr(network, name)}: {who} {reason}")


def refuse_unused(network: NetworkConfig, seen: Sequence[tuple[str, nn.Module]], *, continuous: bool) -> None:
    """Refuses options of what sees and of what acts that nothing would go by; their defaults say nothing.

    Args:
        network: options.
        seen: leaves by name, each with what sees it.
        continuous: actions are.

    Raises:
        ValueError: names the first such option, and what fits.
    """
    sets = [name for name, encoder in seen if isinstance(encoder, Entities)]
    for name in network.entities:
        if name not in sets:
            raise ValueError(
                f"network.entities has {name!r}, which is no leaf that a transformer could see; fits: an array [E, D] "
                f"of numbers; leaves are {[name for name, _ in seen]}"
            )
    if network.convolutions != _DEFAULT.convolutions and not any(isinstance(each, Spatial) for _, each in seen):
        raise ValueError(
            f"network.convolutions is {network.convolutions}: nothing that is observed is an image; fits: a leaf of "
            "bytes with three axes, or none chosen"
        )
    if not continuous and network.distribution != _DEFAULT.distribution:
        raise ValueError(
            f"network.distribution is {network.distribution}: these actions are discrete; fits: continuous ones, or "
            "none chosen"
        )
    if network.log_std is not None and (not continuous or network.distribution == "squashed"):
        why = "finds its deviation from what it sees" if continuous else "is of discrete actions"
        raise ValueError(
            f"network.log_std is {network.log_std}: this policy {why}; fits: continuous actions with distribution "
            "gaussian or sde, or null"
        )


def encoder_for(leaf: np.ndarray, categories: int | None, network: NetworkConfig, name: str) -> nn.Module:
    """What sees one leaf of an observation, given without batch axis; by its name the options know it."""
    if categories is not None:
        return OneHot(categories, leaf.shape)
    if name in network.entities:
        return Entities(leaf.shape)
    if leaf.ndim == 3 and leaf.dtype == np.uint8:
        return Spatial(leaf.shape, network.convolutions)
    return Numbers(leaf.shape)


def trunk_for(features: int, config: NetworkConfig) -> nn.Module:
    """The hidden layers."""
    if not config.hidden:
        return nn.Identity()
    return MLP([features, *config.hidden], ACTIVATIONS[config.activation], last_activation=True)


def head_for(num_actions: int | Sequence[int] | None, action_size: int | None, config: NetworkConfig) -> Any:
    """Makes the head of a policy, given the number of features."""

    def head(features: int) -> nn.Module:
        if isinstance(num_actions, int):
            return Categorical(features, num_actions)
        if num_actions is not None:
            return MultiHead(features, num_actions)
        assert action_size is not None
        if config.distribution == "squashed":
            return Squashed(features, action_size)
        if config.distribution == "sde":
            return StateDependent(features, action_size, -2.0 if config.log_std is None else config.log_std)
        return Gaussian(features, action_size, config.log_std or 0.0)

    return head
