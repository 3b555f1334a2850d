"""Returns and advantages as pure functions on time-major tensors. Torch only.

Names carry the time index, as in rlax: at step ``t - 1`` the agent saw an observation of value ``v_tm1`` and acted;
``r_t``, ``discount_t`` and ``v_t`` came of it. Every argument is ``[T, ...]``, ``values`` is ``[T + 1, ...]``. The
arguments that decide about ends are made by `discounts`:

    discount_t = gamma * (1 - terminated)                bootstrapping stops where the environment ended
    lambda_t = lam * (1 - (terminated or truncated))     the trace stops where the trajectory was cut

Half precision is computed in float32. No gradient flows through a result.
"""

from __future__ import annotations

import torch
from torch import Tensor


def discounts(terminated: Tensor, truncated: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """``discount_t`` and ``lambda_t`` of transitions.

    Args:
        terminated: bool ``[T, ...]``: the environment ended with this transition.
        truncated: bool ``[T, ...]``: the trajectory was cut after it.
        gamma: discount in [0, 1].
        lam: trace decay in [0, 1].
    """
    _same_shape(terminated=terminated, truncated=truncated)
    dtype = torch.get_default_dtype()
    return gamma * (~terminated).to(dtype), lam * (~(terminated | truncated)).to(dtype)


@torch.no_grad()
def gae(r_t: Tensor, discount_t: Tensor, lambda_t: Tensor, values: Tensor) -> Tensor:
    """Generalised advantage estimates.

    Schulman et al. 2016, "High-dimensional continuous control using generalized advantage estimation", equation 16,
    https://arxiv.org/abs/1506.02438:  A_tm1 = delta_t + discount_t * lambda_t * A_t  with
    delta_t = r_t + discount_t * v_t - v_tm1.

    Args:
        r_t: rewards ``[T, ...]``.
        discount_t: ``[T, ...]``.
        lambda_t: ``[T, ...]``; 0 cuts the trace after that transition and keeps its bootstrap.
        values: ``[T + 1, ...]``, of every observation and the one after the last.

    Returns:
        Advantages ``[T, ...]`` of the actions at ``t - 1``.

    Raises:
        ValueError: shapes do not fit.
    """
    _same_shape(r_t=r_t, discount_t=discount_t, lambda_t=lambda_t)
    if values.shape != (len(r_t) + 1, *r_t.shape[1:]):
        raise ValueError(f"values: expected shape {(len(r_t) + 1, *r_t.shape[1:])}, got {tuple(values.shape)}")
    r_t, discount_t, lambda_t, values = (_full_precision(x) for x in (r_t, discount_t, lambda_t, values))
    delta_t = r_t + discount_t * values[1:] - values[:-1]
    decay_t = discount_t * lambda_t
    advantages = torch.empty_like(delta_t)
    after = torch.zeros_like(delta_t[0])
    for t in range(len(delta_t) - 1, -1, -1):
        after = torch.addcmul(delta_t[t], decay_t[t], after, out=advantages[t])
    return advantages


def lambda_returns(r_t: Tensor, discount_t: Tensor, lambda_t: Tensor, values: Tensor) -> Tensor:
    """Targets for the value: ``gae + v_tm1``, ``[T, ...]``.

    Sutton and Barto 2018, "Reinforcement learning: an introduction", equation 12.18 in recursive form:
    G_tm1 = r_t + discount_t * ((1 - lambda_t) * v_t + lambda_t * G_t). Arguments and errors as in `gae`.
    """
    return gae(r_t, discount_t, lambda_t, values) + _full_precision(values[:-1]).detach()


def _full_precision(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _same_shape(**tensors: Tensor) -> None:
    (first, expected), *rest = tensors.items()
    if expected.ndim < 1 or len(expected) == 0:
        raise ValueError(f"{first}: expected [T, ...] with T >= 1, got shape {tuple(expected.shape)}")
    for name, tensor in rest:
        if tensor.shape != expected.shape:
            raise ValueError(
                f"{name}: expected the shape of {first}, {tuple(expected.shape)}, got {tuple(tensor.shape)}"
            )
