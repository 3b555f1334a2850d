"""Which of the columns that are there make up a batch: uniform, or by priority. NumPy only.

A sampler knows columns by their *slot*, a number below the table's capacity, and works on arrays of them: no step of
it takes longer in Python for more columns. Knows nothing of what is in a column, or how it got its slot.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from brayx.replay.sumtree import SumTree


class Sampler(Protocol):
    """Draws slots, with replacement."""

    def insert(self, slots: np.ndarray, priorities: np.ndarray | None) -> None:
        """New columns ``[n]`` with their priorities ``[n]``; None: nobody knows any yet."""

    def remove(self, slots: np.ndarray) -> None:
        """Columns that are not there any more."""

    def update(self, slots: np.ndarray, priorities: np.ndarray) -> None:
        """Priorities ``[n]`` that the learner found for columns which are there."""

    def draw(self, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray | None]:
        """Slots ``[count]``, and importance weights ``[count]`` float32 where columns are not equally likely.

        These correct the bias in full; see `brayx.replay.importance`. At least one column is there.
        """


class Uniform:
    """Every column is equally likely.

    Args:
        capacity: of the table.
    """

    def __init__(self, capacity: int) -> None:
        self._slots = np.zeros(capacity, np.int64)
        self._place = np.zeros(capacity, np.int64)
        self._count = 0

    def insert(self, slots: np.ndarray, priorities: np.ndarray | None) -> None:
        """As `Sampler.insert`; priorities do not matter."""
        places = np.arange(self._count, self._count + len(slots))
        self._slots[places] = slots
        self._place[slots] = places
        self._count += len(slots)

    def remove(self, slots: np.ndarray) -> None:
        """As `Sampler.remove`: what lies last moves into the gaps."""
        left = self._count - len(slots)
        gone = np.zeros(self._count, np.bool_)
        gone[self._place[slots]] = True
        gaps = np.flatnonzero(gone[:left])
        movers = self._slots[left : self._count][~gone[left:]]
        self._slots[gaps] = movers
        self._place[movers] = gaps
        self._count = left

    def update(self, slots: np.ndarray, priorities: np.ndarray) -> None:
        """As `Sampler.update`; priorities do not matter."""

    def draw(self, count: int, rng: np.random.Generator) -> tuple[np.ndarray, None]:
        """As `Sampler.draw`."""
        return self._slots[rng.integers(self._count, size=count)], None


class Prioritised:
    """Column ``i`` comes with probability ``P(i) = p_i^alpha / sum_j p_j^alpha`` (Schaul et al. 2016, equations 1, 2).

    The batch's draws are spread over equal parts of the running sum, one each, as there. The importance weight of a
    column is ``1 / (N P(i))``, divided by the largest of its batch. A new column of which nobody knows better has the
    highest priority seen so far, so that it is learned from soon.

    Args:
        capacity: of the table.
        exponent: ``alpha``; 0 is uniform.
    """

    _LEAST = 1e-6
    """Added to each priority: a column with an error of 0 may come again."""

    def __init__(self, capacity: int, exponent: float = 0.6) -> None:
        self._tree = SumTree(capacity)
        self._exponent = exponent
        self._highest = 1.0

    def insert(self, slots: np.ndarray, priorities: np.ndarray | None) -> None:
        """As `Sampler.insert`."""
        self.update(slots, np.full(len(slots), self._highest) if priorities is None else priorities)

    def remove(self, slots: np.ndarray) -> None:
        """As `Sampler.remove`."""
        self._tree[slots] = 0.0

    def update(self, slots: np.ndarray, priorities: np.ndarray) -> None:
        """As `Sampler.update`. Raises ValueError for a priority that is negative or not finite."""
        if not len(slots):
            return
        priorities = np.asarray(priorities, np.float64)
        self._tree[slots] = np.where(priorities >= 0, priorities + self._LEAST, priorities) ** self._exponent
        self._highest = max(self._highest, float(priorities.max()))

    def draw(self, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """As `Sampler.draw`."""
        places = (np.arange(count) + rng.random(count)) * (self._tree.total / count)
        slots = self._tree.find(places)
        priorities = self._tree[slots]
        return slots, (priorities.min() / priorities).astype(np.float32)
