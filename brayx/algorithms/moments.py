"""Running mean and deviation of value targets, the same on every rank. Torch only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from brayx.algorithms.base import Across

_LEAST = 1e-4
"""Least deviation to divide by."""


class TensorMoments:
    """Mean and deviation of everything seen so far, updated by whole batches in float64 (Chan et al. 1983).

    Args:
        heads: size of a sample, ``[..., heads]``; 0: samples are scalars, ``[...]``.
    """

    def __init__(self, heads: int = 0) -> None:
        shape = (heads,) if heads else ()
        self._sums = torch.zeros(3, *shape, dtype=torch.float64)
        """Count, mean, and sum of squared distances from it."""

    def add(self, x: Tensor, mask: Tensor, across: Across) -> None:
        """Adds the samples ``x`` ``[T, B]`` or ``[T, B, heads]`` where ``mask`` ``[T, B]`` is 1."""
        self._sums = self._sums.to(x.device)
        wide = x.to(torch.float64)
        mask = mask.to(torch.float64).reshape(mask.shape + (1,) * (x.ndim - mask.ndim))
        count, total = across.sum(torch.stack([mask.expand_as(wide).sum((0, 1)), (mask * wide).sum((0, 1))])).unbind()
        mean = total / count.clamp(min=1)
        squares = across.sum((mask * (wide - mean).square()).sum((0, 1)))
        before, old_mean, old_squares = self._sums.unbind()
        whole = (before + count).clamp(min=1)
        moved = mean - old_mean
        self._sums = torch.stack(
            [
                before + count,
                old_mean + moved * count / whole,
                old_squares + squares + moved.square() * before * count / whole,
            ]
        )

    def scaled(self, x: Tensor) -> Tensor:
        """``(x - mean) / deviation``."""
        mean, deviation = self._now(x)
        return (x - mean) / deviation

    def back(self, x: Tensor) -> Tensor:
        """The inverse of `scaled`."""
        mean, deviation = self._now(x)
        return x * deviation + mean

    def _now(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self._sums = self._sums.to(x.device)
        count, mean, squares = self._sums.unbind()
        deviation = (squares / count.clamp(min=1)).sqrt().clamp(min=_LEAST)
        return mean.to(x.dtype), torch.where(count > 0, deviation, torch.ones_like(deviation)).to(x.dtype)

    def state_dict(self) -> dict[str, Any]:
        """The sums."""
        return {"sums": self._sums.cpu()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a `state_dict`."""
        self._sums = torch.as_tensor(state["sums"]).clone()
