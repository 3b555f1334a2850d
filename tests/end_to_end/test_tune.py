"""Searches over a training's options with real trials, on both hosts: those behind are stopped, or copy those ahead."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from brayx.tracking import tracking_uri
from pipelines.search import Domain
from pipelines.trials import trials as listing
from pipelines.tune import Method, table, tune
from tests.end_to_end.jobs import brayx, said_on_failure, trials, without_ray
from tests.leaning import leaning

SMALL = {"num_envs": 8, "unroll_length": 64}
pytestmark = pytest.mark.slow


def test_trials_behind_are_stopped_before_the_end_and_ray_is_not_imported(tmp_path: Path) -> None:
    """Trials with a learning rate that learns nothing get fewer env steps than the one that learns."""
    searched = ["learning_rate=choice(1e-9, 1e-3)", *(f"{name}={value}" for name, value in SMALL.items())]
    words = ["tune", "--env", "CartPole-v1", *(word for each in searched for word in ("--search", each))]
    words += ["--num-trials", "4", "--num-steps", "16000", "--interval-steps", "4000", "--seed", "4"]
    with brayx(tmp_path, *words, environment=without_ray(tmp_path)) as command, said_on_failure(command):
        assert command.ended() == 0
    imported = tmp_path / "imported.txt"
    assert not imported.exists(), imported.read_text()
    (file,) = tmp_path.rglob("tuning.json")
    best, *others = found = json.loads(file.read_text())["trials"]
    assert {each["options"]["learning_rate"] for each in found} == {1e-9, 1e-3}, "the draws of this seed"
    assert best["options"]["learning_rate"] == 1e-3
    assert best["curve"][-1][0] >= 16_000
    assert [each for each in others if each["curve"][-1][0] < 16_000]
    assert {each["error"] for each in found} == {""}
    runs = [trial for of in trials(tmp_path, "tuning").values() for trial in of]
    assert len(runs) == 5
    assert {run.status for run in runs} == {"FINISHED"}, "a trial that was stopped is done"
    listed = listing(tracking_uri(tmp_path / "mlflow.db"))
    assert sorted(row.env_steps for row in listed) == sorted(each["curve"][-1][0] for each in [best, *found])
    assert sorted(row.mean_return for row in listed) == sorted(each["curve"][-1][1] for each in [best, *found])


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
        num_steps=8_000 if method == "asha" else 24_000,  # a finished trial is not copied
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
        num_steps=24_000,
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
