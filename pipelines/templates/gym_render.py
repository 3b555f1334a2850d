"""Draws the ticks of `gym_agent.GymAgent`, as frames of recordings."""

from __future__ import annotations

import numpy as np

from brayx import State


def each_tick(states: list[State]) -> list[np.ndarray]:
    """An image ``[96, 160, 3]`` uint8 of each tick: bars of the observation, and below them the action."""
    return [_bars(state.step.obs.reshape(-1)[:8], int(state.step.action)) for state in states]


def _bars(obs: np.ndarray, action: int) -> np.ndarray:
    image = np.full((96, 160, 3), 255, np.uint8)
    image[40] = 128
    for index, value in enumerate(np.tanh(obs)):
        low, high = sorted((40, 40 - round(36 * float(value))))
        image[low : high + 1, 20 * index + 2 : 20 * index + 18] = (31, 119, 180)
    if action < 8:
        image[84:94, 20 * action + 2 : 20 * action + 18] = (213, 94, 0)
    return image
