"""The index of a folder: which sessions each chunk has, so that a reader opens a chunk only to read its ticks.

A writer adds an index file for every `CHUNKS` of its chunks. It may be missing or outdated: an entry is valid only if
the chunk has the size in it, and readers open chunks without a valid entry. Knows nothing of ticks.
"""

from __future__ import annotations

import gzip
import json
import zlib
from typing import Any, NamedTuple

from brayx.recording.part import DEFAULTS, Parts, check_parts

SUFFIX = ".index"
CHUNKS = 64
"""Chunks in an index file."""
_FORMAT = 2
_MAX_BYTES = 2**28
"""Maximum size of a decompressed index. Without it, a small hostile file could fill the memory."""
_GZIP = 16 + zlib.MAX_WBITS


class Entry(NamedTuple):
    """One chunk in an index.

    Attributes:
        size: size of its file, in bytes.
        columns: names of the arrays that agents set.
        parts: its index of sessions.
    """

    size: int
    columns: tuple[str, ...]
    parts: Parts


def written(entries: dict[str, Entry]) -> bytes:
    """The content of an index file: entries by the chunk's name."""
    return gzip.compress(json.dumps({"format": _FORMAT, "chunks": entries}).encode(), 1)


def read(data: bytes) -> dict[str, Entry]:
    """The entries in an index file, by the chunk's name; empty if it is broken, since an index only saves time."""
    try:
        file = zlib.decompressobj(_GZIP)
        text = file.decompress(data, _MAX_BYTES)
        if not file.eof:  # truncated, or too long
            return {}
        about = json.loads(text)
        if about["format"] != _FORMAT:
            return {}
        return {name: _entry(*entry) for name, entry in about["chunks"].items()}
    except Exception:  # a hostile file can raise almost any
        return {}


def _entry(size: Any, columns: Any, parts: Any) -> Entry:
    if type(size) is not int or any(type(name) is not str for name in columns):
        raise ValueError("this is not an entry of an index")
    parts = DEFAULTS | parts
    check_parts(parts)
    return Entry(size, tuple(columns), parts)
