"""Weighted mixing of several streams that never waits for an empty one. Pure arithmetic.

Stride scheduling (Waldspurger and Weihl 1995): each stream has a *pass*. Of the streams with data, the one with the
lowest pass is next, and its pass grows by ``1 / weight``. So streams with data share the turns by their weights. A
stream that was empty catches up by at most one turn: otherwise it would block the others for a while.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping


class StreamMix:
    """Chooses streams in proportion to their weights.

    Args:
        weights: positive weights by name; only their ratios matter.

    Raises:
        ValueError: no stream, or a weight that is not positive.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        if not weights:
            raise ValueError("weights: expected at least one stream, got none")
        for name, weight in weights.items():
            if not (math.isfinite(weight) and weight > 0):
                raise ValueError(f"weights[{name!r}] is {weight}, expected more than 0")
        self._strides = {name: 1 / weight for name, weight in weights.items()}
        self._passes = dict.fromkeys(weights, 0.0)
        self._now = 0.0

    def choose(self, available: Collection[str]) -> str:
        """Name of the next stream, chosen from ``available`` (at least one); counts its turn."""
        for name in available:
            self._passes[name] = max(self._passes[name], self._now - self._strides[name])
        chosen = min((name for name in self._passes if name in available), key=self._passes.__getitem__)
        self._now = max(self._now, self._passes[chosen])
        self._passes[chosen] += self._strides[chosen]
        return chosen
