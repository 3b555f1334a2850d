"""A search over a training's options with real trials: who is behind goes on as a copy of who is ahead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlflow
import pytest

from pipelines.search import Domain
from pipelines.tune import tune

SMALL = {"num_envs": 8, "unroll_length": 64}
pytestmark = pytest.mark.slow


def test_a_copy_has_the_weights_and_the_optimiser_of_the_one_ahead(ray_cluster: Any, tmp_path: Path) -> None:
    """One of two learns nothing at its rate; after the first look it plays as well as the other one."""
    found = tune(
        "CartPole-v1",
        {"learning_rate": Domain("choice", (1e-9, 1e-3)), **SMALL},
        method="pbt",
        num_trials=2,
        total_steps=32_000,
        interval_steps=8_000,
        seed=4,
        tracking=str(tmp_path),
        say=lambda line: None,
    )
    assert {outcome.number for outcome in found.trials} == {0, 1}
    copied = [outcome for outcome in found.trials if outcome.clones]
    assert copied, found.trials
    (copy,) = copied[:1]
    after, origin = copy.clones[0]
    (source,) = (outcome for outcome in found.trials if outcome.number == origin)
    steps, mean = copy.curve[after]
    before = [point for point in source.curve if point[0] < steps]
    assert before, "it goes on from where the other one was"
    assert mean > 0.7 * before[-1][1]
    client = mlflow.MlflowClient(found.trial.uri)
    experiment = client.get_experiment_by_name("tuning").experiment_id
    runs = client.search_runs([experiment])
    nested = [run for run in runs if run.data.tags.get("mlflow.parentRunId") == found.trial.run_id]
    assert len(nested) == 2
    assert {run.info.status for run in runs} == {"FINISHED"}
    assert found.trial.latest_checkpoint() is not None
    artifacts = {file.path for file in client.list_artifacts(found.trial.run_id)}
    assert {"tuning.json", "tuning.png"} <= artifacts


def test_who_is_behind_is_stopped_before_the_end(ray_cluster: Any, tmp_path: Path) -> None:
    """Those whose rate learns nothing do not get the env steps of the one that learns."""
    found = tune(
        "CartPole-v1",
        {"learning_rate": Domain("choice", (1e-9, 1e-3)), **SMALL},
        num_trials=4,
        total_steps=16_000,
        interval_steps=4_000,
        seed=4,
        tracking=str(tmp_path),
        say=lambda line: None,
    )
    rates = {outcome.options["learning_rate"] for outcome in found.trials}
    assert rates == {1e-9, 1e-3}, "the draws of this seed"
    steps = {outcome.number: outcome.curve[-1][0] for outcome in found.trials}
    assert found.best.options["learning_rate"] == 1e-3
    assert steps[found.best.number] >= 16_000
    behind = [outcome for outcome in found.trials if steps[outcome.number] < 16_000]
    assert behind
    assert {outcome.error for outcome in found.trials} == {""}
    client = mlflow.MlflowClient(found.trial.uri)
    runs = client.search_runs([client.get_experiment_by_name("tuning").experiment_id])
    assert {run.info.status for run in runs} == {"FINISHED"}, "a trial that was stopped is done"
