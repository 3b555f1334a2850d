"""How trials of a search compete, and what a host of trials needs from both sides. Starts no process.

`Asha` and `Population` say the rules; `Work` is one trial's training, `Listener` hears how the trials do. A host
(`brayx.local.search`, `brayx.cluster.search`) runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

Options = dict[str, Any]
"""A trial's options by name."""


@dataclass(frozen=True)
class Look:
    """What a trial reports at a look.

    Attributes:
        env_steps: done so far.
        score: compared between trials, higher is better; ``-inf`` before there is any.
        return_mean: of the games since the last look; NaN before one has ended.
        origin: number of the trial whose checkpoint this one went on from since its last look; else its own number.
        over: the trial is done.
        options: that it trains with.
    """

    env_steps: int
    score: float
    return_mean: float
    origin: int
    over: bool
    options: Options


Report = Callable[[Look, Path], None]
"""Reports a look with the folder of a checkpoint, which the host copies. It raises where the trial is to stop."""


class Work(Protocol):
    """Trains one trial from start to end. Must pickle: it runs in another process."""

    def __call__(self, number: int, options: Options, report: Report, begun: Path | None) -> None:
        """Trains.

        Args:
            number: of the trial.
            options: of this trial.
            report: called at each look and once, with ``over``, at the end.
            begun: folder of the checkpoint to start from; None: from scratch.
        """
        ...


class Listener(Protocol):
    """Hears how trials do, in the process that searches, one call at a time."""

    def on_look(self, number: int, look: Look, checkpoint: Path | None) -> None:
        """A trial has been looked at; its checkpoint stays until its next look."""
        ...

    def on_end(self, number: int) -> None:
        """A trial is done, or was stopped."""
        ...

    def on_error(self, number: int, error: str) -> None:
        """A trial failed twice."""
        ...


@dataclass(frozen=True)
class Asha:
    """Asynchronous successive halving (Li et al. 2020, https://arxiv.org/abs/1810.05934).

    A trial that reaches a rung, ``grace_steps * reduction ** k`` env steps, goes on only if its score is among the best
    ``1 / reduction`` of those that reached the rung before it.

    Attributes:
        max_steps: env steps of a whole trial.
        grace_steps: of the first rung.
        reduction: the factor.
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
        change: gives a copy's options, from those of the trial that it copies.
        seed: of the draws.
    """

    change: Callable[[Mapping[str, Any]], Options]
    seed: int = 0


Competition = Asha | Population
