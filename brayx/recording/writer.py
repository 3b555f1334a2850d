"""A folder of chunks: writes chunks, and deletes the oldest beyond a limit. Several writers may share a folder."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

import fsspec

from brayx.recording.chunks import write_chunk
from brayx.recording.columns import Columns
from brayx.recording.part import Part

logger = logging.getLogger(__name__)

SUFFIX = ".parquet"
_UNFINISHED = ".unfinished-"
_ABANDONED_S = 3600.0


class Folder:
    """A folder of recordings.

    Args:
        address: a path, or an fsspec address such as ``s3://bucket/recordings``; created if it is missing.
        max_bytes: maximum size of all chunks, those of other writers included.

    Raises:
        OSError: the folder cannot be created; also raised by `write`.
    """

    def __init__(self, address: str, max_bytes: int) -> None:
        self._files, self._path = fsspec.core.url_to_fs(address)
        self._max_bytes = max_bytes
        self._writer = uuid.uuid4().hex[:8]
        self._written = 0
        self._files.makedirs(self._path, exist_ok=True)

    def write(self, parts: Sequence[tuple[Part, Columns]]) -> str:
        """Writes a chunk, whole or not at all; returns its name. Names sort by time."""
        self._written += 1
        name = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{self._writer}-{self._written:06d}{SUFFIX}"
        unfinished = self._at(f"{_UNFINISHED}{name}")
        try:
            with self._files.open(unfinished, "wb") as file:
                write_chunk(file, parts)
            self._files.mv(unfinished, self._at(name))
        except BaseException:
            if self._files.exists(unfinished):
                self._files.rm(unfinished)
            raise
        return name

    def trim(self) -> int:
        """Deletes the oldest chunks beyond the limit, and unfinished files of killed writers.

        Returns:
            The number of deleted chunks.
        """
        chunks, deleted = [], 0
        for entry in self._files.ls(self._path, detail=True, refresh=True):
            name = PurePosixPath(entry["name"]).name
            if name.startswith(_UNFINISHED):
                if time.time() - _modified(entry) > _ABANDONED_S:
                    self._delete(entry["name"])
            elif name.endswith(SUFFIX):
                chunks.append((name, int(entry["size"] or 0), entry["name"]))
        total = sum(size for _, size, _ in chunks)
        for _, size, path in sorted(chunks):
            if total <= self._max_bytes:
                break
            total -= size
            deleted += self._delete(path)
        return deleted

    def _delete(self, path: str) -> bool:
        try:
            self._files.rm(path)
        except FileNotFoundError:  # another writer deleted it first
            return False
        return True

    def _at(self, name: str) -> str:
        return f"{self._path.rstrip('/')}/{name}"


def _modified(entry: dict[str, Any]) -> float:
    """When a file was last written; now, if the file system does not know."""
    found = entry.get("mtime", entry.get("LastModified"))
    if found is None:
        return time.time()
    return float(found) if isinstance(found, int | float) else float(found.timestamp())
