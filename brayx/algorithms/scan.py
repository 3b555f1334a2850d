"""A linear recurrence backwards in time, the basis of all returns. Torch only; knows nothing of returns.

    y_t = x_t + decay_t * y_{t+1},  y_T = 0

Two implementations give the same result up to rounding. `rows` takes one small operation per step: best for short
columns, and for wide ones, where the row itself costs more than the call. `chunks` computes all chunks of C steps
together, then carries from chunk to chunk: about 2 C + T / C operations instead of T. A scan of logarithmic depth takes
fewer operations, but each covers the whole tensor: on a CPU it was faster only for rows of a few numbers, and ten times
slower for wide ones.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_CHUNKS_FROM = 32
"""Least number of steps for `chunks`."""
_WIDE = 1024
"""Greatest row size for `chunks` on a CPU."""


def backward_recurrence(decay_t: Tensor, x_t: Tensor) -> Tensor:
    """Solves the recurrence for ``y``, ``[T, ...]``, in a new tensor.

    Args:
        decay_t: ``[T, ...]``.
        x_t: ``[T, ...]``, of the same shape and dtype.
    """
    steps, width = len(x_t), x_t[0].numel()
    if steps < _CHUNKS_FROM or (width > _WIDE and x_t.device.type == "cpu"):
        return rows(decay_t, x_t)
    return chunks(decay_t, x_t, math.isqrt(steps))


def rows(decay_t: Tensor, x_t: Tensor) -> Tensor:
    """Solves the recurrence step by step."""
    y_t = x_t.clone()
    after, *before = reversed(y_t.unbind(0))
    for row, decay in zip(before, reversed(decay_t[:-1].unbind(0)), strict=True):
        after = row.addcmul_(decay, after)
    return y_t


def chunks(decay_t: Tensor, x_t: Tensor, size: int) -> Tensor:
    """Solves the recurrence for all chunks of ``size`` steps (at least 2) together."""
    steps, *shape = x_t.shape
    count = -(-steps // size)
    # Zeros after the end do not change the result. Chunk-major: one step of all chunks is one block.
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
