"""Limits of the whole numbers in a space's values, and the check that values lie within them.

A *tree of limits* has the nesting of an observation: `Limits` for an array of whole numbers, None for any other leaf.
NumPy only; Gymnasium's spaces are recognised by their attributes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, eq=False)
class Limits:
    """The least and the greatest value of an array of whole numbers.

    Attributes:
        low, high: int64: ``[]`` for categories, which a network sees one-hot; else of the array's shape.
    """

    low: np.ndarray
    high: np.ndarray

    @staticmethod
    def of(count: int, first: int = 0) -> Limits:
        """The limits of ``count`` categories."""
        return Limits(np.asarray(first, np.int64), np.asarray(first + count - 1, np.int64))

    def refusal(self, values: np.ndarray) -> str:
        """As `outside`, for ``[..., *shape]``."""
        return outside(values, self.low, self.high)


def limits_of(space: Any) -> Any:
    """The tree of limits of an observation space; a Tuple's parts are named by their index."""
    inner = getattr(space, "spaces", None)
    if inner is not None:
        parts = inner.items() if isinstance(inner, Mapping) else enumerate(inner)
        return {str(name): limits_of(part) for name, part in parts}
    if hasattr(space, "nvec"):
        first = np.asarray(space.start, np.int64)
        return Limits(first, first + np.asarray(space.nvec, np.int64) - 1)
    if hasattr(space, "n") and not getattr(space, "shape", None):
        return Limits.of(int(space.n), int(space.start))
    return None


def by_path(limits: Any, path: str) -> dict[str, Limits]:
    """The limits in a tree by path, as `brayx.types.flatten` names leaves; ``path`` is that of the whole tree."""
    if isinstance(limits, Mapping):
        return {key: leaf for name, part in limits.items() for key, leaf in by_path(part, f"{path}/{name}").items()}
    return {} if limits is None else {path: limits}


def outside(values: np.ndarray, low: Any, high: Any) -> str:
    """The first value outside its bounds, as ``9 at [3, 0], expected 5 to 7``; empty: all are inside.

    Args:
        values: ``[...]``.
        low, high: bounds, which broadcast to ``values``.
    """
    inside = (values >= low) & (values <= high)
    if inside.all():
        return ""
    at = np.unravel_index(int(inside.argmin()), values.shape)
    least, most = (np.broadcast_to(bound, values.shape)[at] for bound in (low, high))
    where = f" at [{', '.join(map(str, at))}]" if at else ""
    return f"{values[at]:.9g}{where}, expected {least:.9g} to {most:.9g}"
