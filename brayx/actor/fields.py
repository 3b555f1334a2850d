"""Reads numbers from the fields of a JSON body. Refuses what is not finite, naming the field and the index.

NumPy alone would turn ``null`` into NaN. Knows nothing of agents or models.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from brayx.engines.base import as_dtype
from brayx.errors import BadBody
from brayx.types import is_finite, place_of

_LARGEST = float(np.finfo(np.float32).max)


def array_field(
    body: Any, name: str, dtype: DTypeLike = np.float32, shape: tuple[int, ...] | None = None
) -> np.ndarray:
    """Reads a field as an array.

    Args:
        body: a JSON object, such as ``state.input``.
        name: name of the field. Its value is a number or nested lists of numbers.
        dtype: dtype of the array.
        shape: shape of the array, to which the numbers are reshaped; None: the shape of the nested lists.

    Raises:
        BadBody: the field is missing; a value is not a finite number that ``dtype`` can hold; or the numbers do not
            fill ``shape``. The session continues.
    """
    try:
        value = body[name]
        # A direct conversion takes a third of the time. For integer dtypes it would truncate floats.
        array = np.asarray(value, np.float32) if dtype is np.float32 else None
    except (KeyError, TypeError, IndexError, ValueError, OverflowError):
        value, array = _field(body, name), None
    if array is None or not is_finite(array):
        array = _converted(name, value, np.dtype(dtype))
    if shape is None or array.shape == shape:
        return array
    try:
        return array.reshape(shape)
    except ValueError:
        raise _refused(name, f"shape {list(array.shape)}", f"numbers of shape {list(shape)}") from None


def number_field(body: Any, name: str, least: float = -_LARGEST, most: float = _LARGEST) -> float:
    """Reads a number, such as a reward; by default any that float32 can hold. Raises `BadBody` as `array_field`."""
    value = _field(body, name)
    if isinstance(value, int | float) and least <= value <= most:  # false for NaN
        return float(value)
    limits = "" if (least, most) == (-_LARGEST, _LARGEST) else f" from {least:g} to {most:g}"
    raise _refused(name, repr(value), f"a finite number{limits}")


def index_field(body: Any, name: str, count: int) -> int:
    """Reads a whole number from 0 to ``count - 1``. Raises `BadBody` as `array_field`."""
    value = _field(body, name)
    if isinstance(value, int | np.integer) and not isinstance(value, bool) and 0 <= value < count:
        return int(value)
    raise _refused(name, repr(value), f"a whole number from 0 to {count - 1}")


def _field(body: Any, name: str) -> Any:
    try:
        return body[name]
    except (KeyError, TypeError, IndexError):
        got = f"it has {', '.join(map(repr, body))}" if isinstance(body, dict) and body else f"it is {body!r}"
        raise BadBody(f"the body has no field {name!r}: {got:.120}", field=name) from None


def _converted(name: str, value: Any, dtype: np.dtype[Any]) -> np.ndarray:
    """Converts a value to finite numbers; raises `BadBody` for the first that ``dtype`` cannot hold."""
    try:
        given = np.asarray(value)
    except ValueError:
        raise _refused(name, "lists of different lengths", "numbers") from None
    array = as_dtype(given, dtype)
    if array is not None and is_finite(array):
        return array
    expected = "a finite number" if dtype.kind == "f" else f"a whole number that {dtype} can hold"
    for index, value in np.ndenumerate(given):
        single = as_dtype(np.asarray(value), dtype)
        if single is None or not is_finite(single):
            plain = value.item() if isinstance(value, np.generic) else value
            raise _refused(place_of(name, index), repr(plain), expected)
    raise _refused(name, f"values of type {given.dtype}", "numbers")


def _refused(place: str, got: str, expected: str) -> BadBody:
    return BadBody(f"{place} is {got:.80}, expected {expected}", field=place)
