"""Pictures of a game of `gym_agent.GymAgent`: of the whole game for the trial, and of each tick for recordings."""

from __future__ import annotations

from typing import Any

import numpy as np

from brayx import State


def render(episode: list[State]) -> np.ndarray:
    """Observation, action and value over the ticks of ``episode``, as an image ``[height, width, 3]`` uint8."""
    # Here: the training imports this module before its first tick, and Matplotlib takes half a second.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps = [state.step for state in episode]
    figure = Figure(figsize=(8, 6), dpi=100, layout="constrained")
    canvas: Any = FigureCanvasAgg(figure)
    observed, acted, expected = figure.subplots(3, 1, sharex=True, height_ratios=[3, 1, 2])
    observations = np.stack([step.obs.reshape(-1) for step in steps])
    for index, line in enumerate(observations.T):
        observed.plot(line, linewidth=1, label=f"obs[{index}]")
    if observations.shape[1] <= 8:
        observed.legend(loc="upper left", ncols=4, frameon=False, fontsize=8)
    observed.set_title(f"{episode[0].session}: {len(steps)} ticks, policy version {steps[-1].policy_version}")
    acted.step(range(len(steps)), [int(step.action) for step in steps], linewidth=0.8, color="black")
    acted.set_ylabel("action")
    expected.plot([state.value for state in episode], linewidth=1, color="#1f77b4")
    expected.set_ylabel("value")
    expected.set_xlabel("tick")
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[:, :, :3].copy()


def each_tick(states: list[State]) -> list[np.ndarray]:
    """An image ``[96, 160, 3]`` uint8 of each tick: bars of the observation, and below them the action of the first 8.

    For recordings: ``frames`` names a render with this function.
    """
    return [_bars(state.step.obs.reshape(-1)[:8], int(state.step.action)) for state in states]


def _bars(obs: np.ndarray, action: int) -> np.ndarray:
    image = np.full((96, 160, 3), 255, np.uint8)
    image[40] = 128
    for at, value in enumerate(np.tanh(obs)):
        low, high = sorted((40, 40 - round(36 * float(value))))
        image[low : high + 1, 20 * at + 2 : 20 * at + 18] = (31, 119, 180)
    if action < 8:
        image[84:94, 20 * action + 2 : 20 * action + 18] = (213, 94, 0)
    return image
