"""The model's observation of a tick. The agent and recorded games must use the same code, or it learns wrong."""

import numpy as np
from catch_game import HEIGHT, WIDTH

SIZE = HEIGHT + 2 * WIDTH


def encode(seen):
    """One-hot row and column of the ball, and column of the paddle: ``[SIZE]`` float32."""
    obs = np.zeros(SIZE, np.float32)
    obs[[seen["row"], HEIGHT + seen["column"], HEIGHT + WIDTH + seen["paddle"]]] = 1.0
    return obs
