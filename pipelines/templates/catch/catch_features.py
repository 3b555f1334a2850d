"""The model's observation of a tick. The agent and recorded games must use the same code, or it learns wrong."""

import numpy as np
from catch_game import HEIGHT, WIDTH

from brayx import index_field

SIZE = HEIGHT + 2 * WIDTH


def encode(seen):
    """One-hot row and column of the ball, and column of the paddle: ``[SIZE]`` float32."""
    obs = np.zeros(SIZE, np.float32)
    for first, name, count in ((0, "row", HEIGHT), (HEIGHT, "column", WIDTH), (HEIGHT + WIDTH, "paddle", WIDTH)):
        obs[first + index_field(seen, name, count)] = 1.0
    return obs
