"""A job of environments over Ray Train, of which everything is killed in turn while it learns: one trial, one run."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

from brayx.tracking import Trial
from tests.end_to_end.jobs import TEMPLATES, Command, brayx, goes_on, said_on_failure, setting, trials, written

OPTIONS = (
    "trainer.target_return=null", "trainer.num_steps=100000000", "trainer.checkpoint_interval_s=2",
    "trainer.where=train", "trainer.num_workers=2", "trainer.max_failures=10",
    "rollout.num_workers=4", "rollout.wait_s=10", "rollout.normalise_obs=true",
)  # fmt: skip
PARTS = (
    "ray::RolloutWorker", "ray::BufferActor", "ray::RayTrainWorker", "ray::MomentsStore", "ray::_WeightStore",
    "ray::Hub", "SplitCoordinator", "ReadReplay",
)  # fmt: skip
"""The last two are Ray Data's: what feeds the ranks, and what reads the buffer for it."""


def trial_of(command: Command) -> Trial:
    (trial,) = trials(command.folder, "ppo_env")["main"]
    return trial


@pytest.mark.chaos
def test_a_job_goes_on_learning_in_one_run_after_any_kill(tmp_path: Path) -> None:
    shutil.copy(TEMPLATES / "ppo_env.yaml", tmp_path)

    def updates() -> float:
        return trial_of(command).metrics().get("learner/updates", 0.0) if "Ray is up" in command.err else 0.0

    words = ["train", str(tmp_path / "ppo_env.yaml"), "--cluster", *setting(*OPTIONS)]
    with brayx(tmp_path, *words) as command, said_on_failure(command):
        command.until(lambda: updates() > 10 and bool(trial_of(command).checkpoints()), "it learns")
        for part in PARTS:
            (victim, *_) = command.processes(part)
            victim.send_signal(signal.SIGKILL)
            command.until(lambda pid=victim.pid: pid not in command.pids(), f"{part} is gone")
            begun = updates()
            command.until(lambda least=begun + 20: updates() > least, f"it learns again without that {part}")
        command.control_c()
        command.gone(60.0)
        trial = trial_of(command)
        assert goes_on(written(trial, "replay/env_steps"))
        assert trial.metrics()["rollout/workers_lost"] >= 1


@pytest.mark.chaos
def test_a_job_whose_train_controller_is_killed_ends_and_the_same_command_resumes_it(tmp_path: Path) -> None:
    shutil.copy(TEMPLATES / "ppo_env.yaml", tmp_path)
    words = ["train", str(tmp_path / "ppo_env.yaml"), "--cluster", *setting(*OPTIONS)]
    with brayx(tmp_path, *words) as command, said_on_failure(command):
        command.until(lambda: "Ray is up" in command.err and bool(trial_of(command).checkpoints()), "it is saved")
        (victim,) = command.processes("ray::TrainController")
        victim.send_signal(signal.SIGKILL)
        assert command.ended() == 2
        command.gone(60.0)
        assert "brayx: the learner failed: " in command.err
        first = trial_of(command)
    more = setting(f"trainer.num_steps={int(first.metrics()['replay/env_steps']) + 6000}")
    with brayx(tmp_path, *words, *more) as command, said_on_failure(command):
        assert command.ended() == 0
        assert "(resumed)" in command.err
        assert (trial_of(command).run_id, trial_of(command).status) == (first.run_id, "FINISHED")
