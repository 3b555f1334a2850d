"""Exports a torch module to ONNX, and verifies that an engine computes what torch computes.

The graph takes its weights as inputs, or holds them as constants. Weights become inputs *before* the graph is
optimised. Otherwise torch's exporter folds expressions of weights alone (``1 + w``, a batch norm into its convolution)
into constants, and the graph keeps using the weights of its export whatever is bound. `verify` detects this with a
second set of weights, and a batch size frozen into the graph by trying several sizes. Knows nothing of ONNX Runtime.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import optree
import torch

from brayx.engines.base import Engine, LeafSpec, ModelSpec, StateSpec, Tolerance
from brayx.engines.exporter import quiet, trace
from brayx.engines.torch import TorchEngine, describe, example_leaves, frozen_copy, module_weights
from brayx.errors import EngineMismatch, ModelError
from brayx.nets.encoders import Custom
from brayx.types import NestedArray, Weights

Run = Callable[[Sequence[np.ndarray]], list[np.ndarray]]
"""Maps input leaves to output leaves, both ``[B, ...]``."""

_PREFIX = "module."
"""Prefix of weight names inside `_Flat`; no input or output path starts with it."""
_ROWS = 64
"""Rows of noise that `verify` draws from."""
STEPS = 5
"""Steps over which a recurrent model carries its state in a comparison."""
_AGES = 16
"""Number of different ages, in steps, of the states from `with_states`."""
_COUNTED_ROWS = 256
"""Batch size at which `verify` measures the share of differing rows: a share of few rows means little."""


@dataclass(frozen=True)
class OnnxGraph:
    """An exported model.

    Attributes:
        proto: the serialised ONNX model.
        inputs: graph names of the input leaves, in the order of ``spec.inputs``.
        outputs: graph names of the output leaves, in the order of ``spec.outputs``.
        weights: graph input name by `state_dict` name, for the weights the graph uses; empty if they are constants.
        spec: signature of the model.
        traced: made by torch's older, tracing exporter.
    """

    proto: bytes
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    weights: dict[str, str]
    spec: ModelSpec
    traced: bool = False


class _Flat(torch.nn.Module):
    """The module with flat leaves as arguments and result, since the exporter does not handle nesting."""

    def __init__(self, module: torch.nn.Module, input_tree: optree.PyTreeSpec) -> None:
        super().__init__()
        self.module = module
        self._input_tree = input_tree
        self.train(module.training)  # after tracing, torch sets every submodule to the mode of this module

    def forward(self, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = self.module(*self._input_tree.unflatten(leaves))
        # Clone, so that outputs stay distinct values even if one is an input or is returned twice.
        return tuple(leaf.clone() for leaf in optree.tree_leaves(outputs))


def to_onnx(
    module: torch.nn.Module,
    example_args: tuple[NestedArray, ...],
    *,
    weights_as_inputs: bool = True,
    traced: bool = False,
) -> OnnxGraph:
    """Exports ``module`` with a dynamic batch axis; takes seconds, prints nothing.

    Args:
        module: the model; a copy in eval mode is exported.
        example_args: a tuple of example arguments, each leaf with a batch axis of at least 1.
        weights_as_inputs: False makes the weights constants, for a self-contained file.
        traced: try torch's older exporter first. It records one run, in a tenth of a second, with everything that
            depends on the batch size fixed as in that run: verify the graph. The newer exporter takes over where the
            older one fails, warns of control flow that depends on values, or would fold weights into constants.

    Raises:
        ModelError: the module fails on the example, or torch cannot export it with a dynamic batch axis.
    """
    module = frozen_copy(module)
    spec = describe(module, example_args)
    leaves = tuple(torch.as_tensor(leaf) for leaf in example_leaves(example_args, batch_size=2))
    if traced and weights_as_inputs:
        recorded = _traced(_Flat(module, spec.input_tree), leaves, spec)
        if recorded is not None:
            return recorded
    dynamic = (tuple({0: torch.export.Dim.DYNAMIC} for _ in leaves),)
    flat = _Flat(module, spec.input_tree)
    try:
        with quiet():
            program = torch.onnx.export(
                flat, leaves, dynamo=True, dynamic_shapes=dynamic, optimize=False, verbose=False
            )
            assert program is not None
            graph = program.model.graph
            input_names = _rename(graph.inputs, [leaf.path for leaf in spec.inputs], set())
            output_names = _rename(graph.outputs, [leaf.path for leaf in spec.outputs], set(input_names))
            weights = _weights_to_inputs(graph, set(module.state_dict())) if weights_as_inputs else {}
            program.optimize()
            proto = program.model_proto.SerializeToString()
    except Exception as error:
        engine = TorchEngine(module, example_args)
        cause = _randomness(
            functools.partial(engine.run, engine.bind(engine.initial)), spec, [example_leaves(example_args, 2)]
        )
        cause = cause or next((line for line in str(error.__cause__ or error).splitlines() if line.strip()), "unknown")
        named = ", ".join(part.label for part in module.modules() if isinstance(part, Custom))
        with_these = f" with {named}" if named else ""
        raise ModelError(
            f"the model{with_these} cannot be exported to ONNX: {cause}; engine: torch acts without an export"
        ) from error
    return OnnxGraph(proto, tuple(input_names), tuple(output_names), weights, spec)


def _traced(flat: _Flat, leaves: tuple[torch.Tensor, ...], spec: ModelSpec) -> OnnxGraph | None:
    """A graph recorded from one run, with its weights as inputs; None if tracing cannot export this module."""
    inputs = [leaf.path for leaf in spec.inputs]
    outputs = [leaf.path if leaf.path not in inputs else f"{leaf.path}_out" for leaf in spec.outputs]
    try:
        serialised = trace(flat, leaves, inputs, outputs, batched=(*inputs, *outputs), weights_as_inputs=True)
        import onnx

        proto = onnx.load_model_from_string(serialised)
    except Exception:  # the other exporter may succeed, or has a better message
        return None
    names = [value.name for value in proto.graph.input]
    weights = {name: _PREFIX + name for name in flat.module.state_dict() if _PREFIX + name in names}
    if {value.name for value in proto.graph.output} != set(outputs) or set(names) - set(weights.values()) - set(inputs):
        return None
    return OnnxGraph(serialised, tuple(inputs), tuple(outputs), weights, spec, traced=True)


def with_constants(graph: OnnxGraph, weights: Weights) -> bytes:
    """The ONNX model of ``graph``, whose weights are inputs, with ``weights`` as its initializers.

    Its nodes do not depend on the values of the weights: none were folded.
    """
    import onnx
    from onnx import numpy_helper

    proto = onnx.load_model_from_string(graph.proto)
    names = set(graph.weights.values())
    inputs = [value for value in proto.graph.input if value.name not in names]
    del proto.graph.input[:]
    proto.graph.input.extend(inputs)
    proto.graph.initializer.extend(
        numpy_helper.from_array(np.ascontiguousarray(weights[name]).reshape(weights[name].shape), graph_name)
        for name, graph_name in graph.weights.items()
    )
    return proto.SerializeToString()


def _rename(values: Sequence[Any], paths: Sequence[str], taken: set[str]) -> list[str]:
    if len(values) != len(paths):
        raise ModelError(f"the exported graph has {len(values)} leaves where the model has {len(paths)}")
    names = [path if path not in taken else f"{path}_out" for path in paths]  # a recurrent state goes in and out
    for value, name in zip(values, names, strict=True):
        value.name = name
    return names


def _weights_to_inputs(graph: Any, known: AbstractSet[str]) -> dict[str, str]:
    """Turns the weights of these names into inputs. A tensor that ``forward`` creates has the prefix too, and stays."""
    weights = {}
    for name in [name for name in graph.initializers if name.startswith(_PREFIX)]:
        if name.removeprefix(_PREFIX) not in known:
            continue
        value = graph.initializers.pop(name)
        value.const_value = None
        graph.inputs.append(value)
        weights[name.removeprefix(_PREFIX)] = name
    return weights


def verify(
    engine: Engine,
    module: torch.nn.Module,
    example_args: tuple[NestedArray, ...],
    *,
    batch_sizes: Sequence[int] = (1, 2, 5),
    samples: Sequence[np.ndarray] | None = None,
) -> None:
    """Compares ``engine`` with torch at several batch sizes.

    An engine that is not frozen is also compared with a second, different set of weights. A recurrent model runs over
    several steps, and each side carries its own state.

    Args:
        engine: built from ``module``.
        module: the model.
        example_args: a tuple of example arguments, each leaf with a batch axis of at least 1.
        batch_sizes: sizes to try, at least two.
        samples: input leaves ``[N, ...]`` to draw from; if absent, the example's rows with noise added to floats.

    Raises:
        EngineMismatch: names the worst output leaf, its error, batch size, weights and step; or says that ``forward``
            is random.
    """
    tolerance, outputs = engine.tolerance, engine.spec.outputs
    reference = TorchEngine(module, example_args)
    rng, state = np.random.default_rng(0), engine.spec.state
    drawn = samples if samples is not None else noisy_leaves(example_args, _ROWS)
    tried = [(size, replace(tolerance, differing=1.0) if tolerance.differing else tolerance) for size in batch_sizes]
    if tolerance.differing and any(leaf.dtype.kind != "f" for leaf in outputs):
        tried.append((_COUNTED_ROWS, tolerance))
    weight_sets = [("own", module_weights(module))]
    if not engine.frozen:
        weight_sets.append(("other", module_weights(_perturbed(module))))
    for label, weights in weight_sets:
        bound, bound_reference = engine.bind(weights), reference.bind(weights)
        peaks = [peak(leaf) for leaf in reference.run(bound_reference, drawn)]
        for batch_size, allowed in tried:
            batches = [_rows(drawn, batch_size, rng) for _ in range(1 if state is None else STEPS)]
            ours = carried(functools.partial(engine.run, bound), state, batches)
            theirs = carried(functools.partial(reference.run, bound_reference), state, batches)
            for step, (got, want) in enumerate(zip(ours, theirs, strict=True)):
                errors = compare(got, want, allowed, peaks)
                worst = max(range(len(errors)), key=lambda leaf_index: errors[leaf_index].excess)
                if not errors[worst].excess <= 0:
                    path = outputs[worst].path
                    raise EngineMismatch(
                        _randomness(functools.partial(reference.run, bound_reference), engine.spec, batches)
                        or f"{type(engine).__name__} differs from torch: worst leaf {path!r}, shape "
                        f"{list(got[worst].shape)}, expected {list(want[worst].shape)}, {errors[worst]} "
                        f"at batch size {batch_size}, {label} weights"
                        + (f", step {step}" if step else ""),
                        leaf=path,
                        **errors[worst].measured(),
                        batch_size=batch_size,
                        weights=label,
                        step=step,
                    )


def _randomness(run: Run, spec: ModelSpec, batches: Sequence[Sequence[np.ndarray]]) -> str:
    """An error message if two runs on the same batches differ; otherwise empty."""
    for first, second in zip(carried(run, spec.state, batches), carried(run, spec.state, batches), strict=True):
        outside = first_outside(spec.outputs, first, second, Tolerance(), [peak(output) for output in second])
        if outside is not None:
            return (
                f"the model is random in forward: two runs of torch in eval mode on the same inputs differ in leaf "
                f"{outside[0]!r}, so no engine can be compared with torch; draw noise only if self.training"
            )
    return ""


@dataclass(frozen=True)
class LeafError:
    """Largest error of one output.

    Attributes:
        excess: amount by which it exceeds the tolerance; at most 0 if it is within.
        absolute: largest difference of floats; infinite if shapes or dtypes differ, or only one side is NaN.
        relative: the absolute error as a share of the output's peak.
        differing: share of rows that are not equal, for outputs that are not floats; None for floats.
    """

    excess: float
    absolute: float = 0.0
    relative: float = 0.0
    differing: float | None = None

    def measured(self) -> dict[str, float]:
        """The errors that apply to this kind of output, by name."""
        if self.differing is not None:
            return {"differing": self.differing}
        return {"absolute": self.absolute, "relative": self.relative}

    def __str__(self) -> str:
        return ", ".join(f"{name} error {value:.3g}" for name, value in self.measured().items())


def compare(
    got: Sequence[np.ndarray], want: Sequence[np.ndarray], tolerance: Tolerance, peaks: Sequence[float]
) -> list[LeafError]:
    """The error of each output leaf.

    Args:
        got: the engine's leaves.
        want: torch's leaves.
        tolerance: the allowed error.
        peaks: `peak` of each leaf over many rows.
    """
    return [_error(*arrays, tolerance) for arrays in zip(got, want, peaks, strict=True)]


def first_outside(
    outputs: Sequence[LeafSpec],
    got: Sequence[np.ndarray],
    want: Sequence[np.ndarray],
    tolerance: Tolerance,
    peaks: Sequence[float],
) -> tuple[str, LeafError] | None:
    """Path and error of the first leaf that exceeds the tolerance; None: all are within. Arguments as for `compare`."""
    errors = zip(outputs, compare(got, want, tolerance, peaks), strict=True)
    return next(((leaf.path, error) for leaf, error in errors if not error.excess <= 0), None)


def check_same(
    what: str,
    outputs: Sequence[LeafSpec],
    got: Sequence[np.ndarray],
    want: Sequence[np.ndarray],
    tolerance: Tolerance,
    peaks: Sequence[float],
) -> None:
    """Raises `EngineMismatch` if a leaf exceeds the tolerance; ``what`` says what differs from what."""
    outside = first_outside(outputs, got, want, tolerance, peaks)
    if outside is not None:
        path, error = outside
        size = len(want[0])
        raise EngineMismatch(
            f"{what}: leaf {path!r}, {error} at batch size {size}", leaf=path, **error.measured(), batch_size=size
        )


def worst_of(errors: Sequence[LeafError]) -> LeafError:
    """The maximum of each field over several errors of one output."""
    return LeafError(
        max(error.excess for error in errors),
        max(error.absolute for error in errors),
        max(error.relative for error in errors),
        None if errors[0].differing is None else max(error.differing or 0.0 for error in errors),
    )


def peak(leaf: np.ndarray) -> float:
    """The largest finite magnitude in an output; 0 if there is none."""
    finite = leaf[np.isfinite(leaf)] if leaf.dtype.kind == "f" else leaf
    return float(np.abs(finite.astype(np.float64)).max(initial=0.0))


def _error(got: np.ndarray, want: np.ndarray, peak: float, tolerance: Tolerance) -> LeafError:
    like = got.shape == want.shape and got.dtype == want.dtype
    if want.dtype.kind != "f":
        differing = float((got != want).any(axis=tuple(range(1, want.ndim))).mean()) if like else 1.0
        return LeafError(differing - tolerance.differing if like else float("inf"), differing=differing)
    if not like or not np.array_equal(np.isnan(got), np.isnan(want)):
        return LeafError(float("inf"), float("inf"), float("inf"))
    wide, wide_want = got.astype(np.float64), want.astype(np.float64)
    with np.errstate(invalid="ignore"):
        difference = np.where(wide == wide_want, 0.0, np.abs(wide - wide_want))
    difference = np.where(np.isnan(wide_want), 0.0, difference)
    worst = float(difference.max(initial=0.0))
    relative = worst / peak if peak else (float("inf") if worst else 0.0)
    size = np.maximum(1.0, np.nan_to_num(np.abs(wide_want), nan=0.0, posinf=1.0))
    allowed = tolerance.atol + tolerance.rtol * size + tolerance.of_peak * peak
    return LeafError(float((difference - allowed).max(initial=-1.0)), worst, relative)


def noisy_leaves(example_args: tuple[NestedArray, ...], rows: int) -> list[np.ndarray]:
    """Input leaves ``[rows, ...]``: the example's rows repeated, with noise of standard deviation 1 added to floats."""
    rng = np.random.default_rng(0)
    return [_noisy(leaf, rng) for leaf in example_leaves(example_args, rows)]


def _rows(leaves: Sequence[np.ndarray], count: int, rng: np.random.Generator) -> list[np.ndarray]:
    chosen = rng.integers(0, len(leaves[0]), count)
    return [np.ascontiguousarray(leaf[chosen]) for leaf in leaves]


def carried(run: Run, state: StateSpec | None, batches: Iterable[Sequence[np.ndarray]]) -> Iterator[list[np.ndarray]]:
    """Outputs of consecutive batches; a recurrent model's state is carried from each batch to the next.

    Args:
        run: computes output leaves from input leaves.
        state: positions of the model's state; None for a model without one.
        batches: input leaves of each batch; state leaves are used in the first batch only.
    """
    outputs: list[np.ndarray] | None = None
    for batch in batches:
        inputs = list(batch)
        if state is not None and outputs is not None:
            for into, out_of in zip(state.inputs, state.outputs, strict=True):
                inputs[into] = outputs[out_of]
        outputs = run(inputs)
        yield outputs


def with_states(
    module: torch.nn.Module, example_args: tuple[NestedArray, ...], observed: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Input leaves of a recurrent model, with the states that it reaches on such observations.

    Args:
        module: the model, with the weights it acts with.
        example_args: a tuple of example arguments.
        observed: input leaves ``[N, ...]`` without those of the state; each row's state has seen 0 to 15 of them.
    """
    engine, rng = TorchEngine(module, example_args), np.random.default_rng(0)
    state, bound, rows = engine.spec.state, engine.bind(engine.initial), len(observed[0])
    assert state is not None, "a model without a state"
    initial: NestedArray = state.initial
    states = [np.repeat(np.asarray(leaf)[None], rows, axis=0) for leaf in optree.tree_leaves(initial)]

    def inputs(order: np.ndarray) -> list[np.ndarray]:
        rest = iter(observed)
        places = range(len(engine.spec.inputs))
        return [states[state.inputs.index(index)] if index in state.inputs else next(rest)[order] for index in places]

    ages = np.arange(rows) % _AGES
    batches = (inputs(rng.permutation(rows)) for _ in range(_AGES - 1))
    for age, outputs in enumerate(carried(functools.partial(engine.run, bound), state, batches), start=1):
        for leaf, out_of in zip(states, state.outputs, strict=True):
            leaf[ages == age] = outputs[out_of][ages == age]
    return inputs(np.arange(rows))


def _perturbed(module: torch.nn.Module) -> torch.nn.Module:
    """A copy with noise on every weight, added in place: tied weights stay tied, and variances stay positive."""
    module = copy.deepcopy(module)
    generator = torch.Generator().manual_seed(0)
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
