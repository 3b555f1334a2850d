"""Reads the steps of a Parquet file, in whole or in parts of its row groups. Needs pyarrow.

Knows nothing of episodes, but for where a part's first one begins.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from brayx.errors import ConfigError
from brayx.replay import steps
from brayx.replay.steps import Arrays, declares_nothing
from brayx.types import Fragment

declared = declares_nothing


def episodes(file: Path, fields: Mapping[str, str], first: int = 0, last: int | None = None) -> Iterator[Fragment]:
    """As `brayx.replay.files.FormatReader`, of the episodes that start in row groups ``first`` to ``last - 1``.

    ``last`` None: to the end of the file.
    """
    with _opened(file) as source:
        rows = [source.metadata.row_group(group).num_rows for group in range(source.num_row_groups)]
        row, shapes = sum(rows[:first]), dict[str, tuple[int, ...]]()
        row_count = None if last is None else sum(rows[first:last])
        if row_count == 0:
            return

        def blocks() -> Iterator[Arrays]:
            next_row, past = row, len(rows) if last is None else last
            # This part's groups in one read, then one group at a time until the last episode ends.
            for groups in (range(first, past), *([group] for group in range(past, len(rows)))):
                for batch in filter(len, source.iter_batches(steps.BLOCK_ROWS, row_groups=groups)):
                    yield {name: _column(file, name, batch[name], next_row, shapes) for name in batch.schema.names}
                    next_row += len(batch)
            if next_row == 0:  # a column without rows
                yield {name: np.zeros(0) for name in source.schema_arrow.names}

        if row:  # every part expects lists of the same length as in the file's first row
            head = next(source.iter_batches(1))
            for name in head.schema.names:
                _column(file, name, head[name], 0, shapes)
        goes_on = bool(row) and not _is_end(source, max(g for g in range(first) if rows[g]), fields)
        yield from steps.episodes(file, blocks(), fields, goes_on, row_count)


def blank(file: Path, fields: Mapping[str, str]) -> tuple[Fragment | None, set[str]]:
    """As `brayx.replay.files.FormatReader`; reads the first row, for the lengths of lists."""
    with _opened(file) as source:
        arrays = {name: np.zeros(0) for name in source.schema_arrow.names}
        for row in itertools.islice(filter(len, source.iter_batches(1)), 1):
            arrays = {name: _column(file, name, row[name], 0, {}) for name in arrays}
    arrays = steps.by_our_names(file, arrays, fields)
    return steps.blank(arrays), set(arrays)


def spans(file: Path, count: int) -> list[tuple[int, int]]:
    """At most ``count`` ranges of a file's row groups, as (first, end); one range if it has no groups."""
    with _opened(file) as source:
        groups = source.num_row_groups
    count = max(1, min(count, groups))
    bounds = [groups * number // count for number in range(count + 1)]
    return list(itertools.pairwise(bounds))


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """Opens a file; raises ConfigError if it cannot be read."""
    import pyarrow as pa
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as source:
            yield source
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(f"{file}: cannot be read: {error}", path=str(file)) from error


def _is_end(source: Any, group: int, fields: Mapping[str, str]) -> bool:
    """Whether the last row of a row group ends an episode."""
    names = [fields.get(name, name) for name in ("terminated", "truncated")]
    read = source.read_row_group(group, columns=[name for name in names if name in source.schema_arrow.names])
    return any(column[-1].as_py() for column in read.columns)


def _column(file: Path, name: str, array: Any, first: int, shapes: dict[str, tuple[int, ...]]) -> np.ndarray:
    """A block of rows of a column, ``[rows, ...]``; lists of equal length become axes.

    Args:
        file, name: file and name of the column, for errors.
        array: the values.
        first: number of the block's first row in the file.
        shapes: shape of a row by column name; the file's first block sets it, later blocks must match.

    Raises:
        ConfigError: lists of different lengths, or nulls.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    known = shapes.get(name)
    shape: list[int] = [len(array)]
    entries_per_row = 1  # entries of a row at this depth of nesting

    def refuse(refused: np.ndarray, what: str) -> None:
        if refused.any():
            row = first + int(refused.argmax()) // max(1, entries_per_row)
            raise ConfigError(f"{file}: {name}: row {row} (the first is 0) {what}", path=str(file), row=row)

    while True:
        refuse(array.is_null().to_numpy(zero_copy_only=False), "holds null")
        if not (
            pa.types.is_list(array.type)
            or pa.types.is_large_list(array.type)
            or pa.types.is_fixed_size_list(array.type)
        ):
            break
        lengths = pc.list_value_length(array).to_numpy(zero_copy_only=False)
        first_length = int(lengths[0]) if len(lengths) else 0  # lists of empty lists
        length = first_length if known is None else known[len(shape) - 1]
        refuse(lengths != length, f"has a list of another length than the first one, {length}")
        shape.append(length)
        entries_per_row *= length
        array = array.flatten()
    shapes[name] = tuple(shape[1:])
    flat: np.ndarray = array.to_numpy(zero_copy_only=False)
    return flat.reshape(shape)
