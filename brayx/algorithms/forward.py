"""Calls a module on learner data, so that a memory replayed is the memory that acted. Torch only.

A module without memory sees steps in any order, ``[N, ...]``. One with memory (`brayx.nets.recurrent`) sees sequences,
time-major ``[T, N, ...]``, and the state that acting stored before every step. Learning carries its own state along
where acting did, and takes the stored state where an episode or a column begins.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import optree
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from brayx.nets.recurrent import state_argument

Outputs = Mapping[str, Any]
"""A module's outputs, ``[N, ...]``; of sequences ``[T * N, ...]``, time-major."""


class Forward:
    """Calls ``module``.

    Args:
        module: called with the observation (with its leaves, if that is a tuple), and, if it has a memory, with
            ``state`` at the place its signature has it. One that takes ``carry`` as well, see `brayx.nets.lstm`, gets
            whole sequences in one call; another is called once a step.
    """

    def __init__(self, module: nn.Module) -> None:
        inner = module.module if isinstance(module, DistributedDataParallel) else module
        self._module = module
        self._state_at = state_argument(inner)
        self._takes_carry = "carry" in inspect.signature(inner.forward).parameters

    @property
    def recurrent(self) -> bool:
        """The module has a memory."""
        return self._state_at is not None

    def __call__(self, obs: Any, state: Any = None, carry: Tensor | None = None) -> Outputs:
        """The module's outputs without ``state``.

        Args:
            obs: ``[N, ...]``; with memory ``[T, N, ...]``.
            state: stored before each step, ``[T, N, ...]``; only with memory.
            carry: ``[T, N]`` of `carries`; only with memory.
        """
        if self._state_at is None:
            outputs: Outputs = self._module(*obs) if isinstance(obs, tuple) else self._module(obs)
            return outputs
        assert carry is not None
        if self._takes_carry:
            found = self._module(*self._args(obs, state), carry=carry)
            return {key: _flat(value) for key, value in found.items() if key != "state"}
        steps: list[Any] = []
        after: Any = None
        for t in range(len(carry)):
            before = optree.tree_map(lambda x, t=t: x[t], state)
            if t:
                before = optree.tree_map(
                    lambda new, old, keep=carry[t]: torch.where(_like(keep, new), new, old), after, before
                )
            found = self._module(*self._args(optree.tree_map(lambda x, t=t: x[t], obs), before))
            after = found["state"]
            steps.append({key: value for key, value in found.items() if key != "state"})
        joined: Any = optree.tree_map(lambda *leaves: torch.cat(leaves), steps[0], *steps[1:])
        return dict(joined)

    def _args(self, obs: Any, state: Any) -> tuple[Any, ...]:
        args = obs if isinstance(obs, tuple) else (obs,)
        return (*args[: self._state_at], state, *args[self._state_at :])


def carries(mask: Tensor, terminated: Tensor, truncated: Tensor) -> Tensor:
    """Steps that continue from the previous step's state, ``[T, ...]`` bool, time-major.

    Not after a step that is masked out, nor after an end; but the masked step behind a truncated one only bootstraps
    it, so it sees what that one left.

    Args:
        mask: ``[T, ...]``, 1 for steps to learn from.
        terminated, truncated: ``[T, ...]`` bool.
    """
    follows = (mask[:-1] > 0) & ~terminated[:-1] & (~truncated[:-1] | (mask[1:] <= 0))
    return torch.cat([torch.zeros_like(follows[:1]), follows])


def state_of(batch: Mapping[str, Any]) -> Any:
    """The stored state of a learner batch: what is under ``state``, or a nest of dicts of what is under ``state/...``.

    Raises:
        ValueError: there is none.
    """
    if "state" in batch:
        return batch["state"]
    nest: dict[str, Any] = {}
    for key, value in batch.items():
        first, *path = key.split("/")
        if first == "state" and path:
            inner = nest
            for name in path[:-1]:
                inner = inner.setdefault(name, {})
            inner[path[-1]] = value
    if not nest:
        raise ValueError(
            f"the module has a memory, but the batch has no stored state ('state/...'); it has {sorted(batch)}"
        )
    return nest


def _flat(value: Any) -> Any:
    return optree.tree_map(lambda x: x.flatten(0, 1), value)


def _like(keep: Tensor, x: Tensor) -> Tensor:
    return keep.reshape(keep.shape + (1,) * (x.ndim - keep.ndim))
