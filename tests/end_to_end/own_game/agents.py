"""The two players. They act in the same tick: the keeper waits for the lookout's signal."""

import random

import numpy as np

from brayx import Agent, Fragment, Step, forward, push, record, sample_categorical


class Player(Agent):
    """What both have in common: asking the model, and turning an episode into a fragment."""

    role: int

    def __init__(self, name, config, state):
        super().__init__(name, config, state)
        self.greedy = config["mode"] == "serve"
        self.rng = random.Random(f"{config['seed']}/{state.session}/{name}")

    async def choose(self, state, sees):
        """The symbol to answer what this player sees with; keeps the step in the state, under the player's name."""
        obs = {"role": np.int64(self.role), "sees": np.int64(sees)}
        outputs, version = await forward("player", obs)
        action, log_prob = sample_categorical(outputs["logits"], self.rng, greedy=self.greedy)
        setattr(state, self.name, Step(obs, np.asarray(action), log_prob, version))
        return action

    async def on_episode(self, episode, done):
        *states, last = episode
        steps = [getattr(state, self.name) for state in states]
        rewards = [state.input.reward for state in episode[1:]]
        over = last.kind == "stop" and last.input.over
        if steps:
            # Past the end nothing is seen; before it, the last state was acted on and the next episode begins there.
            last_obs = steps[-1].obs if last.kind == "stop" else getattr(last, self.name).obs
            push("buffer", Fragment.from_steps(steps, rewards, last_obs, terminated=over, truncated=done and not over))
        return rewards if over else None


class Lookout(Player):
    """Sees the colour of the ship and gives a signal."""

    role = 0

    async def on_tick(self, state):
        state.signal = await self.choose(state, sees=state.input.colour)
        state.output.signal = state.signal


class Keeper(Player):
    """Sees the signal, not the ship, and opens a gate."""

    role = 1

    async def on_tick(self, state):
        state.output.gate = await self.choose(state, sees=await state.wait("signal"))

    async def on_episode(self, episode, done):
        rewards = await super().on_episode(episode, done)
        if rewards is not None:
            record("episode_return", sum(rewards))
