"""Trains PPO in this process for `brayx.commands.ppo`: the trial, the console, the registered version.

Imports only what the first step needs: MLflow runs in a separate process, which starts first.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from brayx.command_line import say, say_after_silence
from brayx.errors import BrayxError, TrackingError
from brayx.shutdown import wait_to_save
from brayx.temporary import temporary_files
from brayx.tracking.clerk import Clerk
from brayx.tracking.options import Options
from brayx.tracking.store import tracking_uri

if TYPE_CHECKING:
    from brayx.algorithms.ppo import PPOConfig
    from brayx.local.train import LocalTrainResult
    from brayx.local.training import Training
    from brayx.tracking import Trial


def train_in_process(
    chosen: Mapping[str, Any],
    of_job: Mapping[str, Any],
    algorithm: PPOConfig,
    training: Training,
    project: str,
    name: str,
    progress: Callable[[int, int, Mapping[str, float]], None],
    stop: threading.Event,
) -> tuple[LocalTrainResult, Trial, tuple[str, str]]:
    """Trains as `brayx.commands.ppo.train`; returns the same.

    Args:
        chosen, stop: as there.
        of_job: options of the job, in ``chosen``.
        algorithm, training: the options of PPO and its training in ``chosen``.
        project, name: names of the trial.
        progress: called after each update with its number, the env steps and the newest metrics.
    """
    whole = {**chosen, **algorithm.model_dump(mode="json"), **training.model_dump(mode="json")}
    uri = tracking_uri(chosen["tracking"])
    with temporary_files():  # also the clerk's, if this process is killed
        clerk = Clerk(project, name, uri, Options(whole, whole), resume=not chosen["new"])
        try:
            try:
                from brayx.local.training import as_job  # meanwhile the clerk's process imports MLflow

                components = as_job(chosen["env"], algorithm, training, num_workers=chosen["num_workers"])
                job = {"project": project, "trial": name, **of_job, **components}
                result, registered = _watched(chosen, algorithm, training, clerk, stop, job, uri, progress)
            except BaseException as error:
                with contextlib.suppress(BrayxError):
                    clerk.close("KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED")
                raise
            if result.reason == "stopped" and result.updates:
                wait_to_save(clerk.opened, say)
            trial = clerk.close("KILLED" if result.reason == "stopped" else "FINISHED")
        finally:
            clerk.end()
    return replace(result, reason="stopped") if stop.is_set() else result, trial, registered


def _watched(
    chosen: Mapping[str, Any],
    algorithm: PPOConfig,
    training: Training,
    clerk: Clerk,
    stop: threading.Event,
    job: Mapping[str, Any],
    uri: str,
    progress: Callable[[int, int, Mapping[str, float]], None],
) -> tuple[LocalTrainResult, tuple[str, str]]:
    """Trains and registers, shown by the console; ``job`` is the job that the versions are served as."""
    from brayx.console.job import console_of_training
    from brayx.jobs.config import JobConfig
    from brayx.jobs.progress import error_lines
    from brayx.jobs.result import Ending, training_facts
    from brayx.local.train import LocalTraining

    newest: dict[str, float] = {"rollout_workers": chosen["num_workers"]}

    def show(update: int, env_steps: int, numbers: Mapping[str, float]) -> None:
        newest.update(numbers)
        progress(update, env_steps, numbers)

    def facts() -> dict[str, Any]:
        return training_facts(job["project"], job["trial"], clerk, training, newest.copy(), running.run.notes)

    shown, no_door, ending = JobConfig.of(job, ""), contextlib.nullcontext(), Ending()
    with (
        LocalTraining(chosen["env"], algorithm, training, on_update=show, clerk=clerk, stop=stop) as running,
        console_of_training(shown, uri, facts, no_door, say, running.run.finish, ending),
    ):
        running.run.about.update(job=job, folder=os.getcwd())
        while running.goes_on():
            running.iterate()
        result = running.result(say_after_silence)
        for line in error_lines(newest, running.run.notes):
            say(line)
        if result.dropped:
            share = result.dropped / result.env_steps
            say(f"not learned from: {result.dropped:,} of {result.env_steps:,} env steps ({share:.1%})")
        if result.reason == "stopped":
            ending.say("interrupted", "interrupted, so no version is registered")
            return result, ("", "")
        registered = _register(clerk, job["project"], chosen["env"], result)
        ending.say("finished", registered[1])
        return result, registered


def _register(clerk: Clerk, name: str, env: str, result: LocalTrainResult) -> tuple[str, str]:
    """Registers the best checkpoint, rated by its evaluation, as champion unless the champion is better."""
    from brayx.engines.torch import describe
    from brayx.jobs.champion import register_trial
    from brayx.jobs.evaluate import Evaluation
    from brayx.jobs.rating import rating_tags

    played = None if result.evaluation is None else Evaluation([episode.ret for episode in result.evaluation.episodes])
    rating = rating_tags(env, played) if played and math.isfinite(played.mean) else None
    try:
        say_after_silence("registering the best checkpoint")
        clerk.settle()  # the last checkpoint may be the best
        version, outcome = clerk.call(register_trial, name, describe(result.module, result.forward_args), rating)
    except TrackingError as error:  # the training has a result all the same
        return "", f"not registered: {error.message}"
    return f"models:/{name}/{version}" if version else "", outcome
