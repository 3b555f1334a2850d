"""Searches options of a training: many trials through Ray Tune, each a nested run in MLflow, with one table in the end.

    python -m pipelines.tune --env CartPole-v1 --search "learning_rate=loguniform(1e-4, 1e-2)" --trials 8

``asha`` (Li et al. 2020, https://arxiv.org/abs/1810.05934) stops trials that are behind the others at the same age.
``pbt`` (Jaderberg et al. 2017, https://arxiv.org/abs/1711.09846) lets those behind go on as copies of those ahead,
weights and optimiser included, with options that were changed a little. Both look at a trial after each interval, as
it goes on, and keep a checkpoint of then. Only the driver writes to MLflow. Knows nothing of how a trial learns.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import math
import os
import random
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ray.tune import Callback

from brayx.charts import CHARTS
from brayx.errors import BrayxError, ConfigError, StartupError
from brayx.trainer.loop import GAMES_METRIC, RETURN_METRIC
from pipelines import search
from pipelines.search import Domain, Space

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from brayx.actions import ActionSpec
    from brayx.algorithms.config import AlgorithmConfig
    from brayx.replay.files import Dataset
    from brayx.rollout.policy import Policy
    from brayx.tracking import Trial
    from brayx.types import NestedArray
    from pipelines.rollouts import Model
    from pipelines.training import Training

Method = Literal["asha", "pbt"]
_ENV_STEPS = "env steps"
Say = Callable[[str], None]

_REDUCTION = 3
"""ASHA lets one in so many go on."""
_DRAWN_ANEW = 0.25
"""Share of a copy's options that are drawn from their domains again."""
_TIMEOUT_S = 24 * 3600.0
_COPIED = ("normalise_obs", "normalise_reward", "normalise_value")
"""Options whose moments a copy takes over, which one without them could not."""
_END_S = 60
"""How long a trial that is stopped may take to end, a run that it collects included."""
_ORIGIN_FILE = "origin.json"
_OUTPUT = "RAY_AIR_NEW_OUTPUT"
_GAMES_SEED = 10_000
"""Of the games that are played with clones, added to the search's: no training's."""


@dataclass
class Outcome:
    """What became of one trial.

    Attributes:
        number: of the trial.
        options: by name, as they were in the end.
        curve: ``(env steps, mean return)`` after each interval; of clones, transitions learned from.
        clones: after which of the intervals it went on as a copy of which trial.
        error: why it failed; empty: it did not.
    """

    number: int
    options: dict[str, Any]
    curve: list[tuple[int, float]] = field(default_factory=list)
    clones: list[tuple[int, int]] = field(default_factory=list)
    error: str = ""

    @property
    def return_mean(self) -> float:
        """Of the last interval; NaN before there is a finished game."""
        return self.curve[-1][1] if self.curve else float("nan")


@dataclass(frozen=True)
class TuneResult:
    """What a search found.

    Attributes:
        trials: best first; those that failed, last.
        trial: the run in MLflow that the trials' runs are nested in. It has the best trial's checkpoint.
        steps: what curves are over: ``env steps``, or the ``transitions`` that clones learned from.
    """

    trials: tuple[Outcome, ...]
    trial: Trial
    steps: str = _ENV_STEPS

    @property
    def best(self) -> Outcome:
        """The trial with the highest mean return in the end."""
        return self.trials[0]


def tune(
    env: str,
    space: Space,
    *,
    algorithm: str = "ppo",
    demonstrations: str | Path | Dataset | None = None,
    method: Method = "asha",
    num_trials: int = 8,
    total_steps: int = 60_000,
    interval_steps: int | None = None,
    target_return: float | None = None,
    seed: int = 0,
    project: str = "tuning",
    name: str | None = None,
    tracking: str | None = None,
    address: str = "",
    say: Say = print,
) -> TuneResult:
    """Runs a search.

    Args:
        env: Gymnasium id.
        space: by option, a `Domain` or the one value of all trials.
        algorithm: name of one.
        demonstrations: recorded episodes that every trial imitates, as `train_local` has them. Each trial reads the
            files where it runs, by their whole path. Of ``bc``, which plays nothing, ``evaluation_episodes`` are played
            greedily at each look, the same ones in all trials.
        method: how trials compete.
        num_trials: so many are drawn from the space.
        total_steps: env steps of a trial that is not stopped before; of ``bc``, transitions of its batches.
        interval_steps: of these between two looks at a trial; None: a twelfth of all.
        target_return: a trial that reaches it is done.
        seed: of the draws; trial ``n`` trains with ``seed + n``.
        project: MLflow experiment.
        name: MLflow run that the trials' are nested in; None: of method and environment.
        tracking: MLflow's URI or the path of its sqlite file; None: ``mlflow.db`` in the current folder.
        address: of a running Ray cluster; empty: Ray is used where it runs already in this process, else started.
        say: told of progress, a line at a time.

    Raises:
        ConfigError, ModelError: a count is none, or the space, the environment, the demonstrations, the algorithm or
            its network cannot be trained with; before anything starts.
        StartupError: every trial failed; the message has the first one's error.
    """
    import ray

    from brayx.algorithms.build import algorithm_options
    from brayx.rollout.envs import check_env
    from brayx.tracking import Trial, initialise, tracking_uri

    counts = {"num_trials": num_trials, "total_steps": total_steps, "interval_steps": interval_steps}
    for key, count in counts.items():
        if count is not None and count < 1:
            raise ConfigError(f"{key} is {count}, expected 1 at least", key=key)
    if num_trials < 2 and method == "pbt":
        raise ConfigError("pbt needs two trials at least: one to learn from the other", key="num_trials")
    search.check(algorithm, space)
    copied = [name for name in space if name.startswith("network.") or name in _COPIED]
    if method == "pbt" and (differ := sorted(name for name in copied if isinstance(space[name], Domain))):
        raise ConfigError(
            "pbt copies what was learned, so every trial has the same network and normalises the same: "
            f"{', '.join(differ)} has a domain",
            key="search",
        )
    check_env(env)
    if demonstrations is not None:
        demonstrations = _by_whole_path(demonstrations)
    search.check(algorithm, space, _fits(env, space, total_steps, demonstrations))
    interval = max(1, total_steps // 12) if interval_steps is None else interval_steps
    trial = Trial.open(project, name or f"{method} {env}", initialise(tracking_uri(tracking)), resume=False)
    trial.log_params({"env": env, "algorithm": algorithm, "method": method, "trials": num_trials,
                      "space": {key: str(value) for key, value in space.items()}})  # fmt: skip
    started = not ray.is_initialized()
    folder = tempfile.mkdtemp(prefix="brayx-tune-")
    plays = algorithm_options(algorithm, os.getcwd()).imitates != "everything"
    books = _Books(trial, say, _ENV_STEPS if plays else "transitions")
    status: Literal["FINISHED", "FAILED", "KILLED"] = "FAILED"
    try:
        if started:
            _start_ray(address)
        spec = _Spec(env, algorithm, total_steps, interval, target_return, seed, tuple(sys.path), demonstrations)
        _fit(spec, space, method, num_trials, folder, books)
        result = _finish(books, trial, folder)
        status = "FINISHED"
        return result
    except KeyboardInterrupt:
        status = "KILLED"
        raise
    finally:
        books.close(status)
        trial.finish(status)
        if started:
            ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def _by_whole_path(demonstrations: str | Path | Dataset) -> Dataset:
    """The same, to be found from any folder: each trial runs in one of its own."""
    from brayx.replay.files import Dataset

    data = copy.deepcopy(demonstrations) if isinstance(demonstrations, Dataset) else Dataset(demonstrations)
    data.files = [file.absolute() for file in data.files]
    return data


def _fits(
    env: str, space: Space, total_steps: int, demonstrations: Dataset | None
) -> Callable[[AlgorithmConfig, Training], None]:
    """What refuses options of a trial in ``env``, its network's and its table's too, as `train_local` would."""
    from brayx.actions import ActionSpec
    from brayx.algorithms.build import check_fits
    from brayx.algorithms.mappo import STATE
    from brayx.nets.recurrent import state_argument
    from brayx.replay.packing import Layout
    from brayx.rollout.collector import check_noise
    from brayx.rollout.envs import make_envs
    from brayx.trainer.fits import actions_of, check_model
    from brayx.types import DEMONSTRATION, flatten
    from pipelines.demonstrations import Demonstrations, check_imitates
    from pipelines.rollouts import check_updates, observation_of, ready_made

    options = space.get("env_options", {})
    envs = make_envs(env, 1, options=options.extremes[0] if isinstance(options, Domain) else options)
    try:
        spec, obs = ActionSpec.of(envs.single_action_space), observation_of(envs)
    finally:
        envs.close()
    observed = flatten(obs, "obs")
    fitting: set[str] = set()

    def fits(algorithm: AlgorithmConfig, drawn: Training) -> None:
        training = drawn.model_copy(update={"total_steps": total_steps}).of(algorithm)
        if demonstrations is not None:
            check_imitates(algorithm, training)
        check_fits(
            algorithm,
            kind=spec.kind,
            unroll_length=training.unroll_length,
            gives={*observed, *([] if demonstrations is None else [DEMONSTRATION])},
            sampler=training.sampler,
        )
        plays = algorithm.imitates != "everything"
        if not plays and not training.evaluation_episodes:
            raise ConfigError(
                f"evaluation_episodes is 0, and trials of {algorithm.name!r} are compared by those alone: expected 1 "
                "at least",
                key="evaluation_episodes",
            )
        if plays:  # else its batches depend on its data
            check_updates(algorithm, training)
        # What a model may fit or not: most draws have the same.
        model = f"{training.network!r} {algorithm.value_heads} {training.sde_steps > 1}"
        if model not in fitting:
            module, forward_args = ready_made(training.network, envs, algorithm)(obs, spec)
            given = check_model(algorithm, module, forward_args, state=observed.get(STATE))
            check_noise(training.sde_steps, {leaf.path for leaf in given.outputs})
            if demonstrations is not None:
                at = state_argument(module)
                taken = tuple(arg for index, arg in enumerate(forward_args) if index != at)
                Demonstrations(
                    demonstrations,
                    Layout.of_model(taken, actions_of(given)),
                    batch_size=training.batch_size,
                    unroll_length=training.unroll_length,
                    seed=training.seed,
                    initial=None
                    if at is None
                    else {path: leaf[0] for path, leaf in flatten(forward_args[at], "state").items()},
                )
            fitting.add(model)

    return fits


@dataclass(frozen=True)
class _Spec:
    """What all trials have in common; travels to their processes."""

    env: str
    algorithm: str
    total_steps: int
    interval_steps: int
    target_return: float | None
    seed: int
    path: tuple[str, ...]
    demonstrations: Dataset | None = None


Report = Callable[[dict[str, Any], Path], None]
"""Tells Tune numbers of a trial, with a checkpoint that is copied; a trial that is stopped ends there."""


class _Looks:
    """The `Books` of a trial: its newest checkpoint, which is reported when it is time to look at the trial.

    That is at the same env steps in all trials, up to a run: at each whole number of intervals from the beginning. But
    not when less than one is left of all, since the return of a short rest would be of few games. The first look waits
    until as many games have ended as are played side by side: those that end before are the short ones, and a trial is
    not behind because its games last.

    Args:
        path: of a folder for the checkpoint.
        number: of the trial.
        spec: what all trials have in common.
        options: of this one.
        num_envs: games side by side.
        report: called at each look.
        play: gives the mean return at a look, where the training plays no games; None: it does.
    """

    def __init__(
        self,
        path: Path,
        number: int,
        spec: _Spec,
        options: Mapping[str, Any],
        num_envs: int,
        report: Report,
        play: Callable[[], float] | None = None,
    ) -> None:
        self._path = path
        self._number = self._origin = number
        self._spec = spec
        self._options = options
        self._num_envs = num_envs
        self._report = report
        self._play = play
        self._asked: tuple[int, float] | None = None
        self._seen: int | None = None

    def adopt(self, folder: Path) -> None:
        """Takes a checkpoint, perhaps another trial's, as its own to begin with."""
        shutil.copytree(folder, self._path)
        self._origin = json.loads((self._path / _ORIGIN_FILE).read_text())

    def due(self, env_steps: int, numbers: Mapping[str, float]) -> bool:
        """As `train_local` asks."""
        if self._seen is None:  # a copy's first steps here are not its first
            self._seen = env_steps - int(numbers.get("env_steps", 0))  # none while demonstrations come first
        interval, left = self._spec.interval_steps, self._spec.total_steps - env_steps
        passed = env_steps // interval - self._seen // interval
        if not passed or left < interval:
            return False
        if self._play is None and numbers.get(GAMES_METRIC, 0) < self._num_envs:
            return False
        self._asked = (env_steps, numbers[RETURN_METRIC] if self._play is None else self._play())
        return True

    def save(self, folder: Path, step: int, metrics: Mapping[str, float]) -> None:
        """As `Keeper.save`."""
        shutil.rmtree(self._path, ignore_errors=True)
        shutil.copytree(folder, self._path)
        (self._path / _ORIGIN_FILE).write_text(json.dumps(self._number))
        if self._asked is not None:
            (self._seen, mean), self._asked = self._asked, None
            self.report(self._seen, mean)

    def report(self, env_steps: int, return_mean: float, *, over: bool = False) -> None:
        """Has the trial looked at."""
        origin, self._origin = self._origin, self._number
        numbers = {
            "env_steps": env_steps,
            "return_mean": return_mean,
            "score": _or_least(return_mean),  # what schedulers compare
            "origin": origin,
            "over": over,
            "options": self._options,
        }
        self._report(numbers, self._path)

    def latest(self) -> Path | None:
        """As `Keeper.latest`."""
        return self._path if self._path.exists() else None

    def push(self, part: Any) -> None:
        """As `Books.push`: the driver keeps the books, of what is reported."""

    def check(self) -> None:
        """As `Books.check`."""


class _Player:
    """Plays games with what a cloning trial has learned: the same ones at every look, and in all trials.

    Args:
        spec: what all trials have in common.
        algorithm, training: options of this one.

    Attributes:
        reached: set once a mean return was the target.
    """

    def __init__(self, spec: _Spec, algorithm: AlgorithmConfig, training: Training) -> None:
        from brayx.rollout.envs import make_envs
        from pipelines.rollouts import ready_made

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
        """The mean return."""
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


class _Books(Callback):
    """What the trials report, in the driver: kept for the ranking, told to people, and written to a nested run each.

    Args:
        trial: the run that theirs are nested in.
        say: told of each report.
        steps: what trials count.
    """

    def __init__(self, trial: Trial, say: Say, steps: str) -> None:
        self.steps = steps
        self.outcomes: list[Outcome] = []
        self.checkpoints: dict[int, str] = {}
        self._trial = trial
        self._say = say
        self._runs: dict[int, Trial] = {}

    def expect(self, drawn: Sequence[Mapping[str, Any]]) -> None:
        """Takes down what each trial begins with, by number."""
        self.outcomes = [Outcome(number, dict(options)) for number, options in enumerate(drawn)]

    def on_trial_result(self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **_: Any) -> None:
        """A trial has come an interval further."""
        if "env_steps" not in result:
            return
        number = _number(trial)
        outcome, run = self.outcomes[number], self._run(number)
        steps, mean, origin = int(result["env_steps"]), float(result["return_mean"]), int(result["origin"])
        said = f"trial {number}: {steps:,} {self.steps}, return {mean:.4g}"
        if origin != number:
            outcome.clones.append((len(outcome.curve), origin))
            run.set_tag("brayx.copy_of", ", ".join(str(copied) for _, copied in outcome.clones))
            said += f", a copy of trial {origin}"
        outcome.options = dict(result["options"])
        outcome.curve.append((steps, mean))
        numbers = {f"option/{name}": value for name, value in outcome.options.items() if type(value) in (int, float)}
        if math.isfinite(mean):
            numbers[CHARTS["episode_return"]] = mean
        run.log_metrics(numbers, steps)
        if trial.checkpoint is not None:
            self.checkpoints[number] = trial.checkpoint.path
        self._say(said)

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
        """A trial is done, or stopped because others are better."""
        self._end(_number(trial), "FINISHED")

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
        """A trial failed."""
        number = _number(trial)
        self.outcomes[number].error = _why(trial)
        self._say(f"trial {number} failed: {self.outcomes[number].error}")
        self._end(number, "FAILED")

    def close(self, status: Literal["FINISHED", "FAILED", "KILLED"]) -> None:
        """Ends the runs that are still open."""
        for number in list(self._runs):
            self._end(number, status)

    def _run(self, number: int) -> Trial:
        from brayx.tracking import Trial

        if number not in self._runs:
            of = self._trial
            run = Trial.open(of.project, f"{of.name} {number:02d}", of.uri, resume=False)
            run.set_tag("mlflow.parentRunId", of.run_id)
            run.log_params(self.outcomes[number].options)
            self._runs[number] = run
        return self._runs[number]

    def _end(self, number: int, status: Literal["FINISHED", "FAILED", "KILLED"]) -> None:
        run = self._runs.pop(number, None)
        if run is not None:
            run.finish(status)


def _number(trial: Any) -> int:
    return int(trial.trial_id.rsplit("_", 1)[-1])


def _why(trial: Any) -> str:
    """A failed trial's error in a line: ours by its message, any other by its last line."""
    text = Path(trial.error_file).read_text() if trial.error_file else ""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else "no report"


def train_trial(
    spec: _Spec, number: int, options: Mapping[str, Any], report: Report, begun: Path | None = None
) -> None:
    """Trains one trial from its start to its end, without a break at the looks: its games and what it has collected go
    on from one to the next.

    Args:
        spec: what all trials have in common.
        number: of the trial.
        options: of this one.
        report: called at each look and in the end.
        begun: a checkpoint to go on from, weights, optimiser and counters; games begin anew. None: from the beginning.
    """
    from pipelines.rollouts import train_local

    algorithm, training = search.arguments(spec.algorithm, options)
    training = training.model_copy(
        update={"total_steps": spec.total_steps, "target_return": spec.target_return, "seed": spec.seed + number}
    )
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="brayx-trial-"))
        play = model = stop = None
        if algorithm.imitates == "everything":
            player = _Player(spec, algorithm, training)
            stack.callback(player.close)
            play, model, stop = player.play, player.model, player.reached
            training = training.model_copy(update={"evaluation_episodes": 0})  # the player's, at every look
        looks = _Looks(Path(folder, "checkpoint"), number, spec, options, training.num_envs, report, play)
        if begun is not None:
            looks.adopt(begun)
        result = train_local(
            spec.env,
            algorithm,
            training,
            demonstrations=spec.demonstrations,
            model=model,
            clerk=looks,
            stop=stop,
            due=looks.due,
        )
        looks.report(result.env_steps, result.return_mean if play is None else play(), over=True)


def _train(config: dict[str, Any], spec: _Spec) -> None:
    """A trial, in a process of Ray Tune's."""
    sys.path[:] = [*spec.path, *(path for path in sys.path if path not in spec.path)]
    # A trial that is stopped closes its environments before another one has its process.
    os.environ["TUNE_FUNCTION_THREAD_TIMEOUT_S"] = str(_END_S)
    from ray import tune as ray_tune

    def report(numbers: dict[str, Any], folder: Path) -> None:
        ray_tune.report(numbers, checkpoint=ray_tune.Checkpoint.from_directory(str(folder)))

    number = int(ray_tune.get_context().get_trial_id().rsplit("_", 1)[-1])
    kept = ray_tune.get_checkpoint()
    with contextlib.nullcontext() if kept is None else kept.as_directory() as begun:
        train_trial(spec, number, config["options"], report, None if begun is None else Path(begun))


def _fit(spec: _Spec, space: Space, method: Method, num_trials: int, folder: str, books: _Books) -> None:
    import ray
    from ray import tune as ray_tune

    rng = random.Random(spec.seed)
    domains = {name: value for name, value in space.items() if isinstance(value, Domain)}
    # Drawn here and not by Tune, so that a seed gives the same trials whatever Tune's version.
    drawn = [
        {name: value.draw(rng) if isinstance(value, Domain) else value for name, value in space.items()}
        for _ in range(num_trials)
    ]
    books.expect(drawn)
    cpus = float(sum(node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]))  # type: ignore[no-untyped-call]
    each, at_once = _shares(method, num_trials, cpus)
    tuner = ray_tune.Tuner(
        ray_tune.with_resources(ray_tune.with_parameters(_train, spec=spec), {"cpu": each}),
        param_space={"options": ray_tune.grid_search(drawn)},
        tune_config=ray_tune.TuneConfig(
            metric="score",
            mode="max",
            scheduler=_scheduler(method, spec, domains, rng),
            max_concurrent_trials=at_once,
            reuse_actors=True,
            time_budget_s=_TIMEOUT_S,
        ),
        run_config=ray_tune.RunConfig(
            # Before the scheduler sees it: nobody goes on who is done, not as a copy either.
            stop=lambda _, result: bool(result.get("over")),
            storage_path=folder,
            name="tune",
            verbose=0,
            callbacks=[books],
            failure_config=ray_tune.FailureConfig(1),
        ),
    )
    with _quiet():
        tuner.fit()


def _shares(method: Method, num_trials: int, cpus: float) -> tuple[float, int | None]:
    """CPUs of a trial, and how many run at once in a cluster of so many; None: all. A population lives side by side,
    since a trial that makes room for another one costs a process's start."""
    if method == "pbt":
        return min(1.0, cpus / num_trials), None
    return min(1.0, cpus), max(1, min(num_trials, int(cpus)))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what Tune prints at the start however quiet it is told to be: folders that are gone when it ends."""
    before = os.environ.get(_OUTPUT)
    os.environ[_OUTPUT] = "0"
    try:
        yield
    finally:
        os.environ.pop(_OUTPUT)
        if before is not None:
            os.environ[_OUTPUT] = before


def _scheduler(method: Method, spec: _Spec, domains: Mapping[str, Domain], rng: random.Random) -> Any:
    from ray.tune.schedulers import ASHAScheduler, PopulationBasedTraining

    if method == "asha":
        return ASHAScheduler(
            # Not the number of looks, of which trials whose games last have fewer at the same age.
            time_attr="env_steps",
            max_t=spec.total_steps,
            grace_period=min(spec.interval_steps, spec.total_steps),
            reduction_factor=_REDUCTION,
            # Else a trial whose first look is at a later rung is taken down at an earlier one afterwards, too old.
            stop_last_trials=False,
        )

    def explore(config: dict[str, Any]) -> dict[str, Any]:
        return {**config, "options": perturbed(config["options"], domains, rng)}

    return PopulationBasedTraining(
        time_attr="training_iteration",
        perturbation_interval=1,
        burn_in_period=1,
        # Tune asks for at least one; `explore` does all of it, because Tune's own leaves the ranges.
        hyperparam_mutations={"unused": lambda: 0},
        custom_explore_fn=explore,
        synch=False,
    )


def perturbed(options: Mapping[str, Any], domains: Mapping[str, Domain], rng: random.Random) -> dict[str, Any]:
    """Options changed a little, inside their domains: a number by a fifth up or down, one in four drawn anew."""
    changed = dict(options)
    for name, domain in domains.items():
        if rng.random() < _DRAWN_ANEW:
            changed[name] = domain.draw(rng)
        elif domain.kind != "choice":
            low, high = domain.arguments
            value = min(max(options[name] * rng.choice((0.8, 1.2)), low), high)
            changed[name] = round(value) if domain.kind == "randint" else value
    return changed


def _start_ray(address: str) -> None:
    import logging

    from brayx.cluster.start import join_ray, start_ray

    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address:
        join_ray(address, **options)
    else:
        start_ray(num_cpus=os.cpu_count() or 1, include_dashboard=False, **options)


def _finish(books: _Books, trial: Trial, folder: str) -> TuneResult:
    """Ranks the trials, and keeps table, picture and the best one's checkpoint with the run."""
    ranked = sorted(books.outcomes, key=lambda each: (bool(each.error) or not each.curve, -_or_least(each.return_mean)))
    if not ranked or not ranked[0].curve:
        why = next((each.error for each in ranked if each.error), "none reported anything")
        raise StartupError(f"every trial failed; the first: {why}")
    best = ranked[0]
    trial.log_dict({"trials": [asdict(each) for each in ranked]}, "tuning.json")
    trial.log_figure(draw(ranked, books.steps), "tuning.png")
    kept = books.checkpoints.get(best.number)
    steps, mean = best.curve[-1]
    if kept is not None and Path(kept).exists():
        trial.save_checkpoint(Path(kept), steps, {"episode_return": mean})
    trial.log_metrics({CHARTS["episode_return"]: mean, "return/best_trial": best.number}, steps)
    return TuneResult(tuple(ranked), trial, books.steps)


def _or_least(value: float) -> float:
    return value if math.isfinite(value) else -math.inf


def draw(outcomes: Sequence[Outcome], steps_of: str = _ENV_STEPS) -> Figure:
    """Every trial's mean return over its steps, the best in colour, a dot where it went on as a copy."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    for rank, outcome in reversed(list(enumerate(outcomes))):
        best = rank == 0
        steps, means = [step for step, _ in outcome.curve], [mean for _, mean in outcome.curve]
        axes.plot(
            steps, means, color="#1f77b4" if best else "#bbbbbb", linewidth=2 if best else 1,
            label=f"trial {outcome.number}" if best else None, zorder=3 if best else 2,
        )  # fmt: skip
        at = [index for index, _ in outcome.clones if index < len(steps)]
        axes.scatter([steps[i] for i in at], [means[i] for i in at], s=14, color="#d62728", zorder=4)
    axes.set_xlabel(steps_of)
    axes.set_ylabel("return, mean of the last games")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    return figure


def table(outcomes: Sequence[Outcome], steps_of: str = _ENV_STEPS) -> str:
    """One line a trial, best first."""
    names = sorted({name for outcome in outcomes for name in outcome.options})
    rows = [["trial", "return", steps_of, *names, ""]]
    for outcome in outcomes:
        steps = f"{outcome.curve[-1][0]:,}" if outcome.curve else "-"
        note = outcome.error or ", ".join(f"copy of {origin}" for _, origin in outcome.clones)
        values = [_short(outcome.options.get(name, "")) for name in names]
        rows.append([str(outcome.number), _short(outcome.return_mean), steps, *values, note])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    lines = [
        "  ".join([*(cell.rjust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]) for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="brayx tune", description=__doc__.splitlines()[0])
    parser.add_argument("--env", required=True, help="Gymnasium id")
    parser.add_argument(
        "--search", action="append", default=[], metavar="OPTION=DOMAIN", dest="lines",
        help="loguniform(a, b), uniform(a, b), randint(a, b), choice(a, b, ...), or one value; once for each option",
    )  # fmt: skip
    parser.add_argument("--algorithm", default="ppo", help="its name, or a module of your own (default: %(default)s)")
    parser.add_argument(
        "--demonstrations", default=None, metavar="FILES",
        help="recorded episodes that every trial of mixed or bc imitates: a file, or a pattern in quotes",
    )  # fmt: skip
    parser.add_argument("--method", choices=["asha", "pbt"], default="asha", help="(default: %(default)s)")
    parser.add_argument("--trials", type=int, default=8, help="(default: %(default)s)")
    parser.add_argument(
        "--timesteps",
        type=int,
        default=60_000,
        help="env steps of a trial; of bc, transitions of its batches (default: %(default)s)",
    )
    parser.add_argument("--interval", type=int, default=None, help="of these between two looks (default: a twelfth)")
    parser.add_argument("--target-return", type=float, default=None, help="a trial that reaches it is done")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--project", default="tuning", help="MLflow experiment (default: %(default)s)")
    parser.add_argument("--tracking", default=None, help="MLflow's URI, or its sqlite file (default: ./mlflow.db)")
    parser.add_argument("--address", default="", help="of a running Ray cluster (default: start one)")
    arguments = parser.parse_args(argv)
    try:
        found = tune(
            arguments.env,
            search.parse(arguments.lines),
            algorithm=arguments.algorithm,
            demonstrations=arguments.demonstrations,
            method=arguments.method,
            num_trials=arguments.trials,
            total_steps=arguments.timesteps,
            interval_steps=arguments.interval,
            target_return=arguments.target_return,
            seed=arguments.seed,
            project=arguments.project,
            tracking=arguments.tracking,
            address=arguments.address,
            say=lambda line: print(line, file=sys.stderr, flush=True),
        )
    except BrayxError as error:
        print(f"brayx: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    print(table(found.trials, found.steps))
    print(f"the table, its picture and the best checkpoint are in run {found.trial.name!r} of {found.trial.project!r}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
