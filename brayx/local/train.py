"""Trains in one process from Python environments: no network, no Ray, and an early first step.

`train_local` joins a collector, the learner's loop and, for algorithms that sample, a replay table. In blocking mode
collecting and learning alternate; in non-blocking mode a second thread collects the next run while the learner uses
the last one. Demonstrations are learned from before the first run, and one batch of them after each run. A pure
imitation algorithm (`bc`) steps environments only to evaluate. Knows nothing of the command line.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from torch import nn

from brayx.actions import ActionSpec
from brayx.algorithms.build import check_enough, check_fits
from brayx.algorithms.config import AlgorithmConfig
from brayx.algorithms.mappo import STATE
from brayx.algorithms.ppo import PPOConfig
from brayx.engines.base import ModelSpec
from brayx.engines.torch import initialise_lazy
from brayx.errors import ConfigError, EnvironmentFailed, TrackingError
from brayx.local.demonstrations import Demonstrations, check_imitates
from brayx.local.run import CurvePoint, Run, TrialKeeper
from brayx.local.training import Settled, Training
from brayx.replay.files import Dataset
from brayx.replay.limiter import RateLimiter
from brayx.replay.samplers import Importance
from brayx.replay.table import Table
from brayx.rollout.collector import Collector
from brayx.rollout.envs import EnvSource, make_envs
from brayx.rollout.evaluate import PolicyEvaluation, evaluate
from brayx.rollout.moments import ObsNormaliser
from brayx.rollout.networks import Model, observation_of, ready_made
from brayx.rollout.policy import RolloutPolicy
from brayx.trainer.config import TrainerConfig
from brayx.trainer.fits import check_model
from brayx.trainer.loop import RETURN_METRIC, LearnerLoop, Reason
from brayx.trainer.ranks import Alone
from brayx.types import DEMONSTRATION, NestedArray, flatten

logger = logging.getLogger(__name__)

_EVALUATION_SEED = 10_000
"""Added to the seed of a training, so that its evaluations play other episodes."""


@dataclass(frozen=True)
class LocalTrainResult:
    """The outcome of a training.

    Attributes:
        reason: why it ended: ``num_steps``, ``target_return``, or ``stopped``.
        began: time of the first step, on the monotonic clock.
        env_steps: transitions collected, including those before a resume; for a pure imitation algorithm, transitions
            in the batches learned from.
        dropped: transitions that this process collected but did not learn from, because a value was not finite. The
            metric ``replay_dropped`` gives the reasons.
        updates: batches learned from.
        seconds: time spent collecting and learning since the first step, in this process only.
        steps_per_s: env steps of this process per second.
        return_mean: mean return of the last hundred training episodes; NaN before the first has ended.
        seconds_to_target: seconds until the target return was reached; None without a target, or if it was missed.
        module: the trained module.
        forward_args: example arguments of the module.
        normaliser: state of the collector's normalisers.
        curve: one point after each run's updates, from the first finished episode on.
        evaluation: evaluation of the greedy policy, with a clerk that of the best checkpoint, which is registered; None
            if none was requested, it was stopped, or an environment raised.
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
    curve: tuple[CurvePoint, ...] = ()
    evaluation: PolicyEvaluation | None = None
    dropped: int = 0


def train_local(
    env: EnvSource,
    algorithm: AlgorithmConfig | None = None,
    training: Training | None = None,
    *,
    demonstrations: str | Path | Dataset | None = None,
    model: Callable[[NestedArray, ActionSpec], Model] | None = None,
    on_update: Callable[[int, int, Mapping[str, float]], None] | None = None,
    clerk: TrialKeeper | None = None,
    stop: threading.Event | None = None,
) -> LocalTrainResult:
    """Trains a policy for ``env`` in this process.

    Args:
        env: Gymnasium id, or a function that returns one environment (or a vector of them).
        algorithm: options; None: PPO's defaults.
        training: all other options; None: their defaults.
        demonstrations: recorded episodes to imitate: a file in a format that `brayx.replay.files` reads, a glob
            pattern, a folder of recordings, or a `Dataset` to set column names or the format
            (`brayx.recording.dataset` selects sessions). They need no recurrent state
            (see `Demonstrations`). ``bc`` learns from demonstrations only; ``mixed`` starts with ``imitation_updates``
            batches of them, and at least one pass over all, before its first run. The files, or the option ``actions``
            of the `Dataset`, say whether the actions are the environment's or a policy's
            (`brayx.replay.files.Dataset.for_env`).
        model: returns a module and its example arguments, given one observation and the action space; None: a
            ready-made network.
        on_update: called after each run's updates with the number of runs, the env steps and the newest metrics: sums
            since the process started, means over that run's updates.
        clerk: stores the trial's metrics and checkpoints, and loads the checkpoint to resume from; None: stores
            nothing.
        stop: once set, training ends after the next update, and a running evaluation is cancelled.

    Raises:
        ConfigError: options do not fit each other, the environment, or the demonstrations.
        EnvironmentFailed: an environment raised while training; in the evaluation this is only logged.
        ModelError: the model lacks outputs that the algorithm needs.
        BadWeights, Diverged: training diverged, or all collected data was unusable.
    """
    with LocalTraining(
        env,
        algorithm,
        training,
        demonstrations=demonstrations,
        model=model,
        on_update=on_update,
        clerk=clerk,
        stop=stop,
    ) as running:
        while running.goes_on():
            running.iterate()
        return running.result()


class LocalTraining:
    """A training of `train_local`, one iteration at a time. A context manager: it trains inside, and closes its
    environments.

    Args:
        resume: checkpoint to resume from, without a clerk; None: start from the beginning.

    The other arguments, and the errors of the constructor and of each method, are those of `train_local`.

    Attributes:
        algorithm, training: all options.
        module, forward_args: the module that learns, and its example arguments.
        run: counters, metrics and newest weights.
        collector: environments and acting policy. Only `iterate` may use them.
    """

    def __init__(
        self,
        env: EnvSource,
        algorithm: AlgorithmConfig | None = None,
        training: Training | None = None,
        *,
        demonstrations: str | Path | Dataset | None = None,
        model: Callable[[NestedArray, ActionSpec], Model] | None = None,
        on_update: Callable[[int, int, Mapping[str, float]], None] | None = None,
        clerk: TrialKeeper | None = None,
        stop: threading.Event | None = None,
        resume: Path | None = None,
    ) -> None:
        self.algorithm = algorithm = algorithm or PPOConfig()
        self.training = training = (training or Training()).of(algorithm)
        self._stop = stop or threading.Event()
        self._reason: Reason = "stream_ended"
        torch.manual_seed(training.seed)
        torch.set_num_threads(training.threads or 1)
        self.envs = make_envs(
            env, training.num_envs, vectorization=training.vectorization, options=training.env_options
        )
        with contextlib.ExitStack() as stack:
            stack.callback(self.envs.close)
            obs, space = observation_of(self.envs), self.envs.single_action_space
            spec = ActionSpec.of(space, scale=True)
            check_options(algorithm, training, obs, spec, demonstrations is not None)
            make = model or ready_made(training.network, self.envs, algorithm)
            self.module, self.forward_args, _, recorded = model_of(algorithm, training, obs, spec, make, demonstrations)
            check_updates(algorithm, training, recorded)
            self.collector = self._collector()
            cloning = algorithm.imitates == "everything"
            self.run = run = Run(
                self.collector,
                None if training.sampler == "fifo" or cloning else _table(training),
                training.num_steps,
                blocking=training.blocking,
                cloning=cloning,
                on_update=on_update,
                clerk=clerk,
                stop=self._stop,
                seed=training.seed,
                importance=Importance(training.importance_exponent, training.importance_batches),
                demonstrations=recorded,
                imitation_updates=algorithm.first_imitates,
                resume=resume,
            )
            stack.callback(run.close)
            self.loop = LearnerLoop(
                _trainer_config(algorithm, training, draws=clerk is not None),
                self.module,
                self.forward_args,
                publisher=run.publisher,
                numbers=run,
                keeper=run,
                ranks=Alone(training.use_gpu),
                about=run.about,
                normaliser=self.collector,
                feedback=run.feedback,
                progress=run.progress,
                resumed=run.resumed,
            )
            self._stack = stack.pop_all()

    def _collector(self) -> Collector:
        training = self.training
        return Collector(
            self.envs,
            RolloutPolicy(self.module, self.forward_args, engine=training.engine),
            training.unroll_length,
            seed=training.seed,
            normalise_obs=training.normalise_obs,
            normalise_reward=training.normalise_reward,
            gamma=self.algorithm.discount,
            reward_clip=training.reward_clip,
            sde_steps=training.sde_steps,
        )

    def __enter__(self) -> LocalTraining:
        try:
            self._stack.enter_context(self.loop.started())
            self._reason = self.loop.learn(self.run.imitation())
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the environments."""
        self._stack.close()

    def goes_on(self) -> bool:
        """Whether more steps are wanted: neither ``num_steps`` nor the target is reached, and nothing stopped it."""
        return self._reason != "target_return" and self.run.goes_on()

    def iterate(self) -> Mapping[str, float]:
        """Collects a run and learns from it; returns the newest metrics, as ``on_update`` gets them."""
        self._reason = self.loop.learn(self.run.iteration())
        return self.run.after_update()

    def result(self, say: Callable[[str], None] | None = None) -> LocalTrainResult:
        """Ends the training: saves the last checkpoint, and plays the evaluation, of which ``say`` gets lines."""
        run, training = self.run, self.training
        summary = self.loop.end(self._reason)
        run.close(None)
        run.check_learned()
        normaliser = self.collector.state_dict()
        seconds, evaluation = run.seconds, None
        if training.evaluation_episodes and not self._stop.is_set():
            evaluation = unless_failed(lambda: self._evaluate_registered(say))
        reached = summary.reason == "target_return"
        return LocalTrainResult(
            reason="target_return" if reached else "num_steps" if run.is_complete else "stopped",
            began=run.began,
            env_steps=run.env_steps,
            updates=summary.updates,
            seconds=seconds,
            steps_per_s=run.steps_per_s,
            return_mean=run.newest().get(RETURN_METRIC, float("nan")),
            seconds_to_target=seconds if reached else None,
            module=self.module,
            forward_args=self.forward_args,
            normaliser=normaliser,
            curve=tuple(run.curve),
            evaluation=None if self._stop.is_set() else evaluation,
            dropped=run.dropped,
        )

    def _evaluate_registered(self, say: Callable[[str], None] | None) -> PolicyEvaluation:
        self.run.act_as_registered()
        return self.evaluate(self.training.evaluation_episodes, stop=self._stop, say=say)

    def evaluate(
        self,
        games: int,
        *,
        seed: int | None = None,
        stop: threading.Event | None = None,
        say: Callable[[str], None] | None = None,
    ) -> PolicyEvaluation:
        """Plays greedy games with the newest weights in the training's own environments, in which nothing may play
        meanwhile; arguments and errors as for `play_evaluation`."""
        collector = self.collector
        collector.load(*self.run.newest_weights())
        normaliser = collector.obs_normaliser
        return play_evaluation(
            self.training, self.envs, collector.policy, games, normaliser=normaliser, seed=seed, stop=stop, say=say
        )


def play_evaluation(
    training: Training,
    envs: VectorEnv,
    policy: RolloutPolicy,
    games: int,
    *,
    normaliser: ObsNormaliser | None,
    seed: int | None = None,
    stop: threading.Event | None = None,
    say: Callable[[str], None] | None = None,
) -> PolicyEvaluation:
    """Plays the greedy games that evaluate a training.

    Args:
        training: its options.
        envs, policy, normaliser, stop, say: as for `brayx.rollout.evaluate.evaluate`.
        games: number of games.
        seed: seed of a training, whose evaluations play the same games; None: this one's.

    Raises:
        EnvironmentFailed: an environment raised.
    """
    return evaluate(
        envs,
        policy,
        games,
        seed=(training.seed if seed is None else seed) + _EVALUATION_SEED,
        normaliser=normaliser,
        max_steps=training.evaluation_steps,
        stop=stop,
        say=say,
    )


def unless_failed(play: Callable[[], PolicyEvaluation]) -> PolicyEvaluation | None:
    """The evaluation that ``play`` returns; None if an environment raises, or a checkpoint cannot be read: the trained
    weights are kept."""
    try:
        return play()
    except (EnvironmentFailed, TrackingError) as error:
        logger.warning("there is no evaluation: %s", error)
        return None


def _trainer_config(algorithm: AlgorithmConfig, training: Settled, *, draws: bool) -> TrainerConfig:
    """The learner's options.

    Args:
        algorithm, training: the options of the training.
        draws: whether a trial draws distributions.
    """
    config = TrainerConfig(
        model="model",
        buffers=["rollout"],
        algorithm=algorithm,
        learning_rate=training.learning_rate,
        num_steps=sys.maxsize,  # the stream ends the training, after `num_steps`
        target_return=training.target_return,
        target_games=training.target_games,
        use_gpu=training.use_gpu,
        threads=training.threads,
        checkpoint_interval=training.checkpoint_interval,
    )
    return config if draws else config.model_copy(update={"histogram_interval_s": None})


def check_options(
    algorithm: AlgorithmConfig, training: Settled, obs: NestedArray, spec: ActionSpec, imitates: bool
) -> None:
    """Refuses options that do not fit each other or the environment.

    Args:
        algorithm, training: the options.
        obs: an observation of the environment.
        spec: its actions.
        imitates: whether there are demonstrations.

    Raises:
        ConfigError: names the option.
    """
    if imitates:
        check_imitates(algorithm, training)
    check_fits(
        algorithm,
        kind=spec.kind,
        unroll_length=training.unroll_length,
        gives={*flatten(obs, "obs"), *([DEMONSTRATION] if imitates else [])},
        sampler=training.sampler,
    )


def model_of(
    algorithm: AlgorithmConfig,
    training: Settled,
    obs: NestedArray,
    spec: ActionSpec,
    make: Callable[[NestedArray, ActionSpec], Model],
    demonstrations: str | Path | Dataset | None,
) -> tuple[nn.Module, tuple[NestedArray, ...], ModelSpec, Demonstrations | None]:
    """The module that learns, its example arguments and signature, and the demonstrations in its layout.

    Args:
        algorithm, training, obs, spec: as for `check_options`.
        make: returns the module and its example arguments.
        demonstrations: as for `train_local`.

    Raises:
        ConfigError, ModelError: the module does not fit the algorithm, or the demonstrations the module.
    """
    module, forward_args = make(obs, spec)
    initialise_lazy(module, forward_args)
    signature = check_model(algorithm, module, forward_args, state=flatten(obs, "obs").get(STATE))
    recorded = None
    if demonstrations is not None:
        recorded = Demonstrations.of_model(demonstrations, module, forward_args, signature, spec, training)
    return module, forward_args, signature, recorded


def check_updates(algorithm: AlgorithmConfig, training: Settled, recorded: Demonstrations | None = None) -> None:
    """Refuses options that would give the training too few updates.

    Args:
        algorithm: options of the algorithm.
        training: options of the training.
        recorded: the demonstrations, for a pure imitation algorithm.

    Raises:
        ConfigError: names the option to change.
    """
    total, length = training.num_steps, training.unroll_length
    imitates_all = algorithm.imitates == "everything"
    if imitates_all or training.sampler == "fifo":
        cloning = recorded is not None and imitates_all
        steps = length * (recorded.batch_size if cloning and recorded is not None else training.num_envs)
        batches = float(-(-total // steps))
        change = f"more num_steps, or a smaller {'batch_size' if cloning else 'num_envs'} or unroll_length"
    else:
        limiter_of(training)
        steps = length * training.batch_size
        per_column = (training.samples_per_insert or math.inf) / training.batch_size
        columns = total // length - training.min_columns
        batches = per_column * columns
        change = "more num_steps, or a smaller min_columns or unroll_length"
        if columns:  # without columns beyond min_columns no samples_per_insert helps
            change = (
                "more num_steps, a greater samples_per_insert, or a smaller batch_size, unroll_length or min_columns"
            )
    check_enough(algorithm, num_steps=total, batches=batches, batch_steps=steps, change=change)


def limiter_of(training: Settled) -> RateLimiter:
    """The rate limiter of the replay table.

    Raises:
        ConfigError: with these options the table would never be sampled.
    """
    come = max(1, training.num_steps // training.unroll_length)
    if come < training.min_columns:
        raise ConfigError(
            f"the table would never be sampled: min_columns is {training.min_columns}, and {training.num_steps} "
            f"num_steps are {come} columns of unroll_length {training.unroll_length}",
            key="min_columns",
        )
    try:
        return RateLimiter(
            training.samples_per_insert,
            training.min_columns,
            samples=training.batch_size,
            capacity=training.capacity,
        )
    except ValueError as error:
        raise ConfigError(f"the table would never be sampled: {error}") from error


def _table(training: Settled) -> Table:
    sizes, limiter = (training.capacity, training.batch_size), limiter_of(training)
    if training.sampler == "prioritised":
        return Table.prioritised(*sizes, limiter, exponent=training.priority_exponent, seed=training.seed)
    return Table.uniform(*sizes, limiter, seed=training.seed)
