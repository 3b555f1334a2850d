"""The torch engine: the reference every other engine is verified against. Runs on the CPU, in eval mode.

Also turns a module into what the rest needs to know of it: its weights and its signature. Knows nothing of ONNX.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import optree
import torch

from brayx.engines.base import Engine, LeafSpec, ModelSpec, check_weights, layout_of
from brayx.errors import ModelError
from brayx.types import NestedArray, Weights


class TorchEngine(Engine):
    """Runs a copy of the module per bound weight set, so that threads and weight sets never meet.

    Args:
        module: any module that takes nested arrays ``[B, ...]`` and returns nested arrays ``[B, ...]``.
        example_args: tuple of arguments it runs on, batch axis of at least 1.
    """

    def __init__(self, module: torch.nn.Module, example_args: tuple[NestedArray, ...]) -> None:
        self._module = frozen_copy(module)
        self.spec = describe(self._module, example_args)
        self.initial = module_weights(self._module)
        self.layout = layout_of(self.initial)

    def bind(self, weights: Weights) -> torch.nn.Module:
        check_weights(self.layout, weights, finite=False)
        module = copy.deepcopy(self._module)
        module.load_state_dict({name: torch.tensor(array) for name, array in weights.items()})
        return module

    def run(self, bound: torch.nn.Module, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        try:
            with torch.inference_mode():
                # Copies on the way in, since torch warns of read-only arrays, and out, since an output may be an input.
                leaves: list[Any] = [torch.tensor(array) for array in inputs]
                outputs = bound(*self.spec.input_tree.unflatten(leaves))
                return [leaf.numpy().copy() for leaf in optree.tree_leaves(outputs)]
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise ModelError(f"the model failed on a batch of {len(inputs[0])}: {error}") from error


def frozen_copy(module: torch.nn.Module) -> torch.nn.Module:
    """A copy on the CPU in eval mode that asks for no gradients: what acts. The original is left alone."""
    return copy.deepcopy(module).cpu().eval().requires_grad_(False)


def module_weights(module: torch.nn.Module) -> Weights:
    """Copies of the module's parameters and buffers by `state_dict` name."""
    return {name: tensor.detach().cpu().numpy().copy() for name, tensor in module.state_dict().items()}


def example_leaves(example_args: tuple[NestedArray, ...], batch_size: int | None = None) -> list[np.ndarray]:
    """Leaves of the example, its rows repeated to ``batch_size`` if given.

    Raises:
        ModelError: a leaf has no batch axis, or the leaves differ in it.
    """
    nested: NestedArray = example_args
    leaves = [np.asarray(leaf) for leaf in optree.tree_leaves(nested)]
    sizes = {leaf.shape[0] if leaf.ndim else None for leaf in leaves}
    if len(sizes) != 1 or None in sizes or 0 in sizes:
        shapes = [list(leaf.shape) for leaf in leaves]
        raise ModelError(f"every leaf of the example needs the same batch axis of at least 1, got shapes {shapes}")
    if batch_size is None:
        return leaves
    rows = np.arange(batch_size) % len(leaves[0])
    return [np.ascontiguousarray(leaf[rows]) for leaf in leaves]


def describe(module: torch.nn.Module, example_args: tuple[NestedArray, ...]) -> ModelSpec:
    """The signature of ``module``, found by running it on the example.

    Raises:
        ModelError: the example has no batch axis, the module fails on it, or an output lacks the batch axis.
    """
    if not isinstance(example_args, tuple):
        raise ModelError(f"forward_args must be a tuple of arguments, got {type(example_args).__name__}")
    arrays = example_leaves(example_args, batch_size=2)
    nested: NestedArray = example_args
    input_tree = optree.tree_structure(nested)
    try:
        with torch.inference_mode():
            outputs = module(*input_tree.unflatten([torch.as_tensor(array) for array in arrays]))
    except Exception as error:
        shapes = [f"{list(array.shape)} {array.dtype}" for array in arrays]
        raise ModelError(f"the model fails on its own forward_args {shapes}: {error}") from error
    names = _argument_names(module, len(example_args))
    input_paths = ["/".join([names[path[0]], *map(str, path[1:])]) for path in optree.tree_paths(nested)]
    output_paths = ["/".join(map(str, path)) or "output" for path in optree.tree_paths(outputs)]
    results = optree.tree_leaves(outputs)
    for path, leaf in zip(output_paths, results, strict=True):
        if not isinstance(leaf, torch.Tensor) or leaf.ndim == 0 or leaf.shape[0] != 2:
            got = f"shape {list(leaf.shape)}" if isinstance(leaf, torch.Tensor) else type(leaf).__name__
            raise ModelError(f"output {path!r} must be a tensor [B, ...]; for B = 2 it is {got}", leaf=path)
    return ModelSpec(
        inputs=tuple(LeafSpec(path, a.shape[1:], a.dtype) for path, a in zip(input_paths, arrays, strict=True)),
        outputs=tuple(
            LeafSpec(path, tuple(leaf.shape[1:]), leaf.numpy().dtype)
            for path, leaf in zip(output_paths, results, strict=True)
        ),
        input_tree=input_tree,
        output_tree=optree.tree_structure(outputs),
    )


def _argument_names(module: torch.nn.Module, count: int) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [name for name, p in inspect.signature(module.forward).parameters.items() if p.kind in kinds]
    return [names[i] if i < len(names) else f"arg{i}" for i in range(count)]
