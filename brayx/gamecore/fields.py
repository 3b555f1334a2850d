"""Reads fields of a JSON body, most of all numbers. Refuses what is not finite, naming the field and the index.

NumPy alone would turn ``null`` into NaN. Knows nothing of agents or models.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Collection, Mapping
from itertools import chain, islice
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from brayx.arrays import as_dtype, is_finite, place_of
from brayx.errors import BadBody

_LARGEST = float(np.finfo(np.float32).max)
_JSON = {"None": "null", "True": "true", "False": "false"}
_PLAIN = {int, float}
_NUMBERS = (int, float, np.number)
_float32s = np.errstate(over="ignore")(np.asarray)
"""Without a warning of NumPy on this terminal for a client's 1e40, which is refused."""
_OTHER_NAMES = {
    "action_mask": "mask",
    "done": "terminated",
    "observation": "obs",
    "observations": "obs",
    "state": "obs",
    "time_limit": "truncated",
}
"""Fields by the names that other libraries use for them."""
_DONE = ", or 'truncated' at a time limit"


def array_field(
    body: Any, name: str, dtype: DTypeLike = np.float32, shape: tuple[int, ...] | None = None
) -> np.ndarray:
    """Reads a field as an array.

    Args:
        body: a JSON object, such as ``state.input``.
        name: name of the field. Its value is a number or nested lists of numbers; unless ``dtype`` is a float, also
            booleans, as in an action mask.
        dtype: dtype of the array.
        shape: shape of the array, to which the numbers are reshaped; None: the shape of the nested lists.

    Raises:
        BadBody: the field is missing; a value is not a finite number that ``dtype`` can hold; or the numbers do not
            fill ``shape``. The session continues.
    """
    return array_of(_field(body, name), name, dtype, shape)


def array_of(value: Any, place: str, dtype: DTypeLike = np.float32, shape: tuple[int, ...] | None = None) -> np.ndarray:
    """As `array_field`, of a value at ``place`` in its body."""
    try:
        # A direct conversion takes a third of the time. For integer dtypes it would truncate floats.
        array = _float32s(value, np.float32) if dtype is np.float32 else None
    except (TypeError, ValueError, OverflowError):
        array = None
    if array is None or not (is_finite(array) and _are_numbers(value, array.ndim)):
        array = _converted(place, value, np.dtype(dtype))
    if shape is None or array.shape == shape:
        return array
    try:
        return array.reshape(shape)
    except ValueError:
        raise _refused(place, f"shape {list(array.shape)}", f"numbers of shape {list(shape)}") from None


def number_field(body: Any, name: str, least: float = -_LARGEST, most: float = _LARGEST) -> float:
    """Reads a number, such as a reward; by default any that float32 can hold. Raises `BadBody` as `array_field`."""
    value = _field(body, name)
    if isinstance(value, int | float) and least <= value <= most:  # false for NaN
        return float(value)
    limits = "" if (least, most) == (-_LARGEST, _LARGEST) else f" from {least:g} to {most:g}"
    raise _refused(name, _shown(value), f"a finite number{limits}")


def index_field(body: Any, name: str, count: int) -> int:
    """Reads a whole number from 0 to ``count - 1``. Raises `BadBody` as `array_field`."""
    value = _field(body, name)
    if isinstance(value, int | np.integer) and not isinstance(value, bool) and 0 <= value < count:
        return int(value)
    raise _refused(name, _shown(value), f"a whole number from 0 to {count - 1}")


def check_names(value: Mapping[str, Any], known: Collection[str], prefix: str = "") -> Mapping[str, Any]:
    """Refuses an object with a name that is not among the known ones; otherwise returns it.

    Raises:
        BadBody: names the field after ``prefix``, and the nearest known name.
    """
    for name in value:
        if name not in known:
            word = str(name)[:64]
            near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
            hint = f"nearest is {near[0]!r}" if near else f"expected {', '.join(known) or 'none'}"
            if (meant := _OTHER_NAMES.get(word)) in known:
                hint = f"use {meant!r}{_DONE if word == 'done' else ''}"
            raise BadBody(f"{prefix}{word} is unknown; {hint}", field=f"{prefix}{word}")
    return value


def _field(body: Any, name: str) -> Any:
    try:
        return body[name]
    except (KeyError, TypeError, IndexError):
        names = ", ".join(map(repr, islice(body, 20))) if isinstance(body, dict) else ""
        got = f"it has {names}" if names else f"it is {reprlib.repr(body)}"
        other = next((key for key, meant in _OTHER_NAMES.items() if meant == name and names and key in body), None)
        hint = f"; rename {other!r} to {name!r}" if other else ""
        raise BadBody(f"the body has no field {name!r}: {got:.120}{hint}", field=name) from None


def _are_numbers(value: Any, ndim: int, *, bools: bool = False) -> bool:
    """Whether lists nested ``ndim`` deep hold only numbers. NumPy would convert ``"1"`` and ``true`` to 1.0."""
    if ndim == 1 and _PLAIN.issuperset(map(type, value)):  # the usual case, without a set
        return True
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "biuf"
    for _ in range(ndim - 1):
        value = chain.from_iterable(value)
    types = set(map(type, value)) if ndim else {type(value)}
    return types <= _PLAIN or all(issubclass(kind, _NUMBERS) and (bools or kind is not bool) for kind in types)


def _converted(name: str, value: Any, dtype: np.dtype[Any]) -> np.ndarray:
    """Converts a value to finite numbers; raises `BadBody` for the first that ``dtype`` cannot hold."""
    try:
        given = np.asarray(value)
    except ValueError:
        raise _refused(name, "lists of different lengths", "numbers") from None
    is_float = dtype.kind == "f"
    if _are_numbers(value, given.ndim, bools=not is_float):
        array = as_dtype(given, dtype)
        if array is not None and is_finite(array):
            return array
    kinds, least, most = _range(dtype)
    given = np.asarray(value, object)  # keeps the values' own types
    for place, single in enumerate(given.flat):
        if not isinstance(single, kinds) or (is_float and isinstance(single, bool)) or not least <= single <= most:
            expected = "a finite number" if is_float else f"a whole number that {dtype} can hold"
            index = [int(coordinate) for coordinate in np.unravel_index(place, given.shape)]
            plain = single.item() if isinstance(single, np.generic) else single
            raise _refused(place_of(name, index), _shown(plain), expected)
    return given.astype(dtype)


def _range(dtype: np.dtype[Any]) -> tuple[Any, float, float]:
    """The types, the least and the largest of the values that ``dtype`` can hold."""
    if dtype.kind == "b":
        return (bool, np.bool_), 0, 1
    if dtype.kind == "f":
        return _NUMBERS, float(np.finfo(dtype).min), float(np.finfo(dtype).max)
    return (int, np.integer), int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)


def _shown(value: Any) -> str:
    """A short text of a value; constants as JSON spells them."""
    text = reprlib.repr(value)
    return _JSON.get(text, text)


def _refused(place: str, got: str, expected: str) -> BadBody:
    return BadBody(f"{place} is {got:.80}, expected {expected}", field=place)
