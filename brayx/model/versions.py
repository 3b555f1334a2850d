"""Weight sets of an engine by policy version: each is bound once, and a bounded number stays ready.

A pin holds a weight set itself, so that the set outlives its removal here. Knows nothing of batching, of Ray, or of the
source of weights. May be used from any thread: binding, which takes long,
happens outside the lock.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakValueDictionary

from brayx.engines.base import Engine
from brayx.engines.scaling import completed
from brayx.errors import Overloaded, VersionUnknown, nearest_version
from brayx.types import Weights


class WeightSet:
    """One version's weights, ready to run on an engine; compared by identity, freed with its last reference."""

    __slots__ = ("__weakref__", "bound", "run", "version")

    def __init__(self, version: int, engine: Engine, bound: Any) -> None:
        self.version = version
        self.use(engine, bound)

    def use(self, engine: Engine, bound: Any) -> None:
        """Runs on ``engine`` from the next batch on; ``bound`` is the engine's form of these weights."""
        self.bound = bound
        self.run = functools.partial(engine.run, bound)  # one attribute: no batch mixes two engines


class Versions:
    """The weight sets of an engine.

    Args:
        engine: binds them.
        weights: weights of the first version; the module's own if absent.
        version: number of the first version.
        keep: maximum weight sets kept ready, the newest included; the least recently used are removed first.
        max_pinned: maximum versions kept by pins alone.
    """

    def __init__(
        self, engine: Engine, *, weights: Weights | None = None, version: int = 0, keep: int = 2, max_pinned: int = 64
    ) -> None:
        if keep < 1 or max_pinned < 0:
            raise ValueError("keep must be at least 1, max_pinned at least 0")
        self._engine = engine
        self._keep = keep
        self._max_pinned = max_pinned
        self._binding = threading.Lock()
        """Lock held while weights are bound, so that none are bound to an engine that `swap` replaces meanwhile."""
        self._lock = threading.Lock()
        self.newest = self._made(version, engine.initial if weights is None else weights)
        """Weight set of forwards without a version; replaced as a whole, so that readers see a consistent one."""
        self._others: OrderedDict[int, WeightSet] = OrderedDict()
        self._alive: WeakValueDictionary[int, WeightSet] = WeakValueDictionary({version: self.newest})

    def known(self) -> list[int]:
        """Versions available without a fetch, in order."""
        with self._lock:
            return sorted(self._alive)

    def load(self, version: int, weights: Weights) -> None:
        """Makes ``weights`` the newest; the previous version stays like any other.

        Raises:
            BadWeights: they do not fit the model; nothing changes.
        """
        with self._binding:
            made = self._made(version, weights)
            with self._lock:
                before, self.newest = self.newest, made
                self._alive[version] = made
                self._others.pop(version, None)
                if before.version != version:
                    self._keep_ready(before)

    def swap(self, engine: Engine, weights_of: Callable[[Any], Weights]) -> None:
        """Moves every version, pinned ones too, to another engine of the same module; later versions use it as well.

        Args:
            engine: the new engine.
            weights_of: the weights in a result of the present engine's ``bind``.

        Raises:
            BadWeights: the weights of a version do not fit; nothing changes.
        """
        with self._binding:
            with self._lock:
                ready = list(self._alive.values())
            bound = [_bind(engine, weights_of(weight_set.bound)) for weight_set in ready]
            self._engine = engine
            for weight_set, weights in zip(ready, bound, strict=True):
                weight_set.use(engine, weights)

    def add(self, version: int, weights: Weights) -> WeightSet:
        """Keeps a version ready that is not the newest, and returns it; a version that is ready already stays.

        Raises:
            BadWeights: they do not fit the model.
        """
        with self._binding:
            made = self._made(version, weights)
            with self._lock:
                weight_set = self._alive.setdefault(version, made)
                if weight_set is not self.newest:
                    self._keep_ready(weight_set)
                return weight_set

    def get(self, version: int) -> WeightSet:
        """The weight set of ``version``.

        Raises:
            VersionUnknown: it is not ready; names the nearest.
        """
        with self._lock:
            weight_set = self._alive.get(version)
            if weight_set is None:
                raise version_unknown(version, self._alive)
            if version in self._others:
                self._others.move_to_end(version)
            return weight_set

    def pin(self, version: int | None = None) -> WeightSet:
        """As `get`, by default of the newest; the caller holds the result.

        Raises:
            VersionUnknown: it is not ready; names the nearest.
            Overloaded: pins keep ``max_pinned`` versions alive already.
        """
        weight_set = self.newest if version is None else self.get(version)
        with self._lock:
            pinned = len(self._alive) - len(self._others) - 1
            if pinned >= self._max_pinned:
                raise Overloaded(
                    f"{pinned} policy versions are pinned, and max_pinned allows no more", max_pinned=pinned
                )
        return weight_set

    def _made(self, version: int, weights: Weights) -> WeightSet:
        return WeightSet(version, self._engine, _bind(self._engine, weights))

    def _keep_ready(self, weight_set: WeightSet) -> None:
        self._others[weight_set.version] = weight_set
        self._others.move_to_end(weight_set.version)
        while len(self._others) >= self._keep:
            self._others.popitem(last=False)


def _bind(engine: Engine, weights: Weights) -> Any:
    return engine.bind(completed(engine.layout, weights))


def version_unknown(version: int, known: Iterable[int]) -> VersionUnknown:
    """The error for a version that is not among ``known``."""
    there = list(known)
    if not there:
        return VersionUnknown(f"there is no policy version {version} and no other", version=version, known=[])
    hint, details = nearest_version(version, there)
    return VersionUnknown(f"there is no policy version {version}, {hint}", version=version, **details)
