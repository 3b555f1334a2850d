"""Models for the engine tests."""

from __future__ import annotations

import numpy as np
import torch

from brayx.nets.mlp import ActorCritic


class Awkward(torch.nn.Module):
    """Everything exporters get wrong: expressions of weights alone, batch norm, tied weights, passed-through and
    duplicate outputs, a recurrent state, an unused input, outputs that are not floats, noise and a spectral norm that
    differ in training; tracing lacks an operator of the norm."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.zeros(3))
        self.mix = torch.nn.Parameter(torch.randn(3, 3))
        self.norm = torch.nn.BatchNorm1d(3)
        self.first = torch.nn.Linear(3, 3)
        self.again = self.first
        self.bounded = torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(3, 3))
        self.embed = torch.nn.Embedding(5, 3)
        self.cell = torch.nn.GRUCell(3, 3)
        self.dropout = torch.nn.Dropout(0.5)

    def forward(self, obs, h, unused):
        x = obs["x"] * (1 + self.scale) @ torch.softmax(self.mix, -1) + self.embed(obs["id"])
        x = self.dropout(self.again(self.first(self.norm(x))))
        if self.training:
            x = x + torch.randn_like(x)
        h = self.bounded(self.cell(x, h))
        return {"h": h, "obs": obs["x"], "twice": (x, x), "best": x.argmax(-1), "positive": h > 0}


def awkward():
    example = (
        {"x": np.zeros((1, 3), np.float32), "id": np.zeros(1, np.int64)},
        np.zeros((1, 3), np.float32),
        np.zeros((1, 2), np.float32),
    )
    return Awkward(), example


def cartpole(hidden=(64, 64)):
    torch.manual_seed(0)
    return ActorCritic(4, 2, hidden), (np.zeros((1, 4), np.float32),)


class WithAction(torch.nn.Module):
    """An action and its logits, which are ``gap`` apart: a quantised model cannot resolve a small gap."""

    def __init__(self, gap: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(4, 2)
        with torch.no_grad():
            self.first.weight[1] = self.first.weight[0] + gap * torch.tensor([1.0, -1.0, 1.0, -1.0])
            self.first.bias.zero_()

    def forward(self, obs):
        logits = self.first(obs)
        return {"action": logits.argmax(-1), "logits": logits}


class Recurrent(torch.nn.Module):
    """A GRU and a counter of ticks; the state is a nest of floats and integers, in the middle of the arguments."""

    is_recurrent = True

    def __init__(self) -> None:
        super().__init__()
        self.cell = torch.nn.GRUCell(3, 4)
        self.head = torch.nn.Linear(4, 2)

    def forward(self, obs, state, scale):
        h = self.cell(obs * scale.unsqueeze(-1), state["h"])
        return {"logits": self.head(h), "state": {"h": h, "ticks": state["ticks"] + 1}}


def recurrent():
    torch.manual_seed(0)
    state = {"h": np.full((1, 4), 0.5, np.float32), "ticks": np.zeros(1, np.int64)}
    return Recurrent(), (np.zeros((1, 3), np.float32), state, np.ones(1, np.float32))


def observations(batch_size, seed=0):
    return [np.random.default_rng(seed).standard_normal((batch_size, 4)).astype(np.float32)]


def changed(engine, seed):
    rng = np.random.default_rng(seed)
    return {
        name: (array + rng.standard_normal(array.shape)).astype(array.dtype) for name, array in engine.initial.items()
    }


def assert_same(got, want):
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
