"""Prepares learner batches for losses: time-major arrays, the module's outputs for every step, micro-batches.

Torch only; knows nothing of any loss. Batches are as `brayx.algorithms.base.Algorithm.update` takes them:
``[B, T + 1, ...]``, observations as a nest under ``obs``, a recurrent module's stored state under ``state``.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import optree
import torch
from torch import Tensor

from brayx.algorithms.forward import Forward, carries, state_of

TURN = "turn"
"""Key of a bool ``[B, T + 1]``: the step is the agent's own move. Only turn-based games have it."""


def check(batch: Mapping[str, Any], *, steps: int = 1) -> None:
    """Checks the shape of a learner batch.

    Args:
        batch: tensors.
        steps: least number of transitions in a column.

    Raises:
        ValueError: names the mask's shape and what was expected.
    """
    mask = batch["mask"]
    if mask.ndim != 2 or mask.shape[1] < steps + 1:
        raise ValueError(f"mask: expected [B, T + 1] with T >= {steps}, got shape {tuple(mask.shape)}")


def own_moves(batch: Mapping[str, Any]) -> Tensor:
    """The ``mask`` ``[B, T + 1]`` of a batch, with other players' steps masked out if it has a ``turn``."""
    mask: Tensor = batch["mask"]
    return mask * batch[TURN] if TURN in batch else mask


def transitions(batch: Mapping[str, Any], key: str) -> Tensor:
    """The values of ``key`` for each transition, time-major ``[T, B, ...]``."""
    found: Tensor = batch[key][:, :-1].transpose(0, 1)
    return found


def forward(module: Forward, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Outputs of ``module`` for every step, time-major ``[T + 1, B, ...]``.

    Args:
        module: wraps the module; a recurrent one is replayed from the stored state.
        batch: tensors.

    Raises:
        ValueError: the module is recurrent, but the batch has no stored state.
    """
    columns, steps = batch["mask"].shape
    obs = _time_major(batch["obs"])
    if module.recurrent:
        carry = carries(*(batch[key].transpose(0, 1) for key in ("mask", "terminated", "truncated")))
        outputs = module(obs, _time_major(state_of(batch)), carry)
    else:
        outputs = module(optree.tree_map(lambda x: x.flatten(0, 1), obs))
    return {name: optree.tree_map(lambda x: x.unflatten(0, (steps, columns)), leaf) for name, leaf in outputs.items()}


def before_last(outputs: Mapping[str, Any]) -> dict[str, Any]:
    """Outputs of `forward` without the last step, which only bootstraps: ``[T, B, ...]``."""
    return {name: optree.tree_map(lambda x: x[:-1], leaf) for name, leaf in outputs.items()}


def parts(batch: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """Splits ``batch`` into ``count`` parts of whole columns, or fewer if it has fewer columns."""
    columns = len(batch["mask"])
    count = min(count, columns)
    if count == 1:
        return [dict(batch)]
    bounds = [round(index * columns / count) for index in range(count + 1)]
    return [
        {key: optree.tree_map(lambda x, a=a, b=b: x[a:b], nest) for key, nest in batch.items()}
        for a, b in itertools.pairwise(bounds)
    ]


def column_weight(batch: Mapping[str, Any]) -> Tensor:
    """Importance weight of each column ``[B]``: its ``weight``, or 1."""
    mask: Tensor = batch["mask"]
    weight: Tensor = batch["weight"] if "weight" in batch else mask.new_ones(len(mask))
    return weight


def moments(value: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """The sums ``[5]`` that `explained_variance` needs; add them up over parts and ranks."""
    error = target - value
    return torch.stack(
        [weight.sum(), *((weight * x).sum() for x in (target, target.square(), error, error.square()))]
    ).detach()


def explained_variance(sums: Tensor) -> Tensor:
    """Share of the targets' variance that the values explain, from summed `moments`; negative if they are worse than
    the mean."""
    count, target, target_square, error, error_square = sums.unbind()
    count = count.clamp(min=1e-8)
    variance = target_square / count - (target / count).square()
    return 1 - (error_square / count - (error / count).square()) / variance.clamp(min=1e-8)


def _time_major(nest: Any) -> Any:
    return optree.tree_map(lambda x: x.transpose(0, 1), nest)
