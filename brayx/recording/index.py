"""The index of a folder: which sessions each chunk has, so that a reader opens a chunk only to read its ticks.

A writer adds a file for each `CHUNKS` of its chunks. The index may be missing or out of date: an entry is valid only
for a chunk of the size that it names, and readers open the other chunks. Knows nothing of ticks.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from brayx.recording.part import FIELDS, check_rows

SUFFIX = ".index"
CHUNKS = 64
"""Chunks of an index file."""
_FORMAT = 1
_MAX_BYTES = 2**28
"""Maximum size of an index when decompressed: a small file may otherwise fill the memory."""


class Entry(NamedTuple):
    """A chunk in an index.

    Attributes:
        size: size of its file, in bytes.
        columns: names of the arrays that agents set.
        rows: its parts, as `brayx.recording.part.rows_of` makes them.
    """

    size: int
    columns: tuple[str, ...]
    rows: list[Sequence[Any]]


def written(entries: dict[str, Entry]) -> bytes:
    """An index file for chunks by name."""
    chunks = {name: [entry.size, entry.columns, entry.rows] for name, entry in entries.items()}
    return gzip.compress(json.dumps({"format": _FORMAT, "fields": FIELDS, "chunks": chunks}).encode(), 1)


def read(data: bytes) -> dict[str, Entry]:
    """The entries of an index file, by the chunk's name; empty if it is broken, since it only saves time."""
    try:
        with gzip.open(io.BytesIO(data)) as file:
            text = file.read(_MAX_BYTES + 1)
        if len(text) > _MAX_BYTES:
            return {}
        about = json.loads(text)
        if about["format"] != _FORMAT or about["fields"] != FIELDS:
            return {}
        return {name: _entry(*entry) for name, entry in about["chunks"].items()}
    except Exception:  # on a hostile file almost any
        return {}


def _entry(size: Any, columns: Any, rows: Any) -> Entry:
    if type(size) is not int or any(type(name) is not str for name in columns):
        raise ValueError("no entry of an index")
    check_rows(rows)
    return Entry(size, tuple(columns), rows)
