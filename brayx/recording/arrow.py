"""Converts NumPy arrays and bodies to Arrow columns, and back with checks, since a file may be hostile.

Knows nothing of files, sessions or ticks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from brayx.recording.bodies import Bodies, number_count

_TEXT = pa.dictionary(pa.int32(), pa.binary())
_FLOAT32 = np.dtype(np.float32)


def type_of(dtype: np.dtype[Any], shape: tuple[int, ...]) -> pa.DataType:
    """Type of a column with arrays ``[N, *shape]``: lists for floats, which compress well as lists, and fixed-size
    bytes for other dtypes."""
    if not shape:
        return pa.from_numpy_dtype(dtype)
    size = math.prod(shape)
    return pa.list_(pa.from_numpy_dtype(dtype), size) if dtype.kind == "f" else pa.binary(size * dtype.itemsize)


def from_numpy(values: np.ndarray) -> pa.Array:
    """The column for arrays ``[N, ...]``, with the type from `type_of`."""
    values = np.ascontiguousarray(values)
    if values.ndim == 1:
        return pa.array(values)
    data_type = type_of(values.dtype, values.shape[1:])
    if pa.types.is_fixed_size_list(data_type):
        return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), data_type.list_size)
    return pa.FixedSizeBinaryArray.from_buffers(data_type, len(values), [None, pa.py_buffer(values)])


def to_numpy(column: pa.ChunkedArray, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray:
    """The arrays ``[N, *shape]`` in a column with the type from `type_of`.

    Raises:
        ValueError: a value is null.
    """
    array = _combined(column)
    if pa.types.is_fixed_size_binary(array.type):
        values = np.frombuffer(b"".join(array.to_pylist()), dtype)
    else:
        values = _combined(array.flatten() if shape else array).to_numpy(zero_copy_only=False)
    return values.reshape(len(array), *shape)


def to_list(column: pa.ChunkedArray) -> list[Any]:
    """The values of a column.

    Raises:
        ValueError: a value is null.
    """
    values: list[Any] = _combined(column).to_pylist()
    return values


def from_bodies(name: str, bodies: Bodies | list[bytes], *, split_numbers: bool) -> dict[str, pa.Array]:
    """The columns of bodies; with ``split_numbers`` each number has its own column."""
    if not isinstance(bodies, Bodies):
        return {name: pa.array(bodies, pa.binary())}
    skeletons = pa.array(bodies.skeletons, pa.binary())
    text = {f"{name}.text": pa.DictionaryArray.from_arrays(pa.array(bodies.indices), skeletons)}
    if not split_numbers:
        return text | {f"{name}.numbers": from_numpy(bodies.numbers)}
    return text | {
        f"{name}.numbers.{index}": pa.array(values)
        for index, values in enumerate(np.ascontiguousarray(bodies.numbers.T))
    }


def body_types(name: str, types: Mapping[str, pa.DataType]) -> dict[str, pa.DataType]:
    """The columns in a file that hold the bodies ``name``, with their types.

    Raises:
        ValueError: there are none, or one has another type than `from_bodies` writes.
    """
    if name in types:
        return expected({name: pa.binary()}, types)
    numbers = [column for column in types if column.startswith(f"{name}.numbers")]
    if f"{name}.text" not in types or not numbers:
        raise ValueError(f"it has no column {name!r}")
    return expected(
        {f"{name}.text": _TEXT} | {column: type_of(_FLOAT32, _shape(types[column])) for column in numbers}, types
    )


def to_bodies(table: pa.Table, name: str) -> Bodies | list[bytes]:
    """The bodies in the rows of a table that has the columns of `body_types`.

    Raises:
        ValueError: a value is null, a number is not finite, or a body has too few of them.
    """
    if name in table.column_names:
        return to_list(table[name])
    texts = _combined(table[f"{name}.text"])
    columns = [table[column] for column in table.column_names if column.startswith(f"{name}.numbers")]
    numbers = np.concatenate(
        [to_numpy(column, _FLOAT32, _shape(column.type)).reshape(len(texts), width(column.type)) for column in columns],
        axis=1,
    )
    skeletons, indices = to_list(texts.dictionary), texts.indices.to_numpy()
    if len(indices) and not 0 <= indices.min() <= indices.max() < len(skeletons):
        raise ValueError(f"{name} has bodies without a text")
    if max(map(number_count, skeletons), default=0) > numbers.shape[1]:
        raise ValueError(f"{name} has bodies of more than {numbers.shape[1]} numbers")
    if not np.isfinite(numbers).all():
        raise ValueError(f"{name} has numbers that are not finite")
    return Bodies(skeletons, indices, numbers)


def expected(needed: Mapping[str, pa.DataType], types: Mapping[str, pa.DataType]) -> dict[str, pa.DataType]:
    """Returns ``wanted`` if a file's columns have these types.

    Raises:
        ValueError: one is missing or has another type.
    """
    for name, data_type in needed.items():
        if types.get(name) != data_type:
            raise ValueError(f"column {name!r} has type {types.get(name)}, expected {data_type}")
    return dict(needed)


def width(data_type: pa.DataType) -> int:
    """Number of values in a row of a column."""
    return math.prod(_shape(data_type))


def is_numeric(data_type: pa.DataType) -> bool:
    """Whether a column holds numbers, or lists of numbers."""
    leaf = data_type.value_type if pa.types.is_fixed_size_list(data_type) else data_type
    return bool(pa.types.is_floating(leaf) or pa.types.is_integer(leaf))


def leaf(name: str, data_type: pa.DataType) -> str:
    """Path of a column's values in a Parquet file."""
    return f"{name}.list.element" if pa.types.is_fixed_size_list(data_type) else name


def _shape(data_type: pa.DataType) -> tuple[int, ...]:
    return (data_type.list_size,) if pa.types.is_fixed_size_list(data_type) else ()


def _combined(column: Any) -> Any:
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if array.null_count:
        raise ValueError("a value is null")
    return array
