"""A job of environments without a door, as a user runs it: on this machine, on a cluster, and from one to the other."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from brayx.engines.base import load_weights
from brayx.tracking import Trial
from tests.end_to_end.jobs import (
    ROOT,
    TEMPLATES,
    Command,
    brayx,
    goes_on,
    numbers_of,
    said_on_failure,
    setting,
    trials,
    without_ray,
    written,
)

ENDLESS = ("trainer.target_return=null", "trainer.num_steps=100000000", "trainer.checkpoint_interval_s=2")
NORMALISED = "rollout.normalise_obs=true"


def words(folder: Path, *options: str) -> list[str]:
    shutil.copy(TEMPLATES / "ppo_env.yaml", folder)
    return ["train", str(folder / "ppo_env.yaml"), *setting(NORMALISED, *options)]


def locally(folder: Path, *options: str) -> Command:
    return brayx(folder, *words(folder, *options), environment=without_ray(folder))


def on_a_cluster(folder: Path, *options: str) -> Command:
    return brayx(folder, *words(folder, *options), "--cluster")


def trial_of_project(folder: Path, project: str, name: str) -> Trial:
    (trial,) = trials(folder, project)[name]
    return trial


def trial_of(command: Command) -> Trial:
    return trial_of_project(command.folder, "ppo_env", "main")


def saved(folder: Path) -> list[int]:
    """Steps of the trial's checkpoints. The store must not be touched before the command has made it."""
    if not any(folder.glob("mlartifacts/**/weights.npz")):
        return []
    main_trials = trials(folder, "ppo_env").get("main")
    return [checkpoint.step for checkpoint in main_trials[-1].checkpoints()] if main_trials else []


def seen(trial: Trial) -> int:
    """Observations in the moments of the newest checkpoint."""
    folder = trial.latest_checkpoint()
    assert folder is not None
    return int(np.load(folder / "normaliser.npz")["obs:count"])


def steps_of(command: Command) -> float:
    return trial_of(command).metrics().get("replay/env_steps", 0.0)


def scale(folder: Path, workers: str) -> tuple[int, str]:
    """Exit code and last words of ``brayx scale`` in another process."""
    with brayx(folder, "scale", "main", workers) as command:
        code = command.ended()
        return code, (command.out or command.err).strip().splitlines()[-1]


@dataclass
class Begun:
    """A job that was killed and interrupted on this machine.

    Attributes:
        left: processes that the killed one left.
        killed: steps and observations in its newest checkpoint.
        interrupted: the same of the one that resumed it until Ctrl-C.
        said: by the one that was interrupted.
        temporary: files that it left.
        scaled: what `brayx scale` said of it.
    """

    folder: Path
    left: list[str]
    killed: tuple[int, int]
    interrupted: tuple[int, int]
    said: str
    temporary: list[str]
    scaled: tuple[int, str]


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Begun:
    folder = tmp_path_factory.mktemp("environments")
    with locally(folder, *ENDLESS) as command, said_on_failure(command):
        command.until(lambda: bool(saved(folder)), "it is saved")
        scaled = scale(folder, "3")
        os.kill(command.process.pid, signal.SIGKILL)
        command.process.wait(timeout=240)
        command.gone()
        left = command.lines()
        killed = max(saved(folder)), seen(trial_of(command))
    with locally(folder, *ENDLESS) as command, said_on_failure(command):
        command.until(lambda: max(saved(folder)) > killed[0], "it is saved again")
        command.control_c()
        command.gone()
        assert command.process.returncode == 130
        said, temporary = command.err + command.out, command.temporary
        return Begun(folder, left, killed, (max(saved(folder)), seen(trial_of(command))), said, temporary, scaled)


@pytest.mark.cluster
def test_a_job_of_environments_is_killed_interrupted_and_resumed_without_ray(begun: Begun) -> None:
    assert begun.left == begun.temporary == []
    assert "ppo_env / main (resumed)" in begun.said
    assert "rollout.num_workers is 2: one thread steps their 16 environments" in begun.said
    assert "interrupted (the same command resumes it)" in begun.said
    assert begun.interrupted[0] > begun.killed[0]
    for steps, observations in (begun.killed, begun.interrupted):
        assert 0.5 * steps < observations < 1.5 * steps, "the moments go on with the trial"
    imported = begun.folder / "imported.txt"
    assert not imported.exists(), imported.read_text()


@pytest.mark.cluster
def test_a_job_in_one_process_has_no_workers_to_scale(begun: Begun) -> None:
    assert begun.scaled[0] == 2
    assert "has no cluster: it trains in one process" in begun.scaled[1]


@dataclass
class Killed:
    """A job that started on this machine, continued on a cluster, lost a worker, was scaled down, lost its driver, and
    was finished on this machine.

    Attributes:
        resumed: steps when it continued.
        lost: metrics after a new worker replaced the killed one.
        refused, scaled: output of `brayx scale` for three workers, and for one.
        workers: number in MLflow afterwards.
        at_kill: env steps in MLflow when the driver was killed.
        left: processes that it left.
        said: output of the command that resumed it.
        trial: its trial afterwards.
    """

    resumed: int
    lost: dict[str, float]
    refused: tuple[int, str]
    scaled: tuple[int, str]
    workers: list[float]
    at_kill: float
    left: list[str]
    said: str
    trial: Trial


@pytest.fixture(scope="module")
def killed(begun: Begun) -> Iterator[Killed]:
    folder, resumed = begun.folder, begun.interrupted[0]
    with on_a_cluster(folder, *ENDLESS) as command, said_on_failure(command):
        command.until(command.says("Ray is up"), "Ray is up")
        assert "ppo_env / main (resumed)" in command.err
        steps = steps_of(command)
        command.until(lambda: steps_of(command) > steps + 1500, "environments were stepped")
        (victim, *_) = command.processes("ray::RolloutWorker")
        victim.send_signal(signal.SIGKILL)
        command.until(
            lambda: numbers_of(trial_of(command)).get("rollout_workers_lost.died", 0) == 1, "the worker was missed"
        )
        steps = steps_of(command)
        command.until(lambda: len(command.processes("ray::RolloutWorker")) == 2, "another one is there")
        command.until(lambda: steps_of(command) > steps + 1500, "it goes on with two")
        command.until(lambda: max(saved(folder)) > resumed, "there is a checkpoint")
        lost = numbers_of(trial_of(command))
        refused, scaled = scale(folder, "3"), scale(folder, "1")
        command.until(lambda: len(command.processes("ray::RolloutWorker")) == 1, "the other one has left")
        steps = steps_of(command)
        command.until(lambda: steps_of(command) > steps + 600, "it goes on with one")
        at_kill = steps_of(command)
        workers = [value for _, value in written(trial_of(command), "rollout/workers.rollout")]
        os.kill(command.process.pid, signal.SIGKILL)
        command.process.wait(timeout=240)
        command.gone()
        left = command.lines()
    more = (f"trainer.num_steps={int(at_kill) + 2000}", "trainer.target_return=null")
    with locally(folder, *more) as command, said_on_failure(command):
        assert command.ended() == 0
        yield Killed(
            resumed, lost, refused, scaled, workers, at_kill, left, command.err + command.out, trial_of(command)
        )


@pytest.mark.cluster
def test_a_killed_worker_is_replaced_and_costs_two_fragments_at_most(killed: Killed) -> None:
    assert killed.lost["rollout_workers_lost.died"] == 1
    assert 0 < killed.lost["rollout_steps_lost.died"] <= 2 * 8 * 32
    assert "replay_dropped.bad_fragment" not in killed.lost


@pytest.mark.cluster
def test_workers_leave_when_another_command_asks_for_fewer(killed: Killed) -> None:
    assert killed.refused[0] == 2
    assert "rollout 'rollout' cannot have 3 workers, but 1, 2: mode is blocking" in killed.refused[1]
    assert killed.scaled == (0, "workers of rollout 'rollout': 1 from now on; before, 2")
    assert killed.workers[-2:] == [2, 1]


@pytest.mark.cluster
def test_a_killed_driver_leaves_no_process(killed: Killed) -> None:
    assert killed.left == []


@pytest.mark.cluster
def test_a_trial_goes_from_this_machine_to_a_cluster_and_back_in_the_same_run(killed: Killed) -> None:
    assert "(resumed)" in killed.said
    for metric in ("replay/env_steps", "learner/updates"):
        assert goes_on(written(killed.trial, metric)), metric
    assert seen(killed.trial) > 0.5 * killed.at_kill, "the moments of every part are in there"
    assert killed.trial.status == "FINISHED"
    assert killed.trial.metrics()["replay/env_steps"] > killed.at_kill
    assert "finished after" in killed.said
    assert "champion: ppo_env version 1" in killed.said


@pytest.mark.parametrize(
    "cluster", [False, pytest.param(True, marks=pytest.mark.cluster)], ids=["on this machine", "on a cluster"]
)
def test_an_unknown_environment_ends_the_command_before_anything_starts(tmp_path: Path, cluster: bool) -> None:
    start = on_a_cluster if cluster else locally
    with start(tmp_path, "rollout.env=CartPoll-v1") as command:
        assert command.ended() == 2
    assert "Ray is up" not in command.err
    assert "rollout 'rollout' (CartPoll-v1): no environment 'CartPoll-v1'" in command.err.strip().splitlines()[-1]


BREAKING = """
import gymnasium

class Breaking(gymnasium.Wrapper):
    steps = 0

    def step(self, action):
        Breaking.steps += 1
        if Breaking.steps > 2000:
            raise ValueError("the pole is broken")
        return super().step(action)

def make(name, config):
    return Breaking(gymnasium.make("CartPole-v1"))
"""


def test_an_environment_that_always_raises_ends_the_training_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "breaking.py").write_text(BREAKING)
    overrides = ("rollout.env=null", "rollout.module=breaking", "rollout.func=make", "rollout.max_failures=1")
    with locally(tmp_path, *ENDLESS, *overrides) as command, said_on_failure(command):
        assert command.ended() == 2
        last = command.err.strip().splitlines()[-1]
        command.gone()
    assert "rollout 'rollout' (breaking.make): the environment raised ValueError in step: the pole is broken" in last
    assert "breaking.py:10" in last


PPO = (
    "--env Pendulum-v1 --num-workers 2 --timesteps 4000 --lr 3e-4 --gamma 0.99 --gae-lambda 0.95 --clip-param 0.2 "
    "--value-coef 0.5 --entropy-coef 0.01 --max-grad-norm 0.5 --device cpu --distributed true --seed 0 "
    "--save-interval 2 --log-interval 2 --course course.json --set engine=torch --set vectorization=sync "
    "--set env_options.g=0.0 --set network.lstm=8 --set normalise_obs=true --set normalise_value=true "
    "--set clip_value=0.5"
)
BATCH = 2 * 8 * 64
"""Transitions of an update by the defaults: workers, environments of each, steps."""


@pytest.mark.cluster
def test_ppo_over_a_cluster_from_its_command_line(tmp_path: Path) -> None:
    words = ["python", "-m", "pipelines.ppo", *PPO.split()]  # which runs `brayx ppo`
    with Command(words, tmp_path, {"PYTHONPATH": str(ROOT)}) as command, said_on_failure(command):
        assert command.ended() == 0
        command.gone()
        result = json.loads(command.out.strip().splitlines()[-1])
        said = command.err
    assert list(result) == ["env_steps", "seconds", "steps_per_s", "return_mean", "seconds_to_target", "trial"]
    # Blocking workers are a batch ahead of the learner at most, and what they pushed is counted once.
    assert 4000 <= result["env_steps"] <= 4000 + 2 * BATCH
    assert result["seconds_to_target"] is None
    trial = trial_of_project(tmp_path, "Pendulum-v1", "ppo Pendulum-v1 seed 0")
    assert (trial.run_id, trial.status) == (result["trial"], "FINISHED")
    assert trial.metrics()["learner/updates"] == 4
    assert trial.metrics()["replay/env_steps"] == result["env_steps"]
    # Every observation was seen by the moments, once: those of all workers are in the checkpoint.
    assert 0.5 * result["env_steps"] < seen(trial) < 1.5 * result["env_steps"]
    assert "memory.inputs.weight" in load_weights(trial.latest_checkpoint() / "weights.npz")
    lines = [line for line in said.splitlines() if "env steps  return" in line]
    assert 1 <= len(lines) <= 2, "a line every second update, of four"
    points = json.loads((tmp_path / "course.json").read_text())
    assert points
    assert [steps for _, steps, _, _ in points] == sorted(steps for _, steps, _, _ in points)
    assert points[-1][3] == pytest.approx(result["return_mean"], abs=1e-3)


DISTRIBUTED = """
import json
from brayx.commands.distributed import train_distributed
from brayx.local.training import Training

training = Training(num_envs=16, unroll_length=32, learning_rate=1e-3, num_steps=60_000, target_return=60.0,
    target_games=20, normalise_obs=True, evaluation_episodes=4)
result, trial, _ = train_distributed("CartPole-v1", training=training, num_workers=2, cluster=None)
print(json.dumps({
    "reason": result.reason, "env_steps": result.env_steps, "updates": result.updates,
    "seconds_to_target": result.seconds_to_target, "return_mean": result.return_mean,
    "seen": int(result.normaliser["obs:count"]), "curve": len(result.curve), "trial": trial.name,
    "episodes": len(result.evaluation.episodes), "mean": result.evaluation.mean,
}))
"""


@pytest.mark.cluster
def test_one_call_trains_a_job_and_gives_what_training_without_one_gives(tmp_path: Path) -> None:
    with Command(["python", "-c", DISTRIBUTED], tmp_path, without_ray(tmp_path)) as command, said_on_failure(command):
        assert command.ended() == 0
        result = json.loads(command.out.strip().splitlines()[-1])
    assert result["reason"] == "target_return"
    assert result["seconds_to_target"] > 0
    assert result["return_mean"] >= 60
    assert result["env_steps"] >= 16 * 32 * result["updates"] * 0.9
    # Every observation was seen by the moments, once: those of both workers are in the checkpoint.
    assert 0.5 * result["env_steps"] < result["seen"] < 1.5 * result["env_steps"]
    assert result["curve"] > 0
    assert result["episodes"] == 4
    assert result["mean"] > 30, "the weights and moments of the checkpoint play"


SOFT = """
import json
from brayx.algorithms.sac import SACConfig
from brayx.commands.distributed import train_distributed
from brayx.local.training import Training

training = Training(num_envs=4, unroll_length=4, sampler="uniform", batch_size=64, capacity=4096, min_columns=64,
    samples_per_insert=8.0, num_steps=2_000, evaluation_episodes=2)
result, trial, _ = train_distributed("Pendulum-v1", SACConfig(n_step=2), training, num_workers=1, cluster=None)
(obs,) = result.forward_args
print(json.dumps({
    "reason": result.reason, "updates": result.updates, "alpha": trial.metrics()["learner/alpha"],
    "worth": list(result.module.critic(obs, result.module(obs)["tanh_mean"]).shape),
    "episodes": len(result.evaluation.episodes),
}))
"""


@pytest.mark.cluster
def test_sac_learns_with_the_networks_that_are_made_for_it(tmp_path: Path) -> None:
    with Command(["python", "-c", SOFT], tmp_path, without_ray(tmp_path)) as command, said_on_failure(command):
        assert command.ended() == 0
        result = json.loads(command.out.strip().splitlines()[-1])
    assert result["reason"] == "num_steps"
    assert result["updates"] == -(-2_000 * 8 // (64 * 4)), "every sampled transition counts"
    assert 0.9 < result["alpha"] < 1, "it has begun to fall"
    assert (result["worth"], result["episodes"]) == ([2, 2], 2)
