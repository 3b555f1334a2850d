"""Kills processes of a running training job, one kind at a time: training continues to its end.

Each kill loses only this: an actor replica its sessions (their gamecores restart), the learner its work since the
newest checkpoint, the hub the numbers of the last second, the weight store nothing that the learner does not publish
again, the buffer its waiting fragments.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.end_to_end.jobs import (
    FREE_PORTS,
    ONE_GAME_EACH_OVER_WS,
    Command,
    brayx,
    goes_on,
    job_folder,
    metrics_of,
    said_on_failure,
    setting,
    trials,
    written,
)

pytestmark = pytest.mark.chaos

NUM_GAMES = 4
NUM_STEPS = 12_000
KILL_AFTER = 1_500
"""Env steps before the kill: acting, learning and publishing are all at work."""


def start(folder: Path, where: str) -> Command:
    options = [
        *FREE_PORTS, *ONE_GAME_EACH_OVER_WS, f"actor.gamecores.0.num={NUM_GAMES}",
        f"trainer.where={where}", f"trainer.num_steps={NUM_STEPS}",
        "trainer.target_return=null", "trainer.checkpoint_interval_s=1.0",
    ]  # fmt: skip
    return brayx(folder, "train", str(job_folder(folder)), "--cluster", *setting(*options))


@pytest.mark.parametrize(
    ("victim", "where"),
    [
        ("ray::ServeReplica:", "process"),
        ("ray::RayTrainWorker", "train"),
        ("ray::Hub", "process"),
        ("ray::_WeightStoreActor", "process"),
        ("ray::BufferActor", "process"),
        ("ray::BufferActor", "train"),
        ("ray::_DirectoryActor", "process"),
    ],
)
def test_training_survives_a_kill(tmp_path: Path, victim: str, where: str) -> None:
    with start(tmp_path, where) as command, said_on_failure(command):
        command.until(lambda: metrics_of(command).get("env_steps", 0) > KILL_AFTER, "training was under way")
        if "Train" in victim:
            command.until(lambda: bool(trials(tmp_path)["main"][0].checkpoints()), "a checkpoint was saved")
        before = command.pids(victim)
        assert before, f"no process {victim!r}"
        started = metrics_of(command)["sessions_started"]
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        command.until(lambda: bool(command.pids(victim) - before), f"{victim} ran again")
        assert command.ended(600.0) == 0, command.err
        command.gone()
    (trial,) = trials(tmp_path)["main"]
    assert trial.status == "FINISHED"
    assert trial.checkpoints()[-1].step >= NUM_STEPS
    numbers = trial.metrics()
    assert numbers["replay/env_steps"] >= NUM_STEPS - KILL_AFTER
    if "Replica" in victim:
        assert numbers["session/started"] >= started + NUM_GAMES, "no game has started anew after the kill"
    assert goes_on(written(trial, "learner/policy_version")), "env steps and versions go on where they were"
