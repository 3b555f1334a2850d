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
from brayx.engines.torch import initialise_lazy
from brayx.errors import ConfigError, EnvironmentFailed
from brayx.local.demonstrations import Demonstrations, check_imitates
from brayx.local.run import Point, Run, TrialKeeper
from brayx.local.training import Settled, Training
from brayx.replay.files import Dataset
from brayx.replay.importance import Importance
from brayx.replay.limiter import RateLimiter
from brayx.replay.table import Table
from brayx.rollout.collector import Collector
from brayx.rollout.envs import EnvSource, make_envs
from brayx.rollout.evaluate import Evaluation, evaluate
from brayx.rollout.networks import Model, observation_of, ready_made
from brayx.rollout.policy import Policy
from brayx.trainer.config import TrainerConfig
from brayx.trainer.fits import check_model
from brayx.trainer.loop import RETURN_METRIC, LearnerLoop
from brayx.trainer.ranks import Alone
from brayx.types import DEMONSTRATION, NestedArray, flatten

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Result:
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
        evaluation: evaluation of the greedy policy; None if none was requested, it was stopped, or an environment
            raised.
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
    clerk: TrialKeeper | None = None,
    stop: threading.Event | None = None,
    due: Callable[[int, Mapping[str, float]], bool] | None = None,
) -> Result:
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
        due: called after each update except the last with env steps and the newest metrics; returns whether to save an
            extra checkpoint now.

    Raises:
        ConfigError: options do not fit each other, the environment, or the demonstrations.
        EnvironmentFailed: an environment raised while training; in the evaluation this is only logged.
        ModelError: the model lacks outputs that the algorithm needs.
        BadWeights, Diverged: training diverged, or all collected data was unusable.
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
        spec = ActionSpec.of(envs.single_action_space, scale=training.scale_actions)
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
        initialise_lazy(module, forward_args)
        given = check_model(algorithm, module, forward_args, state=observed.get(STATE))
        recorded = None
        if demonstrations is not None:
            recorded = Demonstrations.of_model(demonstrations, module, forward_args, given, spec, training)
        check_updates(algorithm, training, recorded)
        collector = _collector(envs, Policy(module, forward_args, engine=training.engine), algorithm, training)
        cloning = algorithm.imitates == "everything"
        table = None if training.sampler == "fifo" or cloning else _table(training)
        run = Run(
            collector,
            table,
            training.num_steps,
            on_update,
            clerk,
            stop,
            training.seed,
            Importance(training.importance_exponent, training.importance_batches),
            recorded,
            algorithm.first_imitates,
        )
        stream = run.recorded() if cloning else run.alternating() if training.blocking else run.concurrent()
        stack.callback(stream.close)
        summary = LearnerLoop(
            _trainer_config(algorithm, training, draws=clerk is not None),
            module,
            forward_args,
            batches=stream,
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
        ).run()
        stream.close()
        run.settle()
        run.check_learned()
        if summary.reason == "target_return":  # the stream was closed before it could record the last update
            run.after_update()
        seconds = run.seconds
        normaliser = collector.state_dict()
        evaluation = None
        if training.evaluation_episodes and not stop.is_set():
            collector.load(*run.newest_weights())
            evaluation = _evaluated(envs, collector, training, stop)
    reached = summary.reason == "target_return"
    return Result(
        reason="target_return" if reached else "num_steps" if run.env_steps >= training.num_steps else "stopped",
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


def _collector(envs: VectorEnv, policy: Policy, algorithm: AlgorithmConfig, training: Settled) -> Collector:
    return Collector(
        envs,
        policy,
        training.unroll_length,
        seed=training.seed,
        scale_actions=training.scale_actions,
        normalise_obs=training.normalise_obs,
        normalise_reward=training.normalise_reward,
        gamma=algorithm.discount,
        reward_clip=training.reward_clip,
        sde_steps=training.sde_steps,
    )


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


def _evaluated(envs: VectorEnv, collector: Collector, training: Settled, stop: threading.Event) -> Evaluation | None:
    """Plays the games of the evaluation; None if they were stopped, or an environment raised."""
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
        return None if stop.is_set() else played
    except EnvironmentFailed as error:  # keep the trained weights
        logger.warning("there is no evaluation: %s", error)
        return None


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
            f"the table cannot be sampled so: min_columns is {training.min_columns}, and {training.num_steps} "
            f"num_steps are {come} columns of unroll_length {training.unroll_length}",
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
