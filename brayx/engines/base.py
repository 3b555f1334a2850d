"""What an engine is: an executor of one model graph for any number of weight sets; and the model's signature.

An engine is built once from a torch module and example inputs. `Engine.bind` makes a set of weights ready to run
and any number of them may be alive; `Engine.run` executes one batch with one of them. Arrays at this level are
leaves in a fixed order, batch-major ``[B, ...]``; `ModelSpec` turns nested arguments of *one* observation (no batch
axis) into leaves and back. Knows nothing of batching, versions, threads' owners or Ray; NumPy and optree only.
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

from brayx.errors import BadWeights, ShapeMismatch
from brayx.types import NestedArray, Weights


@dataclass(frozen=True)
class LeafSpec:
    """Path, shape (without batch axis) and dtype of one array."""

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def __str__(self) -> str:
        return f"{self.path}: {list(self.shape)} {self.dtype}"


@dataclass(frozen=True)
class StateSpec:
    """Where a recurrent model's state goes in and comes out.

    Attributes:
        argument: position of the argument ``state``.
        inputs: its leaves among ``ModelSpec.inputs``.
        outputs: the same leaves among ``ModelSpec.outputs``.
        initial: what a session begins with, without batch axis: the first row of the example's.
    """

    argument: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    initial: NestedArray = field(compare=False)


@dataclass(frozen=True)
class ModelSpec:
    """The signature of a model: leaves and nesting of its arguments and of what it returns. Pickles.

    Attributes:
        inputs: leaves of the positional arguments, in the order engines take them.
        outputs: leaves of the result.
        input_tree: optree structure of the tuple of arguments.
        output_tree: optree structure of the result.
        state: of a model that declares a memory (`brayx.nets.recurrent`). To an engine it is an input and an output
            like others; `Recurrence` carries it.
    """

    inputs: tuple[LeafSpec, ...]
    outputs: tuple[LeafSpec, ...]
    input_tree: optree.PyTreeSpec
    output_tree: optree.PyTreeSpec
    state: StateSpec | None = None

    def check(self, args: tuple[NestedArray, ...]) -> None:
        """Raises `ShapeMismatch`, which shows expected and got for each leaf, unless ``args`` fit."""
        self.flatten_inputs(args)

    def flatten_inputs(self, args: tuple[NestedArray, ...]) -> list[np.ndarray]:
        """Leaves of one observation's arguments, C-contiguous and of the expected dtypes.

        Lists and scalars where an array belongs, and values of a dtype that loses no meaning (integers to floats,
        float64 to float32, integers that fit a smaller integer type) are converted.

        Args:
            args: positional arguments of the model, without batch axis.

        Raises:
            ShapeMismatch: the nesting, a shape or a dtype does not fit.
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
        return leaves

    def unflatten_outputs(self, leaves: Sequence[np.ndarray]) -> NestedArray:
        """The model's result from its leaves, whatever their leading axes."""
        return self.output_tree.unflatten(leaves)

    def room(self, batch_size: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Arrays ``[B, ...]`` for the inputs and the outputs of a batch; what is in them means nothing."""
        inputs, outputs = (
            [np.zeros((batch_size, *leaf.shape), leaf.dtype) for leaf in leaves]
            for leaves in (self.inputs, self.outputs)
        )
        return inputs, outputs

    def _mismatch(self, args: NestedArray) -> ShapeMismatch:
        expected = [str(leaf) for leaf in self.inputs]
        try:
            # Lists stay leaves where the structure allows it, so that the message shows arrays and not numbers.
            leaves: list[Any] = self.input_tree.flatten_up_to(args)
            got = [_describe(spec.path, leaf) for spec, leaf in zip(self.inputs, leaves, strict=True)]
        except (ValueError, TypeError):
            paths, leaves, _ = optree.tree_flatten_with_path(args)
            got = [_describe("/".join(map(str, path)), leaf) for path, leaf in zip(paths, leaves, strict=True)]
            got = [f"arguments {line}" for line in got[:16]] + (["..."] if len(got) > 16 else [])
        return ShapeMismatch(
            f"model input does not fit: expected [{'; '.join(expected)}], got [{'; '.join(got)}]",
            expected=expected,
            got=got,
        )


def _describe(path: str, leaf: Any) -> str:
    try:
        array = np.asarray(leaf)
    except ValueError:
        return f"{path}: ragged {type(leaf).__name__}"
    if array.dtype.kind == "O":
        return f"{path}: {type(leaf).__name__}"
    return f"{path}: {list(array.shape)} {array.dtype}"


def _convert(leaf: Any, spec: LeafSpec) -> np.ndarray | None:
    """``leaf`` as ``spec`` wants it, or None when it would not mean the same."""
    try:
        array = np.asarray(leaf)
    except ValueError:
        return None
    if array.shape != spec.shape:
        return None
    converted = as_dtype(array, spec.dtype)
    # ascontiguousarray makes [] a [1]
    return None if converted is None else np.ascontiguousarray(converted).reshape(spec.shape)


def as_dtype(array: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray | None:
    """``array`` in a dtype that loses no meaning of it, see `ModelSpec.flatten_inputs`; None when it would not fit."""
    if array.dtype == dtype:
        return array
    integers = array.dtype.kind in "iu" and dtype.kind in "iu"
    if array.dtype.kind not in "biuf" or not (integers or np.can_cast(array.dtype, dtype, "same_kind")):
        return None
    with np.errstate(over="ignore"):  # what is too large becomes an infinity, which is for others to judge
        converted = array.astype(dtype, order="C")
    if dtype.kind in "iu" and not np.array_equal(converted, array):
        return None
    return converted


@dataclass(frozen=True)
class Tolerance:
    """How far outputs may be from torch's: ``|got - want| <= atol + rtol * max(1, |want|) + of_peak * peak``.

    Outputs that are not floats, an action chosen say, are no further from one value than from another: of those
    the rows are counted that are not equal.

    Attributes:
        rtol: share of the value, if that is above 1.
        atol: absolute.
        of_peak: share of the output's peak, its largest magnitude over many inputs: by this quantisation is measured.
        differing: share of the rows in which an output that is not floats may be another; a quantised model decides
            otherwise where it is a near thing.
    """

    rtol: float = 1e-4
    atol: float = 1e-5
    of_peak: float = 0.0
    differing: float = 0.0


@dataclass(frozen=True)
class Seat:
    """Room for batches of one size, which one caller fills, runs and reads again and again.

    Attributes:
        inputs: leaves ``[B, ...]`` in the order of ``spec.inputs``, to be written.
        outputs: leaves ``[B, ...]`` in the order of ``spec.outputs``; every run overwrites them.
        run: runs the batch that the inputs hold; raises `ModelError` as `Engine.run` does.
        keeps: what has to live as long as this does, weights say.
    """

    inputs: list[np.ndarray]
    outputs: list[np.ndarray]
    run: Callable[[], None]
    keeps: Any = None


class Engine(ABC):
    """Executes one model graph.

    Attributes:
        frozen: takes no weights but those it was built with.
        tolerance: within which it computes what torch computes.
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
        """Makes a weight set ready to run; drop the result to free it.

        Read-only arrays may be used in place for as long as the result lives; writeable ones are copied.

        Raises:
            BadWeights: names, shapes or dtypes are not those of `layout`.
            WeightsFrozen: the engine is frozen, and these are other weights than its own.
        """

    @abstractmethod
    def run(self, bound: Any, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Runs one batch. May be called from any thread, also at the same time.

        Args:
            bound: what `bind` gave.
            inputs: leaves ``[B, ...]`` in the order of ``spec.inputs``, C-contiguous and of the spec's dtypes.

        Returns:
            Fresh leaves ``[B, ...]`` in the order of ``spec.outputs``.

        Raises:
            ModelError: the engine failed on this batch.
        """

    def seat(self, bound: Any, batch_size: int) -> Seat:
        """Room for who runs many batches of one size, and would pay at each for arrays made and bound anew.

        Args:
            bound: what `bind` gave.
            batch_size: of every batch.
        """
        inputs, outputs = self.spec.room(batch_size)

        def run() -> None:
            for output, leaf in zip(outputs, self.run(bound, inputs), strict=True):
                output[...] = leaf

        return Seat(inputs, outputs, run)


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
