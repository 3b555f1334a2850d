"""Limits of whole numbers in observations, the check against them, and that of action masks.

A *tree of limits* is nested like an observation: `Limits` for an array of whole numbers, None for any other leaf.
Depends on NumPy only: it recognises Gymnasium's spaces by their attributes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

MASK = "action_mask"
"""Name of the action mask in an observation or an environment's info. The heads use it; it is never a feature."""
LIMITS_ATTRIBUTE = "input_limits"
"""Attribute of a module: limits of the whole numbers in its arguments, by path."""


@dataclass(frozen=True, eq=False)
class Limits:
    """The least and the greatest value of an array of whole numbers.

    Attributes:
        low, high: int64; ``[]`` for categories, which a network encodes one-hot; otherwise of the array's shape.
    """

    low: np.ndarray
    high: np.ndarray

    @staticmethod
    def of(count: int, first: int = 0) -> Limits:
        """The limits of ``count`` categories."""
        return Limits(np.asarray(first, np.int64), np.asarray(first + count - 1, np.int64))

    def refusal(self, values: np.ndarray) -> str:
        """As `outside`; ``values`` are ``[..., *shape]``."""
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
    """Flattens a tree of limits to a dict by path, as `brayx.types.flatten`; ``path`` is the name of the whole tree."""
    if isinstance(limits, Mapping):
        return {key: leaf for name, part in limits.items() for key, leaf in by_path(part, f"{path}/{name}").items()}
    return {} if limits is None else {path: limits}


def outside(values: np.ndarray, low: Any, high: Any) -> str:
    """Describes the first value out of bounds: ``9 at [3, 0], expected 5 to 7``; empty if all are within.

    Args:
        values: ``[...]``.
        low, high: bounds, which broadcast to ``values``.
    """
    inside = (values >= low) & (values <= high)
    if inside.all():
        return ""
    index = np.unravel_index(int(inside.argmin()), values.shape)
    least, most = (np.broadcast_to(bound, values.shape)[index] for bound in (low, high))
    where = f" at [{', '.join(map(str, index))}]" if index else ""
    return f"{values[index]:.9g}{where}, expected {least:.9g} to {most:.9g}"


def row_without_action(mask: np.ndarray, sizes: Sequence[int]) -> tuple[tuple[int, ...], int] | None:
    """Finds a row in which a head allows no action: the row's index and the head; None if every head allows one.

    Args:
        mask: ``[..., A]``, positive or true for an allowed action; the masks of several heads are concatenated.
        sizes: number of actions of each head; ``A`` is their sum.
    """
    allowed, first = mask > 0, 0
    for head, size in enumerate(sizes):
        has_action = allowed[..., first : first + size].any(-1)
        first += size
        if not has_action.all():
            return tuple(map(int, np.argwhere(~has_action)[0])), head
    return None
