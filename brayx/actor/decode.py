"""Turns a policy's outputs into an action, one observation at a time, in NumPy.

One row of logits becomes one action and its log-probability, which PPO's ratio needs. The learner handles batches
(`brayx.algorithms`). It uses `math` for short rows, because a NumPy call costs more than a
dozen Python operations. Knows nothing of agents or models.
"""

from __future__ import annotations

import math
import random

import numpy as np

from brayx.errors import ModelError


def sample_categorical(logits: np.ndarray, rng: random.Random, *, greedy: bool = False) -> tuple[int, float]:
    """Draws an action from ``softmax(logits)``.

    Args:
        logits: ``[A]`` floats; ``-inf`` marks an action that is not allowed.
        rng: source of randomness, one per session.
        greedy: take the most probable action instead.

    Returns:
        The action's index and its log-probability under ``softmax(logits)``.

    Raises:
        ModelError: NaN among the logits, or no action is allowed.
    """
    row = logits.tolist()
    peak = max(row)
    if not math.isfinite(peak):
        raise ModelError(f"logits {row} allow no action: at least one must be finite and none NaN")
    weights = [math.exp(x - peak) for x in row]
    total = math.fsum(weights)
    if math.isnan(total):
        raise ModelError(f"logits {row} hold NaN")
    if greedy:
        action = row.index(peak)
    else:
        left = rng.random() * total
        action = len(row) - 1
        for index, weight in enumerate(weights):
            left -= weight
            if left < 0.0:
                action = index
                break
        while weights[action] == 0.0:  # the sum of the weights rounded up past the last allowed action
            action -= 1
    return action, row[action] - peak - math.log(total)
