"""Searches over a training's options with real trials, on both hosts: those behind are stopped, or copy those ahead."""

from __future__ import annotations

import json
from pathlib import Path

import mlflow
import pytest

from brayx.search.space import Domain
from brayx.search.tune import Method, table, tune
from brayx.tracking import tracking_uri
from brayx.tracking.trials import trials as listing
from tests.end_to_end.jobs import brayx, said_on_failure, trials, without_ray
from tests.leaning import leaning

SMALL = {"num_envs": 8, "unroll_length": 64}
pytestmark = pytest.mark.slow


def test_trials_behind_are_stopped_before_the_end_and_ray_is_not_imported(tmp_path: Path) -> None:
    """Trials with a learning rate that learns nothing get fewer env steps than the one that learns."""
    searched = ["learning_rate=choice(1e-9, 1e-3)", *(f"{name}={value}" for name, value in SMALL.items())]
    words = ["tune", "--env", "CartPole-v1", *(word for setting in searched for word in ("--search", setting))]
    words += ["--num-trials", "4", "--num-steps", "16000", "--interval-steps", "4000", "--seed", "4"]
    with brayx(tmp_path, *words, environment=without_ray(tmp_path)) as command, said_on_failure(command):
        assert command.ended() == 0
    imported = tmp_path / "imported.txt"
    assert not imported.exists(), imported.read_text()
    (file,) = tmp_path.rglob("tuning.json")
    best, *others = rows = json.loads(file.read_text())["trials"]
    assert {row["options"]["learning_rate"] for row in rows} == {1e-9, 1e-3}, "the draws of this seed"
    assert best["options"]["learning_rate"] == 1e-3
    assert best["curve"][-1][0] >= 16_000
    assert [row for row in others if row["curve"][-1][0] < 16_000]
    assert {row["error"] for row in rows} == {""}
    runs = [trial for named in trials(tmp_path, "tuning").values() for trial in named]
    assert len(runs) == 5
    assert {run.status for run in runs} == {"FINISHED"}, "a trial that was stopped is done"
    listed = listing(tracking_uri(tmp_path / "mlflow.db"))
    assert sorted(row.env_steps for row in listed) == sorted(row["curve"][-1][0] for row in [best, *rows])
    assert sorted(row.mean_return for row in listed) == sorted(row["curve"][-1][1] for row in [best, *rows])


@pytest.mark.cluster
@pytest.mark.parametrize("method", ["asha", "pbt"])
def test_every_trial_imitates_the_demonstrations(tmp_path: Path, method: Method) -> None:
    """Demonstrations are imitated at one learning rate, not at the other; a copy plays like the trial that imitated."""
    result = tune(
        "CartPole-v1",
        {"learning_rate": Domain("choice", (1e-9, 1e-2)), "num_envs": 4, "batch_size": 8, "imitation_updates": 200},
        algorithm="mixed",
        demonstrations=leaning(tmp_path / "games.npz"),
        method=method,
        num_trials=2,
        num_steps=8_000 if method == "asha" else 24_000,  # a finished trial is not copied
        interval_steps=2_000 if method == "asha" else 4_000,
        seed=24,
        tracking=str(tmp_path),
        say=lambda line: None,
    )
    assert {outcome.error for outcome in result.trials} == {""}
    first = {outcome.number: outcome.curve[0][1] for outcome in result.trials}
    best, other = max(first, key=lambda number: first[number]), min(first, key=lambda number: first[number])
    assert first[best] > 1.5 * first[other]
    (copies,) = ([origin for _, origin in outcome.clones] for outcome in result.trials if outcome.number == other)
    assert set(copies) == ({best} if method == "pbt" else set())


def test_clones_are_compared_by_games_and_those_behind_are_stopped(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It prints only the search's own lines, with transitions instead of env steps."""
    said: list[str] = []
    result = tune(
        "CartPole-v1",
        {"learning_rate": Domain("choice", (1e-9, 1e-2)), "network.hidden": [16], "batch_size": 8},
        algorithm="bc",
        demonstrations=leaning(tmp_path / "games.npz"),
        num_trials=4,
        num_steps=24_000,
        interval_steps=4_000,
        seed=4,
        tracking=str(tmp_path),
        say=said.append,
    )
    assert {outcome.error for outcome in result.trials} == {""}
    assert result.best.options["learning_rate"] == 1e-2
    assert result.best.return_mean > 150
    assert result.best.curve[-1][0] >= 24_000
    assert any(outcome.curve[-1][0] < 24_000 for outcome in result.trials)
    assert all(" transitions, return " in line for line in said)
    assert "transitions" in table(result.trials, result.steps).splitlines()[0]
    assert capfd.readouterr().out == ""


@pytest.mark.cluster
def test_a_copy_plays_as_the_one_ahead_without_learning(tmp_path: Path) -> None:
    copy_plays_as_the_one_ahead(tmp_path)


def copy_plays_as_the_one_ahead(tmp_path: Path, cluster: str | None = None) -> None:
    """One of two learns nothing at its rate. After a look it goes on as a copy of the other, and with this seed
    at a rate that learns nothing again, so what it plays like is what it was given.

    What else a copy is given: tests/unit/search/test_tune.py.
    """
    result = tune(
        "CartPole-v1",
        {"learning_rate": Domain("choice", (1e-9, 1e-3)), "num_envs": 8, "unroll_length": 64},
        method="pbt",
        num_trials=2,
        num_steps=128_000,
        interval_steps=8_000,
        seed=24,
        tracking=str(tmp_path),
        cluster=cluster,
        say=lambda line: None,
    )
    source, copy = sorted(result.trials, key=lambda outcome: outcome.number)
    after, origin = copy.clones[0]
    assert origin == source.number
    (_, without), (steps, mean) = copy.curve[after - 1 : after + 1]
    before = [point for point in source.curve if point[0] < steps]
    assert before, "it goes on from where the other one was"
    # A hundred games of a policy that is not learned further vary by a tenth.
    assert min(mean, before[-1][1]) > 1.5 * without
    assert mean > 0.7 * before[-1][1]
    client = mlflow.MlflowClient(result.trial.uri)
    experiment = client.get_experiment_by_name("tuning").experiment_id
    runs = client.search_runs([experiment])
    nested = [run for run in runs if run.data.tags.get("mlflow.parentRunId") == result.trial.run_id]
    assert len(nested) == 2
    (run,) = (run for run in nested if run.info.run_name.endswith(f"{copy.number:02d}"))
    rates = {rate.step: rate.value for rate in client.get_metric_history(run.info.run_id, "option/learning_rate")}
    assert rates[steps] == 1e-9
    assert {run.info.status for run in runs} == {"FINISHED"}
    assert result.trial.latest_checkpoint() is not None
    artifacts = {file.path for file in client.list_artifacts(result.trial.run_id)}
    assert {"tuning.json", "tuning.png"} <= artifacts
