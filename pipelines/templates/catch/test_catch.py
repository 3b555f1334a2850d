"""Does the project work? `pytest` says so in a minute or two: the rules hold, the job is right, it trains."""

import random
import subprocess
import sys
from pathlib import Path

import mlflow
import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # wherever pytest is started, and whatever settings it finds above

from catch_features import SIZE, encode  # noqa: E402
from catch_game import BALLS, Catch  # noqa: E402

(JOB,) = HERE.glob("*.yaml")


def test_a_game_has_ten_balls_and_each_counts():
    game, rewards = Catch(random.Random(0)), []
    while not game.over:
        assert encode(game.see()).shape == (SIZE,)
        rewards.append(game.move(0))
    assert sum(abs(reward) for reward in rewards) == BALLS


def brayx(*arguments):
    command = [sys.executable, "-m", "brayx", *arguments]
    return subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=300)


def test_the_job_is_right():
    done = brayx("check", JOB.name)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_it_trains(tmp_path):
    options = ("trainer.num_steps=4000", "actor.port=0", "actor.native_port=0", "actor.tcp_port=0")  # 0: a free port
    few = [word for option in options for word in ("--set", option)]
    done = brayx("train", JOB.name, "--tracking", str(tmp_path), *few)
    assert done.returncode == 0, done.stderr
    if "name: bc" not in JOB.read_text():
        mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'mlflow.db'}")
        runs = mlflow.search_runs(search_all_experiments=True, output_format="list")
        assert any("learner/policy_loss" in run.data.metrics for run in runs), "nothing was reinforced"
