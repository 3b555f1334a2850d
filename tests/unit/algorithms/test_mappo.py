"""`brayx.algorithms.mappo`: PPO's update with a value of the game's state, which acting does without."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from brayx.algorithms.mappo import MAPPO, MAPPOConfig
from brayx.algorithms.ppo import PPO, PPOConfig
from tests.unit.algorithms.tables import moved, random_batch, sgd


class Worth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.from_numpy(np.random.default_rng(1).normal(size=5)))

    def forward(self, state):
        return self.table[state]


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.policy = nn.Parameter(torch.from_numpy(np.random.default_rng(0).normal(size=(7, 3))))
        self.critic = Worth()

    def forward(self, obs):
        return {"logits": self.policy[obs]}


class Both(Shared):
    """The same tables for PPO, which is shown everything."""

    def forward(self, own, world):
        return {"logits": self.policy[own], "value": self.critic(world)}


OPTIONS = {"epochs": 2, "minibatch_size": 20, "max_grad_norm": None}


def test_an_update_is_ppos_with_the_critics_value():
    batch = random_batch()
    state = torch.randint(0, 5, (5, 10))
    one, other = Shared(), Both()
    torch.manual_seed(0)
    ours = moved(one, lambda: MAPPO(one, sgd(one), MAPPOConfig(**OPTIONS)).update({**batch, "obs/state": state}, 0.0))
    torch.manual_seed(0)
    theirs = moved(
        other, lambda: PPO(other, sgd(other), PPOConfig(**OPTIONS)).update({**batch, "obs": (batch["obs"], state)}, 0.0)
    )
    assert np.abs(ours["critic.table"]).max() > 1e-3
    for name in theirs:
        np.testing.assert_array_equal(ours[name], theirs[name])


def test_a_critic_that_gives_a_column_is_refused():
    """Values ``[N, 1]`` are as many as there are rewards, and were each pulled to the targets of all steps."""
    module = Shared()
    module.critic.table = nn.Parameter(module.critic.table.detach()[:, None])
    batch = {**random_batch(), "obs/state": torch.randint(0, 5, (5, 10))}
    with pytest.raises(ValueError, match=r"value: expected one for each reward, \(50,\), got \(50, 1\)"):
        MAPPO(module, sgd(module), MAPPOConfig(**OPTIONS)).update(batch, 0.0)


def test_what_it_cannot_learn_from_is_refused():
    module = Shared()
    with pytest.raises(ValueError, match="obs/state: missing"):
        MAPPO(module, sgd(module), MAPPOConfig()).update(random_batch(), 0.0)
    with pytest.raises(ValueError, match="critic"):
        MAPPO(nn.Linear(2, 2), torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0), MAPPOConfig())
