"""Removers choose the slot of a new column in a full table: the oldest, the lowest priority, or by weighted reservoir.

NumPy only. Like samplers (`samplers.py`), a remover works on arrays and knows nothing of a column's content.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np


class Remover(Protocol):
    """Assigns slots to new columns. A column whose slot is assigned again is replaced."""

    def place(self, count: int, priorities: np.ndarray | None, rng: np.random.Generator) -> np.ndarray:
        """Distinct slots ``[count]`` int64; -1 for a column that is not kept.

        Args:
            count: number of new columns.
            priorities: their priorities ``[count]``; None: unknown.
            rng: random generator.
        """

    def remove(self, slots: np.ndarray) -> None:
        """Frees the slots of columns that were removed for another reason."""

    def update(self, slots: np.ndarray, priorities: np.ndarray) -> None:
        """New priorities ``[n]`` from the learner for stored columns."""


class Oldest:
    """Replaces the oldest column: slots form a ring.

    Args:
        capacity: capacity of the table.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._next = 0

    def place(self, count: int, priorities: np.ndarray | None, rng: np.random.Generator) -> np.ndarray:
        """See `Remover.place`; if ``count`` exceeds the capacity, the first columns are not kept."""
        slots = (self._next + np.arange(count)) % self._capacity
        self._next = (self._next + count) % self._capacity
        slots[: max(0, count - self._capacity)] = -1
        return slots

    def remove(self, slots: np.ndarray) -> None:
        """See `Remover.remove`; the ring's order stays the same."""

    def update(self, slots: np.ndarray, priorities: np.ndarray) -> None:
        """See `Remover.update`; priorities are ignored."""


class _ByKey:
    """Gives each slot a key, and replaces the lowest keys."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._keys = np.zeros(capacity, np.float64)
        self._count = 0

    def remove(self, slots: np.ndarray) -> None:
        """See `Remover.remove`; these slots are assigned first."""
        self._keys[slots] = -np.inf

    def _best(self, keys: np.ndarray, *, at_any_rate: bool) -> np.ndarray:
        """Slots for new columns by their keys; ``at_any_rate``: also where the replaced keys are higher."""
        slots = np.full(len(keys), -1, np.int64)
        order = np.argsort(-keys, kind="stable")[: self._capacity]  # at most the capacity, best first
        fresh = min(self._capacity - self._count, len(order))
        slots[order[:fresh]] = self._count + np.arange(fresh)
        rest = order[fresh:]
        if len(rest):
            old = np.argpartition(self._keys[: self._count], len(rest) - 1)[: len(rest)]
            old = old[np.argsort(self._keys[old], kind="stable")]  # the best new column replaces the worst
            better = np.ones(len(rest), np.bool_) if at_any_rate else keys[rest] > self._keys[old]
            slots[rest[better]] = old[better]
        self._count += fresh
        inserted = slots >= 0
        self._keys[slots[inserted]] = keys[inserted]
        return slots


class LowestPriority(_ByKey):
    """Replaces the columns with the lowest priority. A new column is always kept; if its priority is unknown, it gets
    the highest seen so far.

    A push to a full table scans all priorities once.

    Args:
        capacity: capacity of the table.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._highest = 1.0

    def place(self, count: int, priorities: np.ndarray | None, rng: np.random.Generator) -> np.ndarray:
        """See `Remover.place`; if ``count`` exceeds the capacity, the highest priorities are kept."""
        keys = np.full(count, self._highest) if priorities is None else np.asarray(priorities, np.float64)
        self._highest = max(self._highest, float(keys.max(initial=0.0)))
        return self._best(keys, at_any_rate=True)

    def update(self, slots: np.ndarray, priorities: np.ndarray) -> None:
        """As `Remover.update`."""
        self._keys[slots] = priorities
        self._highest = max(self._highest, float(np.max(priorities, initial=0.0)))


class Reservoir(_ByKey):
    """Keeps a weighted sample, without replacement, of all columns ever pushed; a column's weight is its priority.

    Each column draws the key ``log(u) / w`` with ``u`` uniform in (0, 1), and the highest keys are kept (Efraimidis and
    Spirakis 2006, algorithm A-Res). Without weights, every column of the stream is kept with equal probability. The
    learner's later priorities change nothing.

    Args:
        capacity: capacity of the table.
    """

    def place(self, count: int, priorities: np.ndarray | None, rng: np.random.Generator) -> np.ndarray:
        """See `Remover.place`; a column of weight 0 is never kept."""
        weights = np.ones(count) if priorities is None else np.asarray(priorities, np.float64)
        chosen = np.flatnonzero(weights > 0)
        slots = np.full(count, -1, np.int64)
        slots[chosen] = self._best(np.log1p(-rng.random(len(chosen))) / weights[chosen], at_any_rate=False)
        return slots

    def update(self, slots: np.ndarray, priorities: np.ndarray) -> None:
        """See `Remover.update`; ignored."""
