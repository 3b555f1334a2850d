"""Many observations as columns: input leaves ``[N, ...]``, checked before they enter a batch. NumPy only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from brayx.engines.base import LeafSpec, ModelSpec, as_dtype
from brayx.errors import ShapeMismatch
from brayx.types import NestedArray


def check_columns(expected: Sequence[LeafSpec], columns: Sequence[np.ndarray]) -> int:
    """Number of observations in ``columns``.

    Raises:
        ShapeMismatch: the leaves are not ``[N, ...]`` of the expected shapes and dtypes, with the same N of at least 1;
            or a whole number is outside its limits.
    """
    sizes = {len(leaf) for leaf in columns if leaf.ndim}
    fits = len(columns) == len(expected) and len(sizes) == 1 and 0 not in sizes
    if fits:
        fits = all(
            leaf.shape[1:] == spec.shape and leaf.dtype == spec.dtype
            for leaf, spec in zip(columns, expected, strict=True)
        )
    if not fits:
        raise _mismatch(expected, [f"{list(leaf.shape)} {leaf.dtype}" for leaf in columns])
    for leaf, spec in zip(columns, expected, strict=True):
        spec.check(leaf)
    return sizes.pop()


def to_columns(spec: ModelSpec, args: tuple[NestedArray, ...]) -> list[np.ndarray]:
    """The columns of nested arguments whose every leaf has a leading batch axis.

    Dtypes are converted as by `ModelSpec.flatten_inputs`.

    Raises:
        ShapeMismatch: the nesting, a shape or a dtype does not fit, or leaves differ in their batch axis.
    """
    nested: NestedArray = args
    try:
        leaves: list[Any] = spec.input_tree.flatten_up_to(nested)
        arrays = [np.asarray(leaf) for leaf in leaves]
    except (ValueError, TypeError) as error:
        raise _mismatch(spec.inputs, [f"another nesting: {error}"]) from None
    columns = []
    for array, leaf in zip(arrays, spec.inputs, strict=True):
        converted = as_dtype(array, leaf.dtype)
        columns.append(array if converted is None else np.ascontiguousarray(converted).reshape(array.shape))
    check_columns(spec.inputs, columns)
    return columns


def _mismatch(expected: Sequence[LeafSpec], got: list[str]) -> ShapeMismatch:
    wanted = [f"{spec.path}: [{', '.join(['N', *map(str, spec.shape)])}] {spec.dtype}" for spec in expected]
    return ShapeMismatch(f"model input does not fit: expected {wanted}, got {got}", expected=wanted, got=got)


def stacked(rows: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
    """Leaves ``[N, ...]`` from those of ``N`` observations."""
    return [np.stack(column) for column in zip(*rows, strict=True)]


def to_rows(count: int, outputs: Sequence[np.ndarray], versions: np.ndarray) -> list[tuple[list[np.ndarray], int]]:
    """Leaves and policy version of the first ``count`` rows, from output leaves and versions ``[N, ...]``."""
    return [([leaf[i, ...] for leaf in outputs], int(versions[i])) for i in range(count)]
