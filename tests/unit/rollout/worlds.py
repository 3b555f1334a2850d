"""Environments and models with known numbers."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import nn


class Counting(gymnasium.Env[np.ndarray, Any]):
    """Observes ``[episode, step]``; ends after 3 steps, by truncation in every second episode; reward: the step."""

    observation_space = spaces.Box(-1e6, 1e6, (2,), np.float64)
    action_space: spaces.Space[Any] = spaces.Discrete(2)

    def __init__(self) -> None:
        self._episode = -1
        self._at = 0
        self.actions: list[Any] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        self._episode, self._at = self._episode + 1, 0
        return np.asarray([self._episode, 0.0]), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.actions.append(np.array(action))
        self._at += 1
        over = self._at == 3
        truncated = over and self._episode % 2 == 1
        return np.asarray([self._episode, self._at], float), float(self._at), over and not truncated, truncated, {}


class BoxCounting(Counting):
    """`Counting` with a bounded continuous action."""

    action_space = spaces.Box(np.asarray([-2.0, 0.0]), np.asarray([2.0, 10.0]), dtype=np.float64)


class Kinds(Counting):
    """`Counting`, observed as whole numbers that do not start at 0: in a dict, in a Tuple, and as a MultiDiscrete."""

    observation_space = spaces.Dict(  # type: ignore[assignment]
        pair=spaces.Tuple([spaces.Discrete(4, start=-2), spaces.Box(-1, 1, (1,))]),
        me=spaces.Dict(kind=spaces.Discrete(4, start=5), seen=spaces.MultiDiscrete([2, 4], start=[1, 1000])),
    )

    def _kinds(self) -> Any:
        me = {"kind": np.int64(5 + self._at), "seen": np.asarray([1, 1000 + self._at])}
        return {"pair": (np.int64(self._at - 2), np.zeros(1, np.float32)), "me": me}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset()
        return self._kinds(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        _, *rest = super().step(action)
        return self._kinds(), *rest  # type: ignore[return-value]


class MaskedCounting(Counting):
    """`Counting` seen as a dict, with a mask that forbids the first action."""

    observation_space = spaces.Dict(  # type: ignore[assignment]
        {"where": Counting.observation_space, "action_mask": spaces.Box(0, 1, (2,), np.int8)}
    )

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        where, info = super().reset()
        return {"where": where, "action_mask": np.asarray([0, 1], np.int8)}, info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        where, *rest = super().step(action)
        return {"where": where, "action_mask": np.asarray([0, 1], np.int8)}, *rest  # type: ignore[return-value]


class Linear(nn.Module):
    """Logits and a value, linear in the observation."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)

    def forward(self, obs: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.layer(obs * 0.01)
        return {"logits": y[..., :2], "value": y[..., 2]}


class Masked(nn.Module):
    """`Linear` with its logits masked by the observation's mask."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Linear()

    def forward(self, obs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        y = self.inner(obs["where"])
        return {**y, "logits": torch.where(obs["action_mask"] > 0, y["logits"], torch.full_like(y["logits"], -1e9))}


class Gaussian(nn.Module):
    """Mean and deviation of two actions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.log_std = nn.Parameter(torch.zeros(2))

    def forward(self, obs: torch.Tensor) -> dict[str, torch.Tensor]:
        mean = self.layer(obs * 0.01)
        return {"mean": mean, "log_std": self.log_std.expand_as(mean), "value": mean[..., 0]}


class Counter(nn.Module):
    """Its state counts the steps since an episode's start."""

    is_recurrent = True

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, obs: torch.Tensor, state: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.layer(obs * 0.01), "value": state[..., 0], "state": state + 1}
