"""Searches with real trials: a copy plays as the one ahead, on both hosts; on Ray ASHA stops who is behind.

ASHA on the local host: `tests/end_to_end/test_tune.py`.
"""

from __future__ import annotations

from pathlib import Path

import mlflow
import pytest
from ray.util.placement_group import placement_group, remove_placement_group

from pipelines.search import Domain
from pipelines.tune import tune


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
    source, copy = sorted(found.trials, key=lambda outcome: outcome.number)
    after, origin = copy.clones[0]
    assert origin == source.number
    (_, without), (steps, mean) = copy.curve[after - 1 : after + 1]
    before = [point for point in source.curve if point[0] < steps]
    assert before, "it goes on from where the other one was"
    # A hundred games of a policy that is not learned further vary by a tenth.
    assert min(mean, before[-1][1]) > 1.5 * without
    assert mean > 0.7 * before[-1][1]
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


def test_asha_on_ray_stops_who_is_behind(ray_cluster: str, tmp_path: Path) -> None:
    """One after the other: the first learns, and the second, which learns nothing, is stopped at its first look."""
    others = placement_group([{"CPU": 3}])  # leaves one CPU
    assert others.wait(30)
    try:
        found = tune(
            "CartPole-v1",
            {"learning_rate": Domain("choice", (1e-9, 1e-3)), "num_envs": 8, "unroll_length": 64},
            num_trials=2,
            num_steps=12_000,
            interval_steps=4_000,
            seed=7,
            tracking=str(tmp_path),
            cluster="",
            say=lambda line: None,
        )
    finally:
        remove_placement_group(others)
    assert {outcome.error for outcome in found.trials} == {""}
    ahead, behind = found.trials
    assert [outcome.options["learning_rate"] for outcome in (ahead, behind)] == [1e-3, 1e-9], "the draws of this seed"
    assert ahead.curve[-1][0] >= 12_000
    assert [4_000 <= steps < 12_000 for steps, _ in behind.curve] == [True]
