"""Frozen weights: a model that acts with one version, the files that keep the weights, and their digest.

Knows nothing of leagues.
"""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

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
        """Reads a version's weights.

        Raises:
            VersionUnknown: there is no such file; the error lists the known versions.
        """
        try:
            return load_weights(self.path(version))
        except BadWeights as error:
            known = sorted(int(path.stem) for path in self._folder.glob("[0-9]*.npz"))
            raise VersionUnknown(
                f"no weights of version {version}: {error.message}", version=version, known=known
            ) from None

    async def get(self, version: int) -> Weights:
        """As `read`, without blocking the event loop."""
        return await asyncio.to_thread(self.read, version)


def digest_of(weights: Weights) -> str:
    """A digest of weights: equal for equal names, shapes, dtypes and values."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(weights):
        array = weights[name]
        digest.update(f"{name} {array.dtype.str} {array.shape}\0".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
