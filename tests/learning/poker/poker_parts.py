"""Agent and model of a league that learns a game of OpenSpiel, and a check for its gate."""

import random

import numpy as np
import pyspiel
import torch
from exploitability import nash_conv

from brayx import Agent, Fragment, Step, forward, push, sample_categorical
from brayx.nets.policy import NetworkConfig, policy_for


def encode(state, player):
    """What a player knows, and which of its actions are legal."""
    return seen(state.information_state_tensor(player), state.legal_actions_mask(player))


def seen(x, legal):
    return {"action_mask": np.array(legal, np.int8), "x": np.array(x, np.float32)}


def build_model(name, config):
    game = pyspiel.load_game(config["network"]["game"])
    actions = game.num_distinct_actions()
    example = seen(np.zeros(game.information_state_tensor_shape()), np.ones(actions))
    module = policy_for(example, num_actions=actions, network=NetworkConfig())[0]
    with torch.no_grad():
        module.head.logits.bias += torch.tensor(config["network"]["bias"])
    return module, ({key: np.stack([value] * 2) for key, value in example.items()},)


def check(module, config):
    """For the league's gate."""
    return nash_conv(module, config["network"]["game"], encode)


class Player(Agent):
    def __init__(self, name, config, state):
        super().__init__(name, config, state)
        self.rng = random.Random(f"{config['seed']}/{state.session}")

    async def on_tick(self, state):
        obs = seen(**state.input)
        outputs, version = await forward("model", obs)
        action, log_prob = sample_categorical(outputs["logits"], self.rng)
        state.step = Step(obs, np.asarray(action), log_prob, version)
        state.output["action"] = action

    async def on_episode(self, episode, done):
        last, steps = episode[-1], [state.step for state in episode[:-1]]
        if last.kind == "stop" and steps:
            rewards = [0.0] * (len(steps) - 1) + [last.input["reward"]]
            push("games", Fragment.from_steps(steps, rewards, steps[-1].obs, terminated=True, truncated=False))
