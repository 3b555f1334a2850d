"""A named model without its weights: the pickled module, an example, options and lineage.

It is small enough for every process to get it; weights travel through a weight store. A module that is defined in a
notebook or script is pickled by value, so only processes that trust each other may share a recipe. Of
Ray it uses the pickler, with which users register their modules.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from ray import cloudpickle

from brayx.engines.base import LeafSpec, ModelSpec, layout_of
from brayx.errors import ModelError, ShapeMismatch, first_line
from brayx.model.checkpoints import CheckpointInterval
from brayx.model.config import ModelConfig
from brayx.tracking.lineage import Origin
from brayx.tracking.trial import Trial
from brayx.types import NestedArray, Weights

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Recipe:
    """A model without its weights.

    Attributes:
        skeleton: the module, pickled, with empty weights.
        example_args: positional arguments ``[B, ...]`` that it runs on.
        names: of its positional parameters, as far as they can be given by name.
        spec: its signature.
        layout: what its weights must be.
        config: engine, batcher and replicas.
        lineage: what it started from, and that from; the nearest first.
        trial: where checkpoints go; None: nowhere.
        checkpoint_interval: when one is due.
        token: tells models of one name apart.
    """

    skeleton: bytes
    example_args: tuple[NestedArray, ...]
    names: tuple[str, ...]
    spec: ModelSpec
    layout: Mapping[str, LeafSpec]
    config: ModelConfig
    lineage: tuple[Origin, ...]
    trial: Trial | None
    checkpoint_interval: CheckpointInterval
    token: str

    @property
    def local(self) -> bool:
        """Forwards run in the process that asks, without a deployment."""
        return self.config.placement == "local"

    def pickled(self) -> bytes:
        """The recipe for `ray.cloudpickle`."""
        pickled: bytes = cloudpickle.dumps(self)  # type: ignore[no-untyped-call]
        return pickled

    def positional(self, args: tuple[NestedArray, ...], kwargs: Mapping[str, NestedArray]) -> tuple[NestedArray, ...]:
        """The arguments of a call in the module's order.

        Raises:
            ShapeMismatch: one is missing, given twice or unknown.
        """
        return _positional(self.names, args, kwargs) if kwargs else args

    def module(self, weights: Weights) -> torch.nn.Module:
        """The module with ``weights``, which are copied.

        Raises:
            ModelError: its code is not here.
        """
        import torch

        try:
            module: torch.nn.Module = cloudpickle.loads(self.skeleton)
        except Exception as error:
            raise ModelError(f"the model's code cannot be loaded here: {first_line(error)}") from error
        _on_device(module, "cpu")
        module.load_state_dict({name: torch.from_numpy(np.array(array)) for name, array in weights.items()})
        return module


def prepare(
    module: torch.nn.Module, forward_args: tuple[NestedArray, ...], forward_kwargs: Mapping[str, NestedArray]
) -> tuple[bytes, tuple[NestedArray, ...], tuple[str, ...], ModelSpec, dict[str, LeafSpec], Weights]:
    """Skeleton, example, names, signature and layout of a recipe, and the weights the module has now.

    Raises:
        ModelError: the module fails on its example, or is no module; or it cannot be pickled.
    """
    from torch import nn

    from brayx.engines.torch import describe, frozen_copy, module_weights

    if not isinstance(module, nn.Module):
        raise ModelError(f"model must be a torch.nn.Module, got {type(module).__name__}")
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = tuple(name for name, p in inspect.signature(module.forward).parameters.items() if p.kind in kinds)
    try:
        example = _positional(names, tuple(forward_args), forward_kwargs)
    except ShapeMismatch as error:
        raise ModelError(f"forward_args and forward_kwargs: {error}") from None
    spec = describe(frozen_copy(module), example)
    weights = module_weights(module)
    bare = copy.deepcopy(module)
    _on_device(bare, "meta")
    try:
        skeleton: bytes = cloudpickle.dumps(bare)  # type: ignore[no-untyped-call]
    except Exception as error:
        raise ModelError(f"the model cannot be pickled: {first_line(error)}") from error
    return skeleton, example, names, spec, layout_of(weights), weights


def _positional(
    names: tuple[str, ...], args: tuple[NestedArray, ...], kwargs: Mapping[str, NestedArray]
) -> tuple[NestedArray, ...]:
    following = names[len(args) : len(args) + len(kwargs)]
    if set(following) != set(kwargs):
        raise ShapeMismatch(
            f"arguments by name: expected {', '.join(following) or 'none'} after {len(args)} others, "
            f"got {', '.join(kwargs)}",
            expected=list(following),
            got=list(kwargs),
        )
    return (*args, *(kwargs[name] for name in following))


def _on_device(module: torch.nn.Module, device: str) -> None:
    """Moves what is in the state dict, without its values and in place; what is shared stays shared."""
    import torch

    kept = set(module.state_dict())
    moved: dict[int, Any] = {}
    for prefix, part in module.named_modules(remove_duplicate=False):
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is None or (f"{prefix}.{name}" if prefix else name) not in kept:
                    continue
                if id(tensor) not in moved:
                    empty: torch.Tensor = torch.empty_like(tensor.detach(), device=device)
                    if isinstance(tensor, torch.nn.Parameter):
                        empty = torch.nn.Parameter(empty, requires_grad=tensor.requires_grad)
                    # The old one is kept too, so that no other tensor gets its id.
                    moved[id(tensor)] = (tensor, empty)
                tensors[name] = moved[id(tensor)][1]
