"""Frozen weights: a model that acts with one version, the files that keep the weights, and their digest.

Knows nothing of leagues.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from brayx.actions import tempered
from brayx.engines.base import load_weights, save_weights
from brayx.errors import BadWeights, VersionUnknown
from brayx.model.handles import PinnedVersion
from brayx.model.local import LocalModel
from brayx.types import Forward, NestedArray, Weights


class SnapshotModel(PinnedVersion):
    """A model at a snapshot's version; fetches the weights again if they have left memory.

    Args:
        model: the model.
        version: the version.
        temperature: temperature of the policy in its outputs, see `brayx.actions.tempered`.
    """

    __slots__ = ("_of", "_temperature")

    def __init__(self, model: LocalModel, version: int, temperature: float = 1.0) -> None:
        super().__init__(model, version)
        self._of = model
        self._temperature = temperature

    async def forward(self, *args: NestedArray, deadline_s: float | None = None) -> Forward:
        outputs, version = await super().forward(*args, deadline_s=deadline_s)
        return Forward(outputs if self._temperature == 1.0 else tempered(outputs, self._temperature), version)

    @property
    def spec(self) -> Any:
        return self._of.spec

    def pinned(self, version: int | None = None) -> SnapshotModel:
        return self if version is None else SnapshotModel(self._of, version, self._temperature)


class SnapshotFiles:
    """Weights of snapshots in a local folder, a file for each version.

    Args:
        folder: the folder; created if it is missing.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, version: int) -> Path:
        """The file of a version, which may not exist."""
        return self._folder / f"{version}.npz"

    def put(self, version: int, weights: Weights) -> None:
        """Writes a version's weights, whole or not at all."""
        temporary = self._folder / f".{version}.npz"
        save_weights(temporary, weights)
        temporary.replace(self.path(version))

    def read(self, version: int) -> Weights:
        """Reads a version's weights; the arrays are read-only.

        Raises:
            VersionUnknown: there is no such file; the error lists the known versions.
        """
        path = self.path(version)
        with contextlib.suppress(OSError):
            if (weights := _stored(path.read_bytes())) is not None:
                return weights
        try:
            return load_weights(path)
        except BadWeights as error:
            known = sorted(int(path.stem) for path in self._folder.glob("[0-9]*.npz"))
            raise VersionUnknown(
                f"no weights of version {version}: {error.message}", version=version, known=known
            ) from None

    async def get(self, version: int) -> Weights:
        """As `read`, without blocking the event loop."""
        return await asyncio.to_thread(self.read, version)


_MEMBER, _SIZES = struct.Struct("<4s2xHH4xLL4xHH"), struct.Struct("<HHQQ")
"""Header of a member in a zip archive, and its extra field with the sizes, which `numpy.savez` always writes."""


def _stored(archive: bytes) -> Weights | None:
    """The read-only arrays of a file of `save_weights`; None if the file is damaged or of another form.

    `numpy.load` takes 250 us for a small model, and holds the interpreter's lock all the time, so that batches of other
    versions wait. This function holds it for 30 us: only reading, checking and copying take longer, and they release
    it.
    """
    weights: Weights = {}
    offset, view = 0, memoryview(archive)
    try:
        while archive[offset : offset + 4] != b"PK\1\2":  # the directory, after the last member
            mark, flags, method, checksum, size, name_size, extra_size = _MEMBER.unpack_from(archive, offset)
            name_at = offset + _MEMBER.size
            extra_at = name_at + name_size
            kind, _, size_64, _ = _SIZES.unpack_from(archive, extra_at)
            begin = extra_at + extra_size
            if (mark, method, flags & 8, size, kind) != (b"PK\3\4", 0, 0, 0xFFFFFFFF, 1):
                return None
            offset = begin + size_64
            if zlib.crc32(view[begin:offset]) != checksum:
                return None
            header = begin + 10 + int.from_bytes(archive[begin + 8 : begin + 10], "little")
            shape, fortran, dtype = _described(archive[begin:header])
            flat = np.frombuffer(view[header:offset], dtype)
            array = flat.reshape(shape, order="F" if fortran else "C").copy()  # aligned
            array.flags.writeable = False
            weights[archive[name_at:extra_at].decode().removesuffix(".npy")] = array
    except (struct.error, ValueError):
        return None
    return weights


@functools.lru_cache(4096)
def _described(header: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, whether it is in Fortran's order, and dtype in the header of an ``.npy``: the same for all snapshots."""
    file = io.BytesIO(header)
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError("expected version 1.0")
    return np.lib.format.read_array_header_1_0(file)


def digest_of(weights: Weights) -> str:
    """A digest of weights: equal for equal names, shapes, dtypes and values."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(weights):
        array = weights[name]
        digest.update(f"{name} {array.dtype.str} {array.shape}\0".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
