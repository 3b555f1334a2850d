"""Searches for good training options: many trials, each a nested run in MLflow, and a final table.

``asha`` (Li et al. 2020, https://arxiv.org/abs/1810.05934) stops trials that are worse than others of the same age.
``pbt`` (Jaderberg et al. 2017, https://arxiv.org/abs/1711.09846) replaces bad trials by copies of good ones, including
weights and optimiser, with slightly changed options. Both compare trials after each interval, while they run, and keep
a checkpoint of each comparison. Trials run in processes on this machine, or in Ray Tune with ``--cluster``. Only this
process writes to MLflow. Knows nothing of how a trial learns.
"""

from __future__ import annotations

import copy
import math
import os
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from brayx.errors import ConfigError, StartupError
from brayx.metrics import significant
from brayx.metrics.charts import CHARTS
from brayx.search.competition import Asha, Competition, Population, TrialReport
from brayx.tables import aligned
from brayx.temporary import temporary_folder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from brayx.algorithms.config import AlgorithmConfig
    from brayx.local.training import Training
    from brayx.replay.files import Dataset
    from brayx.replay.steps import ActionsOf
    from brayx.search.space import Domain, Space
    from brayx.search.tune_trial import Spec
    from brayx.tracking import Status, Trial

Method = Literal["asha", "pbt"]
_ENV_STEPS = "env steps"
Say = Callable[[str], None]

_DRAWN_ANEW = 0.25
"""Share of a copy's options that are drawn again from their domains."""
_TIMEOUT_S = 24 * 3600.0
_COPIED = ("normalise_obs", "normalise_reward", "normalise_value")
"""Options with running moments. A copy takes these over, so they must be the same in all trials."""


@dataclass
class TrialOutcome:
    """The result of a trial.

    Attributes:
        number: number of the trial.
        options: its final options, by name.
        curve: ``(env steps, mean return)`` after each interval; for ``bc``, transitions learned from.
        clones: the intervals after which it became a copy, with the trial it copied.
        error: why it failed; empty: it did not fail.
    """

    number: int
    options: dict[str, Any]
    curve: list[tuple[int, float]] = field(default_factory=list)
    clones: list[tuple[int, int]] = field(default_factory=list)
    error: str = ""

    @property
    def return_mean(self) -> float:
        """Mean return of the last interval; NaN without a finished game."""
        return self.curve[-1][1] if self.curve else float("nan")


@dataclass(frozen=True)
class TuneResult:
    """The result of a search.

    Attributes:
        trials: best first; those that failed, last.
        trial: the parent run in MLflow of the trials' runs. It has the best trial's checkpoint.
        steps: x axis of the curves: ``env steps``, or for ``bc`` the ``transitions`` learned from.
    """

    trials: tuple[TrialOutcome, ...]
    trial: Trial
    steps: str = _ENV_STEPS

    @property
    def best(self) -> TrialOutcome:
        """The trial with the highest final mean return."""
        return self.trials[0]

    def draw(self) -> Figure:
        """Plots every trial's mean return over its steps: the best in colour, with a dot where it became a copy."""
        from brayx.figures import Figure

        figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
        axes = figure.add_subplot()
        for rank, outcome in reversed(list(enumerate(self.trials))):
            best = rank == 0
            steps, means = [step for step, _ in outcome.curve], [mean for _, mean in outcome.curve]
            axes.plot(
                steps, means, color="#1f77b4" if best else "#bbbbbb", linewidth=2 if best else 1,
                label=f"trial {outcome.number}" if best else None, zorder=3 if best else 2,
            )  # fmt: skip
            copied_at = [index for index, _ in outcome.clones if index < len(steps)]
            axes.scatter([steps[i] for i in copied_at], [means[i] for i in copied_at], s=14, color="#d62728", zorder=4)
        axes.set_xlabel(self.steps)
        axes.set_ylabel("return, mean of the last games")
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        return figure


def tune(
    env: str,
    space: Space,
    *,
    algorithm: str = "ppo",
    demonstrations: str | Path | Dataset | None = None,
    actions: ActionsOf | None = None,
    method: Method = "asha",
    num_trials: int = 8,
    num_steps: int = 60_000,
    interval_steps: int | None = None,
    target_return: float | None = None,
    seed: int = 0,
    project: str = "tuning",
    trial: str | None = None,
    tracking: str | None = None,
    cluster: str | None = None,
    say: Say = print,
) -> TuneResult:
    """Runs a search.

    Args:
        env: Gymnasium id.
        space: for each option a `Domain`, or a value for all trials.
        algorithm: name of the algorithm.
        demonstrations: recorded episodes that every trial imitates, as for `train_local`. Each trial reads the files
            where it runs, by their absolute path. ``bc`` plays no games while it learns, so each comparison plays
            ``evaluation_episodes`` greedy games, the same ones in all trials.
        actions: whose actions the demonstrations have, if they are a path; a `Dataset` has its own option.
        method: how trials compete.
        num_trials: number of trials drawn from the space.
        num_steps: env steps of a trial that is not stopped early; for ``bc``, transitions of its batches.
        interval_steps: steps between two comparisons; None: a twelfth of the total.
        target_return: stop a trial that reaches it.
        seed: seed of the draws; trial ``n`` trains with ``seed + n``.
        project: MLflow experiment.
        trial: name of the MLflow run that is the parent of the trials' runs; None: METHOD ENV.
        tracking: MLflow's URI or the path of its sqlite file; None: ``mlflow.db`` in the current folder.
        cluster: address of a Ray cluster to run the trials on; empty: start one, or use the one that this process has
            joined. None: in processes on this machine.
        say: called with each line of progress.

    Raises:
        ConfigError, ModelError: a count is invalid, or the space, the environment, the demonstrations, the algorithm or
            its network do not fit each other; raised before anything starts.
        StartupError: every trial failed; the message has the first one's error.
    """
    from brayx.algorithms.build import algorithm_options
    from brayx.search.tune_trial import Spec
    from brayx.tracking import Trial, initialise, tracking_uri

    counts = {"num_trials": num_trials, "num_steps": num_steps, "interval_steps": interval_steps}
    for key, count in counts.items():
        if count is not None and count < 1:
            raise ConfigError(f"{key} is {count}, expected at least 1", key=key)
    if num_trials < 2 and method == "pbt":
        raise ConfigError("pbt needs at least two trials", key="num_trials")
    data = None if demonstrations is None else _by_whole_path(demonstrations, actions)
    interval = max(1, num_steps // 12) if interval_steps is None else interval_steps
    spec = Spec(env, algorithm, num_steps, interval, target_return, seed, data)
    _check(spec, space, method)
    parent = Trial.open(project, trial or f"{method} {env}", initialise(tracking_uri(tracking)), resume=False)
    parent.log_params({"env": env, "algorithm": algorithm, "method": method, "trials": num_trials,
                      "space": {key: str(value) for key, value in space.items()}})  # fmt: skip
    plays = algorithm_options(algorithm, os.getcwd()).imitates != "everything"
    status: Status = "FAILED"
    with temporary_folder("tune") as folder:
        outcomes = _Outcomes(parent, say, _ENV_STEPS if plays else "transitions", folder)
        try:
            _search(spec, space, method, num_trials, outcomes, cluster)
            result = _finish(outcomes, parent)
            status = "FINISHED"
            return result
        except KeyboardInterrupt:
            status = "KILLED"
            raise
        finally:
            outcomes.close(status)
            parent.finish(status)


def _check(spec: Spec, space: Space, method: Method) -> None:
    """Raises what `tune` says if a trial could not start, or be copied."""
    from brayx.rollout.envs import check_env
    from brayx.search.space import Domain, check

    check(spec.algorithm, space)
    copied = [name for name in space if name.startswith("network.") or name in _COPIED]
    if method == "pbt" and (differ := sorted(name for name in copied if isinstance(space[name], Domain))):
        raise ConfigError(
            "pbt copies what was learned, so every trial has the same network and normalises the same: "
            f"{', '.join(differ)} has a domain",
            key="search",
        )
    check_env(spec.env)
    check(spec.algorithm, space, _fits(spec, space))


def _search(
    spec: Spec, space: Space, method: Method, num_trials: int, outcomes: _Outcomes, cluster: str | None
) -> None:
    """Runs the trials; arguments as for `tune`."""
    from brayx.search.space import Domain
    from brayx.search.tune_trial import train_trial

    rng = random.Random(spec.seed)
    domains = {name: value for name, value in space.items() if isinstance(value, Domain)}
    # Draw here, so that a seed gives the same trials on every host.
    drawn = [
        {name: value.draw(rng) if isinstance(value, Domain) else value for name, value in space.items()}
        for _ in range(num_trials)
    ]
    competition: Competition = Asha(spec.num_steps, min(spec.interval_steps, spec.num_steps))
    if method == "pbt":
        competition = Population(partial(perturbed, domains=domains, rng=rng), spec.seed)
    work = partial(train_trial, spec)
    outcomes.expect(drawn)
    if cluster is None:
        from brayx.search.local import run_trials

        run_trials(work, drawn, competition, outcomes, deadline_s=_TIMEOUT_S)
    else:
        os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")  # as in `brayx.front.train_job`
        from brayx.cluster.search import run_trials as run_on_ray

        run_on_ray(work, drawn, competition, outcomes, deadline_s=_TIMEOUT_S, address=cluster)


def _by_whole_path(demonstrations: str | Path | Dataset, actions: ActionsOf | None = None) -> Dataset:
    """The demonstrations with an absolute path, since each trial runs in a separate folder."""
    from brayx.recording.source import dataset

    if isinstance(demonstrations, str | Path):
        demonstrations = dataset(demonstrations, actions=actions)
    data = copy.copy(demonstrations)
    data.files = [file.absolute() for file in data.files]
    return data


def _fits(spec: Spec, space: Space) -> Callable[[AlgorithmConfig, Training], None]:
    """Returns a check of a trial's options in its environment, including network and table, as in `train_local`."""
    from brayx.actions import ActionSpec
    from brayx.local.train import check_options, check_updates, model_of
    from brayx.rollout.collector import check_noise
    from brayx.rollout.envs import make_envs
    from brayx.rollout.networks import observation_of, ready_made
    from brayx.search.space import Domain

    options = space.get("env_options", {})
    envs = make_envs(spec.env, 1, options=options.extremes[0] if isinstance(options, Domain) else options)
    try:
        action_space, obs = envs.single_action_space, observation_of(envs)
    finally:
        envs.close()
    fitting: set[str] = set()

    def fits(algorithm: AlgorithmConfig, drawn: Training) -> None:
        training = drawn.model_copy(update={"num_steps": spec.num_steps}).of(algorithm)
        actions = ActionSpec.of(action_space, scale=True)
        check_options(algorithm, training, obs, actions, spec.demonstrations is not None)
        plays = algorithm.imitates != "everything"
        if not plays and not training.evaluation_episodes:
            raise ConfigError(
                f"evaluation_episodes is 0, and trials of {algorithm.name!r} are compared by those alone: expected 1 "
                "at least",
                key="evaluation_episodes",
            )
        if plays:  # without play, its batches depend on its data
            check_updates(algorithm, training)
        # The options that decide whether a model fits; most draws share them.
        model = f"{training.network!r} {algorithm.value_heads} {training.sde_steps > 1}"
        if model not in fitting:
            make = ready_made(training.network, envs, algorithm)
            _, _, signature, _ = model_of(algorithm, training, obs, actions, make, spec.demonstrations)
            check_noise(training.sde_steps, {leaf.path for leaf in signature.outputs})
            fitting.add(model)

    return fits


class _Outcomes:
    """A `ReportListener`: keeps the trials' reports for the ranking, prints them, and writes each to its nested run.

    Args:
        trial: the parent run of the trials' runs.
        say: called with a line for each report.
        steps: unit of the trials' steps.
        folder: for the newest checkpoint of each trial.
    """

    def __init__(self, trial: Trial, say: Say, steps: str, folder: Path) -> None:
        self.steps = steps
        self.outcomes: list[TrialOutcome] = []
        self._folder = folder
        self._trial = trial
        self._say = say
        self._runs: dict[int, Trial] = {}

    def expect(self, drawn: Sequence[Mapping[str, Any]]) -> None:
        """Sets the initial options of each trial, by number."""
        self.outcomes = [TrialOutcome(number, dict(options)) for number, options in enumerate(drawn)]

    def on_report(self, number: int, report: TrialReport, checkpoint: Path | None) -> None:
        """Handles a trial's report after an interval."""
        outcome, run = self.outcomes[number], self._run(number)
        steps, mean, origin = report.env_steps, report.return_mean, report.origin
        said = f"trial {number}: {steps:,} {self.steps}, return {significant(mean)}"
        if origin != number:
            outcome.clones.append((len(outcome.curve), origin))
            run.set_tag("brayx.copy_of", ", ".join(str(copied) for _, copied in outcome.clones))
            said += f", a copy of trial {origin}"
        outcome.options = dict(report.options)
        outcome.curve.append((steps, mean))
        numbers = {f"option/{name}": value for name, value in outcome.options.items() if type(value) in (int, float)}
        if math.isfinite(mean):
            numbers[CHARTS["episode_return"]] = mean
        run.log_metrics(numbers | self.counted(steps), steps)
        if checkpoint is not None:
            saved = self.checkpoint(number)
            shutil.rmtree(saved, ignore_errors=True)
            shutil.copytree(checkpoint, saved)
        self._say(said)

    def counted(self, steps: int) -> dict[str, float]:
        """The chart of env steps; empty where steps are recorded transitions."""
        return {CHARTS["env_steps"]: steps} if self.steps == _ENV_STEPS else {}

    def checkpoint(self, number: int) -> Path:
        """Folder of a trial's newest checkpoint, which exists after its first comparison."""
        return self._folder / f"{number:03d}"

    def on_end(self, number: int) -> None:
        """Handles the end of a trial: it is done, or stopped because others are better."""
        self._end(number, "FINISHED")

    def on_error(self, number: int, error: str) -> None:
        """Handles the failure of a trial."""
        self.outcomes[number].error = error
        self._say(f"trial {number} failed: {error}")
        self._end(number, "FAILED")

    def close(self, status: Status) -> None:
        """Ends the runs that are still open."""
        for number in list(self._runs):
            self._end(number, status)

    def _run(self, number: int) -> Trial:
        from brayx.tracking import Trial

        if number not in self._runs:
            parent = self._trial
            run = Trial.open(parent.project, f"{parent.name} {number:02d}", parent.uri, resume=False)
            run.set_tag("mlflow.parentRunId", parent.run_id)
            run.log_params(self.outcomes[number].options)
            self._runs[number] = run
        return self._runs[number]

    def _end(self, number: int, status: Status) -> None:
        run = self._runs.pop(number, None)
        if run is not None:
            run.finish(status)


def perturbed(options: Mapping[str, Any], domains: Mapping[str, Domain], rng: random.Random) -> dict[str, Any]:
    """Slightly changed options within their domains: a number by 20 % up or down, one in four drawn again."""
    changed = dict(options)
    for name, domain in domains.items():
        if rng.random() < _DRAWN_ANEW:
            changed[name] = domain.draw(rng)
        elif domain.kind != "choice":
            low, high = domain.arguments
            value = min(max(options[name] * rng.choice((0.8, 1.2)), low), high)
            changed[name] = round(value) if domain.kind == "randint" else value
    return changed


def _finish(outcomes: _Outcomes, trial: Trial) -> TuneResult:
    """Ranks the trials, and logs the table, the picture and the best trial's checkpoint to the parent run."""
    from brayx.search.tune_trial import or_least

    ranked = sorted(
        outcomes.outcomes,
        key=lambda outcome: (bool(outcome.error) or not outcome.curve, -or_least(outcome.return_mean)),
    )
    if not ranked or not ranked[0].curve:
        why = next((outcome.error for outcome in ranked if outcome.error), "none reported anything")
        raise StartupError(f"every trial failed; the first: {why}")
    best = ranked[0]
    trial.log_dict({"trials": [asdict(outcome) for outcome in ranked]}, "tuning.json")
    result = TuneResult(tuple(ranked), trial, outcomes.steps)
    trial.log_figure(result.draw(), "tuning.png")
    checkpoint = outcomes.checkpoint(best.number)
    steps, mean = best.curve[-1]
    if checkpoint.exists():
        trial.save_checkpoint(checkpoint, steps, {"episode_return": mean})
    numbers = {CHARTS["episode_return"]: mean, "return/best_trial": best.number}
    trial.log_metrics(numbers | outcomes.counted(steps), steps)
    return result


def table(outcomes: Sequence[TrialOutcome], steps_of: str = _ENV_STEPS) -> str:
    """One line per trial, best first."""
    names = sorted({name for outcome in outcomes for name in outcome.options})
    rows = [["trial", "return", steps_of, *names, ""]]
    for outcome in outcomes:
        steps = f"{outcome.curve[-1][0]:,}" if outcome.curve else "-"
        note = outcome.error or ", ".join(f"copy of {origin}" for _, origin in outcome.clones)
        values = [_short(outcome.options.get(name, "")) for name in names]
        rows.append([str(outcome.number), significant(outcome.return_mean), steps, *values, note])
    return "\n".join(aligned(rows, left=[len(rows[0]) - 1]))


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
