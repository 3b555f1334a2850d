"""Which slot a new column gets, and whose it was: the oldest's, the least important's, or by weighted reservoir.

NumPy only. A remover works on arrays, as samplers do (`samplers.py`), and knows nothing of what is in a column.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np


class Remover(Protocol):
    """Gives slots to new columns; a slot that is given again takes the place of the column that had it."""

    def place(self, count: int, priorities: np.ndarray | None, rng: np.random.Generator) -> np.ndarray:
        """Slots ``[count]`` int64, none twice; -1 for a column that is not kept.

        Args:
            count: how many new columns.
            priorities: theirs, ``[count]``; None: nobody knows any.
            rng: for what is left to chance.
        """

    def remove(self, slots: np.ndarray) -> None:
        """Columns that were taken away for another reason: their slots may be given again."""

    def update(self, slots: np.ndarray, priorities: np.ndarray) -> None:
        """Priorities ``[n]`` that the learner found for columns which are there."""


class Oldest:
    """The oldest goes: slots are a ring.

    Args:
        capacity: of the table.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._next = 0

    def place(self, count: int, priorities: np.ndarray | None, rng: np.random.Generator) -> np.ndarray:
        """As `Remover.place`; of more than the capacity the first are not kept."""
        slots = (self._next + np.arange(count)) % self._capacity
        self._next = (self._next + count) % self._capacity
        slots[: max(0, count - self._capacity)] = -1
        return slots

    def remove(self, slots: np.ndarray) -> None:
        """As `Remover.remove`; they are given again in their turn."""

    def update(self, slots: np.ndarray, priorities: np.ndarray) -> None:
        """As `Remover.update`; priorities do not matter."""


class _ByKey:
    """Slots with a key each; the lowest keys go."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._keys = np.zeros(capacity, np.float64)
        self._count = 0

    def remove(self, slots: np.ndarray) -> None:
        """As `Remover.remove`; they are the first to be given again."""
        self._keys[slots] = -np.inf

    def _best(self, keys: np.ndarray, *, at_any_rate: bool) -> np.ndarray:
        """Slots for new columns by their keys; ``at_any_rate``: they stay even if the old ones' keys are higher."""
        slots = np.full(len(keys), -1, np.int64)
        order = np.argsort(-keys, kind="stable")[: self._capacity]  # the new ones that may stay, best first
        fresh = min(self._capacity - self._count, len(order))
        slots[order[:fresh]] = self._count + np.arange(fresh)
        rest = order[fresh:]
        if len(rest):
            old = np.argpartition(self._keys[: self._count], len(rest) - 1)[: len(rest)]
            old = old[np.argsort(self._keys[old], kind="stable")]  # the worst is given to the best
            better = np.ones(len(rest), np.bool_) if at_any_rate else keys[rest] > self._keys[old]
            slots[rest[better]] = old[better]
        self._count += fresh
        taken = slots >= 0
        self._keys[slots[taken]] = keys[taken]
        return slots


class LowestPriority(_ByKey):
    """The column with the lowest priority goes; a new one stays at first, with the highest seen if nobody knows any.

    A push to a full table looks at every priority once, in one pass.

    Args:
        capacity: of the table.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._highest = 1.0

    def place(self, count: int, priorities: np.ndarray | None, rng: np.random.Generator) -> np.ndarray:
        """As `Remover.place`; of more than the capacity those with the highest priority are kept."""
        keys = np.full(count, self._highest) if priorities is None else np.asarray(priorities, np.float64)
        self._highest = max(self._highest, float(keys.max(initial=0.0)))
        return self._best(keys, at_any_rate=True)

    def update(self, slots: np.ndarray, priorities: np.ndarray) -> None:
        """As `Remover.update`."""
        self._keys[slots] = priorities
        self._highest = max(self._highest, float(np.max(priorities, initial=0.0)))


class Reservoir(_ByKey):
    """A weighted sample, without replacement, of all that was ever pushed: a column's weight is its priority.

    Each column draws the key ``log(u) / w`` with ``u`` uniform in (0, 1), and those with the highest keys stay
    (Efraimidis and Spirakis 2006, algorithm A-Res). Without weights every column of the stream is equally likely to
    be there. What the learner finds later changes nothing.

    Args:
        capacity: of the table.
    """

    def place(self, count: int, priorities: np.ndarray | None, rng: np.random.Generator) -> np.ndarray:
        """As `Remover.place`; a weight of 0 is never kept."""
        weights = np.ones(count) if priorities is None else np.asarray(priorities, np.float64)
        chosen = np.flatnonzero(weights > 0)
        slots = np.full(count, -1, np.int64)
        slots[chosen] = self._best(np.log1p(-rng.random(len(chosen))) / weights[chosen], at_any_rate=False)
        return slots

    def update(self, slots: np.ndarray, priorities: np.ndarray) -> None:
        """As `Remover.update`; nothing changes."""
