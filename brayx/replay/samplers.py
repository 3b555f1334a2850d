"""Samplers choose the stored columns of a batch: uniformly, or by priority. NumPy only.

A sampler identifies columns by *slot*, a number below the table's capacity, and works on arrays of slots, so its Python
time does not grow with their number. `Importance` weighs a batch by an exponent ``beta`` that grows over a training. A
shard gives weights for ``beta`` 1, and the learner applies its own: only the learner knows the number of batches, over
all shards and restarts. Knows nothing of a column's content, or how it got its slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from brayx.replay.packing import Batch


class Sampler(Protocol):
    """Draws slots, with replacement."""

    def insert(self, slots: np.ndarray, priorities: np.ndarray | None) -> None:
        """Adds new columns at ``slots`` ``[n]`` with priorities ``[n]``; None: unknown."""

    def remove(self, slots: np.ndarray) -> None:
        """Forgets removed columns."""

    def update(self, slots: np.ndarray, priorities: np.ndarray) -> None:
        """New priorities ``[n]`` from the learner for stored columns."""

    def draw(self, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray | None]:
        """Slots ``[count]``, and importance weights ``[count]`` float32 unless columns are equally likely.

        The weights are for ``beta`` 1; see `Importance`. At least one column must be stored.
        """


class Uniform:
    """Every column is equally likely.

    Args:
        capacity: capacity of the table.
    """

    def __init__(self, capacity: int) -> None:
        self._slots = np.zeros(capacity, np.int64)
        self._place = np.zeros(capacity, np.int64)
        self._count = 0

    def insert(self, slots: np.ndarray, priorities: np.ndarray | None) -> None:
        """See `Sampler.insert`; priorities are ignored."""
        places = np.arange(self._count, self._count + len(slots))
        self._slots[places] = slots
        self._place[slots] = places
        self._count += len(slots)

    def remove(self, slots: np.ndarray) -> None:
        """See `Sampler.remove`; the last entries move into the gaps."""
        left = self._count - len(slots)
        removed = np.zeros(self._count, np.bool_)
        removed[self._place[slots]] = True
        gaps = np.flatnonzero(removed[:left])
        movers = self._slots[left : self._count][~removed[left:]]
        self._slots[gaps] = movers
        self._place[movers] = gaps
        self._count = left

    def update(self, slots: np.ndarray, priorities: np.ndarray) -> None:
        """See `Sampler.update`; priorities are ignored."""

    def draw(self, count: int, rng: np.random.Generator) -> tuple[np.ndarray, None]:
        """As `Sampler.draw`."""
        return self._slots[rng.integers(self._count, size=count)], None


class Prioritised:
    """Draws column ``i`` with probability ``P(i) = p_i^alpha / sum_j p_j^alpha`` (Schaul et al. 2016, equations 1, 2).

    As in the paper, the running sum is divided into equal parts and each part gives one draw. The importance weight of
    a column is ``1 / (N P(i))``, divided by the largest of its batch. A new column of unknown priority gets the highest
    priority seen so far, so that it is learned from soon.

    Args:
        capacity: capacity of the table.
        exponent: ``alpha``; 0 is uniform.
    """

    _LEAST = 1e-6
    """Added to each priority, so that a column with an error of 0 can be drawn again."""

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
        """See `Sampler.update`. Raises ValueError for a priority that is negative or not finite."""
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


class SumTree:
    """Non-negative weights by index, all 0 at first, and lookup of indices by a place in their running sum.

    One array holds the leaves behind their parents (node ``i`` has children ``2 i`` and ``2 i + 1``). So reading or
    writing ``n`` leaves takes ``log2(capacity)`` array operations, for any ``n``. A parent is always recomputed from
    its children, so rounding errors do not accumulate.

    Args:
        capacity: number of indices.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}, expected 1 or more")
        self._capacity = capacity
        self._levels = (capacity - 1).bit_length()
        self._leaves = 1 << self._levels
        self._nodes = np.zeros(2 * self._leaves, np.float64)

    @property
    def total(self) -> float:
        """Sum of all weights."""
        return float(self._nodes[1])

    def __getitem__(self, indices: np.ndarray) -> np.ndarray:
        """Weights ``[n]`` float64 of ``indices`` ``[n]``."""
        weights: np.ndarray = self._nodes[self._leaves + np.asarray(indices)]
        return weights

    def __setitem__(self, indices: np.ndarray, weights: np.ndarray | float) -> None:
        """Sets the weights of ``indices`` ``[n]``; the last weight of a repeated index counts.

        Raises:
            ValueError: an index is out of range, or a weight negative or not finite.
        """
        indices, weights = np.asarray(indices, np.int64), np.asarray(weights, np.float64)
        if not indices.size:
            return
        if indices.min() < 0 or indices.max() >= self._capacity:
            raise ValueError(f"an index is out of range 0..{self._capacity - 1}")
        if not (np.isfinite(weights) & (weights >= 0)).all():
            raise ValueError("a weight is negative or not finite")
        nodes = self._leaves + indices
        self._nodes[nodes] = weights
        for _ in range(self._levels):
            nodes = np.unique(nodes >> 1)
            self._nodes[nodes] = self._nodes[2 * nodes] + self._nodes[2 * nodes + 1]

    def find(self, places: np.ndarray) -> np.ndarray:
        """The indices ``[n]`` whose interval of the running sum contains ``places`` ``[n]`` (from 0 to below `total`).

        Never an index of weight 0, even if rounding puts a place past the end.

        Raises:
            ValueError: all weights are 0.
        """
        if self.total <= 0:
            raise ValueError("all weights are 0")
        left = np.asarray(places, np.float64).copy()
        nodes = np.ones(left.shape, np.int64)
        for _ in range(self._levels):
            nodes <<= 1
            before = self._nodes[nodes]
            right = (left >= before) & (self._nodes[nodes + 1] > 0)
            left -= np.where(right, before, 0.0)
            nodes += right
        return nodes - self._leaves


@dataclass(frozen=True)
class Importance:
    """Importance weights ``(N P(i))^-beta``, divided by the largest of their batch (Schaul et al. 2016, section 3.4).

    Attributes:
        start: ``beta`` of the first batch; 1 is a full correction.
        batches: learner batches over which ``beta`` grows linearly to 1; None: it is constant.
    """

    start: float = 0.4
    batches: int | None = None

    def exponent(self, before: int) -> float:
        """``beta`` after ``before`` batches."""
        return self.start if self.batches is None else self.start + (1 - self.start) * min(1.0, before / self.batches)

    def weigh(self, batch: Batch, before: int) -> Batch:
        """The batch with its ``weight`` ``[B]`` raised to ``beta``; a batch without weights is returned unchanged.

        Args:
            batch: batch from a shard or `Table`, with weights for ``beta`` 1; not modified.
            before: number of learner batches before it.
        """
        if "weight" not in batch:
            return batch
        return {**batch, "weight": batch["weight"] ** batch["weight"].dtype.type(self.exponent(before))}
