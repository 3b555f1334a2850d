"""Forwards for several agents of one session at once: arguments and outputs have a leading axis, a row for each agent.

Knows nothing of ticks or bodies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from time import monotonic
from typing import Any

import numpy as np
import optree

from brayx.actor.agent import model_in_use
from brayx.types import Forward, NestedArray, stack


class RowMemory:
    """The states of a recurrent model, one for each agent."""

    def __init__(self) -> None:
        self._states: dict[int, NestedArray] = {}

    def forget(self, agents: Iterable[int]) -> None:
        """Drops the states of agents whose episodes have ended."""
        for agent in agents:
            self._states.pop(agent, None)

    def before(self, agents: Sequence[int], initial: NestedArray) -> NestedArray:
        """The states ``[N, ...]`` of agents before their forward; those that have none get the initial one."""
        return stack([self._states.get(agent, initial) for agent in agents])

    def keep(self, agents: Sequence[int], states: NestedArray) -> None:
        """Keeps the states ``[N, ...]`` after a forward."""
        for row, agent in enumerate(agents):
            # Copies: a view would keep the whole batch alive.
            self._states[agent] = optree.tree_map(lambda leaf: np.array(leaf[row, ...]), states)  # noqa: B023


async def forward_rows(model: str, agents: Sequence[int], obs: NestedArray, memory: RowMemory) -> Forward:
    """As `brayx.forward`, for an observation of each of several agents.

    Args:
        model: name of a model component.
        agents: numbers of the agents.
        obs: their observations ``[N, ...]``.
        memory: their states, if the model is recurrent.

    Returns:
        ``outputs`` ``[N, ...]``, with the states before the forward as ``state``, and ``policy_version`` ``[N]``.

    Raises:
        BrayxError: as `brayx.forward`.
    """
    services, handle = model_in_use(model)
    state = getattr(getattr(handle, "spec", None), "state", None)
    args: tuple[NestedArray, ...] = (obs,)
    if state is not None:
        before = memory.before(agents, state.initial)
        args = (*args[: state.argument], before, *args[state.argument :])
    began = monotonic()
    outputs, versions = await outputs_of_rows(handle, args)
    if state is not None:
        memory.keep(agents, outputs["state"])
        outputs = {**outputs, "state": before}
    if services.seen is not None:
        services.seen(model, Forward(outputs, int(versions.min())), monotonic() - began)
    return Forward(outputs, versions)  # type: ignore[arg-type]


async def outputs_of_rows(handle: Any, args: tuple[NestedArray, ...]) -> tuple[Any, np.ndarray]:
    """The outputs ``[N, ...]`` of a model for arguments ``[N, ...]``, and the version of each; at once if it can."""
    if hasattr(handle, "forward_rows"):
        outputs, versions = await handle.forward_rows(*args)
        return outputs, versions
    count = len(optree.tree_leaves(args)[0])  # type: ignore[arg-type]
    rows = [optree.tree_map(lambda leaf: leaf[row, ...], args) for row in range(count)]  # type: ignore[arg-type]  # noqa: B023
    results = await asyncio.gather(*(handle.forward(*row) for row in rows))
    return stack([outputs for outputs, _ in results]), np.array([version for _, version in results], np.int64)
