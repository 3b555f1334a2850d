"""A game for the tests of leagues: both seats name a number once, the higher one wins. Agent, model and script."""

import random

import numpy as np
import torch
from torch import nn

from brayx import Agent, Fragment, Step, forward, push, sample_categorical

NUMBERS = 3


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.logits = nn.Linear(1, NUMBERS)
        self.value = nn.Linear(1, 1)

    def forward(self, obs):
        return {"logits": self.logits(obs), "value": self.value(obs).squeeze(-1)}


def build_model(name, config):
    return Net(), (torch.zeros(2, 1),)


class Namer(Agent):
    def __init__(self, name, config, state):
        super().__init__(name, config, state)
        self.rng = random.Random(state.session)

    async def on_tick(self, state):
        obs = np.ones(1, np.float32)
        outputs, version = await forward("model", obs)
        action, log_prob = sample_categorical(outputs["logits"], self.rng)
        state.step = Step(obs, np.asarray(action), log_prob, version)
        state.output = {"number": int(action)}

    async def on_episode(self, episode, done):
        if episode[-1].kind == "stop":
            fragment = Fragment.from_steps(
                [state.step for state in episode[:-1]],
                [episode[-1].input["reward"]],
                np.ones(1, np.float32),
                terminated=True,
                truncated=False,
            )
            push("games", fragment)


def zero(state):
    """Always names the lowest number."""
    state.output = {"number": 0}
