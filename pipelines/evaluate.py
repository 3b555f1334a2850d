"""Plays games against a served job through its HTTP door, and draws a trial's curve.

The games run in processes of their own, as everybody's gamecores do. Knows nothing of training.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from brayx.errors import BrayxError, StartupError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Evaluation:
    """Returns of finished games.

    Attributes:
        returns: undiscounted return of each game, in no order.
    """

    returns: Sequence[float]

    @property
    def mean(self) -> float:
        """Their mean."""
        return statistics.fmean(self.returns)

    def __str__(self) -> str:
        spread = statistics.pstdev(self.returns)
        return (
            f"{self.mean:.1f} ± {spread:.1f} over {len(self.returns)} games "
            f"(lowest {min(self.returns):g}, highest {max(self.returns):g})"
        )


def evaluate(
    url: str,
    env_id: str,
    *,
    games: int = 20,
    processes: int = 4,
    door: str = "http",
    seed: int = 0,
    timeout_s: float = 180.0,
) -> Evaluation:
    """Plays ``games`` games of a Gymnasium environment against the service at ``url``.

    Args:
        url: base URL of the door.
        env_id: Gymnasium id.
        games: how many, shared among the processes.
        processes: gamecore processes, at most one a game.
        door: ``http`` or ``ws``.
        seed: of the first process's first game.
        timeout_s: deadline for all of them.

    Raises:
        StartupError: a gamecore failed; the message holds the last line it wrote.
    """
    processes = min(processes, games)
    shares = [games // processes + (index < games % processes) for index in range(processes)]
    running = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "brayx.gamecore.gym", env_id, "--url", url, "--door", door),
                *("--games", str(share), "--seed", str(seed + 10_000 * index), "--json", "--die-with-parent"),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index, share in enumerate(shares)
    ]
    returns: list[float] = []
    deadline = time.monotonic() + timeout_s
    try:
        for process in running:
            output, errors = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
            if process.returncode != 0:
                said = (errors.strip().splitlines() or ["nothing"])[-1]
                raise StartupError(f"a gamecore ended with status {process.returncode} and said: {said}")
            returns.extend(json.loads(line)["return"] for line in output.splitlines() if '"return"' in line)
    except subprocess.TimeoutExpired:
        raise StartupError(f"the evaluation's {games} games did not finish within {timeout_s:g} s") from None
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
                process.wait()
    return Evaluation(returns)


def draw_curve(points: Sequence[tuple[int, float]], *, title: str, target: float | None = None) -> Figure:
    """The curve of a trial.

    Args:
        points: ``(env steps, mean return of the last 100 games)``.
        title: above the axes.
        target: drawn as a dashed line.

    Raises:
        BrayxError: there are no points.
    """
    from matplotlib.figure import Figure

    if not points:
        raise BrayxError("the trial has no finished game yet: nothing to draw")
    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    axes.plot([step for step, _ in points], [value for _, value in points], color="#1f77b4", linewidth=2)
    if target is not None:
        axes.axhline(target, color="#888888", linestyle="--", linewidth=1, label=f"target {target:g}")
        axes.legend(frameon=False)
    axes.set_xlabel("env steps")
    axes.set_ylabel("return, mean of the last 100 games")
    axes.set_title(title)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    return figure
