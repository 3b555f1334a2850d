"""Makes a module normalise its own observation, so that served and exported models take a game's raw values.

The scalings are buffers, named as in `scaling`: they are bound, swapped and exported like weights. The module's class,
signature and other weights stay unchanged. Torch only; knows nothing of how moments are computed.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import optree
import torch

from brayx.engines.scaling import PREFIX, Scaling, quoted
from brayx.errors import ModelError
from brayx.nets.recurrent import state_argument
from brayx.types import NestedArray, flatten

_ATTRIBUTE = PREFIX.removesuffix(".")


def normalised(module: torch.nn.Module, scalings: Mapping[str, Scaling]) -> torch.nn.Module:
    """A copy of ``module`` that applies ``scalings`` to its observation.

    Args:
        module: takes an observation, named as in learner batches: all arguments except the state, in one nest.
        scalings: scalings by path of the leaf.

    Raises:
        ModelError: the module already has an attribute of the normaliser's name.
    """
    if hasattr(module, _ATTRIBUTE):
        raise ModelError(f"the model has an attribute {_ATTRIBUTE!r}: brayx reserves this name for its normaliser")
    module = copy.deepcopy(module)
    normaliser = torch.nn.Module()
    for path, scaling in scalings.items():
        leaf = torch.nn.Module()
        for part, value in scaling._asdict().items():
            leaf.register_buffer(part, torch.tensor(np.asarray(value, np.float32)))
        normaliser.add_module(quoted(path), leaf)
    module.add_module(_ATTRIBUTE, normaliser)
    module.register_forward_pre_hook(functools.partial(_see, state_at=state_argument(module)))
    return module


def normalises(module: torch.nn.Module) -> bool:
    """Whether the module comes from `normalised`."""
    return hasattr(module, _ATTRIBUTE)


def observed(module: torch.nn.Module, args: tuple[NestedArray, ...]) -> dict[str, np.ndarray]:
    """The observation's leaves among ``args`` by their paths in a learner batch."""
    return flatten(_observation(args, state_argument(module)), "obs")


def _observation(args: tuple[Any, ...], state_at: int | None) -> Any:
    rest = tuple(arg for index, arg in enumerate(args) if index != state_at)
    return rest[0] if len(rest) == 1 else rest


def _see(module: torch.nn.Module, args: tuple[Any, ...], *, state_at: int | None) -> tuple[Any, ...]:
    """Forward pre-hook: returns the arguments with the observation normalised."""
    parts: dict[str, Any] = dict(getattr(module, _ATTRIBUTE).named_children())

    def see(path: tuple[Any, ...], leaf: torch.Tensor) -> torch.Tensor:
        scaling = parts.get(quoted("/".join(["obs", *map(str, path)])))
        if scaling is None:
            return leaf
        scaled = (leaf - scaling.mean) * scaling.scale
        return torch.minimum(torch.maximum(scaled, -scaling.limit), scaling.limit).to(leaf.dtype)

    seen: Any = optree.tree_map_with_path(see, _observation(args, state_at))
    if len(args) - (state_at is not None and state_at < len(args)) == 1:
        seen = (seen,)
    return seen if state_at is None else (*seen[:state_at], *args[state_at : state_at + 1], *seen[state_at:])
