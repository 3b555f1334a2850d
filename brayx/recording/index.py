"""The index of a folder: which sessions each chunk has, so that a reader opens a chunk only to read its ticks.

A writer adds a file for each `CHUNKS` of its chunks. The index may be missing or out of date: an entry is valid only
for a chunk of the size that it names, and readers open the other chunks. Knows nothing of ticks.
"""

from __future__ import annotations

import gzip
import json
import zlib
from typing import Any, NamedTuple

from brayx.recording.part import Parts, check_parts

SUFFIX = ".index"
CHUNKS = 64
"""Chunks of an index file."""
_FORMAT = 2
_MAX_BYTES = 2**28
"""Maximum size of an index when decompressed: a small file may otherwise fill the memory."""
_GZIP = 16 + zlib.MAX_WBITS


class Entry(NamedTuple):
    """A chunk in an index.

    Attributes:
        size: size of its file, in bytes.
        columns: names of the arrays that agents set.
        parts: index of the sessions in it.
    """

    size: int
    columns: tuple[str, ...]
    parts: Parts


def written(entries: dict[str, Entry]) -> bytes:
    """An index file for chunks by name."""
    return gzip.compress(json.dumps({"format": _FORMAT, "chunks": entries}).encode(), 1)


def read(data: bytes) -> dict[str, Entry]:
    """The entries of an index file, by the chunk's name; empty if it is broken, since it only saves time."""
    try:
        file = zlib.decompressobj(_GZIP)
        text = file.decompress(data, _MAX_BYTES)
        if not file.eof:  # cut, or too long
            return {}
        about = json.loads(text)
        if about["format"] != _FORMAT:
            return {}
        return {name: _entry(*entry) for name, entry in about["chunks"].items()}
    except Exception:  # on a hostile file almost any
        return {}


def _entry(size: Any, columns: Any, parts: Any) -> Entry:
    if type(size) is not int or any(type(name) is not str for name in columns):
        raise ValueError("no entry of an index")
    check_parts(parts)
    return Entry(size, tuple(columns), parts)
