"""An agent for any environment with discrete actions that `brayx gamecore gym` or `brayx gamecore pettingzoo` plays.

It speaks those gamecores' JSON: a tick is ``{"obs": …, "reward": r}`` where ``r`` is what the last action earned, the
reply ``{"action": a}``, a stop ``{"obs": …, "reward": r, "terminated": …, "truncated": …}``. The model counts actions
from 0, the game from ``first_action`` in the start.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Mapping
from typing import Any

import numpy as np

from brayx import (
    Agent,
    Fragment,
    State,
    Step,
    array_field,
    flatten,
    forward,
    number_field,
    push,
    record,
    sample_categorical,
)


class GymAgent(Agent):
    """Samples from the policy while training, takes the most probable action when serving."""

    def __init__(self, name: str, config: Mapping[str, Any], state: State) -> None:
        super().__init__(name, config, state)
        options = config[name]["options"]
        self.model = options.get("model", "model")
        self.buffer = options.get("buffer", "buffer")
        self.greedy = config["mode"] == "serve"
        self.rng = random.Random(f"{config['seed']}/{state.session}")
        self.total_reward = 0.0
        self.length = 0
        start = state.input if isinstance(state.input, Mapping) else {}
        self.num_actions, self.first_action = start.get("num_actions"), start.get("first_action", 0)

    async def on_tick(self, state: State) -> None:
        obs = array_field(state.input, "obs")
        if state.tick:  # check it now: when the episode is cut it is too late to refuse the tick
            number_field(state.input, "reward")
        outputs, version = await forward(self.model, obs)
        if not state.tick and self.num_actions not in (None, len(outputs["logits"])):
            raise ValueError(f"the model has {len(outputs['logits'])} actions, the game {self.num_actions}")
        action, log_prob = sample_categorical(outputs["logits"], self.rng, greedy=self.greedy)
        state.value = float(outputs["value"])
        # The state of a recurrent policy before the step.
        memory = flatten(outputs["state"], "state") if "state" in outputs else {}
        state.step = Step(obs, np.asarray(action), log_prob, version, memory)
        state.output["action"] = self.first_action + action

    async def on_episode(self, episode: list[State], done: bool) -> None:
        last = episode[-1]
        steps = [state.step for state in episode[:-1]]
        rewards = [number_field(state.input, "reward") for state in episode[1:]]
        stopped = last.kind == "stop"
        terminated = stopped and bool(last.input.get("terminated"))
        over = terminated or (stopped and bool(last.input.get("truncated")))
        if steps:
            last_obs = array_field(last.input, "obs") if stopped else last.step.obs
            truncated = done and not terminated
            push(
                self.buffer,
                Fragment.from_steps(steps, rewards, last_obs, terminated=terminated, truncated=truncated),
            )
        self.total_reward += sum(rewards)
        self.length += len(steps)
        if over:  # a game that was broken off says nothing about the policy
            record("episode_return", self.total_reward)
            record("episode_length", self.length)

    def snapshot(self) -> bytes:
        return pickle.dumps((self.rng.getstate(), self.total_reward, self.length))

    def restore(self, snapshot: bytes) -> None:
        state, self.total_reward, self.length = pickle.loads(snapshot)
        self.rng.setstate(state)
