"""Calls a module on learner data, and replays recurrent state as in acting. Torch only.

A feed-forward module gets steps in any order, ``[N, ...]``. A recurrent one (`brayx.nets.recurrent`) gets sequences,
time-major ``[T, N, ...]``, and the state stored before every step. It uses the stored state at the start of an
episode or column, and its own state in between.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import optree
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from brayx.nets.recurrent import state_argument
from brayx.types import unflatten

Outputs = Mapping[str, Any]
"""A module's outputs, ``[N, ...]``; for sequences ``[T * N, ...]``, time-major."""


class LearnerForward:
    """Calls ``module`` on learner data.

    Args:
        module: takes the observation (its leaves, if that is a tuple) and, if recurrent, the argument ``state``. A
            recurrent module that also takes ``carry`` (see `brayx.nets.lstm`) gets whole sequences in one call;
            otherwise it is called once per step.

    Attributes:
        before: called before each forward.
    """

    def __init__(self, module: nn.Module) -> None:
        inner = module.module if isinstance(module, DistributedDataParallel) else module
        self._module = module
        self._state_at = state_argument(inner)
        self.before: Callable[[], None] | None = None
        self._takes_carry = "carry" in inspect.signature(inner.forward).parameters

    @property
    def recurrent(self) -> bool:
        """Whether the module is recurrent."""
        return self._state_at is not None

    def __call__(self, obs: Any, state: Any = None, carry: Tensor | None = None) -> Outputs:
        """Returns the module's outputs without ``state``.

        Args:
            obs: ``[N, ...]``; if recurrent ``[T, N, ...]``.
            state: state stored before each step, ``[T, N, ...]``; only if recurrent.
            carry: the result of `carries`, ``[T, N]``; only if recurrent.
        """
        if self.before is not None:
            self.before()
        if self._state_at is None:
            outputs: Outputs = self._module(*obs) if isinstance(obs, tuple) else self._module(obs)
            return outputs
        assert carry is not None
        if self._takes_carry:
            result = self._module(*self._args(obs, state), carry=carry)
            return {key: _flat(value) for key, value in result.items() if key != "state"}
        steps: list[Any] = []
        after: Any = None
        for t in range(len(carry)):
            before = optree.tree_map(lambda x, t=t: x[t], state)
            if t:
                before = optree.tree_map(
                    lambda new, old, keep=carry[t]: torch.where(_like(keep, new), new, old), after, before
                )
            result = self._module(*self._args(optree.tree_map(lambda x, t=t: x[t], obs), before))
            after = result["state"]
            steps.append({key: value for key, value in result.items() if key != "state"})
        joined: Any = optree.tree_map(lambda *leaves: torch.cat(leaves), steps[0], *steps[1:])
        return dict(joined)

    def _args(self, obs: Any, state: Any) -> tuple[Any, ...]:
        args = obs if isinstance(obs, tuple) else (obs,)
        return (*args[: self._state_at], state, *args[self._state_at :])


def carries(mask: Tensor, terminated: Tensor, truncated: Tensor) -> Tensor:
    """Marks the steps that continue from the previous step's state, ``[T, ...]`` bool, time-major.

    A step after a masked step or an episode's end does not. The masked step after a truncation does: it holds the
    truncated episode's last observation.

    Args:
        mask: ``[T, ...]``, 1 for steps to learn from.
        terminated, truncated: ``[T, ...]`` bool.
    """
    follows = (mask[:-1] > 0) & ~terminated[:-1] & (~truncated[:-1] | (mask[1:] <= 0))
    return torch.cat([torch.zeros_like(follows[:1]), follows])


def state_of(batch: Mapping[str, Any]) -> Any:
    """The stored state of a learner batch: the value of ``state``, or a nest of dicts from keys ``state/...``.

    Raises:
        ValueError: the batch has no stored state.
    """
    state = nest_of(batch, "state")
    if state is None:
        raise ValueError(
            f"the module has a memory, but the batch has no stored state ('state/...'); it has {sorted(batch)}"
        )
    return state


def nest_of(batch: Mapping[str, Any], key: str) -> Any:
    """A nest of a batch, of dicts from keys ``KEY/...``, or the value of ``KEY``; None: it has neither."""
    return unflatten(batch, key) or batch.get(key)


def _flat(value: Any) -> Any:
    return optree.tree_map(lambda x: x.flatten(0, 1), value)


def _like(keep: Tensor, x: Tensor) -> Tensor:
    return keep.reshape(keep.shape + (1,) * (x.ndim - keep.ndim))
