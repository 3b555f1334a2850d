"""What the model sees of a tick: one and the same code for the agent and for recorded games, or it learns wrong."""

import numpy as np
from catch_game import HEIGHT, WIDTH

SIZE = HEIGHT + 2 * WIDTH


def encode(seen):
    """One-hot row and column of the ball, and column of the paddle: ``[SIZE]`` float32."""
    obs = np.zeros(SIZE, np.float32)
    obs[[seen["row"], HEIGHT + seen["column"], HEIGHT + WIDTH + seen["paddle"]]] = 1.0
    return obs
