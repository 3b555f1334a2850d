"""Ready-made actor-critics: `policy_for` builds one for an observation and a kind of action. Torch only.

Knows nothing of Gymnasium: it takes an example observation and the size of an action.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from brayx.nets.encoders import Custom, Numbers, Observation, OneHot, Spatial, features_of
from brayx.nets.heads import Categorical, Gaussian, Hybrid, MultiHead, Squashed, StateDependent, Value, plain_layers
from brayx.nets.lstm import LSTM, State
from brayx.nets.mlp import MLP, Towers, linears
from brayx.nets.transformer import Entities
from brayx.spaces import LIMITS_ATTRIBUTE, MASK, Limits, by_path
from brayx.types import NestedArray

Categories: TypeAlias = int | Limits | Mapping[str, Any] | None
"""Numbers of categories, or limits, in the nesting of an observation."""
Encoders: TypeAlias = Callable[[str], nn.Module]
"""Makes the encoder of a leaf by its name."""
ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU, "silu": nn.SiLU, "elu": nn.ELU}


class NetworkConfig(BaseModel):
    """Options of a ready-made actor-critic."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    hidden: list[Annotated[int, Field(ge=1)]] = [64, 64]
    """Sizes of the hidden layers, after any convolutions."""
    activation: Literal["tanh", "relu", "silu", "elu"] = "tanh"
    """Activation between layers; SAC's default is relu."""
    shared: bool | None = None
    """Policy and value share their hidden layers; null: only with images or a memory."""
    convolutions: Literal["small", "nature", "impala"] = "nature"
    """Encoder of images; ``small`` takes a third of the work of ``nature``."""
    entities: list[str] = []
    """Leaves ``[E, D]`` of the observation that are sets, for a transformer; a row of zeros is an absent entity. The
    name of a bare array is ``""``."""
    lstm: Annotated[int, Field(ge=0)] = 0
    """Size of an LSTM after the hidden layers; 0: no memory."""
    distribution: Literal["gaussian", "sde", "squashed"] = "gaussian"
    """Distribution of continuous actions: a Gaussian, one with state-dependent exploration (``sde``), or one squashed
    to (-1, 1)."""
    log_std: float | None = None
    """Initial log standard deviation of continuous actions; null: 0, or -2 for ``sde``."""
    value_heads: Annotated[int, Field(ge=1)] | None = None
    """Number of values, one per reward head; null: a single value."""
    uniform_init: bool = False
    """Weights and biases start uniform within 1 / sqrt(inputs), as in torch's layers. Otherwise weights start
    orthogonal, with the policy's last layer near zero, and biases at zero."""


_DEFAULT = NetworkConfig()


class Policy(nn.Module):
    """An actor-critic: encoder, hidden layers, heads.

    Args:
        encoder: observation to ``[..., features]``; has ``features``.
        head: makes the policy's head from the number of features.
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
        """Observations ``[..., *shape]`` -> the head's outputs and ``value``."""
        x = self.encoder(obs)
        y = self.trunk(x)
        return self.outputs(y, y if self.value_trunk is None else self.value_trunk(x), obs)

    def towers(self) -> Towers | None:
        """The layers if policy and value are plain MLPs, behind an encoder without parameters."""
        encoder, heads = self.encoder, plain_layers(self.head)
        if type(self) is not Policy or self.shared or not isinstance(encoder, Observation) or heads is None:
            return None
        if next(encoder.parameters(), None) is not None:
            return None
        if self.value.heads or self.activation not in ("tanh", "relu"):
            return None
        assert self.value_trunk is not None
        return Towers(
            linears(self.trunk),
            (*linears(self.value_trunk), self.value.value),
            "tanh" if self.activation == "tanh" else "relu",
            **heads,
            encode=None if encoder.lone else encoder,
            mask=MASK if encoder.masked and self._masks else None,
        )

    def outputs(self, y: Tensor, for_value: Tensor, obs: Any) -> dict[str, Any]:
        """The outputs of all heads."""
        mask = obs.get(MASK) if isinstance(obs, Mapping) else None
        outputs = self.head(y) if mask is None or not self._masks else self.head(y, mask)
        return {**outputs, "value": self.value(for_value)}


class RecurrentPolicy(Policy):
    """An actor-critic with memory: encoder, hidden layers, LSTM, heads.

    The initial state is zero. Learning passes whole sequences, see `brayx.nets.lstm`.
    """

    is_recurrent = True

    def __init__(self, encoder: nn.Module, head: Any, config: NetworkConfig) -> None:
        super().__init__(encoder, lambda _: head(config.lstm), config, shared=True)
        last = config.hidden[-1] if config.hidden else features_of(encoder)
        self.memory = LSTM(last, config.lstm)
        self.value = Value(config.lstm, config.value_heads)

    def forward(self, obs: Any, state: State, carry: Tensor | None = None) -> dict[str, Any]:  # type: ignore[override]
        """One step ``[N, ...]``, or a sequence ``[T, N, ...]`` with ``carry`` ``[T, N]``; also returns ``state``."""
        y, after = self.memory(self.trunk(self.encoder(obs)), state, carry)
        return {**self.outputs(y, y, obs), "state": after}


def policy_for(
    obs: NestedArray,
    *,
    num_actions: int | Sequence[int] | None = None,
    action_size: int | None = None,
    categories: Categories = None,
    network: NetworkConfig | None = None,
    encoders: Encoders | None = None,
) -> tuple[nn.Module, tuple[NestedArray, ...]]:
    """An actor-critic, and example arguments with a batch axis, to build an engine with.

    A uint8 leaf with three axes is an image; all others are flattened. A leaf ``action_mask``, with one entry per
    action of all heads, masks the logits.

    Args:
        obs: one observation without batch axis, for its shapes and dtypes: an array, or a dict of arrays or dicts.
        num_actions: number of discrete actions; a sequence for several heads.
        action_size: length of a continuous action; with ``num_actions``, too, actions are hybrid.
        categories: for integer leaves, the number of categories or their `Limits`, by name of the leaf; for a bare
            array without names.
        network: options.
        encoders: makes the encoders of a dict's leaves, instead of the choice by dtype and shape.

    Raises:
        ValueError: neither ``num_actions`` nor ``action_size``, an observation that fits no network, or options that
            do not apply.
    """
    network = network or NetworkConfig()
    encoder = observation_for(obs, categories, network, encoders=encoders)
    seen = leaf_encoders(encoder)
    refuse_unused(network, seen, continuous=action_size is not None)
    images = any(isinstance(leaf, Spatial) for _, leaf in seen)
    module: nn.Module
    if network.lstm:
        if network.shared is False:
            raise ValueError("network.shared is False: policy and value share a memory; use null or true, or lstm 0")
        module = RecurrentPolicy(encoder, head_for(num_actions, action_size, network), network)
    else:
        shared = images if network.shared is None else network.shared
        module = Policy(encoder, head_for(num_actions, action_size, network), network, shared)
    start_layers(module, network)
    declare_limits(module, categories)
    check_mask(obs, num_actions)
    example = example_of(obs)
    return module, (example, module.memory.initial(2)) if isinstance(module, RecurrentPolicy) else (example,)


def check_mask(obs: NestedArray, num_actions: int | Sequence[int] | None) -> None:
    """Refuses an ``action_mask`` without one entry per action of all heads.

    Raises:
        ValueError: names its shape and the expected one.
    """
    if isinstance(obs, Mapping) and MASK in obs and num_actions is not None:
        expected = num_actions if isinstance(num_actions, int) else sum(num_actions)
        if np.shape(obs[MASK]) != (expected,):
            raise ValueError(f"{MASK}: expected shape ({expected},), one for each action, got {np.shape(obs[MASK])}")


def declare_limits(module: nn.Module, categories: Categories) -> None:
    """Declares limits of the whole numbers in the argument ``obs``; acting and replay refuse values outside."""
    setattr(module, LIMITS_ATTRIBUTE, by_path(_limits(categories), "obs"))


def _limits(categories: Categories) -> Any:
    """A tree of `Limits`."""
    if isinstance(categories, Mapping):
        return {name: _limits(part) for name, part in categories.items()}
    return Limits.of(categories) if isinstance(categories, int) else categories


def start_layers(module: nn.Module, network: NetworkConfig) -> None:
    """Reinitialises all linear and convolutional layers if ``uniform_init`` is set, except those of a `Custom`."""
    custom = {layer for part in module.modules() if isinstance(part, Custom) for layer in part.modules()}
    for layer in module.modules() if network.uniform_init else ():
        if isinstance(layer, nn.Linear | nn.Conv2d) and layer not in custom:
            layer.reset_parameters()


def example_of(obs: NestedArray) -> NestedArray:
    """A batch of two copies of an observation, as tensors; all floats are float32.

    Args:
        obs: one observation, without batch axis.
    """
    if isinstance(obs, Mapping):
        return {name: example_of(leaf) for name, leaf in obs.items()}
    leaf = np.asarray(obs)
    return torch.from_numpy(np.stack([leaf, leaf]).astype(np.float32 if leaf.dtype.kind == "f" else leaf.dtype))


def observation_for(
    obs: NestedArray,
    categories: Categories,
    network: NetworkConfig,
    path: tuple[str, ...] = (),
    encoders: Encoders | None = None,
) -> Observation:
    """The encoder of a whole observation without ``action_mask``; arguments as for `policy_for`. ``path`` leads to a
    dict inside a dict."""
    if not isinstance(obs, Mapping):
        count = None if isinstance(categories, Mapping) else categories
        return Observation({"": encoder_for(np.asarray(obs), count, network, "")})
    if path and MASK in obs:
        raise ValueError(f"{MASK} is inside {'/'.join(path)!r}, expected it next to {path[0]!r}")
    parts: dict[str, nn.Module] = {}
    for name, leaf in obs.items():
        of_leaf: Any = categories.get(name) if isinstance(categories, Mapping) else None
        inner = (*path, str(name))
        if isinstance(leaf, Mapping):
            parts[str(name)] = observation_for(leaf, of_leaf, network, inner)
        elif name != MASK and encoders is not None:
            parts[str(name)] = encoders(str(name))
        elif name != MASK:
            parts[str(name)] = encoder_for(np.asarray(leaf), of_leaf, network, "/".join(inner))
    return Observation(parts, masked=MASK in obs)


def leaf_encoders(encoder: Observation, path: str = "") -> list[tuple[str, nn.Module]]:
    """Name and encoder of each leaf. The name of a leaf in a nested dict is its path."""
    leaves: list[tuple[str, nn.Module]] = []
    for name, part in zip(encoder.names, encoder.encoders, strict=True):
        if isinstance(part, Observation):
            leaves += leaf_encoders(part, f"{path}{name}/")
        else:
            leaves.append((f"{path}{name}", part))
    return leaves


def refuse_options(network: NetworkConfig, subject: str, **reasons: str) -> None:
    """Refuses options that a kind of network does not support, unless they have their default value.

    Args:
        network: options.
        subject: the kind of network, for the message.
        **reasons: by option.

    Raises:
        ValueError: names the first such option.
    """
    for name, reason in reasons.items():
        if getattr(network, name) not in (None, 0, False):
            raise ValueError(f"network.{name} is {getattr(network, name)}: {subject} {reason}")


def refuse_unused(network: NetworkConfig, seen: Sequence[tuple[str, nn.Module]], *, continuous: bool) -> None:
    """Refuses options of encoders and heads that would have no effect, unless they have their default value.

    Args:
        network: options.
        seen: name and encoder of each leaf.
        continuous: whether actions are continuous.

    Raises:
        ValueError: names the first such option, and what it needs.
    """
    sets = [name for name, encoder in seen if isinstance(encoder, Entities)]
    for name in network.entities:
        if name not in sets:
            raise ValueError(
                f"network.entities has {name!r}: expected the name of an array [E, D] of numbers; "
                f"leaves are {[name for name, _ in seen]}"
            )
    if network.convolutions != _DEFAULT.convolutions and not any(isinstance(leaf, Spatial) for _, leaf in seen):
        raise ValueError(
            f"network.convolutions is {network.convolutions}, but no observation is an image that brayx "
            "encodes: it needs a uint8 leaf with three axes"
        )
    if not continuous and network.distribution != _DEFAULT.distribution:
        raise ValueError(
            f"network.distribution is {network.distribution}, but actions are discrete: it needs continuous actions"
        )
    if network.log_std is not None and (not continuous or network.distribution == "squashed"):
        why = "the deviation depends on the observation" if continuous else "actions are discrete"
        raise ValueError(
            f"network.log_std is {network.log_std}, but {why}: it needs continuous actions with distribution gaussian "
            "or sde"
        )


def encoder_for(leaf: np.ndarray, categories: int | Limits | None, network: NetworkConfig, name: str) -> nn.Module:
    """The encoder of one leaf, given without batch axis; ``name`` is its name in the options."""
    limits = Limits.of(categories) if isinstance(categories, int) else categories
    if limits is not None and not limits.low.ndim:
        return OneHot(int(limits.high - limits.low) + 1, leaf.shape, int(limits.low))
    if name in network.entities:
        return Entities(leaf.shape)
    if leaf.ndim == 3 and leaf.dtype == np.uint8:
        return Spatial(leaf.shape, network.convolutions)
    return Numbers(leaf.shape, None if limits is None else limits.low)


def trunk_for(features: int, config: NetworkConfig) -> nn.Module:
    """The hidden layers."""
    if not config.hidden:
        return nn.Identity()
    return MLP([features, *config.hidden], ACTIVATIONS[config.activation], last_activation=True)


def head_for(num_actions: int | Sequence[int] | None, action_size: int | None, config: NetworkConfig) -> Any:
    """A function that makes the head of a policy from the number of features.

    Raises:
        ValueError: there is no action.
    """
    if num_actions is None and action_size is None:
        raise ValueError("expected num_actions, action_size or both, got neither")
    if num_actions is not None and action_size is not None:
        heads = head_for(num_actions, None, config), head_for(None, action_size, config)
        return lambda features: Hybrid(*(make(features) for make in heads))

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
