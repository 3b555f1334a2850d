"""`brayx.replay.importance`: weights as the paper writes them, at any moment of a training."""

from __future__ import annotations

import numpy as np
import pytest

from brayx.replay.importance import Importance
from brayx.replay.samplers import Prioritised


@pytest.mark.parametrize(("start", "batches", "before", "beta"), [
    (0.4, None, 0, 0.4), (0.4, None, 10**9, 0.4), (0.4, 10, 0, 0.4), (0.4, 10, 5, 0.7), (0.4, 10, 10, 1.0),
    (0.4, 10, 99, 1.0), (0.0, 4, 1, 0.25), (1.0, 10, 3, 1.0),
])  # fmt: skip
def test_weights_match_the_paper(start, batches, before, beta):
    priorities, alpha = np.array([1.0, 4.0, 9.0, 0.25, 16.0]), 0.6
    sampler = Prioritised(8, alpha)
    sampler.insert(np.arange(5), priorities)
    slots, full = sampler.draw(7, np.random.default_rng(0))
    given = {"reward": np.zeros(7), "weight": full}
    batch = Importance(start, batches).weigh(given, before)
    p = priorities**alpha / (priorities**alpha).sum()
    paper = (5 * p[slots]) ** -beta
    np.testing.assert_allclose(batch["weight"], paper / paper.max(), rtol=1e-5)
    assert batch["weight"].dtype == np.float32
    assert batch["reward"] is given["reward"]
    assert given["weight"] is full, "a buffer may return the same batch again"


def test_a_batch_without_weights_is_unchanged():
    batch = {"reward": np.zeros(2)}
    assert Importance().weigh(batch, 5) is batch
