"""Writes chunks into a folder, and deletes the oldest ones beyond a limit. Several writers may share a folder."""

from __future__ import annotations

import io
import logging
import re
import time
import uuid
from collections import deque
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

from brayx.recording import index
from brayx.recording.addresses import files_of
from brayx.recording.chunks import write_chunk
from brayx.recording.columns import TickColumns
from brayx.recording.frames import write_video
from brayx.recording.index import Entry, SessionPart

logger = logging.getLogger(__name__)

SUFFIX = ".parquet"
VIDEO = ".mp4"
"""Suffix of a chunk's video, whose frame i belongs to row i."""
_VIDEO_NAME = re.compile(r"\d{8}T\d{6}-[0-9a-f]{8}-\d{6,}\.mp4")
UNFINISHED = ".unfinished-"
_ABANDONED_S = 3600.0
_LIST_S = 60.0


def video_of(chunk: str) -> str:
    """Path of a chunk's video."""
    return chunk.removesuffix(SUFFIX) + VIDEO


class Folder:
    """A folder of recordings.

    Args:
        address: a path, or an fsspec address such as ``s3://bucket/recordings``; created if it is missing.
        max_bytes: maximum size of all chunks and videos, including those of other writers.
        fps: frames per second of the videos.

    Raises:
        OSError: the folder cannot be created; also raised by `write`.
    """

    def __init__(self, address: str, max_bytes: int, fps: int = 30) -> None:
        self._files, self._path = files_of(address)
        self._max_bytes, self._fps = max_bytes, fps
        self._writer = uuid.uuid4().hex[:8]
        self._written = 0
        self._known: deque[tuple[str, int]] = deque()
        self._total = 0
        self._indices: list[str] = []
        self._has_videos = False
        self._list_at = 0.0
        self._entries: dict[str, Entry] = {}
        self._files.makedirs(self._path, exist_ok=True)

    def write(self, parts: Sequence[SessionPart], columns: TickColumns, stamp: str = "") -> str:
        """Writes a chunk and its video, whole or not at all.

        Args:
            parts, columns: as for `write_chunk`.
            stamp: time at the beginning of the chunk's name, as in the names of others; empty: now.

        Returns:
            The chunk's name. Names sort by time.
        """
        self._written += 1
        stamp = stamp or time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        name = f"{stamp}-{self._writer}-{self._written:06d}{SUFFIX}"
        video = video_of(name)
        try:
            with self._files.open(self._at(f"{UNFINISHED}{name}"), "wb") as file:
                row_groups, names = write_chunk(file, parts, columns, self._fps)
            size = whole = int(self._files.size(self._at(f"{UNFINISHED}{name}")))
            if any(frame is not None for frame in columns.frames):
                self._has_videos = True
                whole += self._write_video(f"{UNFINISHED}{video}", columns.frames)
                self._files.mv(self._at(f"{UNFINISHED}{video}"), self._at(video))
            self._files.mv(self._at(f"{UNFINISHED}{name}"), self._at(name))  # last, since readers look for this file
        except BaseException:
            for path in (f"{UNFINISHED}{name}", f"{UNFINISHED}{video}", name, video):
                if self._files.exists(self._at(path)):
                    self._files.rm(self._at(path))
            raise
        self._known.append((name, whole))
        self._total += whole
        self._entries[name] = Entry(size, tuple(names), row_groups)
        if len(self._entries) >= index.CHUNKS:
            self.write_index()
        return name

    def _write_video(self, name: str, frames: Sequence[Any]) -> int:
        """Writes a video; returns its size."""
        video_file = io.BytesIO()  # writing an MP4 needs to seek, which not every file system can
        write_video(video_file, frames, self._fps)
        with self._files.open(self._at(name), "wb") as file:
            file.write(video_file.getvalue())
        return len(video_file.getvalue())

    def write_index(self) -> None:
        """Writes an index of the chunks since the last index. Does not raise: an index only saves time."""
        entries, self._entries = self._entries, {}
        if not entries:
            return
        name = list(entries)[-1].removesuffix(SUFFIX) + index.SUFFIX
        try:
            with self._files.open(self._at(f"{UNFINISHED}{name}"), "wb") as file:
                file.write(index.written(entries))
            self._files.mv(self._at(f"{UNFINISHED}{name}"), self._at(name))
        except Exception as error:
            logger.warning("the index of %d files of recordings is not written: %s", len(entries), error)

    def trim(self) -> int:
        """Deletes the oldest chunks beyond the limit, and unfinished files of killed writers.

        Lists the folder at most once a minute, since listing many files is slow. So files of other writers may be
        counted a minute late. Does not raise: the newest chunk is written, and the next one trims the folder again.

        Returns:
            The number of deleted chunks.
        """
        try:
            return self._trimmed()
        except Exception as error:  # cloud stores raise their own exceptions
            logger.warning("the oldest recordings in %s are not deleted: %r", self._path, error)
            return 0

    def _trimmed(self) -> int:
        if time.monotonic() >= self._list_at:
            self._list()
        deleted = 0
        while self._total > self._max_bytes and self._known:
            name, size = self._known.popleft()
            self._total -= size
            deleted += self._delete(self._at(name))
            if self._has_videos:
                self._delete(self._at(video_of(name)))
        if deleted:
            oldest = self._known[0][0] if self._known else ""
            outdated = [name for name in self._indices if name.removesuffix(index.SUFFIX) + SUFFIX < oldest]
            for name in outdated:
                self._indices.remove(name)
                self._delete(self._at(name))
        return deleted

    def _list(self) -> None:
        self._list_at = time.monotonic() + _LIST_S
        sizes: dict[str, int] = {}
        videos: dict[str, dict[str, Any]] = {}
        self._indices = []
        for entry in self._files.ls(self._path, detail=True, refresh=True):
            name = PurePosixPath(entry["name"]).name
            if name.startswith(UNFINISHED):
                if time.time() - _modified(entry) > _ABANDONED_S:
                    self._delete(entry["name"])
            elif name.endswith(SUFFIX):
                sizes[name] = int(entry["size"] or 0)
            elif _VIDEO_NAME.fullmatch(name):  # otherwise a user may have saved it here
                videos[name.removesuffix(VIDEO) + SUFFIX] = entry
            elif name.endswith(index.SUFFIX):
                self._indices.append(name)
        for name, entry in videos.items():
            if name in sizes:
                sizes[name] += int(entry["size"] or 0)
            elif time.time() - _modified(entry) > _ABANDONED_S:  # its writer was killed before it finished the chunk
                self._delete(entry["name"])
        self._has_videos = bool(videos)
        self._known = deque(sorted(sizes.items()))
        self._total = sum(sizes.values())

    def _delete(self, path: str) -> bool:
        try:
            self._files.rm(path)
        except FileNotFoundError:  # another writer deleted it first
            return False
        return True

    def _at(self, name: str) -> str:
        return f"{self._path.rstrip('/')}/{name}"


def _modified(entry: dict[str, Any]) -> float:
    """When a file was last written, in seconds since 1970; now, if the file system does not know."""
    modified = entry.get("mtime", entry.get("LastModified"))
    if modified is None:
        return time.time()
    return float(modified) if isinstance(modified, int | float) else float(modified.timestamp())
