"""Modules that are tables, with known gradients, and random learner batches for them."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn


class Table(nn.Module):
    """A tabular policy over ``actions`` and a tabular value, indexed by the observation, an integer; float64."""

    def __init__(self, states: int, actions: int, seed: int = 0) -> None:
        super().__init__()
        rng = np.random.default_rng(seed)
        self.policy = nn.Parameter(torch.from_numpy(rng.normal(size=(states, actions))))
        self.worth = nn.Parameter(torch.from_numpy(rng.normal(size=states)))

    def forward(self, obs):
        return {"logits": self.policy[obs], "value": self.worth[obs]}


class Recurrent(nn.Module):
    """A recurrent module: its state is a decaying sum of its inputs, from which it computes its outputs."""

    is_recurrent = True

    def __init__(self, actions: int = 3, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.inner = nn.Linear(2, 4)
        self.outer = nn.Linear(4, actions + 1)

    def forward(self, obs, state):
        state = {"sum": 0.5 * state["sum"] + self.inner(obs)}
        out = self.outer(torch.tanh(state["sum"]))
        return {"logits": out[..., :-1], "value": out[..., -1], "state": state}


def random_batch(columns=5, steps=9, states=7, actions=3, seed=0):
    """A learner batch, float64, laid out as packing does it, with the same steps after each episode's end."""
    rng = np.random.default_rng(seed)
    shape = (columns, steps + 1)
    terminated = rng.random(shape) < 0.12
    truncated = ~terminated & (rng.random(shape) < 0.12)
    mask = np.ones(shape)
    for b in range(columns):
        for t in range(steps):
            if truncated[b, t]:  # the step after it only bootstraps, and does not end
                mask[b, t + 1] = 0
                terminated[b, t + 1] = truncated[b, t + 1] = False
    mask[:, -1] = 0
    terminated[:, -1] = truncated[:, -1] = False
    arrays = {
        "obs": rng.integers(0, states, shape),
        "action": rng.integers(0, actions, shape),
        "log_prob": np.log(rng.uniform(0.1, 0.9, shape)) * mask,
        "reward": rng.normal(size=shape) * mask,
        "terminated": terminated,
        "truncated": truncated,
        "mask": mask,
        "policy_version": np.zeros(shape, np.int64),
    }
    return {key: torch.from_numpy(array) for key, array in arrays.items()}


def sgd(module):
    """Plain gradient descent with rate 1: the change of a parameter is minus its gradient."""
    return torch.optim.SGD(module.parameters(), lr=1.0)


def moved(module, update):
    """Gradient of every parameter, by name, inferred from its change by ``update`` under `sgd`."""
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    update()
    return {name: (before[name] - p.detach()).numpy() for name, p in module.named_parameters()}
