"""Recorded games of an expert, which `source` reads. Replace them by your own recordings."""

import random
from dataclasses import replace

import numpy as np
from catch_features import encode
from catch_game import Catch

from brayx import Fragment, Step

MISTAKES = 0.05
"""Share of the moves that are random: people are not perfect either."""


def build_source(name, config):
    """Games without end, as fragments; ``epochs`` counts how often this is called."""
    rng = random.Random(config["seed"])
    for _ in range(config[name].get("games", 10**9)):
        yield record_game(rng)


def record_game(rng):
    """One whole game as a `Fragment`."""
    game, steps, rewards = Catch(rng), [], []
    while not game.over:
        obs = encode(game.see())
        move = (game.column > game.paddle) - (game.column < game.paddle)
        if rng.random() < MISTAKES:
            move = rng.choice((-1, 0, 1))
        # The log-probability is not known of a recording; imitation does not ask for it.
        steps.append(Step(obs, np.asarray(move + 1), 0.0, 0))
        rewards.append(game.move(move))
    fragment = Fragment.from_steps(steps, rewards, encode(game.see()), terminated=True, truncated=False)
    # By this extra an algorithm distinguishes recorded games from its own.
    return replace(fragment, extras={"demonstration": np.ones(len(steps), np.bool_)})
