"""A vectorised sum tree: weights by index, and lookup of indices by a place in their running sum. NumPy only.

One array holds the leaves behind their parents (node ``i`` has children ``2 i`` and ``2 i + 1``). So reading or writing
``n`` leaves takes ``log2(capacity)`` array operations, for any ``n``. A parent is always recomputed from its children,
so rounding errors do not accumulate. Knows nothing of replay.
"""

from __future__ import annotations

import numpy as np


class SumTree:
    """Non-negative weights of ``capacity`` indices, all 0 at first.

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
        found: np.ndarray = nodes - self._leaves
        return found
