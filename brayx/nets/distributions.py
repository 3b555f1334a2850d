"""The categorical distribution over discrete actions, as functions of its logits: torch for learning, NumPy for acting.

Leading axes are whatever the caller has (``[B]``, ``[T, B]`` or none); the last axis of logits is the action.
"""

from __future__ import annotations

import numpy as np
import torch


def log_prob(logits: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
    """log pi(action): logits ``[..., A]``, action ``[...]`` int64 -> ``[...]``."""
    if action.shape != logits.shape[:-1]:
        raise ValueError(
            f"action must be {list(logits.shape[:-1])} for logits {list(logits.shape)}, got {list(action.shape)}"
        )
    return torch.log_softmax(logits, -1).gather(-1, action.unsqueeze(-1)).squeeze(-1)


def entropy(logits: torch.Tensor) -> torch.Tensor:
    """Entropy in nats: ``[..., A] -> [...]``; an action with logit -inf adds nothing."""
    log_p = torch.log_softmax(logits, -1)
    p = log_p.exp()
    return -(p * torch.where(p > 0, log_p, torch.zeros_like(log_p))).sum(-1)


def sample(logits: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Actions and their log-probabilities, for acting without torch.

    Args:
        logits: ``[..., A]`` floats; -inf for an action that must not be taken.
        rng: source of randomness.

    Returns:
        Actions ``[...]`` int64, and log pi(action) ``[...]`` float32.

    Raises:
        ValueError: a row has no finite logit, or a NaN.
    """
    wide = np.asarray(logits, np.float64)
    highest = wide.max(-1, keepdims=True)
    if not np.isfinite(highest).all():
        raise ValueError("logits hold NaN or +inf, or mask every action")
    log_p = wide - highest
    log_p -= np.log(np.exp(log_p).sum(-1, keepdims=True))
    # The Gumbel-max trick: argmax(log p + G) is distributed as p.
    action = np.asarray((log_p + rng.gumbel(size=log_p.shape)).argmax(-1), np.int64)
    chosen = np.take_along_axis(log_p, action[..., None], -1)[..., 0]
    return action, np.asarray(chosen, np.float32)


def greedy(logits: np.ndarray) -> np.ndarray:
    """The likeliest action: ``[..., A] -> [...]`` int64; the first of equals."""
    return np.asarray(np.asarray(logits).argmax(-1), np.int64)
