"""A module that normalises its observation itself, so that what is served or exported takes what a game gives.

Its scalings are buffers, named as in `scaling`: they are bound, swapped and exported as weights are. The module's
class, signature and other weights stay as they are. Torch only; knows nothing of how moments are gathered.
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
    """A copy of ``module`` that sees its observation through ``scalings``.

    Args:
        module: takes an observation as learner batches name it: all arguments except its memory's, in one nest.
        scalings: by path of the leaf.

    Raises:
        ModelError: it has something of that name already.
    """
    if hasattr(module, _ATTRIBUTE):
        raise ModelError(f"the model has an attribute {_ATTRIBUTE!r}, which is where brayx puts its normaliser")
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
    """Whether `normalised` made it."""
    return hasattr(module, _ATTRIBUTE)


def observed(module: torch.nn.Module, args: tuple[NestedArray, ...]) -> dict[str, np.ndarray]:
    """The observation's leaves among ``args`` by their paths in a learner batch."""
    return flatten(_observation(args, state_argument(module)), "obs")


def _observation(args: tuple[Any, ...], state_at: int | None) -> Any:
    rest = tuple(arg for index, arg in enumerate(args) if index != state_at)
    return rest[0] if len(rest) == 1 else rest


def _see(module: torch.nn.Module, args: tuple[Any, ...], *, state_at: int | None) -> tuple[Any, ...]:
    """Torch's hook before a forward: the arguments with the observation normalised."""
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
