"""PPO's two classes: their defaults, what their arguments become, and what they refuse."""

from __future__ import annotations

import dataclasses
import sys

import pytest

from brayx.commands.ppo import configs
from brayx.errors import ConfigError, EnvironmentFailed
from brayx.local.training import as_job
from pipelines.parallel_ppo import DistributedPPO, ParallelPPO

PROMISED = {
    "env_name": "Pendulum-v1", "epochs": 10, "mini_batch_size": 64, "lr": 3e-4, "gamma": 0.99, "gae_lambda": 0.95,
    "clip_param": 0.2, "value_coef": 0.5, "entropy_coef": 0.01, "max_grad_norm": 0.5, "seed": 0, "device": "cpu",
    "num_envs": 8,
}  # fmt: skip


@pytest.mark.parametrize(
    ("made", "more"),
    [(ParallelPPO, {"num_steps": 2048}), (DistributedPPO, {"steps_per_worker": 512, "sync_mode": "blocking"})],
)
def test_the_promised_arguments_have_the_promised_defaults(made, more):
    given = made(env_name="Pendulum-v1")
    assert PROMISED.items() | more.items() <= dataclasses.asdict(given).items()
    assert given == made(**PROMISED, **more)


def test_the_arguments_become_the_options_of_the_one_training():
    trainer = ParallelPPO(env_name="CartPole-v1", num_envs=4, num_steps=128, lr=1e-3, epochs=3, mini_batch_size=32)
    algorithm, training = configs(trainer.options)
    assert (algorithm.epochs, algorithm.minibatch_size) == (3, 32)
    assert (training.num_envs, training.unroll_length, training.learning_rate) == (4, 128, 1e-3)


@pytest.mark.parametrize(("sync_mode", "mode"), [("blocking", "blocking"), ("non_blocking", "non_blocking")])
def test_workers_become_those_of_a_job(sync_mode, mode):
    trainer = DistributedPPO(
        "CartPole-v1", num_workers=2, num_envs=4, steps_per_worker=256, sync_mode=sync_mode, buffer_size=2_000
    )
    chosen = trainer.options
    job = as_job("CartPole-v1", *configs(chosen), num_workers=2, buffer_size=chosen["buffer_size"])
    assert (job["rollout"]["num_workers"], job["rollout"]["num_envs"], job["rollout"]["mode"]) == (2, 4, mode)
    assert (job["buffer"]["unroll_length"], job["buffer"]["batch_size"], job["buffer"]["size"]) == (64, 8, 3)


@pytest.mark.parametrize(
    ("made", "arguments", "message"),
    [
        (ParallelPPO, {"env_name": "CartPoll-v1"}, "nearest known id is 'CartPole-v1'"),
        (ParallelPPO, {"device": "tpu"}, "device is 'tpu', expected cpu or cuda"),
        (ParallelPPO, {"lr": 0}, "^lr is 0: Input should be greater than 0"),
        (ParallelPPO, {"num_steps": 0}, "^num_steps is 0: Input should be greater than or equal to 1"),
        (ParallelPPO, {"mini_batch_size": 0}, "^mini_batch_size is 0: "),
        (DistributedPPO, {"sync_mode": "sometimes"}, "expected blocking or non_blocking"),
        (DistributedPPO, {"steps_per_worker": 100}, "expected a multiple of num_envs, 8"),
    ],
)
def test_wrong_arguments_are_refused_at_once_by_their_names(made, arguments, message):
    with pytest.raises(ConfigError, match=message):
        made(**{"env_name": "CartPole-v1", **arguments})


FAILING = """
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv

class Failing(CartPoleEnv):
    steps = 0

    def step(self, action):
        Failing.steps += 1
        if Failing.steps > 5_000:
            raise RuntimeError("the game is broken")
        return super().step(action)

gymnasium.register("Failing-v0", Failing)
"""


@pytest.mark.cluster
@pytest.mark.slow  # starts MLflow in a separate process
def test_a_trial_that_fails_is_failed_in_mlflow_with_what_it_had(tmp_path, tracking_db, monkeypatch, capsys):
    from mlflow.tracking import MlflowClient

    (tmp_path / "failing.py").write_text(FAILING)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "failing", raising=False)
    trainer = ParallelPPO("failing:Failing-v0", num_steps=256, epochs=1, log_dir=tracking_db)
    with pytest.raises(EnvironmentFailed, match="the game is broken"):
        trainer.train(total_timesteps=10_000, log_interval=1, save_interval=50)
    assert "update 2: " in capsys.readouterr().err
    client = MlflowClient(tracking_db)
    (project,) = client.search_experiments(filter_string="name LIKE 'failing%'")
    (trial,) = client.search_runs([project.experiment_id])
    assert trial.info.status == "FAILED"
    assert trial.data.metrics["replay/env_steps"] >= 2_048
