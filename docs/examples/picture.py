"""Draws docs/learning.gif, the picture of the README: games of a training beside its curve.

    brayx train cartpole.yaml --new --set recording.kind=recording --set recording.folder=games
    python docs/examples/picture.py games docs/learning.gif

The curve is that of the recorded games, so record all of them.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from PIL import Image

import brayx.recording
from brayx.figures import Figure

SHOWN = (0.0, 0.08, 0.3, 1.0)
"""The games that are shown, as shares of the training's env steps."""
TICKS, STRIDE = 240, 5
"""Ticks shown of a game, at most, and from one frame to the next."""
FRAME_MS = 80


def main(folder: str, out: str) -> None:
    episodes = sorted((e for e in brayx.recording.open(folder) if e.end == "stop"), key=lambda episode: episode.began)
    lengths = np.array([len(episode) for episode in episodes])
    steps = np.cumsum(lengths)
    returns = [lengths[max(0, index - 99) : index + 1].mean() for index in range(len(lengths))]
    frames: list[Image.Image] = []
    for share in SHOWN:
        index = min(int(np.searchsorted(steps, share * steps[-1])), len(episodes) - 1)
        obs = episodes[index]["obs"][:TICKS]
        frames.extend(frame(seen, index, len(episodes[index]), steps, returns) for seen in obs[::STRIDE])
        frames.extend([frames[-1]] * 6)
    palette = frames[-1].quantize(64)
    small = [image.quantize(palette=palette, dither=Image.Dither.NONE) for image in frames]
    small[0].save(out, save_all=True, append_images=small[1:], duration=FRAME_MS, loop=0, optimize=True)
    print(f"{out}: {len(frames)} frames, {Path(out).stat().st_size / 1e6:.2f} MB")


def frame(obs: np.ndarray, index: int, length: int, steps: np.ndarray, returns: list[float]) -> Image.Image:
    figure = Figure(figsize=(8, 3), dpi=100, layout="constrained")
    game, curve = figure.subplots(1, 2, width_ratios=(3, 4))
    draw_cart(game, obs)
    game.set_title(f"game {index + 1}: balances for {length} steps", fontsize=10)
    curve.plot(steps / 1000, returns, color="#c8d4e0", linewidth=1.5)
    curve.plot(steps[: index + 1] / 1000, returns[: index + 1], color="#1f77b4", linewidth=2)
    curve.plot(steps[index] / 1000, returns[index], "o", color="#d55e00")
    curve.set_xlabel("thousand env steps")
    curve.set_title("mean return of the last 100 games", fontsize=10)
    curve.spines[["top", "right"]].set_visible(False)
    curve.grid(alpha=0.25)
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return Image.open(picture).convert("RGB")


def draw_cart(axes: Axes, obs: np.ndarray) -> None:
    """The cart at its position, in metres, and the pole at its angle, drawn three times as steep as it is."""
    position, angle = float(obs[0]), 3 * float(obs[2])
    axes.plot([-2.4, 2.4], [0, 0], color="#888888", linewidth=1)
    axes.plot([position - 0.3, position + 0.3], [0, 0], color="#333333", linewidth=12, solid_capstyle="butt")
    axes.plot([position, position + np.sin(angle)], [0.1, 0.1 + np.cos(angle)], color="#d55e00", linewidth=5)
    axes.set(xlim=(-2.5, 2.5), ylim=(-0.5, 1.5), aspect="equal")
    axes.axis("off")


if __name__ == "__main__":
    main(*sys.argv[1:])
