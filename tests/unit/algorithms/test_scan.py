"""The recurrence of all returns: both implementations solve it for all lengths, and change no argument."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from brayx.algorithms import returns


def slow(decay, x):
    y = np.zeros_like(x)
    after = np.zeros_like(x[0])
    for t in reversed(range(len(x))):
        after = y[t] = x[t] + decay[t] * after
    return y


@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (31, 2), (32, 2), (33, 2), (100, 3, 2), (128,), (64, 1025)])
def test_the_recurrence(shape):
    rng = np.random.default_rng(0)
    decay, x = rng.random(shape) * (rng.random(shape) < 0.9), rng.normal(size=shape)
    inputs = torch.from_numpy(decay), torch.from_numpy(x)
    copies = [tensor.clone() for tensor in inputs]
    np.testing.assert_allclose(returns.backward_recurrence(*inputs).numpy(), slow(decay, x), rtol=0, atol=1e-9)
    assert all(torch.equal(a, b) for a, b in zip(inputs, copies, strict=True))


@pytest.mark.parametrize("steps", range(1, 40))
def test_chunks_of_any_size_equal_rows(steps):
    rng = np.random.default_rng(steps)
    decay, x = torch.from_numpy(rng.random((steps, 2))), torch.from_numpy(rng.normal(size=(steps, 2)))
    expected = returns.rows(decay, x)
    for size in (2, 3, 5, steps + 2):
        torch.testing.assert_close(returns.chunks(decay, x, size), expected, rtol=0, atol=1e-12)


def test_a_decay_of_one_sums_and_a_decay_of_zero_copies():
    x = torch.arange(50, dtype=torch.float64).view(50, 1)
    assert returns.backward_recurrence(torch.ones_like(x), x)[0].item() == 49 * 50 / 2
    assert torch.equal(returns.backward_recurrence(torch.zeros_like(x), x), x)
