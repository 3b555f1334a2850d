"""Removes sessions from a folder of recordings, as the erasure of a player's data requires.

A file that holds such a session is replaced by one with its other sessions; indices no longer name them. The new
file is complete before the old one is deleted, so an interrupted run can be repeated. Knows nothing of trials.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from brayx.errors import BadRecording
from brayx.recording import index, reader
from brayx.recording.addresses import files_of
from brayx.recording.chunks import Chunk
from brayx.recording.columns import concatenated
from brayx.recording.config import is_named
from brayx.recording.index import SessionPart, part_at
from brayx.recording.reader import Recordings
from brayx.recording.writer import SUFFIX, UNFINISHED, VIDEO, Folder, video_of

_NO_LIMIT = 2**62


class Forgotten(NamedTuple):
    """What was removed.

    Attributes:
        sessions, ticks: their numbers.
        files: number of files that held them.
        began: start of the first of these sessions, in seconds since 1970; infinite if there was none.
        ids: their ids.
    """

    sessions: int
    ticks: int
    files: int
    began: float
    ids: frozenset[str]


def forget(address: str, names: Collection[str]) -> Forgotten:
    """Removes the sessions that one of ``names`` selects, see `brayx.recording.config.is_named`.

    A session must have ended: a writer may still add ticks of one that runs.

    Args:
        address: path or fsspec address of the folder.
        names: ids of sessions, which may have ``*``, or games.

    Raises:
        BadRecording: there is no such folder; or a file cannot be read, or is not finished, so that it may hold such a
            session. Nothing is removed then.
        OSError: a file cannot be written.
    """
    files, path = files_of(address)
    if not files.isdir(path):
        raise BadRecording(f"there is no folder of recordings at {address}", file=address)
    recordings = reader.open(address)
    paths = sorted(str(entry["name"]) for entry in files.ls(path, detail=True))
    if unfinished := [path for path in paths if _is_unfinished(path, paths)]:
        raise BadRecording(
            "nothing is removed, since files that may hold such sessions are not finished: "
            f"{', '.join(unfinished)}; try again after their writer, or delete them if it was killed",
            files=unfinished,
        )
    try:
        parts = {chunk: _parts(recordings.chunk(chunk)) for chunk in paths if _is_chunk(chunk)}
    except BadRecording as error:
        message = f"nothing is removed, since a file that may hold such sessions is broken: {error.message}"
        raise BadRecording(message, **error.details) from None
    gone = [part for listed in parts.values() for part in listed if _is_one(part, names)]
    affected = [chunk for chunk, listed in parts.items() if any(_is_one(part, names) for part in listed)]
    for chunk in affected:
        _replace(files, address, chunk, parts, recordings, names)
    _clean_indices(files, paths, names)
    return Forgotten(
        len({part.episode for part in gone}),
        sum(part.ticks for part in gone),
        len(affected),
        min((part.began for part in gone), default=float("inf")),
        frozenset(part.session for part in gone),
    )


def _replace(
    files: Any,
    address: str,
    path: str,
    parts: dict[str, list[SessionPart]],
    recordings: Recordings,
    names: Collection[str],
) -> None:
    """Replaces a chunk by one without the sessions, or deletes it if it has no others."""
    listed = parts.pop(path)
    # An interrupted run may have written some of them already.
    elsewhere = {(part.episode, part.first) for others in parts.values() for part in others}
    kept = [part for part in listed if not _is_one(part, names) and (part.episode, part.first) not in elsewhere]
    if kept:
        chunk, blocks = recordings.chunk(path), []
        for part in kept:
            block = chunk.read(part.row, part.ticks)
            if part.frames:
                block.frames = recordings.video(path).frames(part.row, part.ticks)
            blocks.append(block)
        target = Folder(address, _NO_LIMIT, chunk.fps)
        target.write(kept, concatenated(blocks), stamp=PurePosixPath(path).name.partition("-")[0])
        target.write_index()
        parts[path] = kept
    files.rm(path)
    if files.exists(video_of(path)):
        files.rm(video_of(path))


def _clean_indices(files: Any, paths: list[str], names: Collection[str]) -> None:
    """Rewrites every index that names such sessions without their chunks; deletes it if none is left."""
    for path in paths:
        if not path.endswith(index.SUFFIX):
            continue
        entries = index.read(files.cat_file(path))
        others = {
            chunk: entry
            for chunk, entry in entries.items()
            if not any(is_named(session, name) for session in entry.parts["session"] for name in names)
        }
        if len(others) == len(entries):
            continue
        if others:
            files.pipe_file(path, index.written(others))
        else:
            files.rm(path)


def _is_chunk(path: str) -> bool:
    name = PurePosixPath(path).name
    return name.endswith(SUFFIX) and not name.startswith(".")


def _is_unfinished(path: str, paths: Collection[str]) -> bool:
    """Whether a writer is not done with a file, or was killed: a video comes before its chunk."""
    if PurePosixPath(path).name.startswith(UNFINISHED):
        return True
    return path.endswith(VIDEO) and path.removesuffix(VIDEO) + SUFFIX not in paths


def _parts(chunk: Chunk) -> list[SessionPart]:
    return [part_at(chunk.parts, number) for number in range(len(chunk.parts["episode"]))]


def _is_one(part: SessionPart, names: Collection[str]) -> bool:
    return any(is_named(part.session, name) for name in names)
