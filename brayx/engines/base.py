"""The engine interface, and `ModelSpec`, a model's signature.

An engine executes one model graph with any number of weight sets. It is built once, from a torch module and example
inputs. `Engine.bind` prepares a weight set, and several can be bound at the same time; `Engine.run` executes one batch
with one of them. Engines take and return lists of leaves in a fixed order, batch-major ``[B, ...]``. `ModelSpec`
converts the nested arguments of *one* observation (no batch axis) to leaves and back. Knows nothing of batching,
versions or Ray; NumPy and optree only.
"""

from __future__ import annotations

import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import optree

from brayx.arrays import as_dtype
from brayx.errors import BadWeights, ModelError, ShapeMismatch
from brayx.spaces import Limits
from brayx.types import NestedArray, Weights


@dataclass(frozen=True)
class LeafSpec:
    """Path, shape (without batch axis) and dtype of one array; limits of whole numbers, if the module declares them."""

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    limits: Limits | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return f"{self.path}: {list(self.shape)} {self.dtype}"

    def check(self, array: np.ndarray) -> None:
        """Raises `ShapeMismatch` if a number of ``array``, ``[..., *shape]``, is outside the limits."""
        if self.limits is not None and (wrong := self.limits.refusal(array)):
            raise ShapeMismatch(f"model input does not fit: {self.path}: {wrong}", leaf=self.path)


@dataclass(frozen=True)
class StateSpec:
    """Positions of a recurrent model's state among its inputs and outputs.

    Attributes:
        argument: position of the argument ``state``.
        inputs: indices of its leaves in ``ModelSpec.inputs``.
        outputs: indices of the same leaves in ``ModelSpec.outputs``.
        initial: the state at the start of a session, without batch axis: the first row of the example's state.
    """

    argument: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    initial: NestedArray = field(compare=False)


@dataclass(frozen=True)
class ModelSpec:
    """The signature of a model: leaves and nesting of its arguments and its result. Can be pickled.

    Attributes:
        inputs: leaves of the positional arguments, in the order engines take them.
        outputs: leaves of the result.
        input_tree: optree structure of the tuple of arguments.
        output_tree: optree structure of the result.
        state: set for a recurrent model (`brayx.nets.recurrent`). Engines treat the state as an ordinary input and
            output; `Recurrence` carries it from step to step.
    """

    inputs: tuple[LeafSpec, ...]
    outputs: tuple[LeafSpec, ...]
    input_tree: optree.PyTreeSpec
    output_tree: optree.PyTreeSpec
    state: StateSpec | None = None

    def check(self, args: tuple[NestedArray, ...]) -> None:
        """Raises `ShapeMismatch`, which lists each leaf as expected and as received, unless ``args`` fit."""
        self.flatten_inputs(args)

    def flatten_inputs(self, args: tuple[NestedArray, ...]) -> list[np.ndarray]:
        """Leaves of one observation's arguments, C-contiguous and of the expected dtypes.

        Lists and scalars become arrays. Dtypes are converted where values keep their meaning: integers to floats,
        float64 to float32, integers that fit a smaller integer type.

        Args:
            args: positional arguments of the model, without batch axis.

        Raises:
            ShapeMismatch: the nesting, a shape or a dtype does not fit, or a whole number is outside its limits.
        """
        nested: NestedArray = args
        try:
            leaves: list[Any] = self.input_tree.flatten_up_to(nested)
        except (ValueError, TypeError):
            raise self._mismatch(args) from None
        for index, spec in enumerate(self.inputs):
            leaf = leaves[index]
            fits = type(leaf) is np.ndarray and leaf.dtype == spec.dtype and leaf.shape == spec.shape
            if not (fits and leaf.flags.c_contiguous):
                converted = _convert(leaf, spec)
                if converted is None:
                    raise self._mismatch(args)
                leaves[index] = converted
            if spec.limits is not None:
                spec.check(leaves[index])
        return leaves

    def unflatten_outputs(self, leaves: Sequence[np.ndarray]) -> NestedArray:
        """The nested result from its leaves, with any leading axes."""
        return self.output_tree.unflatten(leaves)

    def room(self, batch_size: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Allocates arrays ``[B, ...]`` for the inputs and outputs of a batch; their values are arbitrary."""
        inputs, outputs = (
            [np.zeros((batch_size, *leaf.shape), leaf.dtype) for leaf in leaves]
            for leaves in (self.inputs, self.outputs)
        )
        return inputs, outputs

    def _mismatch(self, args: NestedArray) -> ShapeMismatch:
        expected = [str(leaf) for leaf in self.inputs]
        try:
            # Keep lists as leaves where the structure allows it: the message then shows arrays, not single numbers.
            leaves: list[Any] = self.input_tree.flatten_up_to(args)
            got = [_describe(spec.path, leaf) for spec, leaf in zip(self.inputs, leaves, strict=True)]
        except (ValueError, TypeError):
            paths, leaves, _ = optree.tree_flatten_with_path(args)
            got = [_describe("/".join(map(str, path))[:100], leaf) for path, leaf in zip(paths, leaves, strict=True)]
            got = [f"arguments {line}" for line in got[:16]] + (["..."] if len(got) > 16 else [])
        return ShapeMismatch(
            f"model input does not fit: expected [{'; '.join(expected)}], got [{'; '.join(got)}]",
            expected=expected,
            got=got,
        )


class Recurrence:
    """Carries one session's state from each forward into the next.

        args = recurrence.args(obs)
        outputs = recurrence.keep((await model.forward(*args)).outputs)

    Args:
        spec: signature of a recurrent model.

    Raises:
        ModelError: the model has no state.
    """

    def __init__(self, spec: ModelSpec) -> None:
        if spec.state is None:
            raise ModelError("the model has no memory: a recurrent model declares is_recurrent = True")
        self._spec = spec.state
        self.state: NestedArray = self._spec.initial

    def reset(self) -> None:
        """Returns to the initial state, for a new episode."""
        self.state = self._spec.initial

    def args(self, *args: NestedArray) -> tuple[NestedArray, ...]:
        """The model's arguments: those given, with the state inserted at its position."""
        position = self._spec.argument
        return (*args[:position], self.state, *args[position:])

    def keep(self, outputs: Any) -> Any:
        """Stores the state from a forward's outputs, and returns the outputs without ``state``."""
        # Copy: an output is a view into its batch and would keep the whole batch alive.
        self.state = optree.tree_map(np.array, outputs["state"])
        return {name: value for name, value in outputs.items() if name != "state"}


def _describe(path: str, leaf: Any) -> str:
    try:
        array = np.asarray(leaf)
    except ValueError:
        return f"{path}: ragged {type(leaf).__name__}"
    if array.dtype.kind == "O":
        other = next((entry for entry in np.ndenumerate(array) if not isinstance(entry[1], int | float)), None)
        which = f" with {other[1]!r:.40} at {list(other[0])}" if other and other[0] else ""
        return f"{path}: {type(leaf).__name__}{which}"
    return f"{path}: {list(array.shape)} {array.dtype}"


def _convert(leaf: Any, spec: LeafSpec) -> np.ndarray | None:
    """``leaf`` with the shape and dtype of ``spec``; None where a conversion would change its values."""
    try:
        array = np.asarray(leaf)
    except ValueError:
        return None
    if array.shape != spec.shape:
        return None
    converted = as_dtype(array, spec.dtype)
    # reshape, because ascontiguousarray turns shape [] into [1]
    return None if converted is None else np.ascontiguousarray(converted).reshape(spec.shape)


@dataclass(frozen=True)
class Tolerance:
    """Limit on the difference from torch: ``|got - want| <= atol + rtol * max(1, |want|) + of_peak * peak``.

    Outputs that are not floats, such as a chosen action, have no distance: the share of rows that differ is limited
    instead.

    Attributes:
        rtol: relative error, for values above 1.
        atol: absolute error.
        of_peak: error as a share of the output's peak, its largest magnitude over many inputs; for quantised engines.
        differing: share of rows in which a non-float output may differ. A quantised model may choose another action
            where two are almost equal.
    """

    rtol: float = 1e-4
    atol: float = 1e-5
    of_peak: float = 0.0
    differing: float = 0.0


@dataclass(frozen=True)
class BatchBuffers:
    """Reusable buffers for batches of one size: one caller writes the inputs, runs, and reads the outputs.

    Attributes:
        inputs: leaves ``[B, ...]`` in the order of ``spec.inputs``, to be written.
        outputs: leaves ``[B, ...]`` in the order of ``spec.outputs``; every run overwrites them.
        run: runs the batch in ``inputs``; raises `ModelError` as `Engine.run` does.
        keeps: references that keep memory alive, the weights for example.
    """

    inputs: list[np.ndarray]
    outputs: list[np.ndarray]
    run: Callable[[], None]
    keeps: Any = None


class Engine(ABC):
    """Executes one model graph.

    Attributes:
        frozen: runs only the weights it was built with.
        tolerance: largest allowed difference of its outputs from torch's.
        spec: signature of the model.
        layout: name, shape and dtype of every array a weight set must hold.
        initial: the weights the module was built with.
    """

    frozen: ClassVar[bool] = False
    tolerance: ClassVar[Tolerance] = Tolerance()
    spec: ModelSpec
    layout: dict[str, LeafSpec]
    initial: Weights

    @abstractmethod
    def bind(self, weights: Weights) -> Any:
        """Prepares a weight set to run; drop the result to free it.

        Read-only arrays may be used in place while the result lives; writeable ones are copied.

        Raises:
            BadWeights: names, shapes or dtypes are not those of `layout`.
            WeightsFrozen: the engine is frozen and these are not its own weights.
        """

    @abstractmethod
    def run(self, bound: Any, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Runs one batch. Safe to call from several threads at once.

        Args:
            bound: a result of `bind`.
            inputs: leaves ``[B, ...]`` in the order of ``spec.inputs``, C-contiguous and of the spec's dtypes.

        Returns:
            New leaves ``[B, ...]`` in the order of ``spec.outputs``.

        Raises:
            ModelError: the engine failed on this batch.
        """

    def seat(self, bound: Any, batch_size: int) -> BatchBuffers:
        """Buffers for many runs at one batch size; saves allocating and binding arrays for each run.

        Args:
            bound: a result of `bind`.
            batch_size: size of every batch.
        """
        inputs, outputs = self.spec.room(batch_size)

        def run() -> None:
            for output, leaf in zip(outputs, self.run(bound, inputs), strict=True):
                output[...] = leaf

        return BatchBuffers(inputs, outputs, run)


def layout_of(weights: Weights) -> dict[str, LeafSpec]:
    """The layout that other weights of the same model must have."""
    return {name: LeafSpec(name, array.shape, array.dtype) for name, array in weights.items()}


def check_weights(layout: Mapping[str, LeafSpec], weights: Weights, *, finite: bool = True) -> None:
    """Raises `BadWeights` naming the leaf unless ``weights`` have this layout and, if ``finite``, no NaN or inf."""
    if missing := [name for name in layout if name not in weights]:
        raise BadWeights(f"weights lack {missing[0]!r} ({len(missing)} missing)", leaf=missing[0], missing=missing)
    if extra := [name for name in weights if name not in layout]:
        raise BadWeights(f"weights hold {extra[0]!r}, which the model does not have", leaf=extra[0], extra=extra)
    for name, spec in layout.items():
        array = weights[name]
        if array.shape != spec.shape or array.dtype != spec.dtype:
            raise BadWeights(f"weights: expected {spec}, got {list(array.shape)} {array.dtype}", leaf=name)
    if finite:
        check_finite(weights)


def check_finite(weights: Weights) -> None:
    """Raises `BadWeights` naming the first leaf that holds NaN or infinity."""
    for name, array in weights.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            count = int(array.size - np.isfinite(array).sum())
            raise BadWeights(f"weights: {name!r} holds {count} values that are NaN or infinite", leaf=name, count=count)


def save_weights(path: str | Path, weights: Weights) -> None:
    """Writes ``weights`` as an uncompressed ``.npz`` without pickles; ``path`` ends in ``.npz``."""
    arrays: dict[str, Any] = dict(weights)
    np.savez(path, **arrays)


def load_weights(path: str | Path) -> Weights:
    """Reads what `save_weights` wrote.

    Raises:
        BadWeights: the file is absent or is not such an archive.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise BadWeights(f"no weights could be read from {path}: {error}", path=str(path)) from error
