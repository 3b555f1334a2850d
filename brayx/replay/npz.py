"""Reads the steps of a NumPy archive (npz): its arrays in blocks of rows, without unpacking the whole archive.

An array in Fortran order is read as a whole, since its rows are not contiguous. Knows nothing of episodes.
"""

from __future__ import annotations

import contextlib
import math
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

import numpy as np

from brayx.errors import ConfigError, first_line
from brayx.replay import steps
from brayx.replay.steps import Arrays, declares_nothing
from brayx.types import Fragment

declared = declares_nothing


def episodes(file: Path, fields: Mapping[str, str]) -> Iterator[Fragment]:
    """As `brayx.replay.files.FormatReader`."""

    def blocks() -> Iterator[Arrays]:
        with _members(file) as members:
            # Errors come before any row is read.
            rows = len(steps.by_our_names(file, _headers(members), fields)["reward"])
            for start in range(0, max(1, rows), steps.BLOCK_ROWS):
                with _reading(file):
                    block = {name: member.read(min(steps.BLOCK_ROWS, rows - start)) for name, member in members.items()}
                yield block

    return steps.episodes(file, blocks(), fields)


def blank(file: Path, fields: Mapping[str, str]) -> tuple[Fragment | None, set[str]]:
    """As `brayx.replay.files.FormatReader`."""
    with _members(file) as members:
        arrays = steps.by_our_names(file, _headers(members), fields)
    return steps.blank(arrays), set(arrays)


@contextlib.contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Raises ConfigError for an archive that cannot be read."""
    try:
        yield
    except Exception as error:  # zipfile, zlib and NumPy raise different ones
        raise ConfigError(f"{file}: cannot be read: {first_line(error)}", path=str(file)) from error


@contextlib.contextmanager
def _members(file: Path) -> Iterator[dict[str, _Rows]]:
    """The arrays of an archive by name, with only their headers read; raises ConfigError if that fails."""
    with contextlib.ExitStack() as stack:
        members = {}
        with _reading(file):
            archive = stack.enter_context(zipfile.ZipFile(file))
            for name in archive.namelist():
                if name.endswith(".npy"):
                    members[name.removesuffix(".npy")] = _Rows(stack.enter_context(archive.open(name)))
        yield members


def _headers(members: Mapping[str, _Rows]) -> Arrays:
    """Views of full length that use no memory."""
    return {name: np.broadcast_to(np.zeros((), member.dtype), member.shape) for name, member in members.items()}


class _Rows:
    """An array of an archive, read in blocks of rows.

    Args:
        member: the archive's member, in NumPy's format.

    Attributes:
        shape, dtype: shape and dtype of the array.

    Raises:
        ValueError: it is not an array, or an array of Python objects.
    """

    def __init__(self, member: IO[bytes]) -> None:
        version = np.lib.format.read_magic(member)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        self.shape, fortran, self.dtype = read(member)
        if self.dtype.hasobject:
            raise ValueError("Object arrays cannot be loaded when allow_pickle=False")
        self._member = member
        self._each = math.prod(self.shape[1:])
        self._fortran = fortran and len(self.shape) > 1
        self._whole: np.ndarray | None = None

    def read(self, rows: int) -> np.ndarray:
        """The next ``rows`` rows. Raises ValueError if the file ends before them."""
        if self._fortran:
            if self._whole is None:
                self._whole = self._read(math.prod(self.shape)).reshape(self.shape, order="F")
            read, self._whole = self._whole[:rows], self._whole[rows:]
            return read
        return self._read(rows * self._each).reshape(rows, *self.shape[1:])

    def _read(self, count: int) -> np.ndarray:
        read = self._member.read(count * self.dtype.itemsize)
        if len(read) != count * self.dtype.itemsize:
            raise ValueError("the file ends in the middle of an array")
        return np.frombuffer(read, self.dtype, count)
