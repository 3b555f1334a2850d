"""Divergences as in a textbook, one tick and one number at a time, for the tests of comparisons."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

N = 60


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def softmax(logits: Sequence[float]) -> list[float]:
    weights = [math.exp(logit - max(logits)) for logit in logits]
    return [weight / math.fsum(weights) for weight in weights]


def categorical_kl(p: Sequence[float], q: Sequence[float]) -> float:
    pairs = zip(softmax(p), softmax(q), strict=True)
    return math.fsum(a * (math.log(a) - math.log(max(b, 1e-300))) for a, b in pairs if a > 0)


def gaussian_kl(mean: float, log_std: float, other: float, other_log_std: float) -> float:
    variance, wider = math.exp(2 * log_std), math.exp(2 * other_log_std)
    return other_log_std - log_std + (variance + (mean - other) ** 2) / (2 * wider) - 0.5


def normals(*shape: int, seed: int = 0) -> np.ndarray:
    return rng(seed).standard_normal((N, *shape)).astype(np.float32)


def oracle_kl(p: Mapping[str, Any], q: Mapping[str, Any], tick: int) -> float:
    total = 0.0
    if "logits" in p:
        ours, theirs = (
            [outputs] if isinstance(outputs, np.ndarray) else outputs for outputs in (p["logits"], q["logits"])
        )
        pairs = zip(ours, theirs, strict=True)
        total = math.fsum(categorical_kl(a[tick].tolist(), b[tick].tolist()) for a, b in pairs)
    if not (names := [name for name in p if name not in ("logits", "value")]):
        return total
    mean, log_std = names
    return total + math.fsum(
        gaussian_kl(*numbers)
        for numbers in zip(
            *(outputs[name][tick].tolist() for outputs in (p, q) for name in (mean, log_std)), strict=True
        )
    )
