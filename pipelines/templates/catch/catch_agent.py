"""The agent: from what the game sends to what the model sees, from what the model says to what the game does."""

import random

import numpy as np
from catch_features import encode

from brayx import Agent, Fragment, Step, forward, number_field, push, record, sample_categorical


class CatchAgent(Agent):
    """Explores while it trains, takes the best move when it serves. One instance for each session."""

    def __init__(self, name, config, state):
        super().__init__(name, config, state)
        self.greedy = config["mode"] == "serve"
        self.buffer = config[name]["options"].get("buffer")  # None: plays without learning
        self.rng = random.Random(f"{config['seed']}/{state.session}")
        self.total = 0.0

    async def on_tick(self, state):
        obs = encode(state.input)
        if state.tick:  # check the last move's reward now: at the episode's end it is too late to refuse the tick
            number_field(state.input, "reward")
        outputs, version = await forward("model", obs)
        if len(outputs["logits"]) != 3:
            raise ValueError(f"the model has {len(outputs['logits'])} actions, the game 3")
        action, log_prob = sample_categorical(outputs["logits"], self.rng, greedy=self.greedy)
        state.step = Step(obs, np.asarray(action), log_prob, version)
        state.output["move"] = action - 1

    async def on_episode(self, episode, done):
        last = episode[-1]
        steps = [state.step for state in episode[:-1]]
        rewards = [number_field(state.input, "reward") for state in episode[1:]]
        over = last.kind == "stop"  # the game said so; otherwise the episode was cut, or the game got lost
        if steps and self.buffer is not None:
            after = encode(last.input) if over else last.step.obs
            fragment = Fragment.from_steps(steps, rewards, after, terminated=over, truncated=done and not over)
            push(self.buffer, fragment)
        self.total += sum(rewards)
        if over:
            record("episode_return", self.total)
