"""One trial of a search: trains an environment, and reports after each interval.

Knows nothing of how trials compete, of MLflow or of Ray.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brayx.search import space as search
from brayx.search.competition import Reporter, TrialReport
from brayx.temporary import temporary_folder
from brayx.trainer.loop import GAMES_METRIC, RETURN_METRIC

if TYPE_CHECKING:
    from brayx.actions import ActionSpec
    from brayx.algorithms.config import AlgorithmConfig
    from brayx.local.training import Training
    from brayx.replay.files import Dataset
    from brayx.rollout.networks import Model
    from brayx.rollout.policy import Policy
    from brayx.types import NestedArray

_ORIGIN_FILE = "origin.json"
_GAMES_SEED = 10_000
"""Seed offset of the evaluation games of ``bc``, so that they differ from training games."""


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


class ReportingKeeper:
    """A `TrialKeeper` that keeps the newest checkpoint of a trial, and reports it at each comparison.

    Comparisons are at the same env steps in all trials (to within a run): after each whole interval. There is none if
    less than an interval is left, because the return of a short rest would cover few games. The first comparison waits
    until as many games have ended as run concurrently. The games that end earlier are the short ones, and long games
    must not make a trial look bad.

    Args:
        path: folder for the checkpoint.
        number: number of the trial.
        spec: common settings of all trials.
        options: options of this trial.
        num_envs: number of concurrent games.
        report: called at each comparison.
        play: returns the mean return at a comparison, if the training plays no games; None: it plays.
    """

    def __init__(
        self,
        path: Path,
        number: int,
        spec: Spec,
        options: Mapping[str, Any],
        num_envs: int,
        report: Reporter,
        play: Callable[[], float] | None = None,
    ) -> None:
        self._path = path
        self._number = self._origin = number
        self._spec = spec
        self._options = options
        self._num_envs = num_envs
        self._report = report
        self._play = play
        self._due: tuple[int, float] | None = None
        self._seen: int | None = None

    def adopt(self, folder: Path) -> None:
        """Takes a checkpoint, perhaps another trial's, as the initial one."""
        shutil.copytree(folder, self._path)
        self._origin = json.loads((self._path / _ORIGIN_FILE).read_text())

    def due(self, env_steps: int, numbers: Mapping[str, float]) -> bool:
        """As `train_local` asks."""
        if self._seen is None:  # a copy's first steps here are not its first
            self._seen = env_steps - int(numbers.get("env_steps", 0))  # none while demonstrations come first
        interval, left = self._spec.interval_steps, self._spec.num_steps - env_steps
        passed = env_steps // interval - self._seen // interval
        if not passed or left < interval:
            return False
        if self._play is None and numbers.get(GAMES_METRIC, 0) < self._num_envs:
            return False
        self._due = (env_steps, numbers[RETURN_METRIC] if self._play is None else self._play())
        return True

    def save(self, folder: Path, step: int, metrics: Mapping[str, float]) -> None:
        """As `Keeper.save`."""
        shutil.rmtree(self._path, ignore_errors=True)
        shutil.copytree(folder, self._path)
        (self._path / _ORIGIN_FILE).write_text(json.dumps(self._number))
        if self._due is not None:
            (self._seen, mean), self._due = self._due, None
            self.report(self._seen, mean)

    def report(self, env_steps: int, return_mean: float, *, over: bool = False) -> None:
        """Reports the trial's state and its checkpoint."""
        origin, self._origin = self._origin, self._number
        score = or_least(return_mean)
        self._report(TrialReport(env_steps, score, return_mean, origin, over, dict(self._options)), self._path)

    def latest(self) -> Path | None:
        """As `Keeper.latest`."""
        return self._path if self._path.exists() else None

    def push(self, part: Any) -> None:
        """As `Totals.push`: the search writes metrics, from the reports."""

    def check(self) -> None:
        """As `Totals.check`."""


class Player:
    """Plays games with a cloning trial's model: the same ones at every comparison, and in all trials.

    Args:
        spec: common settings of all trials.
        algorithm, training: options of this trial.

    Attributes:
        reached: set once a mean return reached the target.
    """

    def __init__(self, spec: Spec, algorithm: AlgorithmConfig, training: Training) -> None:
        from brayx.rollout.envs import make_envs
        from brayx.rollout.networks import ready_made

        self.reached = threading.Event()
        self._seed = spec.seed + _GAMES_SEED
        self._target = math.inf if spec.target_return is None else spec.target_return
        self._training = training
        self._envs = make_envs(
            spec.env,
            min(training.num_envs, training.evaluation_episodes),
            vectorization=training.vectorization,
            options=training.env_options,
        )
        self._ready_made = ready_made(training.network, self._envs, algorithm)
        self._module: Any = None
        self._policy: Policy | None = None

    def model(self, obs: NestedArray, spec: ActionSpec) -> Model:
        """As `train_local` has it: the module that it learns is the one that plays."""
        from brayx.rollout.policy import Policy

        made = self._ready_made(obs, spec)
        self._module, self._policy = made[0], Policy(*made, engine=self._training.engine)
        return made

    def play(self) -> float:
        """Plays the games; returns their mean return."""
        from brayx.engines.torch import module_weights
        from brayx.rollout.evaluate import evaluate

        assert self._policy is not None
        self._policy.load(module_weights(self._module), self._policy.version + 1)
        training = self._training
        found = evaluate(
            self._envs,
            self._policy,
            training.evaluation_episodes,
            seed=self._seed,
            scale_actions=training.scale_actions,
            max_steps=training.evaluation_steps,
        )
        if found.mean >= self._target:
            self.reached.set()
        return found.mean

    def close(self) -> None:
        """Closes the environments."""
        self._envs.close()


def train_trial(
    spec: Spec, number: int, options: Mapping[str, Any], report: Reporter, begun: Path | None = None
) -> None:
    """Trains one trial from start to end. Its games and replay continue across comparisons.

    Args:
        spec: common settings of all trials.
        number: number of the trial.
        options: options of this trial.
        report: called at each comparison and at the end.
        begun: a checkpoint to start from: weights, optimiser and counters, with new games. None: from scratch.
    """
    from brayx.local.train import train_local

    algorithm, training = search.arguments(spec.algorithm, options)
    training = training.model_copy(
        update={"num_steps": spec.num_steps, "target_return": spec.target_return, "seed": spec.seed + number}
    )
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(temporary_folder("trial"))
        play = model = stop = None
        if algorithm.imitates == "everything":
            player = Player(spec, algorithm, training)
            stack.callback(player.close)
            play, model, stop = player.play, player.model, player.reached
            training = training.model_copy(update={"evaluation_episodes": 0})  # the player evaluates instead
        keeper = ReportingKeeper(folder / "checkpoint", number, spec, options, training.num_envs, report, play)
        if begun is not None:
            keeper.adopt(begun)
        result = train_local(
            spec.env,
            algorithm,
            training,
            demonstrations=spec.demonstrations,
            model=model,
            clerk=keeper,
            stop=stop,
            due=keeper.due,
        )
        keeper.report(result.env_steps, result.return_mean if play is None else play(), over=True)


def or_least(value: float) -> float:
    """``value``, or minus infinity for NaN, which ranks last."""
    return value if math.isfinite(value) else -math.inf
