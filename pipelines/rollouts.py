"""Trains in one process from environments in Python: no network, no Ray, and a first step as early as can be.

`train_local` joins a collector, a table where the algorithm samples, and the learner's loop. Blocking, the two take
turns; non-blocking, one thread collects the next run while the other learns from the last one. Demonstrations come
before the first run, and a batch of them with each; an algorithm that learns from nothing else steps no environment but
to evaluate. Knows nothing of the command line.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import queue
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from torch import nn

from brayx.actions import ActionSpec
from brayx.algorithms.build import check_enough, check_fits
from brayx.algorithms.config import AlgorithmConfig
from brayx.algorithms.mappo import STATE
from brayx.algorithms.ppo import PPOConfig
from brayx.books import Books
from brayx.engines.base import check_finite
from brayx.errors import BadFragment, ConfigError, Diverged, EnvironmentFailed
from brayx.metrics import Recorder
from brayx.nets.central import central_policy_for
from brayx.nets.policy import NetworkConfig, policy_for
from brayx.nets.recurrent import state_argument
from brayx.nets.soft import NETWORK, soft_policy_for
from brayx.replay.files import Dataset
from brayx.replay.importance import Importance
from brayx.replay.limiter import RateLimiter
from brayx.replay.packing import Batch, Layout, check_columns
from brayx.replay.table import Table
from brayx.rollout.collector import Collector, Episode, record_episodes, seed_after
from brayx.rollout.envs import EnvSource, make_envs
from brayx.rollout.evaluate import Evaluation, evaluate
from brayx.rollout.policy import Policy
from brayx.trainer.config import TrainerConfig
from brayx.trainer.fits import actions_of, check_model
from brayx.trainer.loop import GAMES_METRIC, RETURN_METRIC, learn
from brayx.trainer.ranks import Alone
from brayx.types import DEMONSTRATION, Columns, NestedArray, Weights, flatten
from pipelines.books import Books as TrialBooks
from pipelines.demonstrations import Demonstrations, check_imitates
from pipelines.training import Settled, Training

logger = logging.getLogger(__name__)

Model = tuple[nn.Module, tuple[NestedArray, ...]]
"""A module and example arguments."""

_STEPS = "rollout_env_steps"
_IMITATED = "imitated"
"""In a checkpoint's ``meta.json``."""
_END_S = 30.0
"""How long a collector's thread may take to finish its run."""


class Point(NamedTuple):
    """One moment of a training: seconds since its first step, env steps, episodes finished, and the mean return of the
    last hundred of them."""

    seconds: float
    env_steps: int
    episodes: int
    return_mean: float


@dataclass(frozen=True)
class Result:
    """What a training came to.

    Attributes:
        reason: ``num_steps``, ``target_return``, or ``stopped``.
        began: when the first step was taken, on the monotonic clock.
        env_steps: transitions collected, those before a resume included; where only demonstrations are learned from,
            those of their batches.
        dropped: of those of this process, how many were not learned from, because something in them was not finite, or
            for whatever ``replay_dropped`` says.
        updates: batches learned from.
        seconds: collecting and learning, from the first step on; of this process alone, where a trial was resumed.
        steps_per_s: env steps collected and learned from, each of those seconds.
        return_mean: of the last hundred training episodes; NaN before there are any.
        seconds_to_target: when it reached the target; None: it did not, or there was none.
        module: as it was in the end.
        forward_args: example arguments of it.
        normaliser: what the collector's normalisers had seen.
        curve: after each run's updates, once an episode has ended.
        evaluation: of the greedy policy, where asked for; None if it was stopped, or an environment raised in it.
    """

    reason: str
    began: float
    env_steps: int
    updates: int
    seconds: float
    steps_per_s: float
    return_mean: float
    seconds_to_target: float | None
    module: nn.Module
    forward_args: tuple[NestedArray, ...]
    normaliser: Mapping[str, np.ndarray] = field(default_factory=dict)
    curve: tuple[Point, ...] = ()
    evaluation: Evaluation | None = None
    dropped: int = 0


def train_local(
    env: EnvSource,
    algorithm: AlgorithmConfig | None = None,
    training: Training | None = None,
    *,
    demonstrations: str | Path | Dataset | None = None,
    model: Callable[[NestedArray, ActionSpec], Model] | None = None,
    on_update: Callable[[int, int, Mapping[str, float]], None] | None = None,
    clerk: TrialBooks | None = None,
    stop: threading.Event | None = None,
    due: Callable[[int, Mapping[str, float]], bool] | None = None,
) -> Result:
    """Trains a policy for ``env`` in this process.

    Args:
        env: Gymnasium id, or what makes one environment (or all of them) each time it is called.
        algorithm: options; None: PPO's defaults.
        training: everything else; None: its defaults.
        demonstrations: recorded episodes to imitate: a file of a kind that `brayx.replay.files` reads, a pattern of
            several, or a `Dataset` where names or the kind are to be told. For a recurrent model they need no state
            (`Demonstrations`). ``bc`` learns from them alone; ``mixed`` begins with ``imitation_updates`` batches of
            them, or once through, before its first run. Continuous actions are the policy's own, -1 to 1 with
            ``scale_actions``.
        model: makes module and example arguments instead of the ready-made ones, given one observation and the action
            space.
        on_update: called after each run's updates with the number of runs, env steps and the newest numbers: sums since
            this process began, means over that run's updates.
        clerk: keeps the trial's books and checkpoints, and has those to go on from; None: nobody does.
        stop: once set, training ends after the next update, and an evaluation is given up.
        due: asked after each update but the last, with env steps and the newest numbers: whether ``clerk`` gets a
            checkpoint now, beside those in their turn.

    Raises:
        ConfigError: options that do not fit each other, the environment, or the demonstrations.
        EnvironmentFailed: an environment raised; in the evaluation that is only a warning.
        ModelError: the model does not give what the algorithm learns from.
        BadWeights, Diverged: training diverged, or nothing that was collected could be learned from.
    """
    algorithm = algorithm or PPOConfig()
    training = (training or Training()).of(algorithm)
    stop = stop or threading.Event()
    if demonstrations is not None:
        check_imitates(algorithm, training)
    torch.manual_seed(training.seed)
    torch.set_num_threads(training.threads)
    envs = make_envs(env, training.num_envs, vectorization=training.vectorization, options=training.env_options)
    with contextlib.ExitStack() as stack:
        stack.callback(envs.close)
        spec = ActionSpec.of(envs.single_action_space)
        observed = flatten(observation_of(envs), "obs")
        gives = {*observed, *([] if demonstrations is None else [DEMONSTRATION])}
        check_fits(
            algorithm,
            kind=spec.kind,
            unroll_length=training.unroll_length,
            gives=gives,
            sampler=training.sampler,
        )
        module, forward_args = (model or ready_made(training.network, envs, algorithm))(observation_of(envs), spec)
        given = check_model(algorithm, module, forward_args, state=observed.get(STATE))
        recorded = None
        if demonstrations is not None:
            at = state_argument(module)  # what a memory held comes beside the observation
            taken = tuple(arg for index, arg in enumerate(forward_args) if index != at)
            recorded = Demonstrations(
                demonstrations,
                Layout.of_model(taken, actions_of(given)),
                batch_size=training.batch_size,
                unroll_length=training.unroll_length,
                seed=training.seed,
                # As acting begins an episode (`brayx.engines.base.StateSpec`).
                initial=None
                if at is None
                else {path: leaf[0] for path, leaf in flatten(forward_args[at], "state").items()},
            )
        check_updates(algorithm, training, recorded)
        collector = Collector(
            envs,
            Policy(module, forward_args, engine=training.engine),
            training.unroll_length,
            seed=training.seed,
            scale_actions=training.scale_actions,
            normalise_obs=training.normalise_obs,
            normalise_reward=training.normalise_reward,
            gamma=algorithm.discount,
            reward_clip=training.reward_clip,
            sde_steps=training.sde_steps,
        )
        cloning = algorithm.imitates == "everything"
        table = None if training.sampler == "fifo" or cloning else _table(training)
        run = _Run(
            collector,
            table,
            training.total_steps,
            on_update,
            clerk,
            stop,
            training.seed,
            Importance(training.importance_exponent, training.importance_batches),
            recorded,
            algorithm.first_imitates,
        )
        stream = run.recorded() if cloning else run.turns() if training.blocking else run.beside()
        config = TrainerConfig(
            model="model",
            buffers=["rollout"],
            algorithm=algorithm,
            learning_rate=training.learning_rate,
            num_steps=sys.maxsize,  # it is the stream that ends, after `total_steps`
            target_return=training.target_return,
            target_games=training.target_games,
            use_gpu=training.use_gpu,
            threads=training.threads,
            checkpoint_interval=training.checkpoint_interval,
        )
        stack.callback(stream.close)
        summary = learn(
            config,
            module,
            forward_args,
            batches=stream,
            took=lambda: None,
            publisher=run.publisher,
            numbers=run,
            keeper=run,
            ranks=Alone(training.use_gpu),
            about=run.about,
            normaliser=collector,
            feedback=run.feedback,
            due=None if due is None else lambda: due(run.env_steps, run.newest()),
            progress=run.progress,
            resumed=run.resumed,
        )
        stream.close()
        run.settle()
        run.check_learned()
        if summary.reason == "target_return":  # a stream that is not asked for more does not know of the last update
            run.after_update()
        seconds = run.seconds
        normaliser = collector.state_dict()
        evaluation = None
        if training.evaluation_episodes and not stop.is_set():
            collector.load(*run.newest_weights())
            try:
                played = evaluate(
                    envs,
                    collector.policy,
                    training.evaluation_episodes,
                    seed=training.seed + 10_000,
                    scale_actions=training.scale_actions,
                    normaliser=collector.obs_normaliser,
                    max_steps=training.evaluation_steps,
                    stop=stop,
                )
                evaluation = None if stop.is_set() else played
            except EnvironmentFailed as error:  # what was learned stays
                logger.warning("there is no evaluation: %s", error)
    reached = summary.reason == "target_return"
    return Result(
        reason="target_return" if reached else "num_steps" if run.env_steps >= training.total_steps else "stopped",
        began=run.began,
        env_steps=run.env_steps,
        updates=summary.updates,
        seconds=seconds,
        steps_per_s=run.steps_per_s,
        return_mean=run.newest().get(RETURN_METRIC, float("nan")),
        seconds_to_target=seconds if reached else None,
        module=module,
        forward_args=forward_args,
        normaliser=normaliser,
        curve=tuple(run.curve),
        evaluation=evaluation,
        dropped=run.dropped,
    )


def observation_of(envs: Any) -> NestedArray:
    """One observation of zeros as a model takes it, float64 as float32.

    Raises:
        ConfigError: observations are not arrays of one shape.
    """
    return _zeros(envs.single_observation_space)


def ready_made(
    network: NetworkConfig | None, envs: Any, algorithm: AlgorithmConfig | None = None
) -> Callable[[NestedArray, ActionSpec], Model]:
    """Makes the networks that an algorithm learns, for an observation and an action space.

    An actor-critic, or a policy with the critic that the algorithm needs, which does not act. Whole numbers become
    one-hot.

    Raises:
        ConfigError: there is no ready-made network for the observation space.
    """
    space = envs.single_observation_space
    if any(isinstance(part, gymnasium.spaces.Tuple) for part in _parts(space)):
        raise ConfigError(
            f"observation space is {space}: ready-made networks take an array, or a Dict of arrays. Expected a Dict "
            "instead of the Tuple (gymnasium.wrappers.TransformObservation makes one), or a model of your own, which "
            "gets each part of a Tuple as an argument",
            key="observation_space",
        )
    categories = _categories(space)
    takes = algorithm.critic.takes if algorithm is not None and algorithm.critic is not None else ()

    def make(obs: NestedArray, spec: ActionSpec) -> Model:
        sizes: Any = spec.sizes[0] if spec.kind == "discrete" else list(spec.sizes) if spec.sizes else None
        size = spec.shape[0] if spec.kind == "box" else None
        try:
            if "action" in takes:
                return soft_policy_for(
                    obs, action_size=spec.shape[0], network=network or NETWORK, categories=categories
                )
            made = central_policy_for if "state" in takes else policy_for
            return made(obs, num_actions=sizes, action_size=size, categories=categories, network=network)
        except ValueError as error:
            raise ConfigError(f"no ready-made network for observation space {space}: {error}") from error

    return make


def _parts(space: Any) -> list[Any]:
    """A space and all spaces inside it."""
    inner = getattr(space, "spaces", ())
    members = inner.values() if isinstance(inner, Mapping) else inner
    return [space, *(part for member in members for part in _parts(member))]


def _categories(space: Any) -> Any:
    """How many categories a Discrete observation has; of a Dict by name, of those that have any."""
    if isinstance(space, gymnasium.spaces.Discrete):
        return int(space.n)
    if isinstance(space, gymnasium.spaces.Dict):
        found = {name: _categories(part) for name, part in space.spaces.items()}
        return {name: count for name, count in found.items() if count}
    return None


class _Run:
    """What the two sides of a training share: the newest weights one way, batches and episodes the other.

    Is the loop's `Publisher`, `Numbers` and `Keeper`, all called by the thread that learns.
    """

    def __init__(
        self,
        collector: Collector,
        table: Table | None,
        total_steps: int,
        on_update: Callable[[int, int, Mapping[str, float]], None] | None,
        clerk: TrialBooks | None,
        stop: threading.Event,
        seed: int,
        importance: Importance,
        demonstrations: Demonstrations | None = None,
        imitation_updates: int = 0,
    ) -> None:
        self.env_steps = 0
        self.dropped = 0
        self._unfit: BadFragment | None = None
        self.about: dict[str, Any] = {}
        self._steps_before = 0
        self._begun_at = 0
        self.curve: list[Point] = []
        self._collector = collector
        self._table = table
        self._total = total_steps
        self._on_update = on_update
        self._clerk = clerk
        self._stop = stop
        self._seed = seed
        self._importance = importance
        self._batches_before = 0
        self._demonstrations = demonstrations
        self._first = 0 if demonstrations is None else max(imitation_updates, demonstrations.rounds)
        self._runs = 0
        self._thread: threading.Thread | None = None
        self._weights: tuple[Weights, int] = ({}, 0)
        self._recorder = Recorder()
        self.add = self._recorder.add
        self._books = Books()
        self.began = self._ended = time.monotonic()

    @property
    def seconds(self) -> float:
        """From `begin` to the newest batch asked for."""
        return self._ended - self.began

    @property
    def steps_per_s(self) -> float:
        """Env steps of this process, each second."""
        return (self.env_steps - self._steps_before) / max(self.seconds, 1e-9)

    def progress(self) -> float:
        """How far training had come, 0 to 1, when the run began that is learned from now: a share of what is collected,
        of which a table may be sampled more or less often than it is told on average."""
        return min(self._begun_at / self._total, 1.0)

    def begin(self) -> None:
        """Starts the clock."""
        self.began = self._ended = time.monotonic()

    def publisher(self, newest: int) -> _Run:
        """As `learn` has it: versions go on from ``newest``."""
        self._weights = ({}, newest)
        return self

    def publish(self, weights: Weights, step: int) -> int:
        """As `loop.Publisher.publish`."""
        check_finite(weights)
        self._weights = (weights, self._weights[1] + 1)
        return self._weights[1]

    def newest_weights(self) -> tuple[Weights, int]:
        """The newest published, and their version."""
        return self._weights

    def feedback(self, index: np.ndarray, priorities: np.ndarray) -> None:
        """Tells the table what the learner found of columns that it had sampled."""
        if self._table is not None:
            self._table.update_priorities(index, priorities)

    def resumed(self, learned: int) -> None:
        """Told of the batches that were learned from before: importance weights go on from there."""
        self._batches_before = learned

    def newest(self) -> Mapping[str, float]:
        """As `loop.Numbers.newest`; exact, since everything is in this process.

        Means are over the current run, or over the one before while the current run has none yet.
        """
        part = self._recorder.drain()
        self._books.merge(part)
        if self._clerk is not None:
            self._clerk.push(part)
        return self._books.snapshot()

    def save(self, folder: Path, step: int, metrics: Mapping[str, float]) -> None:
        """As `loop.Keeper.save`; without a clerk nothing is kept."""
        if self._clerk is not None:
            self._clerk.save(folder, step, metrics)

    def latest(self) -> Path | None:
        """As `loop.Keeper.latest`; what was collected before counts on, and other episodes follow."""
        folder = None if self._clerk is None else self._clerk.latest()
        if folder is not None:
            about = json.loads((folder / "meta.json").read_text())
            self.env_steps = self._begun_at = self._steps_before = self.about[_STEPS] = about.get(_STEPS, 0)
            self.about[_IMITATED] = about.get(_IMITATED, 0)
            self._collector.begin_again(seed_after(self._seed, self.env_steps))
            if self._demonstrations is not None:
                # Those that were learned from already are only kept, to be drawn from.
                self._first = max(self._first - self.about[_IMITATED], self._demonstrations.rounds)
        self.begin()
        return folder

    def turns(self) -> Generator[Batch]:
        """Collects, gives batches, and goes on when they are learned from."""
        yield from self._to_imitate(self._first)
        while self._goes_on():
            yield from self._batches(self._collect())
            yield from self._to_imitate(1)
            self.after_update()

    def recorded(self) -> Generator[Batch]:
        """Gives batches of demonstrations, and nothing else."""
        assert self._demonstrations is not None
        while self._goes_on():
            yield from self._batches((self._demonstrations.draw(), []))
            self.after_update()

    def beside(self) -> Generator[Batch]:
        """Collects in a thread of its own, at most one run ahead."""
        yield from self._to_imitate(self._first)
        runs: queue.Queue[tuple[Batch, list[Episode]] | BaseException] = queue.Queue(maxsize=1)
        stopped = threading.Event()

        def work() -> None:
            try:
                while not stopped.is_set():
                    _put(runs, self._collect(), stopped)
            except BaseException as error:  # told to whoever waits for the next run
                _put(runs, error, stopped)

        self._thread = thread = threading.Thread(target=work, name="brayx-collector", daemon=True)
        thread.start()
        try:
            while self._goes_on():
                run = runs.get()
                if isinstance(run, BaseException):
                    raise run
                yield from self._batches(run)
                yield from self._to_imitate(1)
                self.after_update()
        finally:
            stopped.set()
            thread.join(_END_S)

    def settle(self) -> None:
        """Waits until nobody steps the environments any more, once the stream is closed: a run that was begun is
        finished, however slow the environments are."""
        if self._thread is not None:
            self._thread.join()

    def check_learned(self) -> None:
        """Refuses a training all of whose runs were dropped.

        Raises:
            Diverged: names the first field that was not finite.
        """
        collected = self.env_steps - self._steps_before
        if self._unfit is not None and self.dropped == collected:
            raise Diverged(
                f"nothing was learned: all {collected:,} transitions were dropped; {self._unfit}, expected finite "
                "float32 numbers",
                fields=[self._unfit.details["field"]],
            )

    def _goes_on(self) -> bool:
        if self._clerk is not None:
            self._clerk.check()
        return self.env_steps < self._total and not self._stop.is_set()

    def _to_imitate(self, count: int) -> Iterator[Batch]:
        """So many batches of demonstrations, if there are any."""
        for _ in range(count):
            if self._demonstrations is None or not self._goes_on():
                return
            self.about[_IMITATED] = self.about.get(_IMITATED, 0) + 1
            self._batches_before += 1
            yield self._demonstrations.draw()

    def _collect(self) -> tuple[Batch, list[Episode]]:
        weights, version = self._weights
        if version != self._collector.policy.version:
            self._collector.load(weights, version)
        columns = self._collector.collect()
        return dict(columns.arrays), self._collector.episodes()

    def _batches(self, run: tuple[Batch, list[Episode]]) -> Iterator[Batch]:
        arrays, episodes = run
        count = int(arrays["mask"].sum())
        self._begun_at = self.env_steps
        self.env_steps += count
        self.about[_STEPS] = self.env_steps
        self._recorder.add("env_steps", count)
        record_episodes(self._recorder, episodes)
        self._ended = time.monotonic()
        good = self._fit_to_learn_from(arrays)
        if good is None:
            return
        if self._table is None:
            yield good
        else:
            yield from self._sampled(self._table, Columns(good))
        self._ended = time.monotonic()

    def _fit_to_learn_from(self, arrays: Batch) -> Batch | None:
        """A run without the columns that a buffer would refuse for a number that is none; None: there is no other.

        Without a table the batch keeps its shape: what is dropped is masked out.
        """
        try:
            check_columns(Columns(arrays), arrays["mask"].shape[1] - 1, None)
            return arrays
        except BadFragment as error:
            bad = np.zeros(len(arrays["mask"]), np.bool_)
            for array in arrays.values():
                if array.dtype.kind == "f":
                    bad |= ~np.isfinite(array).reshape(len(array), -1).all(axis=1)
            if not bad.any():
                raise
            if self._unfit is None:
                self._unfit = error
                logger.warning("of %d of %d environments a run is not learned from: %s", bad.sum(), len(bad), error)
        lost = int(arrays["mask"][bad].sum())
        self.dropped += lost
        self._recorder.add("replay_dropped", lost, label="bad_fragment")
        if bad.all():
            return None
        if self._table is not None:
            return {key: array[~bad] for key, array in arrays.items()}
        for array in arrays.values():
            array[bad] = 0
        return arrays

    def _sampled(self, table: Table, left: Columns | None) -> Iterator[Batch]:
        """Inserts columns as far as the rate allows, samples as often as it asks, and so on until all are in: nobody
        else samples, so what had no room would be gone, and always of the same environments."""
        while left is not None:
            room, rows = table.room, len(left.arrays["mask"])
            if room is None or room >= rows:
                table.insert(dict(left.arrays))
                left = None
            elif room:
                table.insert({key: array[:room] for key, array in left.arrays.items()})
                left = left.after(room)
            while (batch := table.sample()) is not None:
                yield self._importance.weigh(batch, self._batches_before)
                self._batches_before += 1

    def after_update(self) -> None:
        """Notes how far training has come, once a run was learned from."""
        numbers = self.newest()
        self._books.take_interval()  # so that the next means are of the next run only
        if numbers.get(GAMES_METRIC):
            mean = numbers.get(RETURN_METRIC, float("nan"))
            self.curve.append(Point(self.seconds, self.env_steps, int(numbers[GAMES_METRIC]), mean))
        self._runs += 1
        if self._on_update is not None:
            self._on_update(self._runs, self.env_steps, numbers)


def _put(runs: queue.Queue[Any], item: Any, stopped: threading.Event) -> None:
    """Waits for room, unless nobody will take anything any more."""
    while not stopped.is_set():
        try:
            runs.put(item, timeout=0.2)
            return
        except queue.Full:
            pass


def check_updates(algorithm: AlgorithmConfig, training: Settled, recorded: Demonstrations | None = None) -> None:
    """Refuses a training that would learn next to nothing.

    Args:
        algorithm: its options.
        training: options of the training.
        recorded: the demonstrations that a clone learns from.

    Raises:
        ConfigError: names the option to change.
    """
    total, length = training.total_steps, training.unroll_length
    imitates_all = algorithm.imitates == "everything"
    if imitates_all or training.sampler == "fifo":
        cloning = recorded is not None and imitates_all
        steps = length * (recorded.batch_size if cloning and recorded is not None else training.num_envs)
        batches = float(-(-total // steps))
        change = f"more total_steps, or a smaller {'batch_size' if cloning else 'num_envs'} or unroll_length"
    else:
        limiter_of(training)
        steps = length * training.batch_size
        per_column = (training.samples_per_insert or math.inf) / training.batch_size
        columns = total // length - training.min_columns
        batches = per_column * columns
        change = "more total_steps, or a smaller min_columns or unroll_length"
        if columns:  # else the table is not sampled, however often it may be
            change = (
                "more total_steps, a greater samples_per_insert, or a smaller batch_size, unroll_length or min_columns"
            )
    check_enough(algorithm, total_steps=total, batches=batches, batch_steps=steps, change=change)


def limiter_of(training: Settled) -> RateLimiter:
    """How much of the table may be sampled.

    Raises:
        ConfigError: with these options nothing ever would be.
    """
    come = max(1, training.total_steps // training.unroll_length)
    if come < training.min_columns:
        raise ConfigError(
            f"the table cannot be sampled so: min_columns is {training.min_columns}, and {training.total_steps} "
            f"total_steps are {come} columns of unroll_length {training.unroll_length}",
            key="min_columns",
        )
    try:
        return RateLimiter(
            training.samples_per_insert,
            training.min_columns,
            None,
            samples=training.batch_size,
            capacity=training.capacity,
        )
    except ValueError as error:
        raise ConfigError(f"the table cannot be sampled so: {error}") from error


def _table(training: Settled) -> Table:
    sizes, limiter = (training.capacity, training.batch_size), limiter_of(training)
    if training.sampler == "prioritised":
        return Table.prioritised(*sizes, limiter, exponent=training.priority_exponent, seed=training.seed)
    return Table.uniform(*sizes, limiter, seed=training.seed)


def _zeros(space: Any) -> NestedArray:
    if isinstance(space, gymnasium.spaces.Dict):
        return {name: _zeros(part) for name, part in space.spaces.items()}
    if isinstance(space, gymnasium.spaces.Tuple):
        return tuple(_zeros(part) for part in space.spaces)
    if space.shape is None:
        raise ConfigError(
            f"observation space is {space}, which has no one shape: expected Box, Discrete, MultiDiscrete or "
            "MultiBinary, or a Dict or Tuple of them",
            key="observation_space",
        )
    dtype = np.dtype(np.float32) if space.dtype == np.float64 else np.dtype(space.dtype)
    return np.zeros(space.shape, dtype)
