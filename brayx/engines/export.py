"""Export of a torch module to ONNX, and the proof that an engine computes what torch computes.

The graph takes its weights as inputs, or holds them as constants. Weights become inputs *before* the graph is
optimised: torch's exporter, left to optimise by itself, folds what depends on weights alone (``1 + w``, a batch
norm into its convolution) into constants, and such a graph would go on answering with the weights of its export
whatever is bound. `verify` guards against this with a second set of weights, and against a batch size frozen into
the graph with several sizes. Knows nothing of ONNX Runtime.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import optree
import torch

from brayx.engines.base import Engine, ModelSpec
from brayx.engines.torch import TorchEngine, describe, example_leaves, frozen_copy, module_weights
from brayx.errors import EngineMismatch, ModelError
from brayx.types import NestedArray

_PREFIX = "module."
"""Where weights live inside `_Flat`; no input or output path can begin so."""


@dataclass(frozen=True)
class OnnxGraph:
    """An exported model.

    Attributes:
        proto: the serialised ONNX model.
        inputs: graph names of the observation leaves, in the order of ``spec.inputs``.
        outputs: graph names of the result's leaves, in the order of ``spec.outputs``.
        weights: graph input name by `state_dict` name, for the weights the graph uses; empty when they are constants.
        spec: signature of the model.
    """

    proto: bytes
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    weights: dict[str, str]
    spec: ModelSpec


class _Flat(torch.nn.Module):
    """Leaves in, leaves out: the exporter need not understand the nesting."""

    def __init__(self, module: torch.nn.Module, input_tree: optree.PyTreeSpec) -> None:
        super().__init__()
        self.module = module
        self._input_tree = input_tree

    def forward(self, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = self.module(*self._input_tree.unflatten(leaves))
        # A clone keeps every output a value of its own, also one that is an input or is returned twice.
        return tuple(leaf.clone() for leaf in optree.tree_leaves(outputs))


def to_onnx(
    module: torch.nn.Module, example_args: tuple[NestedArray, ...], *, weights_as_inputs: bool = True
) -> OnnxGraph:
    """Exports ``module`` with a dynamic batch axis; takes seconds, prints nothing.

    Args:
        module: the model; it is copied, the copy goes to eval mode.
        example_args: tuple of arguments it runs on, batch axis of at least 1.
        weights_as_inputs: False makes the weights constants: a file that runs anywhere by itself.

    Raises:
        ModelError: the module fails on the example, or torch cannot export it with a dynamic batch axis.
    """
    module = frozen_copy(module)
    spec = describe(module, example_args)
    leaves = tuple(torch.as_tensor(leaf) for leaf in example_leaves(example_args, batch_size=2))
    dynamic = (tuple({0: torch.export.Dim.DYNAMIC} for _ in leaves),)
    flat = _Flat(module, spec.input_tree)
    try:
        with _quiet():
            program = torch.onnx.export(
                flat, leaves, dynamo=True, dynamic_shapes=dynamic, optimize=False, verbose=False
            )
            assert program is not None
            graph = program.model.graph
            input_names = _rename(graph.inputs, [leaf.path for leaf in spec.inputs], set())
            output_names = _rename(graph.outputs, [leaf.path for leaf in spec.outputs], set(input_names))
            weights = _weights_to_inputs(graph) if weights_as_inputs else {}
            program.optimize()
            proto = program.model_proto.SerializeToString()
    except Exception as error:
        cause = next((line for line in str(error.__cause__ or error).splitlines() if line.strip()), "unknown")
        raise ModelError(f"the model cannot be exported to ONNX: {cause}") from error
    return OnnxGraph(proto, tuple(input_names), tuple(output_names), weights, spec)


def _rename(values: Sequence[Any], paths: Sequence[str], taken: set[str]) -> list[str]:
    if len(values) != len(paths):
        raise ModelError(f"the exported graph has {len(values)} leaves where the model has {len(paths)}")
    names = [path if path not in taken else f"{path}_out" for path in paths]  # a recurrent state goes in and out
    for value, name in zip(values, names, strict=True):
        value.name = name
    return names


def _weights_to_inputs(graph: Any) -> dict[str, str]:
    weights = {}
    for name in [name for name in graph.initializers if name.startswith(_PREFIX)]:
        value = graph.initializers.pop(name)
        value.const_value = None
        graph.inputs.append(value)
        weights[name.removeprefix(_PREFIX)] = name
    return weights


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps the exporter's chatter (missing torchvision, deprecations of its own) off stdout and stderr."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


@dataclass(frozen=True)
class Agreement:
    """How far an engine was from torch at worst: absolute error by output path, over everything `verify` tried."""

    worst_abs: dict[str, float]
    batch_sizes: tuple[int, ...]


def verify(
    engine: Engine,
    module: torch.nn.Module,
    example_args: tuple[NestedArray, ...],
    *,
    batch_sizes: Sequence[int] = (1, 2, 5),
    rtol: float = 1e-4,
    atol: float = 1e-5,
    seed: int = 0,
) -> Agreement:
    """Compares ``engine`` with torch, with the module's weights and with others, at several batch sizes.

    Floats agree when ``|got - want| <= atol + rtol * max(1, |want|)``; other dtypes must be equal. Float inputs are
    the example's rows with noise, others the rows as they are.

    Raises:
        EngineMismatch: names the worst output leaf, its error and where it was seen.
    """
    reference = TorchEngine(module, example_args)
    rng = np.random.default_rng(seed)
    worst_abs = {leaf.path: 0.0 for leaf in engine.spec.outputs}
    for label, weights in (("own", module_weights(module)), ("other", module_weights(_perturbed(module, seed)))):
        bound, bound_reference = engine.bind(weights), reference.bind(weights)
        for batch_size in batch_sizes:
            inputs = [_noisy(leaf, rng) for leaf in example_leaves(example_args, batch_size)]
            got, want = engine.run(bound, inputs), reference.run(bound_reference, inputs)
            errors = {}
            for leaf, ours, theirs in zip(engine.spec.outputs, got, want, strict=True):
                absolute, excess = _error(ours, theirs, rtol, atol)
                worst_abs[leaf.path] = max(worst_abs[leaf.path], absolute)
                errors[leaf.path] = (excess, absolute, ours.shape, theirs.shape)
            path, (excess, absolute, shape, shape_wanted) = max(errors.items(), key=lambda item: item[1][0])
            if not excess <= 0:
                raise EngineMismatch(
                    f"{type(engine).__name__} differs from torch: worst leaf {path!r}, shape {list(shape)} for "
                    f"{list(shape_wanted)}, absolute error {absolute:.3g} at batch size {batch_size}, {label} weights",
                    leaf=path,
                    worst_abs=absolute,
                    batch_size=batch_size,
                    weights=label,
                )
    return Agreement(worst_abs, tuple(batch_sizes))


def _error(got: np.ndarray, want: np.ndarray, rtol: float, atol: float) -> tuple[float, float]:
    """Largest absolute error, and by how much it exceeds the tolerance at worst (infinite for unlike arrays)."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return float("inf"), float("inf")
    if want.dtype.kind != "f":
        return (0.0, -1.0) if np.array_equal(got, want) else (float("inf"), float("inf"))
    if not np.array_equal(np.isnan(got), np.isnan(want)):
        return float("inf"), float("inf")
    wide, wide_want = got.astype(np.float64), want.astype(np.float64)
    with np.errstate(invalid="ignore"):
        difference = np.where(wide == wide_want, 0.0, np.abs(wide - wide_want))
    difference = np.where(np.isnan(wide_want), 0.0, difference)
    allowed = atol + rtol * np.maximum(1.0, np.nan_to_num(np.abs(wide_want), nan=0.0, posinf=1.0))
    return float(difference.max(initial=0.0)), float((difference - allowed).max(initial=-1.0))


def _perturbed(module: torch.nn.Module, seed: int) -> torch.nn.Module:
    """A copy with every weight moved; done in place so that tied weights stay tied and variances positive."""
    module = copy.deepcopy(module)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.is_floating_point():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator).to(parameter))
        for buffer in module.buffers():
            if buffer.is_floating_point():
                noise = torch.rand(buffer.shape, generator=generator).to(buffer)
                buffer.mul_(1 + 0.1 * noise).add_(0.01 * noise)
    return module


def _noisy(leaf: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    if leaf.dtype.kind != "f":
        return leaf
    noise = rng.standard_normal(leaf.shape).astype(leaf.dtype)
    return np.ascontiguousarray(leaf + noise, dtype=leaf.dtype)
