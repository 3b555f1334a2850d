"""A demo that is cut short: it plays and draws all the same, and says that its champion is not good enough.

On a cluster its model acts in a deployment of its own.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from mlflow import MlflowClient

from brayx.gamecore.auth import new_key
from tests.end_to_end.jobs import FREE_PORTS, brayx, said_on_failure, setting, trials, without_ray

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("cluster", [False, pytest.param(True, marks=pytest.mark.cluster)], ids=["local", "ray"])
def test_a_demo_without_a_good_champion_fails_and_says_why(tmp_path: Path, cluster: bool) -> None:
    # It learns next to nothing: after 1,500 steps at the demo's own rate one in many plays to the end by luck.
    keys = tmp_path / "keys.txt"
    new_key(keys)  # of the job's own games, too
    options = *FREE_PORTS, "actor.gamecores.0.num=2", "trainer.num_steps=1500", "trainer.learning_rate=1e-9"
    words = ["demo", "--games", "4", *setting(*options, f"actor.keys_file={keys}")]
    environment = without_ray(tmp_path)
    if cluster:
        words += ["--cluster", *setting("model.placement=remote")]
        # As a user has it: no token for Ray in the environment, a home folder where Ray may write its own.
        environment = {"HOME": str(tmp_path), "RAY_AUTH_MODE": None, "RAY_AUTH_TOKEN": None}
    with brayx(tmp_path, *words, environment=environment) as command, said_on_failure(command):
        assert command.ended() == 1
        assert "champion: cartpole version 1" in command.out
        assert "over 4 games" in command.out
        assert "is below 475" in command.out.splitlines()[-1]
        assert "next:" not in command.out
        command.gone()
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    (trial,) = trials(tmp_path)["main"]
    assert trial.status == "FINISHED"
    assert "curve.png" in [file.path for file in MlflowClient(trial.uri).list_artifacts(trial.run_id)]
    numbers = trial.metrics()
    assert numbers["replay/env_steps"] >= 1500
    if cluster:
        assert numbers["session/ended"] == numbers["session/started"] > 0, "with what replicas sent when they ended"
        assert numbers["learner/policy_version"] > 3
        assert numbers["learner/lag_versions"] < 4, "the deployment acts with the weights that the learner publishes"
