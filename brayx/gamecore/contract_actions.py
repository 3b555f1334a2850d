"""A policy's action as a contract's named actions, and back.

A policy acts with one flat array: first the choice of every discrete action, counted from 0, then the numbers of all
continuous ones, of which -1 to 1 covers the bounds; both in the contract's order (`brayx.actions`). Knows nothing of
models and of bodies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from brayx.gamecore.contract import ActionPart, Contract


def named_actions(contract: Contract, action: np.ndarray) -> dict[str, Any]:
    """The game's actions by name: choices from their starts, numbers within their bounds.

    Args:
        contract: the game's.
        action: one action of a policy.
    """
    flat = iter(action.reshape(-1).tolist())
    named: dict[str, Any] = {part.name: part.start + int(next(flat)) for part in contract.discrete}
    for part in contract.continuous:
        bounds = zip(part.low, part.high, flat, strict=False)
        named[part.name] = [min(max(low + (x + 1) * 0.5 * (high - low), low), high) for low, high, x in bounds]
    return named


def named_rows(contract: Contract, action: np.ndarray) -> dict[str, np.ndarray]:
    """As `named_actions`, of several actions: int64 ``[N]`` and float64 ``[N, size]``.

    Args:
        contract: the game's.
        action: the actions of a policy, ``[N, ...]``.
    """
    rows = action.reshape(len(action), -1)
    named = {part.name: rows[:, index].astype(np.int64) + part.start for index, part in enumerate(contract.discrete)}
    first = len(contract.discrete)
    for part in contract.continuous:
        low, high, half = part.bounds
        numbers = low + (rows[:, first : first + part.size] + 1.0) * half
        named[part.name] = np.minimum(np.maximum(numbers, low), high)
        first += part.size
    return named


def scaled(part: ActionPart, numbers: Any) -> np.ndarray:
    """The numbers of a continuous action, ``[..., size]`` within its bounds, on the policy's scale; float64."""
    low, _, half = part.bounds
    on_scale: np.ndarray = (np.asarray(numbers, np.float64) - low) / half - 1
    return on_scale


def policy_action(contract: Contract, actions: Mapping[str, Any]) -> np.ndarray:
    """The policy's action of a game's actions; the inverse of `named_actions`.

    Args:
        contract: the game's.
        actions: by name, as `brayx.gamecore.contract_values.ActionValues` reads them.

    Returns:
        int64 ``[]`` or ``[H]`` if all actions are discrete, else float32 ``[H + D]``.
    """
    choices = [actions[part.name] - part.start for part in contract.discrete]
    if not contract.continuous:
        return np.asarray(choices if len(choices) > 1 else choices[0], np.int64)
    numbers = [scaled(part, actions[part.name]) for part in contract.continuous]
    return np.concatenate([choices, *numbers]).astype(np.float32)


def policy_rows(contract: Contract, actions: Mapping[str, np.ndarray]) -> np.ndarray:
    """As `policy_action`, of several actions: ``[N, ...]``.

    Args:
        contract: the game's.
        actions: by name, ``[N]`` or ``[N, size]``, as `brayx.gamecore.contract_values.ActionValues` reads them.
    """
    choices = [actions[part.name] - part.start for part in contract.discrete]
    if not contract.continuous:
        return np.stack(choices, -1) if len(choices) > 1 else choices[0]
    columns = [choice[:, np.newaxis] for choice in choices]
    columns += [scaled(part, actions[part.name]) for part in contract.continuous]
    return np.concatenate(columns, -1).astype(np.float32)
