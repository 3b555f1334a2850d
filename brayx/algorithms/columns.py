"""Prepares learner batches for losses: time-major arrays, the module's outputs for every step, micro-batches.

Torch only; knows nothing of any loss. Batches are as `brayx.algorithms.base.Algorithm.update` takes them:
``[B, T + 1, ...]``, observations as a nest under ``obs``, a recurrent module's stored state under ``state``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import optree
import torch
from torch import Tensor

from brayx.algorithms.forward import LearnerForward, Outputs, carries, state_of
from brayx.algorithms.returns import full_precision

TURN = "turn"
"""Key of a bool ``[B, T + 1]``: the step is the agent's own move. Only turn-based games have it."""
_PIECE_ROWS = 2048
"""`in_pieces` never limits a piece to fewer steps than this, unless `_PIECE_BYTES` does."""
_PIECE_BYTES = 2 * 2**20
"""Limit on the observation bytes of a piece on a CPU. Images become four times larger as floats, and
repeated allocation of more memory than that costs as much as the network itself."""

Inputs = tuple[Any, Any, Tensor | None]
"""Arguments of a `LearnerForward`: observation, stored state, carry; the last two are None unless it is recurrent."""


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
    values: Tensor = batch[key][:, :-1].transpose(0, 1)
    return values


def inputs(module: LearnerForward, batch: Mapping[str, Any]) -> Inputs:
    """Arguments of ``module`` for every step, time-major ``[T + 1, B, ...]``, or ``[(T + 1) * B, ...]`` unless it is
    recurrent.

    Raises:
        ValueError: the module is recurrent, but the batch has no stored state.
    """
    obs = _time_major(batch["obs"])
    if not module.recurrent:
        return flat(obs), None, None
    carry = carries(*(batch[key].transpose(0, 1) for key in ("mask", "terminated", "truncated")))
    return obs, _time_major(state_of(batch)), carry


def forward(module: LearnerForward, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Outputs of ``module`` for every step, time-major ``[T + 1, B, ...]``; a recurrent one is replayed from the
    stored state. Errors as for `inputs`."""
    columns, steps = batch["mask"].shape
    outputs = module(*inputs(module, batch))
    return {name: optree.tree_map(lambda x: x.unflatten(0, (steps, columns)), leaf) for name, leaf in outputs.items()}


@torch.no_grad()
def in_pieces(module: LearnerForward, args: Inputs, select: Callable[[Outputs], Any], least_rows: int) -> Any:
    """The outputs that ``select`` chooses, in full precision, computed in pieces to bound the memory.

    Args:
        module: wraps the module.
        args: result of `inputs`, or its first steps.
        select: chooses among the outputs.
        least_rows: number of steps that fits into memory; pieces may be that long, or `_PIECE_ROWS`.

    Returns:
        ``[N, ...]`` for observations ``[N, ...]``; ``[T, B, ...]`` for those of a recurrent module.
    """
    axis = 1 if module.recurrent else 0
    leaves = optree.tree_leaves(args[0])
    rows, max_rows = leaves[0].shape[: axis + 1].numel(), max(least_rows, _PIECE_ROWS)
    if leaves[0].device.type == "cpu":
        max_rows = min(max_rows, max(1, rows * _PIECE_BYTES // max(1, sum(leaf.nbytes for leaf in leaves))))
    pieces = []
    for piece in parts(args, -(-rows // max_rows), axis):
        selected = optree.tree_map(full_precision, select(module(*piece)))
        if axis:
            selected = optree.tree_map(lambda x, steps=len(piece[2]): x.unflatten(0, (steps, -1)), selected)
        pieces.append(selected)
    return optree.tree_map(lambda *leaves: torch.cat(leaves, axis), *pieces)


def before_last(outputs: Mapping[str, Any]) -> dict[str, Any]:
    """Outputs of `forward` without the last step, which only bootstraps: ``[T, B, ...]``."""
    return {name: optree.tree_map(lambda x: x[:-1], leaf) for name, leaf in outputs.items()}


def sizes(units: int, count: int) -> list[int]:
    """Sizes of ``count`` parts of ``units``, which differ by at most 1."""
    size, more = divmod(units, count)
    return [size + 1] * more + [size] * (count - more)


def parts(nest: Any, count: int, axis: int = 0) -> list[Any]:
    """Splits the arrays of ``nest`` along ``axis`` into ``count`` parts without copying, or fewer if they are shorter.

    A batch is split into whole columns, a nest ``[T, B, ...]`` along axis 1 as well.
    """
    if count == 1:
        return [nest]
    leaves, tree = optree.tree_flatten(nest)
    units = leaves[0].shape[axis]
    lengths = sizes(units, min(count, units))
    pieces = zip(*(leaf.split(lengths, axis) for leaf in leaves), strict=True)
    return [optree.tree_unflatten(tree, piece) for piece in pieces]


def select(nest: Any, index: Tensor, axis: int) -> Any:
    """The units at ``index`` along ``axis``, copied."""
    return optree.tree_map(lambda x: x.index_select(axis, index), nest)


def flat(nest: Any) -> Any:
    """Arrays ``[T, B, ...]`` as ``[T * B, ...]``."""
    return optree.tree_map(lambda x: x.flatten(0, 1), nest)


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
