"""Weight sets of an engine by policy version: each bound once, the newest in front, a bounded number kept ready.

A session that pins a version holds its weight set itself, so that one may be dropped here and live on there. Knows
nothing of batching, of Ray, or of where weights come from. May be used from any thread: binding, which takes long,
happens outside the lock.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any
from weakref import WeakValueDictionary

from brayx.engines.base import Engine
from brayx.engines.scaling import completed
from brayx.errors import Overloaded, VersionUnknown, nearest_version
from brayx.types import Weights


class WeightSet:
    """One version's weights, ready to run on an engine; compared by identity, freed when nobody holds it."""

    __slots__ = ("__weakref__", "bound", "engine", "version")

    def __init__(self, version: int, engine: Engine, bound: Any) -> None:
        self.version = version
        self.engine = engine
        self.bound = bound


class Versions:
    """The weight sets of an engine.

    Args:
        engine: binds them.
        weights: of the first version; the module's own if absent.
        version: number of the first version.
        keep: weight sets kept ready at most, the newest included; which were not asked for longest go first.
        max_pinned: versions that pins alone keep alive at most.
    """

    def __init__(
        self, engine: Engine, *, weights: Weights | None = None, version: int = 0, keep: int = 2, max_pinned: int = 64
    ) -> None:
        if keep < 1 or max_pinned < 0:
            raise ValueError("keep must be at least 1, max_pinned at least 0")
        self._engine = engine
        self._keep = keep
        self._max_pinned = max_pinned
        self._lock = threading.Lock()
        self.newest = self._made(version, engine.initial if weights is None else weights)
        """What a forward without a version uses; replaced as a whole, so that nobody sees a half."""
        self._others: OrderedDict[int, WeightSet] = OrderedDict()
        self._alive: WeakValueDictionary[int, WeightSet] = WeakValueDictionary({version: self.newest})

    def known(self) -> list[int]:
        """Versions that can be had without fetching them, in order."""
        with self._lock:
            return sorted(self._alive)

    def load(self, version: int, weights: Weights) -> None:
        """Makes ``weights`` the newest; the one before is kept as any other. By one thread at a time.

        Raises:
            BadWeights: they do not fit the model; nothing changes.
        """
        made = self._made(version, weights)
        with self._lock:
            before, self.newest = self.newest, made
            self._alive[version] = made
            self._others.pop(version, None)
            if before.version != version:
                self._keep_ready(before)

    def swap(self, engine: Engine, version: int, weights: Weights) -> None:
        """As `load`, on another engine, as every version from now on; those that are ready stay on theirs."""
        before, self._engine = self._engine, engine
        try:
            self.load(version, weights)
        except BaseException:
            self._engine = before
            raise

    def add(self, version: int, weights: Weights) -> WeightSet:
        """Keeps a version ready that is not the newest, and gives it; one that is there already stays.

        Raises:
            BadWeights: they do not fit the model.
        """
        made = self._made(version, weights)
        with self._lock:
            found = self._alive.setdefault(version, made)
            if found is not self.newest:
                self._keep_ready(found)
            return found

    def get(self, version: int) -> WeightSet:
        """The weight set of ``version``.

        Raises:
            VersionUnknown: it is not here; names the nearest.
        """
        with self._lock:
            found = self._alive.get(version)
            if found is None:
                raise version_unknown(version, self._alive)
            if version in self._others:
                self._others.move_to_end(version)
            return found

    def pin(self, version: int | None = None) -> WeightSet:
        """As `get`, of the newest by default, for somebody who will hold it.

        Raises:
            VersionUnknown: it is not here; names the nearest.
            Overloaded: pins keep ``max_pinned`` versions alive already.
        """
        found = self.newest if version is None else self.get(version)
        with self._lock:
            pinned = len(self._alive) - len(self._others) - 1
            if pinned >= self._max_pinned:
                raise Overloaded(
                    f"{pinned} policy versions are kept by those who pinned them (max_pinned)", max_pinned=pinned
                )
        return found

    def _made(self, version: int, weights: Weights) -> WeightSet:
        engine = self._engine
        return WeightSet(version, engine, engine.bind(completed(engine.layout, weights)))

    def _keep_ready(self, kept: WeightSet) -> None:
        self._others[kept.version] = kept
        self._others.move_to_end(kept.version)
        while len(self._others) >= self._keep:
            self._others.popitem(last=False)


def version_unknown(version: int, known: Iterable[int]) -> VersionUnknown:
    """The error of a version that is not among ``known``."""
    there = list(known)
    if not there:
        return VersionUnknown(f"there is no policy version {version}, nor any other", version=version, known=[])
    told, details = nearest_version(version, there)
    return VersionUnknown(f"there is no policy version {version}, {told}", version=version, **details)
