"""`ObservationValues` and `ActionValues`: one observation or action of a contract, checked, in each of its forms.

An observation is a value in a body (numbers, a text, or an array's bytes), an array in the game's shape and dtype, and
at last the array that a model gets. Knows nothing of ticks and their encodings.
"""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np

from brayx.arrays import is_finite, place_of
from brayx.errors import BadBody
from brayx.gamecore.contract import ActionPart, ObservationSpec
from brayx.gamecore.fields import array_of

_COUNT = struct.Struct("<H")


class ObservationValues:
    """Reads and writes one observation.

    Args:
        spec: the observation.

    All methods that read raise `BadBody`, which names the field and the index.
    """

    def __init__(self, spec: ObservationSpec) -> None:
        self.spec = spec
        self.place = f"obs.{spec.name}"
        self._dtype = np.dtype(spec.dtype).newbyteorder("<")
        self._model_dtype = spec.model_dtype
        self._count = math.prod(spec.shape)
        self._rows = spec.shape[0] if spec.kind in ("entities", "text") else None
        """Maximum length, where the length may vary from tick to tick."""
        self._row_shape = spec.shape[1:] if self._rows else spec.shape
        self._row_bytes = math.prod(self._row_shape) * self._dtype.itemsize

    @property
    def expected(self) -> str:
        """What a value of it is, for a refusal."""
        shape = f" of shape {list(self.spec.shape)}" if self.spec.shape else ""
        match self.spec.kind:
            case "text":
                return "a text"
            case "category":
                return f"{'whole numbers' if shape else 'a whole number'} {self._range}{shape}"
            case "entities":
                return f"up to {self._rows} rows of {self.spec.shape[1]} numbers"
        return f"numbers{shape}"

    @property
    def _range(self) -> str:
        return f"from {self.spec.start} to {self.spec.start + self.spec.size - 1}"

    def read(self, value: Any) -> np.ndarray:
        """The array of a value: nested lists, a flat list, an array or its little-endian bytes; of a text also ``str``.

        Entities have as many rows as there are, a text as many bytes. Categories keep the game's numbers.
        """
        if isinstance(value, bytes):
            return self._of_bytes(value)
        if self.spec.kind == "text":
            if not isinstance(value, str):
                raise BadBody(f"{self.place} is {value!r:.80}, expected a text", field=self.place)
            return self._of_bytes(value.encode(errors="surrogatepass"))
        array = array_of(value, self.place, np.float32 if self.spec.dtype == "float32" else self._dtype)
        if array.shape != self.spec.shape:
            array = self._shaped(array)
        return self._checked(array)

    def model_array(self, array: np.ndarray) -> np.ndarray:
        """What the model gets: a copy in `ObservationSpec.model_dtype`, padded with zeros to the contract's shape."""
        spec = self.spec
        if spec.kind == "category":
            return np.asarray(array.astype(np.int64) - spec.start)
        if self._rows is None:
            return array.astype(self._model_dtype)
        padded = np.zeros(spec.shape, self._model_dtype)
        padded[: len(array)] = array
        return padded

    def value(self, array: np.ndarray, *, binary: bool) -> Any:
        """The value of an array in a body: its bytes, or JSON values."""
        if self.spec.kind == "text":
            return array.tobytes().decode()
        return array.astype(self._dtype, copy=False).tobytes() if binary else array.tolist()

    def pack(self, array: np.ndarray) -> bytes:
        """The bytes in a packed body: those of the array; after their count, if the length may vary."""
        data = array.astype(self._dtype, copy=False).tobytes()
        return data if self._rows is None else _COUNT.pack(len(array)) + data

    def unpack(self, body: bytes, start: int) -> tuple[np.ndarray, int]:
        """The array at ``start`` of a packed body, and where it ends."""
        count = 1
        if self._rows is not None:
            if start + _COUNT.size > len(body):
                raise self._too_short(body, start + _COUNT.size)
            (count,) = _COUNT.unpack_from(body, start)
            start += _COUNT.size
        end = start + count * self._row_bytes
        if end > len(body):
            raise self._too_short(body, end)
        return self._of_bytes(body[start:end]), end

    def _too_short(self, body: bytes, end: int) -> BadBody:
        return BadBody(f"{self.place} ends at byte {end}, but the body has {len(body)} bytes", field=self.place)

    def _of_bytes(self, data: bytes) -> np.ndarray:
        count, rest = divmod(len(data), self._row_bytes)
        if rest or (self._rows is None and count != 1):
            unit = f"{self._row_bytes} bytes" + (" for each row" if self._rows else "")
            raise BadBody(f"{self.place} has {len(data)} bytes, expected {unit}", field=self.place)
        if self._rows is not None and count > self._rows:
            raise self._too_many(count)
        if self.spec.kind == "text":
            try:
                data.decode()
            except UnicodeDecodeError as error:
                raise BadBody(f"{self.place} is not UTF-8 at byte {error.start}", field=self.place) from None
        lead = () if self._rows is None else (count,)
        return self._checked(np.frombuffer(data, self._dtype).reshape(lead + self._row_shape))

    def _shaped(self, array: np.ndarray) -> np.ndarray:
        """An array of another shape than the contract's: fewer entities, or all values in one list."""
        spec = self.spec
        if spec.kind == "entities" and (array.size == 0 or array.shape[1:] == self._row_shape):
            if array.size and len(array) > spec.shape[0]:
                raise self._too_many(len(array))
            return array.reshape(-1, *self._row_shape)
        if spec.kind == "entities" or array.ndim != 1 or array.size != self._count:
            raise BadBody(f"{self.place} has shape {list(array.shape)}, expected {list(spec.shape)}", field=self.place)
        return array.reshape(spec.shape)

    def _too_many(self, count: int) -> BadBody:
        what = "bytes" if self.spec.kind == "text" else "rows"
        return BadBody(f"{self.place} has {count} {what}, expected at most {self._rows}", field=self.place)

    def _checked(self, array: np.ndarray) -> np.ndarray:
        spec = self.spec
        if spec.kind == "category":
            inside = (array >= spec.start) & (array < spec.start + spec.size)
            if not inside.all():
                raise _refused(self.place, array, inside, f"a whole number {self._range}")
        elif spec.dtype == "float64":  # the model's float32 may not hold it
            with np.errstate(over="ignore"):
                narrow = array.astype(np.float32)
            if not is_finite(narrow):
                raise _refused(self.place, array, np.isfinite(narrow), "a finite number that float32 can hold")
        elif not is_finite(array):
            raise _refused(self.place, array, np.isfinite(array), "a finite number")
        return array


class ActionValues:
    """Reads one action in the game's numbers; `BadBody` names the field and the index.

    Args:
        part: the action.
    """

    def __init__(self, part: ActionPart) -> None:
        self.part = part
        self._low, self._high = np.asarray(part.low, np.float32), np.asarray(part.high, np.float32)

    def read(self, value: Any, place: str = "") -> Any:
        """The action: an ``int`` from ``start``, or a float32 array ``[size]`` within the bounds.

        Args:
            value: a number, numbers, or the little-endian bytes of float32 numbers.
            place: where it is in its body; empty: the action's name.
        """
        part, place = self.part, place or self.part.name
        if part.kind == "discrete":
            is_whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
            if not is_whole or not part.start <= value < part.start + part.size:
                expected = f"a whole number from {part.start} to {part.start + part.size - 1}"
                raise BadBody(f"{place} is {value!r:.80}, expected {expected}", field=place)
            return int(value)
        if isinstance(value, bytes):
            if len(value) != 4 * part.size:
                raise BadBody(f"{place} has {len(value)} bytes, expected {4 * part.size}", field=place)
            value = np.frombuffer(value, "<f4")
        array = array_of(value, place, np.float32, (part.size,))
        inside = (array >= self._low) & (array <= self._high)
        if not inside.all():
            index = int(inside.argmin())
            raise _refused(place, array, inside, f"{part.low[index]:.9g} to {part.high[index]:.9g}")
        return array

    def read_rows(self, value: Any) -> np.ndarray:
        """The actions of several agents: int64 ``[N]`` from ``start``, or float32 ``[N, size]`` within the bounds.

        Args:
            value: the numbers, or their little-endian bytes, int32 or float32.
        """
        part, place = self.part, self.part.name
        is_discrete = part.kind == "discrete"
        if isinstance(value, bytes):
            value = np.frombuffer(value, "<i4" if is_discrete else "<f4")
        dtype = np.dtype(np.int64 if is_discrete else np.float32)
        is_read = isinstance(value, np.ndarray) and value.dtype.kind == dtype.kind
        array = value.astype(dtype, copy=False) if is_read else array_of(value, place, dtype.type)
        if not is_discrete and array.shape[1:] != (part.size,):
            if array.ndim > 1 or array.size % part.size:
                raise BadBody(f"{place} has shape {list(array.shape)}, expected [N, {part.size}]", field=place)
            array = array.reshape(-1, part.size)
        elif is_discrete and array.ndim != 1:
            raise BadBody(f"{place} has shape {list(array.shape)}, expected [N]", field=place)
        low, high = (part.start, part.start + part.size - 1) if is_discrete else (self._low, self._high)
        inside = (array >= low) & (array <= high)
        if np.count_nonzero(inside) < inside.size:  # a quarter of the time of `all`
            index = 0 if is_discrete else int(np.unravel_index(int(inside.argmin()), array.shape)[-1])
            whole = f"a whole number from {low} to {high}"
            raise _refused(
                place, array, inside, whole if is_discrete else f"{part.low[index]:.9g} to {part.high[index]:.9g}"
            )
        return array


def _refused(place: str, array: np.ndarray, inside: np.ndarray, expected: str) -> BadBody:
    """The refusal of the first value of ``array`` that is not ``inside``."""
    index = np.unravel_index(int(inside.argmin()), array.shape)
    field = place_of(place, [int(part) for part in index])
    return BadBody(f"{field} is {array[index].item()!r}, expected {expected}", field=field)
