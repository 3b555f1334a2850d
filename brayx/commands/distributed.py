"""Runs the training of `brayx.local.train.train_local` as a job: rollout workers, a buffer, a learner, a trial.

The arguments become a job's configuration, and a host runs that job. For further options (shards, ranks, your own
modules) write a YAML file. Knows nothing of the command line.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from brayx.command_line import say_after_silence
from brayx.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

    from brayx.algorithms.config import AlgorithmConfig
    from brayx.jobs.config import JobConfig
    from brayx.local.run import CurvePoint
    from brayx.local.train import LocalTrainResult
    from brayx.local.training import Training
    from brayx.rollout.evaluate import PolicyEvaluation
    from brayx.tracking import Trial


def train_distributed(
    env: str,
    algorithm: AlgorithmConfig | None = None,
    training: Training | None = None,
    *,
    num_workers: int = 2,
    project: str | None = None,
    trial: str = "main",
    resume: bool = True,
    tracking: str | None = None,
    cluster: str | None = None,
    log_interval: int | None = None,
    buffer_size: int | None = None,
) -> tuple[LocalTrainResult, Trial, tuple[str, str]]:
    """Trains a policy for ``env`` as a job, with workers on a Ray cluster or in this process.

    The trial is an MLflow run; an interrupted run of that name continues from its checkpoint.

    Args:
        env: Gymnasium id.
        algorithm: options; None: PPO's defaults.
        training: the options that `brayx.local.train.train_local` also takes; None: their defaults.
        num_workers: rollout workers.
        project: MLflow experiment; None: named after ``env``.
        trial: MLflow run.
        resume: continue an unfinished run of that name.
        tracking: MLflow URI or path; None: ``mlflow.db`` in the current folder.
        cluster: address of a Ray cluster to join, empty to start one; None: this process, if it can run the job.
        log_interval: updates between two lines of progress, where there is no terminal to draw on; None: 5 s.
        buffer_size: transitions that may wait for the learner; None: two batches. Unless `fifo`, it is `capacity`.

    Returns:
        A result as from `train_local`, the trial, and the registered version with a message, as from
        `brayx.commands.ppo.train`.

    Raises:
        ConfigError: options do not fit each other or the environment.
        BrayxError: the training failed.
    """
    if not isinstance(env, str):
        raise ConfigError("workers make environments by their id; a function of one's own needs a YAML", key="env")
    from brayx.algorithms.ppo import PPOConfig
    from brayx.front import train_job
    from brayx.jobs.config import JobConfig
    from brayx.local.training import Training, as_job

    algorithm = algorithm or PPOConfig()
    training = training or Training()
    project = project or env.replace("/", "-").replace(":", "-")
    components = as_job(env, algorithm, training, num_workers=num_workers, buffer_size=buffer_size)
    job = JobConfig.of({"project": project, "trial": trial, **components}, "")
    done = train_job(job, cluster=cluster, resume=resume, tracking=tracking, log_interval=log_interval)
    return _result(job, done, training), done.trial, (done.reference if done.version else "", done.outcome)


def _result(job: JobConfig, done: Any, training: Training) -> LocalTrainResult:
    """The result of a job in the form of `train_local`; the module is that of the newest checkpoint."""
    import torch

    from brayx.engines.base import load_weights
    from brayx.engines.scaling import learned
    from brayx.jobs.result import STEPS_THIS_RUN
    from brayx.local.train import LocalTrainResult, unless_failed
    from brayx.model.build import build_model
    from brayx.trainer.loop import RETURN_METRIC

    module, forward_args = build_model("", job.models["model"].module, "model", job.as_dict())
    folder = done.trial.latest_checkpoint()
    normaliser: Mapping[str, np.ndarray] = {}
    if folder is not None:
        weights = learned(load_weights(folder / "weights.npz"))
        module.load_state_dict({name: torch.tensor(array) for name, array in weights.items()})
        if (folder / "normaliser.npz").is_file():
            normaliser = load_weights(folder / "normaliser.npz")
    reached = done.reason == "target_return"
    return LocalTrainResult(
        reason="target_return" if reached else "num_steps" if done.finished else "stopped",
        began=done.began,
        env_steps=int(done.numbers.get("env_steps", 0)),
        updates=int(done.numbers.get("updates", 0)),
        seconds=done.seconds,
        steps_per_s=done.numbers[STEPS_THIS_RUN] / max(done.seconds, 1e-9),
        return_mean=done.numbers.get(RETURN_METRIC, math.nan),
        seconds_to_target=done.seconds if reached else None,
        module=module,
        forward_args=forward_args,
        normaliser=normaliser,
        curve=_curve(done.trial, time.time() - time.monotonic() + done.began),
        evaluation=unless_failed(lambda: _evaluated(job, module, forward_args, normaliser, training))
        if training.evaluation_episodes
        else None,
        dropped=round(sum(n for name, n in done.numbers.items() if name.startswith("replay_dropped."))),
    )


def _curve(trial: Trial, began: float) -> tuple[CurvePoint, ...]:
    """The learning curve of a trial in MLflow, from ``began`` (a Unix time) on."""
    from mlflow import MlflowClient

    from brayx.local.run import CurvePoint
    from brayx.metrics.charts import CHARTS, RETURN_CHART
    from brayx.metrics.totals import GAMES

    client = MlflowClient(trial.uri)
    points = client.get_metric_history(trial.run_id, RETURN_CHART)
    games = {point.timestamp: int(point.value) for point in client.get_metric_history(trial.run_id, CHARTS[GAMES])}
    ordered = sorted(points, key=lambda point: point.timestamp)
    return tuple(
        CurvePoint(point.timestamp / 1e3 - began, point.step, games.get(point.timestamp, 0), point.value)
        for point in ordered
        if point.timestamp / 1e3 >= began  # a resumed trial has older points
    )


def _evaluated(
    job: JobConfig, module: Any, forward_args: Any, normaliser: Mapping[str, np.ndarray], training: Training
) -> PolicyEvaluation:
    from brayx.local.train import play_evaluation
    from brayx.rollout.collector import Collector
    from brayx.rollout.envs import make_envs
    from brayx.rollout.policy import RolloutPolicy

    config = job.rollouts["rollout"]
    assert config.env is not None
    with contextlib.closing(
        make_envs(config.env, config.num_envs, vectorization=config.vectorization, options=config.env_options)
    ) as envs:
        policy = RolloutPolicy(module, forward_args, engine="torch")
        collector = Collector(
            envs, policy, 1, normalise_obs=config.normalise_obs, normalise_reward=config.normalise_reward
        )
        if normaliser:
            collector.load_state_dict(normaliser)
        games = training.evaluation_episodes
        moments, say = collector.obs_normaliser, say_after_silence
        return play_evaluation(training, envs, policy, games, normaliser=moments, say=say)
