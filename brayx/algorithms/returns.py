"""Returns and advantages as pure functions on time-major tensors. Torch only.

Names carry the time index, as in rlax: at step ``t - 1`` the agent saw an observation of value ``v_tm1`` and acted;
``r_t``, ``discount_t`` and ``v_t`` followed. Every argument is ``[T, ...]``, ``values`` is ``[T + 1, ...]``.
`discounts` makes the arguments that encode the ends of episodes:

    discount_t = gamma * (1 - terminated)                bootstrapping stops where the environment ended
    lambda_t = lam * (1 - (terminated or truncated))     the trace stops where the trajectory was cut

So ``lambda_t = 0`` with ``discount_t > 0`` is a truncation: bootstrap, and end the trace. A step that only holds the
observation to bootstrap from (mask 0 in a learner batch) needs no special case: the transition before it ends the
trace, and its own results are masked out. The end of a column acts like a truncation.

In turn-based games `discounts` takes ``own_turn_t``: the trace does not decay (lambda_t = 1) into a state where others
move, so targets do not use the values of states in which the agent decides nothing (HandyRL's rule).

Half precision is computed in float32; float64 stays float64. No gradient flows through the results.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

_CHUNKS_FROM = 32
"""Least number of steps for `chunks`."""
_WIDE = 1024
"""Greatest row size for `chunks` on a CPU."""


def full_precision(x: Tensor) -> Tensor:
    """``x`` as float32; float64 stays float64."""
    return x if x.dtype == torch.float64 else x.float()


def discounts(
    terminated: Tensor,
    truncated: Tensor,
    *,
    gamma: float | Tensor,
    lam: float | Tensor,
    own_turn_t: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """``discount_t`` and ``lambda_t`` of transitions.

    Args:
        terminated: bool ``[T, ...]``: the environment ended with this transition.
        truncated: bool ``[T, ...]``: the trajectory was cut after it.
        gamma: discount in [0, 1]; a tensor has one for each entry of the last axes, such as for each reward head.
        lam: trace decay in [0, 1]; may be such a tensor, too.
        own_turn_t: bool ``[T, ...]``: the agent moves in the state after the transition; None: always.
        dtype: dtype of the results; None: torch's default.

    Raises:
        ValueError: shapes differ.
    """
    _same_shape(terminated=terminated, truncated=truncated)
    dtype = dtype or torch.get_default_dtype()
    goes_on = (~(terminated | truncated)).to(dtype)
    lambda_t = lam * goes_on
    if own_turn_t is not None:
        _same_shape(terminated=terminated, own_turn_t=own_turn_t)
        lambda_t = torch.where(own_turn_t.bool(), lambda_t, goes_on)
    return gamma * (~terminated).to(dtype), lambda_t


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
        values: ``[T + 1, ...]``, of every observation, including the one after the last transition.

    Returns:
        Advantages ``[T, ...]`` of the actions at ``t - 1``.

    Raises:
        ValueError: shapes do not fit.
    """
    r_t, discount_t, lambda_t, values = _checked(r_t=r_t, discount_t=discount_t, lambda_t=lambda_t, values=values)
    delta_t = r_t + discount_t * values[1:] - values[:-1]
    return backward_recurrence(discount_t * lambda_t, delta_t)


@torch.no_grad()
def lambda_returns(r_t: Tensor, discount_t: Tensor, lambda_t: Tensor, values: Tensor) -> Tensor:
    """Targets for the value: ``gae + v_tm1``, ``[T, ...]``.

    Sutton and Barto 2018, "Reinforcement learning: an introduction", equation 12.18 in recursive form:
    G_tm1 = r_t + discount_t * ((1 - lambda_t) * v_t + lambda_t * G_t). Arguments and errors as in `gae`.
    """
    return gae(r_t, discount_t, lambda_t, values) + full_precision(values[:-1])


class NStep(NamedTuple):
    """Results of `n_steps`, ``[T, ...]`` each.

    Attributes:
        reward: sum of the discounted rewards.
        discount: factor of the bootstrap value; 0 after a termination.
        at: int64 index along ``values`` of the bootstrap value, from ``t`` to ``t - 1 + n``.
    """

    reward: Tensor
    discount: Tensor
    at: Tensor


@torch.no_grad()
def n_steps(r_t: Tensor, discount_t: Tensor, lambda_t: Tensor, n: int) -> NStep:
    """Sums the rewards of up to ``n`` transitions, and finds the value to bootstrap from.

    Sutton and Barto 2018, equation 7.1:  G = r_t + discount_t r_{t+1} + ... + discount_t ... v_{t-1+n}. The sum is
    shorter if the trajectory or the column ends earlier; it then bootstraps there.

    Args:
        r_t: rewards ``[T, ...]``.
        discount_t: ``[T, ...]``.
        lambda_t: ``[T, ...]``; 0 ends the sum after that transition, any other value continues it.
        n: at least 1.

    Raises:
        ValueError: shapes do not fit, or n is below 1.
    """
    _same_shape(r_t=r_t, discount_t=discount_t, lambda_t=lambda_t)
    if n < 1:
        raise ValueError(f"n: expected at least 1, got {n}")
    r_t, discount_t = _one_dtype(r_t, discount_t)
    steps = len(r_t)
    reward, discount = r_t.clone(), discount_t.clone()
    end = torch.arange(1, steps + 1, device=r_t.device).view(-1, *[1] * (r_t.ndim - 1)).expand(r_t.shape).clone()
    open_ = lambda_t != 0
    for k in range(1, min(n, steps)):
        goes_on = open_[: steps - k]  # the sum includes k transitions and continues
        reward[: steps - k] += torch.where(goes_on, discount[: steps - k] * r_t[k:], 0)
        discount[: steps - k] *= torch.where(goes_on, discount_t[k:], 1)
        end[: steps - k] += goes_on
        open_ = goes_on & (lambda_t[k:] != 0)
    return NStep(reward, discount, end)


class VTrace(NamedTuple):
    """Results of `vtrace`, ``[T, ...]`` each.

    Attributes:
        target: value target, ``v_s`` in the paper.
        advantage: factor of the policy gradient, including the clipped importance weight.
    """

    target: Tensor
    advantage: Tensor


@torch.no_grad()
def vtrace(
    r_t: Tensor,
    discount_t: Tensor,
    lambda_t: Tensor,
    values: Tensor,
    log_rho_tm1: Tensor,
    *,
    clip_rho: float | None = 1.0,
    clip_c: float | None = 1.0,
    clip_pg_rho: float | None = 1.0,
) -> VTrace:
    """Off-policy targets and advantages.

    Espeholt et al. 2018, "IMPALA: scalable distributed deep-RL with importance weighted actor-learner architectures",
    https://arxiv.org/abs/1802.01561, equation 1 in the recursive form of remark 1, with lambda of remark 2:

        v_s = V(x_s) + rho_s (r_s + gamma V(x_{s+1}) - V(x_s)) + gamma c_s (v_{s+1} - V(x_{s+1}))

    where c_s includes the factor lambda; and the advantage of section 4.2, rho_s (r_s + gamma v_{s+1} - V(x_s)),
    where v_{s+1} is mixed with V(x_{s+1}) by lambda, as in a lambda-return, because after a cut the next step belongs
    to another trajectory.

    Args:
        r_t: rewards ``[T, ...]``.
        discount_t: ``[T, ...]``.
        lambda_t: ``[T, ...]``.
        values: ``[T + 1, ...]`` of the learning policy.
        log_rho_tm1: ``[T, ...]``, log-probability of the action under the learning policy minus that under the acting
            policy.
        clip_rho: bound of rho in the target; None: none.
        clip_c: bound of c; None: none.
        clip_pg_rho: bound of rho in the advantage; None: none.

    Raises:
        ValueError: shapes do not fit.
    """
    _same_shape(r_t=r_t, log_rho_tm1=log_rho_tm1)
    r_t, discount_t, lambda_t, values, log_rho_tm1 = _checked(
        r_t=r_t, discount_t=discount_t, lambda_t=lambda_t, values=values, log_rho_tm1=log_rho_tm1
    )
    rho = log_rho_tm1.exp()
    decay_t = discount_t * lambda_t
    delta_t = _clipped(rho, clip_rho) * (r_t + discount_t * values[1:] - values[:-1])
    above = backward_recurrence(decay_t * _clipped(rho, clip_c), delta_t)  # v_s - V(x_s)
    # gamma * (lambda v_{s+1} + (1 - lambda) V(x_{s+1})); at the last step v = V.
    after = discount_t * values[1:]
    after[:-1] += decay_t[:-1] * above[1:]
    return VTrace(values[:-1] + above, _clipped(rho, clip_pg_rho) * (r_t + after - values[:-1]))


def _clipped(rho: Tensor, bound: float | None) -> Tensor:
    return rho if bound is None else rho.clamp(max=bound)


def _one_dtype(*tensors: Tensor) -> list[Tensor]:
    """Converts all to float64 if one of them is float64, otherwise to float32."""
    dtype = torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32
    return [x.to(dtype) for x in tensors]


def _checked(*, values: Tensor, **tensors: Tensor) -> list[Tensor]:
    """Checks shapes and returns the arguments in one dtype, with ``values`` fourth."""
    _same_shape(**tensors)
    first = tensors["r_t"]
    if values.shape != (len(first) + 1, *first.shape[1:]):
        raise ValueError(f"values: expected shape {(len(first) + 1, *first.shape[1:])}, got {tuple(values.shape)}")
    before, beyond = list(tensors.values())[:3], list(tensors.values())[3:]
    return _one_dtype(*before, values, *beyond)


def _same_shape(**tensors: Tensor) -> None:
    (first, expected), *rest = tensors.items()
    if expected.ndim < 1 or len(expected) == 0:
        raise ValueError(f"{first}: expected [T, ...] with T >= 1, got shape {tuple(expected.shape)}")
    for name, tensor in rest:
        if tensor.shape != expected.shape:
            raise ValueError(
                f"{name}: expected the shape of {first}, {tuple(expected.shape)}, got {tuple(tensor.shape)}"
            )


def backward_recurrence(decay_t: Tensor, x_t: Tensor) -> Tensor:
    """Solves ``y_t = x_t + decay_t * y_{t+1}``, ``y_T = 0`` for ``y``, ``[T, ...]``, in a new tensor.

    Two implementations give the same result up to rounding. `rows` takes one small operation per step: best for short
    columns, and for wide ones, where the row itself costs more than the call. `chunks` computes all chunks of C steps
    together, then carries from chunk to chunk: about 2 C + T / C operations instead of T. A scan of logarithmic depth
    takes fewer operations, but each covers the whole tensor: on a CPU it was faster only for rows of a few numbers, and
    ten times slower for wide ones.

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
    for row in range(size - 2, -1, -1):
        y_rows[row].addcmul_(through_rows[row], y_rows[row + 1])
        through_rows[row].mul_(through_rows[row + 1])
    starts = rows(through_rows[0], y_rows[0])
    y_t[:-1].addcmul_(through[:-1], starts[1:].unsqueeze(1))
    return x[:steps]
