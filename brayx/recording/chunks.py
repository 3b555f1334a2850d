"""Chunks: Parquet files of ticks, with an index of their sessions in the footer.

Other Parquet readers see the same columns, except arrays that are stored as numbers of the input, see `_Stored`. Knows
nothing of folders, limits or running sessions.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from brayx.errors import BadRecording, first_line
from brayx.recording import arrow
from brayx.recording.bodies import Bodies
from brayx.recording.columns import TickColumns
from brayx.recording.frames import MAX_SIDE, sizes_of
from brayx.recording.gather import OWN_PREFIX
from brayx.recording.index import DEFAULTS, Parts, SessionPart, check_parts, check_text, columns_of_parts

ROWS = 8192
"""Maximum ticks in a row group, which is the smallest unit that can be read."""
_MIN_SPLIT_ROWS = 1024
"""Minimum ticks in a chunk for a column per number of a body: that compresses better, but costs 250 bytes a column."""
_GROUP_BYTES = 2**22
"""Maximum size of a row group in memory: a large group makes reading one tick slow."""
_FORMAT = 2
_KEY = "brayx.recording"
_LEVEL, _NUMBERS_LEVEL = 3, 12
"""Levels of zstd, the second for columns of few numbers: from level 11 on, zstd separates exponents from mantissas."""
_FEW_NUMBERS = 16
"""Maximum numbers in a tick's body or array that count as few. With more, pages are so long that zstd separates
exponents at any level, and a column for each number would make reading slow."""
_BODIES = ("input", "output")
_NUMBER, _EVENT, _STOP = f"{OWN_PREFIX}number", f"{OWN_PREFIX}event", f"{OWN_PREFIX}stop"
_TIMES = ("time_us", "duration_us", "queue_us", "forward_us")
_OPTIONAL_TYPES: dict[str, pa.DataType] = {_STOP: pa.binary(), **{f"{OWN_PREFIX}{name}": pa.int64() for name in _TIMES}}
"""Columns that older recordings lack."""
_TYPES = {_NUMBER: pa.int64(), _EVENT: pa.string(), **_OPTIONAL_TYPES}
_CACHE_BYTES = 16 * 2**20
"""Maximum size of the row groups that an open chunk caches."""


@dataclass(frozen=True)
class _Stored:
    """How a chunk stores an array that agents set.

    Attributes:
        dtype, shape: dtype and shape of one tick's array.
        at: offset in the input's numbers, if these contain the array; -1: it has its own column.
    """

    dtype: str
    shape: tuple[int, ...]
    at: int = -1


def write_chunk(
    to: IO[bytes], parts: Sequence[SessionPart], columns: TickColumns, fps: int = 30
) -> tuple[Parts, list[str]]:
    """Writes a chunk; returns its index, the parts with their rows, and the names of the arrays that agents set.

    Args:
        to: an open file; the caller closes it.
        parts: the sessions of the ticks, at least one, in order.
        columns: the ticks.
        fps: frames per second of the chunk's video, whose frame i belongs to row i.
    """
    rows = itertools.accumulate((part.ticks for part in parts), initial=0)
    arrays: dict[str, pa.Array] = {
        _NUMBER: pa.array(columns.number),
        f"{OWN_PREFIX}time_us": pa.array(columns.time_us),
        f"{OWN_PREFIX}duration_us": pa.array(columns.duration_us),
        f"{OWN_PREFIX}queue_us": pa.array(columns.queue_us),
        f"{OWN_PREFIX}forward_us": pa.array(columns.forward_us),
        _EVENT: pa.array(columns.event, pa.string()),
        _STOP: pa.array([stop or None for stop in columns.stop], pa.binary()),
    }
    for name in _BODIES:
        bodies = getattr(columns, name)
        split_numbers = (
            isinstance(bodies, Bodies)
            and len(columns.number) >= _MIN_SPLIT_ROWS
            and bodies.numbers.shape[1] <= _FEW_NUMBERS
        )
        arrays |= arrow.from_bodies(f"{OWN_PREFIX}{name}", bodies, split_numbers=split_numbers)
    inputs = columns.input.numbers if isinstance(columns.input, Bodies) else None
    stored = {}
    for name, values in columns.arrays.items():
        offset = _offset_of(values, inputs)
        stored[name] = _Stored(values.dtype.str, values.shape[1:], offset)
        if offset < 0:
            arrays[name] = arrow.from_numpy(values)
    index = columns_of_parts(
        [
            dataclasses.replace(
                part, row=row, frames=sum(frame is not None for frame in columns.frames[row : row + part.ticks])
            )
            for part, row in zip(parts, rows, strict=False)
        ]
    )
    about: dict[str, Any] = {
        "format": _FORMAT,
        "columns": {name: dataclasses.asdict(column) for name, column in stored.items()},
        "parts": index,
    }
    if sizes := sizes_of(columns.frames):
        about["video"] = {"fps": fps, "sizes": sizes}
    table = pa.table(arrays)
    leaves = {arrow.leaf(name, array.type): array.type for name, array in arrays.items()}
    numeric = [leaf for leaf, data_type in leaves.items() if arrow.is_numeric(data_type)]
    few = [leaf for leaf in numeric if arrow.width(leaves[leaf]) <= _FEW_NUMBERS]
    rising = (_NUMBER, f"{OWN_PREFIX}time_us")
    with pq.ParquetWriter(
        to,
        table.schema,
        compression="zstd",
        compression_level=dict.fromkeys(leaves, _LEVEL) | dict.fromkeys(few, _NUMBERS_LEVEL),
        use_dictionary=[_EVENT, *(f"{OWN_PREFIX}{name}.text" for name in _BODIES)],
        column_encoding=dict.fromkeys(numeric, "BYTE_STREAM_SPLIT") | dict.fromkeys(rising, "DELTA_BINARY_PACKED"),
        write_statistics=False,
    ) as writer:
        fitting = _GROUP_BYTES * len(table) // max(table.nbytes, 1)
        writer.write_table(table, row_group_size=min(max(fitting, 1), ROWS))
        writer.add_key_value_metadata({_KEY: json.dumps(about)})
    return index, list(columns.arrays)


class Chunk:
    """A chunk, open for reading. Thread safe.

    Args:
        file: an open file; it is closed when the chunk is no longer used.
        name: the file's name in errors.

    Attributes:
        parts: its index of sessions, see `brayx.recording.index.Parts`.
        columns: names of the arrays that agents set.
        fps: frames per second of its video.
        sizes: heights and widths of the video's tracks; empty: it has no video.

    Raises:
        BadRecording: the file is not a chunk, or it is broken; also raised by `read`.
    """

    def __init__(self, file: IO[bytes], name: str) -> None:
        self._name = name
        self._lock = threading.Lock()  # pyarrow's files are not thread safe: two readers at once may end the process
        try:
            self._file = pq.ParquetFile(file)
            about = json.loads((self._file.metadata.metadata or {})[_KEY.encode()])
            if about["format"] not in (1, _FORMAT):
                wrong = f"{name} has format {about['format']!r:.40}, expected 1 or {_FORMAT}"
                raise BadRecording(f"{wrong}: another version of brayx wrote it", file=name)
            parts = about["parts"]
            if about["format"] == 1:  # one object for each part
                parts = columns_of_parts([SessionPart(**part) for part in parts])
            self.parts = DEFAULTS | parts
            self._stored = {
                column: _Stored(str(stored["dtype"]), tuple(map(int, stored["shape"])), int(stored["at"]))
                for column, stored in about["columns"].items()
            }
            video = about.get("video", {"fps": 1, "sizes": []})
            self.fps, self.sizes = int(video["fps"]), [(int(height), int(width)) for height, width in video["sizes"]]
            self._check()
            self._types = self._checked_types()
        except BadRecording:
            raise
        except Exception as error:  # on a hostile file, pyarrow raises almost any exception
            what = f"{type(error).__name__}: {first_line(error)[:200]}"
            raise BadRecording(f"{name} is not a file of a recording: {what}", file=name) from None
        self.columns = list(self._stored)
        self._cached: tuple[Any, pa.Table | None] = (None, None)
        self._bounds = np.cumsum([0, *(self._file.metadata.row_group(i).num_rows for i in range(self._groups))])

    @property
    def _groups(self) -> int:
        return int(self._file.num_row_groups)

    def _check(self) -> None:
        rows = self._file.metadata.num_rows
        check_parts(self.parts)
        last = (np.array(self.parts["row"]) + np.array(self.parts["ticks"])).max()
        if last > rows:
            raise ValueError(f"a part ends at row {last} of {rows}")
        if self.fps < 1 or any(not 0 < side <= MAX_SIDE for size in self.sizes for side in size):
            raise ValueError(f"its video has {self.fps} frames per second, of {self.sizes[:4]}")
        check_text(self._stored)
        for name, stored in self._stored.items():
            if name.startswith(OWN_PREFIX):
                raise ValueError(f"an array has the name {name!r}")
            if np.dtype(stored.dtype).kind not in "biuf" or any(size < 0 for size in stored.shape):
                raise ValueError(f"column {name!r} has dtype {stored.dtype!r} and shape {stored.shape}")

    def _checked_types(self) -> dict[str, pa.DataType]:
        """The types of the recording's own columns; those in `_OPTIONAL_TYPES` may be missing."""
        schema = self._file.schema_arrow
        has = dict(zip(schema.names, schema.types, strict=True))
        types = {name: data_type for name, data_type in _TYPES.items() if name in has or name not in _OPTIONAL_TYPES}
        arrow.expected(types, has)
        bodies = {name: arrow.body_types(f"{OWN_PREFIX}{name}", has) for name in _BODIES}
        inputs = sum(arrow.width(data_type) for data_type in bodies["input"].values() if arrow.is_numeric(data_type))
        for name, stored in self._stored.items():
            if stored.at < 0:
                arrow.expected({name: arrow.type_of(np.dtype(stored.dtype), stored.shape)}, has)
            elif stored.dtype != "<f4" or stored.at + math.prod(stored.shape) > inputs:
                raise ValueError(f"column {name!r} is not within the {inputs} numbers of the input")
        return types | bodies["input"] | bodies["output"]

    def read(self, row: int, count: int, names: Sequence[str] | None = None) -> TickColumns:
        """Rows ``row`` to ``row + count``, with the arrays ``names``; None: with all arrays."""
        names = self.columns if names is None else names
        for name in names:
            if name not in self._stored:
                raise BadRecording(f"{self._name} has no array {name!r}", file=self._name, column=name)
        first = int(np.searchsorted(self._bounds, row, "right")) - 1
        last = int(np.searchsorted(self._bounds, row + count, "left"))
        own_columns = [name for name in names if self._stored[name].at < 0]
        try:
            table = self._row_groups(first, last, (*self._types, *own_columns))
            table = table.slice(row - int(self._bounds[first]), count).combine_chunks()
            if len(table) < count:
                raise ValueError(f"it ends before row {row + count}")
            bodies = {name: arrow.to_bodies(table, f"{OWN_PREFIX}{name}") for name in _BODIES}
            arrays = {}
            for name in names:
                stored = self._stored[name]
                if stored.at < 0:
                    arrays[name] = arrow.to_numpy(table[name], np.dtype(stored.dtype), stored.shape)
                else:
                    inputs = bodies["input"]
                    assert isinstance(inputs, Bodies)  # `_checked_types` found its numbers
                    size = math.prod(stored.shape)
                    arrays[name] = inputs.numbers[:, stored.at : stored.at + size].reshape(-1, *stored.shape)
            nothing = np.zeros(len(table), np.int64)
            times: dict[str, Any] = {
                name: arrow.to_numpy(table[f"{OWN_PREFIX}{name}"], nothing.dtype, ())
                if f"{OWN_PREFIX}{name}" in self._types
                else nothing
                for name in _TIMES
            }
            return TickColumns(
                number=arrow.to_numpy(table[_NUMBER], nothing.dtype, ()),
                event=arrow.to_list(table[_EVENT]),
                input=bodies["input"],
                output=bodies["output"],
                arrays=arrays,
                stop=[body or b"" for body in table[_STOP].to_pylist()] if _STOP in self._types else [b""] * len(table),
                **times,
            )
        except Exception as error:  # as above
            what = f"{type(error).__name__}: {first_line(error)[:200]}"
            raise BadRecording(f"{self._name} cannot be read: {what}", file=self._name) from None

    def _row_groups(self, first: int, last: int, columns: tuple[str, ...]) -> pa.Table:
        """Row groups ``first`` to ``last``. The newest read is cached, since several short sessions share a group."""
        key = (first, last, columns)
        with self._lock:
            if self._cached[0] == key:
                return self._cached[1]
            table = self._file.read_row_groups(range(first, last), columns=list(columns))
            self._cached = (key, table) if table.nbytes <= _CACHE_BYTES else (None, None)
        return table


def _offset_of(values: np.ndarray, numbers: np.ndarray | None) -> int:
    """Offset at which ``numbers`` contain ``values`` in every row; -1: there is none."""
    if numbers is None or values.dtype != np.float32 or not values[0].size:
        return -1
    flat = values.reshape(len(values), -1)
    width = flat.shape[1]
    for offset in range(numbers.shape[1] - width + 1):
        piece = numbers[:, offset : offset + width]
        if np.array_equal(piece[0], flat[0]) and np.array_equal(piece, flat):
            return offset
    return -1
