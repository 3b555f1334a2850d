"""Recorded sessions as files to download from the console, by the exporters of `brayx recordings export`.

Knows nothing of HTTP.
"""

from __future__ import annotations

import functools
import shutil
import tempfile
import threading
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Literal, NamedTuple, get_args
from weakref import WeakSet

from brayx.errors import BadRecording, Overloaded, ServiceFull, first_line
from brayx.recording import index
from brayx.recording.copying import copy, file_name, write_videos
from brayx.recording.reader import Recording
from brayx.temporary import temporary_folder

FileFormat = Literal["parquet", "mp4", "rerun", "minari"]
"""Formats of `brayx recordings export`."""

_MAX_BYTES = 2**29
"""Maximum size in memory of a session's ticks and encoded frames; some exporters hold all of them."""
_SAMPLE = 16
"""Ticks that the size is estimated from: a group of frames begins with a keyframe, which is much larger than others."""
_MAX_OPEN = 4

_NEEDS = {"rerun": "rerun", "minari": "h5py"}
"""Module that a format needs, from an extra."""


class Download(NamedTuple):
    """A file for a viewer; the caller closes it.

    Attributes:
        name: its name.
        size: its size in bytes.
        file: its bytes.
    """

    name: str
    size: int
    file: IO[bytes]


def formats_of(episode: Recording) -> list[FileFormat]:
    """The formats in which a session can be downloaded from this process."""
    return [format for format in _installed() if format != "mp4" or episode.frames]


@functools.cache  # a list of recordings asks for each of them
def _installed() -> tuple[FileFormat, ...]:
    return tuple(format for format in get_args(FileFormat) if format not in _NEEDS or find_spec(_NEEDS[format]))


class Downloads:
    """Makes the files. Thread safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._exporting = threading.Lock()
        self._files: WeakSet[IO[bytes]] = WeakSet()

    def make(self, episode: Recording, format: FileFormat) -> Download:
        """Exports an episode. Several files, such as those of a Minari dataset, come as a zip archive.

        Args:
            episode: a recorded session.
            format: format of the file.

        Raises:
            BadRecording: the session is too large, its files are broken, or it lacks what the format needs.
            ConfigError: a package for the format is missing, or the session has no frames for a video.
            ServiceFull: as many other files as possible are being made or downloaded.
            Overloaded: there is no room for the file.
        """
        _check_size(episode)
        # A file without a name, so that nothing is left behind when the job kills the console.
        file = tempfile.TemporaryFile(prefix="brayx-download-")  # noqa: SIM115
        with self._lock:
            if sum(not file.closed for file in self._files) >= _MAX_OPEN:
                file.close()
                raise ServiceFull(f"{_MAX_OPEN} files are being downloaded here, which is the limit: try again later")
            self._files.add(file)
        try:
            # One after the other, which bounds the memory.
            with self._exporting, temporary_folder("download") as folder:
                out = folder / file_name(episode)
                _export(episode, format, out)
                suffix = _join(out, file)
        except OSError as error:
            file.close()
            raise Overloaded(f"the file cannot be written: {first_line(error)}") from error
        except BaseException:
            file.close()
            raise
        size = file.tell()
        file.seek(0)
        return Download(f"{out.name}{suffix}", size, file)


def _check_size(episode: Recording) -> None:
    sample = episode.read(0, _SAMPLE)
    if episode.frames:
        sample.frames = episode.encoded(0, _SAMPLE)
    size = sample.nbytes * len(episode) // len(sample.number)
    if size > _MAX_BYTES:
        raise BadRecording(
            f"session {episode.session!r} has about {size >> 20} MiB, at most {_MAX_BYTES >> 20} can be downloaded: "
            "use `brayx recordings export`"
        )


def _export(episode: Recording, format: FileFormat, out: Path) -> None:
    if format == "parquet":
        copy([episode], str(out))
    elif format == "mp4":
        write_videos([episode], out)
    elif format == "rerun":
        from brayx.recording.rerun import write_rerun

        write_rerun([episode], out)
    else:
        from brayx.recording.fragments import fields_of, fragments
        from brayx.recording.minari import write_minari

        write_minari(fragments(episode, fields_of(episode, {}), most=None), out)


def _join(folder: Path, into: IO[bytes]) -> str:
    """Writes a folder's only file, or a zip archive of the folder; returns the suffix for its name."""
    files = [file for file in sorted(folder.rglob("*")) if file.is_file() and file.suffix != index.SUFFIX]
    if len(files) == 1:
        with files[0].open("rb") as file:
            shutil.copyfileobj(file, into)
        return files[0].suffix
    with zipfile.ZipFile(into, "w") as archive:
        for part in files:
            archive.write(part, part.relative_to(folder.parent))
    return ".zip"
