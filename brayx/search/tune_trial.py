"""One trial of a search: trains an environment, and reports after each interval.

Knows nothing of how trials compete, of MLflow or of Ray.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brayx.search import space as search
from brayx.search.competition import Reporter, TrialReport
from brayx.temporary import temporary_folder
from brayx.trainer.loop import GAMES_METRIC, RETURN_METRIC

if TYPE_CHECKING:
    from brayx.replay.files import Dataset

_ORIGIN_FILE = "origin.json"


@dataclass(frozen=True)
class Spec:
    """Common settings of all trials; sent to their processes.

    Attributes:
        env: Gymnasium id.
        algorithm: name of the algorithm.
        num_steps: env steps of a trial that is not stopped early; for ``bc``, transitions of its batches.
        interval_steps: steps between two comparisons.
        target_return: stop a trial that reaches it.
        seed: trial ``n`` trains with ``seed + n``.
        demonstrations: demonstrations that every trial imitates.
    """

    env: str
    algorithm: str
    num_steps: int
    interval_steps: int
    target_return: float | None
    seed: int
    demonstrations: Dataset | None = None


def train_trial(
    spec: Spec, number: int, options: Mapping[str, Any], report: Reporter, begun: Path | None = None
) -> None:
    """Trains one trial from start to end. Its games and replay continue across comparisons.

    Comparisons are at the same env steps in all trials (to within a run): after each whole interval. There is none if
    less than an interval is left, because the return of a short rest would cover few games. The first comparison waits
    until it has learned something, and as many games have ended as run concurrently. The games that end earlier are the
    short ones, and long games must not make a trial look bad.

    Args:
        spec: common settings of all trials.
        number: number of the trial.
        options: options of this trial.
        report: called at each comparison and at the end.
        begun: a checkpoint to start from: weights, optimiser and counters, with new games. None: from scratch.
    """
    from brayx.local.train import LocalTraining

    algorithm, training = search.arguments(spec.algorithm, options)
    plays = algorithm.imitates != "everything"
    changed = {"num_steps": spec.num_steps, "target_return": spec.target_return, "seed": spec.seed + number}
    games = training.evaluation_episodes
    if not plays:  # it plays at each comparison instead
        changed |= {"num_envs": min(training.num_envs, games), "evaluation_episodes": 0}
    training = training.model_copy(update=changed)
    target = math.inf if spec.target_return is None else spec.target_return
    origin = number if begun is None else json.loads((begun / _ORIGIN_FILE).read_text())
    stop = threading.Event()
    with LocalTraining(
        spec.env, algorithm, training, demonstrations=spec.demonstrations, stop=stop, resume=begun
    ) as running:

        def compare(numbers: Mapping[str, float], *, over: bool = False) -> None:
            """Reports the trial's state, its return and its checkpoint."""
            nonlocal origin
            # A clone plays the same games at every comparison, and in all trials.
            mean = numbers[RETURN_METRIC] if plays else running.evaluate(games, seed=spec.seed).mean
            if mean >= target and not plays:
                stop.set()
            state = TrialReport(running.run.env_steps, or_least(mean), mean, origin, over, dict(options))
            origin = number
            with temporary_folder("checkpoint") as folder:
                running.loop.write(folder)
                (folder / _ORIGIN_FILE).write_text(json.dumps(number))
                report(state, folder)

        compared_at = running.run.env_steps  # a copy's first steps here are not its first
        while running.goes_on():
            numbers = running.iterate()
            steps, interval = running.run.env_steps, spec.interval_steps
            is_last = not running.goes_on() or spec.num_steps - steps < interval
            early = not numbers.get("updates") or (plays and numbers.get(GAMES_METRIC, 0) < training.num_envs)
            if steps // interval > compared_at // interval and not is_last and not early:
                compared_at = steps
                compare(numbers)
        compare({RETURN_METRIC: running.result().return_mean}, over=True)


def or_least(value: float) -> float:
    """``value``, or minus infinity for NaN, which ranks last."""
    return value if math.isfinite(value) else -math.inf
