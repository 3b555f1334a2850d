"""The linear recurrence backwards in time, which every return is made of. Torch only; knows nothing of returns.

    y_t = x_t + decay_t * y_{t+1},  y_T = 0

Two ways, the same numbers up to rounding. Row by row is one small operation a step: best for short columns, and for
wide ones, whose rows cost more than the call. In chunks of C steps, every chunk at once, then one carry a chunk: some
2 C + T / C operations instead of T. A scan of logarithmic depth has fewer operations still, but each goes over
everything; on a CPU it won for rows of a few numbers only, and lost tenfold for wide ones (`benchmarks/scan.py`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_CHUNKS_FROM = 32
"""Steps; shorter columns go row by row."""
_WIDE = 1024
"""Wider rows go row by row on a CPU."""


def backward_recurrence(decay_t: Tensor, x_t: Tensor) -> Tensor:
    """``y`` of the recurrence above, ``[T, ...]``, in a new tensor.

    Args:
        decay_t: ``[T, ...]``.
        x_t: ``[T, ...]``, of the same shape and dtype.
    """
    steps, width = len(x_t), x_t[0].numel()
    if steps < _CHUNKS_FROM or (width > _WIDE and x_t.device.type == "cpu"):
        return rows(decay_t, x_t)
    return chunks(decay_t, x_t, math.isqrt(steps))


def rows(decay_t: Tensor, x_t: Tensor) -> Tensor:
    """The recurrence, one step after the other."""
    y_t = x_t.clone()
    after, *before = reversed(y_t.unbind(0))
    for row, decay in zip(before, reversed(decay_t[:-1].unbind(0)), strict=True):
        after = row.addcmul_(decay, after)
    return y_t


def chunks(decay_t: Tensor, x_t: Tensor, size: int) -> Tensor:
    """The recurrence in chunks of ``size`` steps, at least 2, all chunks together."""
    steps, *shape = x_t.shape
    count = -(-steps // size)
    # Padded with zeros after the end, from which nothing comes back. Chunk-major: a step of every chunk is one block.
    x = x_t.new_zeros(count * size, *shape)
    decay = torch.zeros_like(x)
    x[:steps], decay[:steps] = x_t, decay_t
    y_t = x.view(count, size, *shape)
    through = decay.view(count, size, *shape)  # product of the decays from a step to the end of its chunk
    y_rows, through_rows = y_t.unbind(1), through.unbind(1)
    for at in range(size - 2, -1, -1):
        y_rows[at].addcmul_(through_rows[at], y_rows[at + 1])
        through_rows[at].mul_(through_rows[at + 1])
    starts = rows(through_rows[0], y_rows[0])
    y_t[:-1].addcmul_(through[:-1], starts[1:].unsqueeze(1))
    return x[:steps]
