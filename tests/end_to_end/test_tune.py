"""Searches over a training's options with real trials, on both hosts: those behind are stopped, or copy those ahead."""

from __future__ import annotations

from pathlib import Path

import mlflow
import pytest

from pipelines.search import Domain
from pipelines.tune import Method, table, tune
from tests.leaning import leaning

SMALL = {"num_envs": 8, "unroll_length": 64}
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("cluster", [None, ""], ids=["local", "ray"])
def test_a_copy_plays_as_the_one_ahead_without_learning(
    request: pytest.FixtureRequest, tmp_path: Path, cluster: str | None
) -> None:
    """One of two learns nothing at its rate. After a look it goes on as a copy of the other, and with this seed
    at a rate that learns nothing again, so what it plays like is what it was given.

    What else a copy is given: tests/unit/pipelines/test_tune.py.
    """
    if cluster is not None:
        request.getfixturevalue("ray_cluster")
    found = tune(
        "CartPole-v1",
        {"learning_rate": Domain("choice", (1e-9, 1e-3)), **SMALL},
        method="pbt",
        num_trials=2,
        total_steps=128_000,
        interval_steps=8_000,
        seed=24,
        tracking=str(tmp_path),
        cluster=cluster,
        say=lambda line: None,
    )
    source, copy = sorted(found.trials, key=lambda outcome: outcome.number)
    after, origin = copy.clones[0]
    assert origin == source.number
    (_, without), (steps, mean) = copy.curve[after - 1 : after + 1]
    before = [point for point in source.curve if point[0] < steps]
    assert before, "it goes on from where the other one was"
    assert mean > before[-1][1] > 1.5 * without
    client = mlflow.MlflowClient(found.trial.uri)
    experiment = client.get_experiment_by_name("tuning").experiment_id
    runs = client.search_runs([experiment])
    nested = [run for run in runs if run.data.tags.get("mlflow.parentRunId") == found.trial.run_id]
    assert len(nested) == 2
    (run,) = (run for run in nested if run.info.run_name.endswith(f"{copy.number:02d}"))
    rates = {rate.step: rate.value for rate in client.get_metric_history(run.info.run_id, "option/learning_rate")}
    assert rates[steps] == 1e-9
    assert {run.info.status for run in runs} == {"FINISHED"}
    assert found.trial.latest_checkpoint() is not None
    artifacts = {file.path for file in client.list_artifacts(found.trial.run_id)}
    assert {"tuning.json", "tuning.png"} <= artifacts


def test_who_is_behind_is_stopped_before_the_end(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("method", ["asha", "pbt"])
def test_every_trial_imitates_the_demonstrations(tmp_path: Path, method: Method) -> None:
    """Demonstrations are imitated at one learning rate, not at the other; a copy plays like the trial that imitated."""
    found = tune(
        "CartPole-v1",
        {"learning_rate": Domain("choice", (1e-9, 1e-2)), "num_envs": 4, "batch_size": 8, "imitation_updates": 200},
        algorithm="mixed",
        demonstrations=leaning(tmp_path / "games.npz"),
        method=method,
        num_trials=2,
        total_steps=8_000 if method == "asha" else 24_000,  # who is done is not copied
        interval_steps=2_000 if method == "asha" else 4_000,
        seed=24,
        tracking=str(tmp_path),
        say=lambda line: None,
    )
    assert {outcome.error for outcome in found.trials} == {""}
    first = {outcome.number: outcome.curve[0][1] for outcome in found.trials}
    best, other = max(first, key=lambda number: first[number]), min(first, key=lambda number: first[number])
    assert first[best] > 1.5 * first[other]
    (copies,) = ([origin for _, origin in each.clones] for each in found.trials if each.number == other)
    assert set(copies) == ({best} if method == "pbt" else set())


def test_clones_are_compared_by_games_and_those_behind_are_stopped(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It prints only the search's own lines, with transitions instead of env steps."""
    said: list[str] = []
    found = tune(
        "CartPole-v1",
        {"learning_rate": Domain("choice", (1e-9, 1e-2)), "network.hidden": [16], "batch_size": 8},
        algorithm="bc",
        demonstrations=leaning(tmp_path / "games.npz"),
        num_trials=4,
        total_steps=24_000,
        interval_steps=4_000,
        seed=4,
        tracking=str(tmp_path),
        say=said.append,
    )
    assert {outcome.error for outcome in found.trials} == {""}
    assert found.best.options["learning_rate"] == 1e-2
    assert found.best.return_mean > 150
    assert found.best.curve[-1][0] >= 24_000
    assert any(outcome.curve[-1][0] < 24_000 for outcome in found.trials)
    assert all(" transitions, return " in line for line in said)
    assert "transitions" in table(found.trials, found.steps).splitlines()[0]
    assert capfd.readouterr().out == ""
