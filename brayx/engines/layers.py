"""A table of a module's layers: name, kind, shape of the output, parameters. Knows nothing of where it is shown."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import optree
import torch

from brayx.engines.torch import example_leaves, frozen_copy
from brayx.nets.encoders import Observation
from brayx.tables import aligned
from brayx.types import NestedArray

_ROWS = 2
"""Batch size of the example; a first axis of this size is shown as N."""


def layer_table(module: torch.nn.Module, example_args: tuple[NestedArray, ...]) -> str:
    """The layers as a text table; its last line has the number of all parameters.

    Only leaf layers, and layers with parameters of their own, have a row. A layer that the module does
    not call, but whose parameters it uses, has no shape. The module runs once, as a copy in eval mode.

    Args:
        module: takes and returns nested arrays ``[N, ...]``.
        example_args: example arguments, each leaf with a batch axis.

    Raises:
        ModelError: an example has no batch axis.
    """
    copy, shapes = frozen_copy(module), dict[str, str]()

    def note(name: str, layer: Any, args: Any, output: Any) -> None:
        shapes[name] = " ".join(_shape(leaf) for leaf in optree.tree_leaves(output) if isinstance(leaf, torch.Tensor))

    layers = [
        (name, layer, sum(parameter.numel() for parameter in layer.parameters(recurse=False)))
        for name, layer in copy.named_modules()
    ]
    shown = [row for row in layers if row[2] or (row[0] and not list(row[1].children()))]
    for name, layer, _ in shown:
        layer.register_forward_hook(partial(note, name))
    leaves = [torch.as_tensor(array) for array in example_leaves(example_args, batch_size=_ROWS)]
    nested: NestedArray = example_args
    with torch.inference_mode():
        copy(*optree.tree_structure(nested).unflatten(leaves))
    named = {
        f"{f'{prefix}.' if prefix else ''}encoders.{index}": f"{f'{prefix}.' if prefix else ''}{name}"
        for prefix, layer in copy.named_modules()
        if isinstance(layer, Observation)
        for index, name in enumerate(layer.names)
        if name
    }
    rows = [
        (_shown(name, named) or "(the module itself)", type(layer).__name__, shapes.get(name, "-"), f"{count:,}")
        for name, layer, count in shown
    ]
    rows = [("layer", "kind", "output", "parameters"), *rows]
    total = sum(parameter.numel() for parameter in module.parameters())
    return "\n".join([*aligned(rows, left=range(3)), f"{total:,} parameters in all", ""])


def _shown(name: str, named: Mapping[str, str]) -> str:
    """The name of a layer, with that of its observation instead of an index."""
    place = next((place for place in named if f"{name}.".startswith(f"{place}.")), "")
    return named[place] + name.removeprefix(place) if place else name


def _shape(tensor: torch.Tensor) -> str:
    sizes = [str(size) for size in tensor.shape]
    if sizes and tensor.shape[0] == _ROWS:
        sizes[0] = "N"
    return f"[{', '.join(sizes)}]"
