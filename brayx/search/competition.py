"""Rules by which the trials of a search compete, and the interfaces between trial, host and search. Starts no process.

`Asha` and `Population` are the rules, `Work` trains one trial, and `ReportListener` receives the trials' reports. A
host (`brayx.search.local`, `brayx.cluster.search`) runs the trials.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

Options = dict[str, Any]
"""A trial's options by name."""


@dataclass(frozen=True)
class TrialReport:
    """A trial's progress at one comparison.

    Attributes:
        env_steps: env steps so far.
        score: value that trials are compared by, higher is better; ``-inf`` before there is one.
        return_mean: mean return of the games since the last report; NaN before one has ended.
        origin: number of the trial whose checkpoint this one copied since its last report; else its own number.
        over: the trial is done.
        options: the trial's options.
    """

    env_steps: int
    score: float
    return_mean: float
    origin: int
    over: bool
    options: Options


Reporter = Callable[[TrialReport, Path], None]
"""Sends a report and a checkpoint's folder, which the host copies. It raises if the trial has to stop."""


class Work(Protocol):
    """Trains one trial from start to end. Must pickle: it runs in another process."""

    def __call__(self, number: int, options: Options, report: Reporter, begun: Path | None) -> None:
        """Trains the trial.

        Args:
            number: number of the trial.
            options: options of the trial.
            report: called at each comparison and once, with ``over``, at the end.
            begun: folder of the checkpoint to start from; None: from scratch.
        """
        ...


class ReportListener(Protocol):
    """Receives the trials' reports in the process of the search, one call at a time."""

    def on_report(self, number: int, report: TrialReport, checkpoint: Path | None) -> None:
        """Called after a report; the checkpoint stays until the trial's next report."""
        ...

    def on_end(self, number: int) -> None:
        """Called when a trial is done or was stopped."""
        ...

    def on_error(self, number: int, error: str) -> None:
        """Called when a trial has failed twice."""
        ...


@dataclass(frozen=True)
class Asha:
    """Asynchronous successive halving (Li et al. 2020, https://arxiv.org/abs/1810.05934).

    A trial that reaches a rung, ``grace_steps * reduction ** k`` env steps, continues only if its score is among the
    best ``1 / reduction`` of those that reached the rung before it.

    Attributes:
        max_steps: env steps of a whole trial.
        grace_steps: env steps of the first rung.
        reduction: factor between two rungs.
    """

    max_steps: int
    grace_steps: int
    reduction: int = 3


@dataclass(frozen=True)
class Population:
    """Population-based training (Jaderberg et al. 2017, https://arxiv.org/abs/1711.09846).

    All trials run at once. At each comparison a trial of the worst quarter becomes a copy of one of the best quarter,
    drawn at random.

    Attributes:
        change: returns a copy's options, given those of the copied trial.
        seed: seed of the draws.
    """

    change: Callable[[Mapping[str, Any]], Options]
    seed: int = 0


Competition = Asha | Population
