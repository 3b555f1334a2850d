"""MAPPO: PPO for a policy shared by a game's agents, with a value of the whole game's state. Torch only.

Yu et al. 2022, "The surprising effectiveness of PPO in cooperative multi-agent games",
https://arxiv.org/abs/2103.01955. Each agent's columns hold its own observations and, under ``obs/state``, the game's
state before every step; of a game by contract the observations of the agent's group (`brayx.actor.groups`). The acting
module takes only the agent's own observation. Its submodule ``critic`` maps states ``[N, ...]`` to values ``[N]`` and
runs only in learning (`brayx.nets.central`).

Everything else is PPO's. With groups the value is that of MA-POCA (Cohen et al. 2022, https://arxiv.org/abs/2111.05992)
without its second, counterfactual one, which also sees the other members' actions. Knows nothing of where batches come
from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from brayx.algorithms.base import ALONE, Across, Algorithm, critic_of
from brayx.algorithms.config import Critic
from brayx.algorithms.forward import nest_of
from brayx.algorithms.magnet import bare
from brayx.algorithms.ppo import PPO, PPOConfig
from brayx.errors import ConfigError

STATE = "obs/state"
"""Key of the game's states in a batch, ``[B, T + 1, ...]``; or the first part of the keys of a nest of them."""
CRITIC = Critic("states [N, ...] -> values [N]", takes=("state",), rank=1)
"""The submodule ``critic`` that MAPPO needs."""


class MAPPOConfig(PPOConfig):
    """Options of MAPPO, which are PPO's and the size of groups."""

    name: Literal["mappo"] = "mappo"  # type: ignore[assignment]
    group_size: Annotated[int, Field(ge=1, le=256)] = 8
    """Number of agents of a group, in a game by contract, whose observations the value sees. A batch has room for so
    many observations with each one."""
    outputs: ClassVar[tuple[str, ...]] = ()
    recurrent: ClassVar[bool] = False
    critic: ClassVar[Critic] = CRITIC
    data: ClassVar[Mapping[str, str]] = {
        STATE: f"needs {STATE}, the state of the whole game, and observations have no leaf of that name"
    }

    def build(self, module: nn.Module, optimizer: torch.optim.Optimizer, across: Across) -> Algorithm:
        """As `AlgorithmConfig.build`."""
        return MAPPO(module, optimizer, self, across)


class MAPPO(PPO):
    """Updates a module from learner batches; each column is of one agent.

    Args:
        module: takes an agent's observations, ``[N, ...]``, returns a distribution, and has a submodule ``critic``.
        optimizer: over the module's parameters, including the critic's; schedules start from its learning rates at
            construction.
        config: options.
        across: the ranks that learn together.

    Raises:
        ValueError: the module has no critic, or is recurrent.
    """

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, config: MAPPOConfig, across: Across = ALONE
    ) -> None:
        super().__init__(_Central(module), optimizer, config, across)
        self.module = module

    def update(self, batch: Mapping[str, Any], progress: float) -> dict[str, float]:
        """As `PPO.update`; the batch also needs ``obs/state``.

        Raises:
            ConfigError: the batch has no ``obs/state``.
        """
        state = nest_of(batch, STATE)
        if state is None:
            raise ConfigError(
                f"{STATE}: missing, the game's state that the value sees; the batch has {sorted(batch)}",
                key="algorithm",
            )
        inputs = batch["obs"] if isinstance(batch["obs"], tuple) else (batch["obs"],)
        return super().update({**batch, "obs": (*inputs, state)}, progress)

    def _bare(self) -> nn.Module:
        return _Central(bare(self.module))


class _Central(nn.Module):
    """Joins the policy of an agent's observation and the value of the game's state into one module for PPO."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._policy, self._critic = module, critic_of(module, CRITIC.shown)
        for name in ("no_sync", "extra_loss"):
            if hasattr(module, name):
                setattr(self, name, getattr(module, name))

    def forward(self, *args: Any) -> dict[str, Any]:
        *inputs, state = args
        value: Tensor = self._critic(state)
        return {**self._policy(*inputs), "value": value}
