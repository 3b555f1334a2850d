"""Reads and writes the columns of ticks with rows: observations, and their numbers.

Errors name the field and the index. Knows nothing of bodies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from brayx.errors import BadBody
from brayx.gamecore.contract_values import ObservationValues
from brayx.gamecore.fields import array_of

_LARGEST = float(np.finfo(np.float32).max)


class ObservationRows(ObservationValues):
    """Reads and writes the rows of one observation: ``[N, ...]``; a list of arrays if their length may vary."""

    def read_rows(self, value: Any, count: int) -> Any:
        """The rows of a value: their values, an array, or its little-endian bytes."""
        if self._rows is not None:
            if not isinstance(value, Sequence | np.ndarray) or isinstance(value, str | bytes) or len(value) != count:
                raise BadBody(f"{self.place} is {value!r:.80}, expected {count} rows", field=self.place)
            return [self.read(row) for row in value]
        if isinstance(value, list) and value and isinstance(value[0], bytes | np.ndarray):
            value = np.stack([self.read(row) for row in value])
        if isinstance(value, bytes):
            if len(value) != count * self._row_bytes:
                expected = f"{count} rows of {self._row_bytes}"
                raise BadBody(f"{self.place} has {len(value)} bytes, expected {expected}", field=self.place)
            array = self._checked(np.frombuffer(value, self._dtype))
        elif self.spec.dtype == "float32":
            array = array_of(value, self.place)  # and so checked
        else:
            array = self._checked(array_of(value, self.place, self._dtype))
        shape = (count, *self.spec.shape)
        if array.shape != shape:
            if array.size != math.prod(shape) or (array.ndim > 1 and len(array) != count):
                raise BadBody(f"{self.place} has shape {list(array.shape)}, expected {list(shape)}", field=self.place)
            array = array.reshape(shape)
        return array

    def model_rows(self, rows: Any) -> np.ndarray:
        """What the model gets: ``[N, ...]``."""
        return np.stack([self.model_array(row) for row in rows]) if self._rows is not None else self.model_array(rows)

    def row_values(self, rows: Any, is_binary: bool) -> Any:
        """The rows in a body: their bytes, or JSON values."""
        if self._rows is not None:
            return [self.value(row, binary=is_binary) for row in rows]
        return self.value(rows, binary=is_binary)

    def pack_rows(self, rows: Any) -> bytes:
        """The bytes in a packed body: those of the rows; after their lengths, if these may vary."""
        if self._rows is None:
            return self.pack(rows)
        lengths = np.array([len(row) for row in rows], "<u2").tobytes()
        return lengths + b"".join(bytes_of(row, self._dtype) for row in rows)

    def unpack_rows(self, body: bytes, start: int, count: int) -> tuple[Any, int]:
        """The rows at ``start`` of a packed body, and where they end."""
        if self._rows is None:
            end = start + count * self._row_bytes
            if end > len(body):
                raise self._too_short(body, end)
            return self.read_rows(body[start:end], count), end
        end = start + 2 * count
        if end > len(body):
            raise self._too_short(body, end)
        lengths = np.frombuffer(body, "<u2", count, start).astype(np.int64) * self._row_bytes
        ends = [end, *(end + lengths.cumsum()).tolist()]
        if ends[-1] > len(body):
            raise self._too_short(body, ends[-1])
        return [self._of_bytes(body[first:last]) for first, last in pairwise(ends)], ends[-1]


def whole_numbers(place: str, value: Any) -> np.ndarray:
    """int64 ``[N]`` whole numbers that int32 can hold, 0 or more; of little-endian int32, a list or an array."""
    if isinstance(value, bytes) and len(value) % 4:
        raise BadBody(f"{place} has {len(value)} bytes, expected 4 for each row", field=place)
    try:
        array = np.frombuffer(value, "<i4") if isinstance(value, bytes) else np.asarray(value)
    except ValueError:  # lists of different lengths, which the check below refuses
        array = np.empty(0)
    if array.dtype.kind not in "iu":
        array = array_of(value, place, np.int64)
    if array.ndim != 1:
        raise BadBody(f"{place} has the shape {list(array.shape)}, expected a number for each row", field=place)
    numbers = array.tolist()
    if numbers and (min(numbers) < 0 or max(numbers) >= 2**31):
        index = next(index for index, number in enumerate(numbers) if not 0 <= number < 2**31)
        where = f"{place}[{index}]"
        raise BadBody(f"{where} is {numbers[index]}, expected a whole number from 0 to {2**31 - 1}", field=where)
    return array.astype(np.int64, copy=False)


def read_numbers(place: str, value: Any, count: int) -> np.ndarray:
    """float64 ``[N]`` numbers that float32 can hold."""
    if isinstance(value, np.ndarray) and value.dtype == np.float64 and value.shape == (count,):
        numbers = value
    elif isinstance(value, list) and len(value) == count and {float}.issuperset(map(type, value)):
        numbers = np.array(value)  # what a game usually gives
    else:
        numbers = array_of(value, place, np.float64, (count,))
    # The sum of squares takes a fifth of the time. Large numbers that fit may exceed it, so only then look at each.
    if not np.vdot(numbers, numbers) <= _LARGEST and not np.abs(numbers).max() <= _LARGEST:
        index = int((~(np.abs(numbers) <= _LARGEST)).argmax())
        where = f"{place}[{index}]"
        raise BadBody(f"{where} is {numbers[index]}, expected a finite number", field=where)
    return numbers


def as_sent(rewards: np.ndarray) -> np.ndarray:
    """float64 ``[N]`` as float32 holds it."""
    return rewards.astype(np.float32).astype(np.float64)


def read_flags(place: str, value: Any, count: int) -> np.ndarray:
    """bool ``[N]``."""
    is_read = isinstance(value, np.ndarray) and value.dtype == np.bool_ and value.shape == (count,)
    return value if is_read else array_of(value, place, np.bool_, (count,))


def bytes_of(array: Any, dtype: Any) -> bytes:
    """The little-endian bytes of an array."""
    data: bytes = array.astype(dtype, copy=False).tobytes()
    return data
