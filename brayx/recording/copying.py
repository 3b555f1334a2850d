"""Copies recorded sessions: into another folder, or as a video for each. Frames are copied, not encoded again."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterable
from pathlib import Path

from brayx.errors import ConfigError
from brayx.recording.packer import ChunkPacker
from brayx.recording.reader import Recording
from brayx.recording.writer import Folder

_NO_LIMIT = 2**62
_NAME_CHARS = 48
"""Maximum characters of a session's id in a file name: file systems allow 255 bytes, and a character takes up to 4."""
_NOT_IN_NAMES = re.compile(r"[^\w.-]")


def copy(episodes: Iterable[Recording], folder: str, without: Collection[str] = ()) -> tuple[int, int]:
    """Copies sessions with their frames into a folder of recordings.

    Args:
        episodes: recorded sessions.
        folder: its path or fsspec address; created if it is missing.
        without: ids of episodes to leave out, since the folder has them.

    Returns:
        The numbers of copied sessions and ticks.

    Raises:
        BadRecording: a file is broken.
        OSError: the folder cannot be written.
    """
    packer: ChunkPacker | None = None
    known = set(without)
    sessions = ticks = 0
    for episode in episodes:
        if episode.id in known:
            continue
        known.add(episode.id)
        if packer is None:
            packer = ChunkPacker(functools.partial(Folder, folder, _NO_LIMIT, episode.fps), flush_s=float("inf"))
        for part, columns in episode.parts():
            packer.add([part], columns)
            _check(packer)
        sessions, ticks = sessions + 1, ticks + len(episode)
    if packer is not None:
        packer.close()
        _check(packer)
    return sessions, ticks


def _check(packer: ChunkPacker) -> None:
    if packer.failure:
        raise OSError(packer.failure)


def write_videos(episodes: Iterable[Recording], out: Path) -> tuple[int, int]:
    """Writes ``SESSION-ID.mp4`` for each session with frames.

    Args:
        episodes: recorded sessions.
        out: the folder; created if it is missing.

    Returns:
        The numbers of sessions and frames.

    Raises:
        BadRecording: a file is broken.
        ConfigError: PyAV is missing, or no session has frames.
    """
    sessions = frames = 0
    for episode in episodes:
        if episode.frames:
            out.mkdir(parents=True, exist_ok=True)
            episode.save_video(out / f"{file_name(episode)}.mp4")
            sessions, frames = sessions + 1, frames + episode.frames
    if not sessions:
        raise ConfigError("no selected session has frames (`recording.frames`): no video is written")
    return sessions, frames


def file_name(episode: Recording) -> str:
    """File name for a session, without a suffix. It is safe for any ids, which may be any text."""
    return _NOT_IN_NAMES.sub("_", f"{episode.session[:_NAME_CHARS]}-{episode.id[:8]}").lstrip(".")
