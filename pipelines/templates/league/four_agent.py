"""The agent: turns the game's body into an observation, and the model's outputs into a column.

Each seat has its own session and its own agent. At the end are two scripted players, which need no model.
"""

import random

import numpy as np
from four_rules import HEIGHT, WIDTH, random_column, tactical_column

from brayx import Agent, Fragment, Step, array_field, forward, number_field, push, record, sample_categorical


def encode(seen, mirrored=False):
    """The observation: planes of own and opponent's stones, ``[2, 6, 7]`` float32, and legal columns, ``[7]`` int8."""
    board, legal = array_field(seen, "board", np.int8, (HEIGHT, WIDTH)), array_field(seen, "legal", np.int8, (WIDTH,))
    if mirrored:
        board, legal = board[:, ::-1], legal[::-1].copy()
    return {"board": np.stack([board > 0, board < 0]).astype(np.float32), "action_mask": legal}


class FourAgent(Agent):
    """Explores in training, and takes the best move in serving. Each session has its own instance."""

    def __init__(self, name, config, state):
        super().__init__(name, config, state)
        options = config[name]["options"]
        # 0: best moves; 1: the model's own probabilities; above 1: weaker, with more random moves.
        self.temperature = 1.0 if config["mode"] == "train" else options.get("temperature", 0.0)
        self.buffer = options.get("buffer")  # None: plays without learning
        self.rng = random.Random(f"{config['seed']}/{state.session}")
        # The game is symmetric: half of the games are learned from a mirrored board, and served ones look at both.
        self.looks_twice = config["mode"] != "train"
        self.mirrored = not self.looks_twice and self.rng.random() < 0.5
        self.against = (state.input or {}).get("against")  # the game's script or human; empty: another session

    async def on_tick(self, state):
        obs = encode(state.input, self.mirrored)
        if state.tick:  # check it now: at the episode's end it is too late to refuse the tick
            number_field(state.input, "reward")
        outputs, version = await forward("model", obs)
        logits = outputs["logits"]
        if len(logits) != WIDTH:
            raise ValueError(f"the model has {len(logits)} actions, the game {WIDTH}")
        if self.looks_twice:
            mirror, _ = await forward("model", encode(state.input, mirrored=True))
            state.logits = logits = (logits + mirror["logits"][::-1]) / 2
        greedy = self.temperature == 0.0
        action, log_prob = sample_categorical(logits / (self.temperature or 1.0), self.rng, greedy=greedy)
        state.step = Step(obs, np.asarray(action), log_prob, version)
        state.output["move"] = WIDTH - 1 - action if self.mirrored else action

    async def on_episode(self, episode, done):
        last = episode[-1]
        steps = [state.step for state in episode[:-1]]  # this seat's turns only
        rewards = [number_field(state.input, "reward") for state in episode[1:]]
        over = last.kind == "stop"  # else the episode was cut, or the client was lost
        if over:
            record("episode_return", rewards[-1])
        if not self.against and steps and self.buffer is not None:
            after = encode(last.input, self.mirrored) if over else last.step.obs
            fragment = Fragment.from_steps(steps, rewards, after, terminated=over, truncated=done and not over)
            push(self.buffer, fragment)


def random_move(state):
    """Plays any legal column."""
    state.output["move"] = random_column(state.input["board"])


def tactical_move(state):
    """Wins if one move can, else blocks the opponent's win, else plays any legal column."""
    state.output["move"] = tactical_column(state.input["board"])
