"""Checks and conversions of plain arrays, for bodies, models and replay alike. NumPy only."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

FEW = 16
"""Maximum length of a vector that Python sums faster than NumPy."""


def is_finite(array: np.ndarray) -> bool:
    """Whether an array has neither NaN nor infinity; always true for integers and bools."""
    if array.dtype.kind != "f":
        return True
    if array.ndim == 1 and array.size <= FEW:
        return math.isfinite(sum(array.tolist()))
    # The sum of squares needs no second array. If it is not finite, check each value, because large ones overflow it.
    return math.isfinite(np.vdot(array, array)) or bool(np.isfinite(array).all())


def jsonable(value: Any) -> Any:
    """Nested arrays as JSON values: arrays become nested lists, tuples lists, mappings objects."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(name): jsonable(part) for name, part in value.items()}
    if isinstance(value, tuple | list):
        return [jsonable(part) for part in value]
    return value


def as_dtype(array: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray | None:
    """``array`` converted to ``dtype``; None if its values do not fit.

    Whole numbers must stay the same; they may become floats, but floats no whole numbers. A float that is too large
    becomes infinite.
    """
    if array.dtype == dtype:
        return array
    integers = array.dtype.kind in "iu" and dtype.kind in "iu"
    if array.dtype.kind not in "biuf" or not (integers or np.can_cast(array.dtype, dtype, "same_kind")):
        return None
    with np.errstate(over="ignore"):
        converted = array.astype(dtype, order="C")
    if dtype.kind in "iu" and not np.array_equal(converted, array):
        return None
    return converted


def place_of(name: str, index: Sequence[int]) -> str:
    """Names a value in an array for an error message: ``obs[2, 0]``."""
    return f"{name}[{', '.join(map(str, index))}]" if index else name
