"""Turns a policy's outputs into an action.

One observation's outputs become one action and its log-probability, which PPO's ratio needs; those of several become
as many, by `brayx.actions`. A short single row is computed with `math`, because a NumPy call costs more than a dozen
Python operations. Knows nothing of agents or models.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any

import numpy as np

import brayx.actions as actions
from brayx.arrays import is_finite
from brayx.errors import ModelError

_MAX_LOG_STD = 88.0
"""Beyond it float32 has no deviation."""
_SHORT = 32
"""Maximum number of categories of a head, or of numbers, that Python computes faster than NumPy."""
_HALF_LOG_TAU = 0.5 * math.log(2 * math.pi)


def sample_action(
    policy: Mapping[str, Any], rng: np.random.Generator, *, greedy: bool = False
) -> tuple[np.ndarray, Any]:
    """Draws an action of any policy, as `brayx.actions.sample`.

    Args:
        policy: a policy's outputs for one observation: ``logits`` ``[A]`` or one row for each head, ``mean`` and
            ``log_std`` ``[D]``, …; or for several, with a leading axis.
        rng: source of randomness, one per session.
        greedy: take the most probable action instead.

    Returns:
        The action, shaped as `brayx.actions.choose` shapes it, and its log-probability (density); ``[N]`` for several.

    Raises:
        ModelError: these are not a policy's outputs, or no action is allowed.
    """
    logits, mean = policy.get("logits"), policy.get("mean")
    heads = logits if isinstance(logits, tuple | list) else () if logits is None else (logits,)
    is_plain = (heads or mean is not None) and policy.keys() <= {"logits", "mean", "log_std"}
    rows = (*heads, *(() if mean is None else (mean,)))
    if any(row.ndim > 1 for row in (rows or tuple(policy.values()))[:1]):
        return _sample_rows(policy, rng, greedy)
    if not is_plain or any(row.size > _SHORT for row in rows):
        batch = {name: _batched(output) for name, output in policy.items()}
        action = actions.greedy(batch) if greedy else actions.sample(batch, rng)[0]
        return action[0], float(actions.log_prob(batch, action)[0])
    choices, total = [], 0.0
    for row in heads:
        choice, log_prob = sample_categorical(row, rng, greedy=greedy)
        choices.append(choice)
        total += log_prob
    if mean is None:
        return np.array(choices if logits is not heads[0] else choices[0]), total
    means, log_stds = mean.tolist(), policy["log_std"].tolist()
    if any(not abs(log_std) < _MAX_LOG_STD for log_std in log_stds):
        raise ModelError(f"log_std {log_stds} allows no action: the model has diverged")
    drawn = means if greedy else [m + math.exp(s) * rng.standard_normal() for m, s in zip(means, log_stds, strict=True)]
    action = np.array([*choices, *drawn], np.float32)
    numbers = action[len(choices) :].tolist()  # rounded to float32, as the learner sees them
    for number, centre, log_std in zip(numbers, means, log_stds, strict=True):
        standard = (number - centre) * math.exp(-log_std)
        total -= 0.5 * standard * standard + log_std + _HALF_LOG_TAU
    return action, total


def _sample_rows(policy: Mapping[str, Any], rng: np.random.Generator, greedy: bool) -> tuple[np.ndarray, np.ndarray]:
    with np.errstate(all="ignore"):  # what the model gave is checked below
        if greedy:
            action = actions.greedy(policy)
            log_probs = actions.log_prob(policy, action)
        else:
            action, log_probs = actions.sample(policy, rng)
    if not is_finite(log_probs):
        row = int((~np.isfinite(log_probs)).argmax())
        outputs = {name: _row(output, row) for name, output in policy.items()}
        raise ModelError(f"{outputs} allow no action: the model has diverged")
    return action, log_probs


def _row(output: Any, row: int) -> Any:
    return [head[row].tolist() for head in output] if isinstance(output, tuple | list) else output[row].tolist()


def _batched(output: Any) -> Any:
    return tuple(head[None] for head in output) if isinstance(output, tuple | list) else np.asarray(output)[None]


def sample_categorical(
    logits: np.ndarray, rng: random.Random | np.random.Generator, *, greedy: bool = False
) -> tuple[int, float]:
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
