"""`brayx.Trainer`: iterations, checkpoints, evaluation and actions between them, and jobs."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

import brayx
from brayx.algorithms.ppo import PPOConfig
from brayx.errors import ConfigError, EnvironmentFailed
from brayx.jobs.config import JobConfig
from brayx.local.train import train_local
from brayx.local.trainer import Trainer
from brayx.local.training import Training, as_job, of_job
from tests.unit.rollout.worlds import BoxCounting, Counting

QUICK = {"num_envs": 4, "unroll_length": 8, "num_steps": 200, "engine": "torch"}


def weights(trainer):
    return trainer._running.module.state_dict()


def test_it_learns_as_train_local_does():
    with Trainer("CartPole-v1", epochs=2, **QUICK) as trainer:
        results = list(trainer)
        alone = train_local("CartPole-v1", PPOConfig(epochs=2), Training(**QUICK))
        for name, weight in alone.module.state_dict().items():
            assert torch.equal(weight, weights(trainer)[name])
    assert [result["iteration"] for result in results] == list(range(1, len(results) + 1))
    assert [result["env_steps"] for result in results] == sorted(result["env_steps"] for result in results)
    assert results[-1]["env_steps"] == alone.env_steps
    assert results[-1]["return_mean"] == alone.return_mean
    assert math.isfinite(results[-1]["policy_loss"])


def test_a_call_is_one_iteration_also_beyond_the_last():
    with Trainer("Pendulum-v1", **QUICK | {"num_steps": 32}) as trainer:
        assert trainer.train()["updates"] == 1
        assert list(trainer) == []
        assert trainer.train()["updates"] == 2


@pytest.mark.gpu
@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_a_trainer_on_a_gpu_evaluates_and_acts_and_its_checkpoint_continues_on_the_cpu(tmp_path, env):
    sac = {"algorithm": "sac", "sampler": "prioritised", "min_columns": 8, "batch_size": 8, "samples_per_insert": 8}
    options = QUICK | ({**sac, "num_steps": 2000} if env == "Pendulum-v1" else {})
    with Trainer(env, use_gpu=True, blocking=False, **options) as trainer:
        results = [trainer.train() for _ in range(6)]
        assert results[-1]["updates"] >= 4
        assert {weight.device.type for weight in weights(trainer).values()} == {"cuda"}
        saved = trainer.save(tmp_path / "checkpoint")
        obs = np.full(trainer._running.envs.single_observation_space.shape, 0.1, np.float32)
        before, mean = trainer.act(obs), trainer.evaluate(2).mean
    with Trainer.restore(saved, use_gpu=False) as again:
        assert np.array_equal(again.act(obs), before)
        assert again.evaluate(2).mean == mean
        for name, weight in weights(trainer).items():
            assert torch.equal(weight.cpu(), weights(again)[name])
        assert again.train()["env_steps"] > 0


@pytest.mark.parametrize("blocking", [True, False])
def test_what_ends_it_ends_a_for_loop(blocking):
    with Trainer(Counting, blocking=blocking, target_return=-1e9, target_games=1, **QUICK) as trainer:
        results = list(trainer)
        assert trainer.curve
        assert len(results) < 7
        assert results[-1]["return_mean"] == trainer.curve[-1].return_mean


def test_a_checkpoint_continues(tmp_path):
    with Trainer("CartPole-v1", "impala", gamma=0.9, normalise_obs=True, network={"hidden": [8]}, **QUICK) as trainer:
        trainer.train()
        trainer.train()
        saved = trainer.save(tmp_path / "checkpoint")
        obs = np.full(4, 0.1, np.float32)
        before = trainer.act(obs), trainer.evaluate(4).mean
    with Trainer.restore(saved) as again:
        assert (again.act(obs), again.evaluate(4).mean) == before
        for name, weight in weights(trainer).items():
            assert torch.equal(weight, weights(again)[name])
        assert again._running.algorithm.gamma == 0.9
        assert again.train()["env_steps"] > 64
        again.save(saved)
    with Trainer.restore(saved, learning_rate=0.5) as other:
        assert other._running.training.learning_rate == 0.5
        assert other._running.algorithm.name == "impala"


def test_a_checkpoint_of_an_earlier_version_has_former_options(tmp_path):
    with Trainer("ppo_env.yaml", num_envs=2, unroll_length=8, num_steps=64) as trainer:
        trainer.train()
        saved = trainer.save(tmp_path / "checkpoint")
    about = json.loads((saved / "meta.json").read_text())
    made_with = about["made_with"]
    made_with["options"]["scale_actions"] = made_with["job"]["rollout"]["scale_actions"] = True
    made_with["job"]["buffer"]["max_pending"] = 4096
    (saved / "meta.json").write_text(json.dumps(about))
    with Trainer.restore(saved) as again:
        assert again.train()["env_steps"] > 16
    made_with["options"]["scale_actions"] = False
    (saved / "meta.json").write_text(json.dumps(about))
    with pytest.raises(ConfigError, match=r"scale_actions is false, .*no such option"):
        Trainer.restore(saved)


def test_a_checkpoint_has_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with Trainer(Counting, **QUICK) as trainer:
        trainer.train()
        steps = trainer._running.run.env_steps
        saved = trainer.save()
        assert saved == tmp_path / f"checkpoint-{steps}"
        with pytest.raises(ConfigError, match="no checkpoint"):
            trainer.save("mine")
    with pytest.raises(ConfigError, match="no checkpoint"):
        Trainer.restore("mine")
    with pytest.raises(ConfigError) as refused:
        Trainer.restore(saved)
    assert refused.value.details["key"] == "env"
    with Trainer.restore(saved, Counting) as again:
        assert again.train()["env_steps"] > steps
    assert (tmp_path / "mine" / "notes.txt").read_text() == "keep"


def test_evaluating_and_acting_do_not_disturb_training():
    with Trainer("CartPole-v1", **QUICK) as trainer, Trainer("CartPole-v1", **QUICK) as other:
        first = trainer.train()
        assert len(trainer.evaluate(games=3).episodes) == 3
        assert trainer.act(np.zeros(4)) in (0, 1)
        assert first["env_steps"] == trainer._running.run.env_steps
        other.train()
        torch.manual_seed(1)
        trainer.train()
        torch.manual_seed(1)
        other.train()
        for name, weight in weights(trainer).items():
            assert torch.equal(weight, weights(other)[name])


def test_a_continuous_action_is_the_environments():
    with Trainer("Pendulum-v1", **QUICK) as trainer:
        action = trainer.act(np.array([1, 0, 0]))
        assert action.shape == (1,)
        assert action.dtype == np.float32
        assert trainer.act(np.array([1, 0, 0]), greedy=False) != action
        with pytest.raises(ConfigError, match="obs: expected float32"):
            trainer.act(np.zeros(4))


def test_a_memory_begins_again_with_a_game():
    with Trainer("CartPole-v1", network={"lstm": 4}, **QUICK) as trainer:
        player = trainer._playing()
        obs = np.full(4, 0.1, np.float32)
        trainer.act(obs, start=True)
        (first, _) = (leaf.copy() for leaf in player._memory)
        trainer.act(obs)
        assert not np.array_equal(player._memory[0], first)
        trainer.act(obs, start=True)
        assert np.array_equal(player._memory[0], first)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("CartPole-v1",), {"learning_rat": 1}, "there is no option 'learning_rat'; nearest is 'learning_rate'"),
        (("CartPole-v1",), {"n_steps": 64}, "there is no option 'n_steps'; use 'unroll_length'"),
        (("CartPole-v1",), {"clip_range": 0.2}, "use 'clip_param'"),
        (("CartPole-v1",), {"net_arch": [64]}, r'use network={"hidden": …}, or --set network.hidden=…'),
        (("Pendulum-v1", "sac"), {"ent_coef": "auto"}, "use 'alpha'"),
        (("CartPole-v1",), {"gamma": 7}, "gamma is 7"),
        (("CartPoll-v1",), {}, "nearest known id is 'CartPole-v1'"),
        (("CartPole-v1", "pppo"), {}, "algorithm is 'pppo'"),
        (("ppo_env.yaml", "ppo"), {}, "a job has its own algorithm"),
        (("cartpole.yaml",), {}, "expected no actor"),
        (("nowhere.yaml",), {}, "nowhere.yaml"),
    ],
)
def test_wrong_arguments_are_refused(arguments, options, message):
    with pytest.raises(ConfigError, match=message):
        Trainer(*arguments, **options)


def test_a_closed_trainer_is_refused():
    trainer = Trainer(Counting, **QUICK)
    trainer.close()
    for use in (trainer.train, trainer.save, trainer.evaluate):
        with pytest.raises(ConfigError, match="is closed"):
            use()


def test_an_environment_that_raises_is_one_error_and_the_next_iteration_goes_on():
    class Breaking(BoxCounting):
        broken = True

        def step(self, action):
            if Breaking.broken:
                raise RuntimeError("broken")
            return super().step(action)

    with Trainer(Breaking, **QUICK) as trainer:
        with pytest.raises(EnvironmentFailed, match="broken"):
            trainer.train()
        Breaking.broken = False
        assert trainer.train()["env_steps"] > 0


def test_a_job_with_a_rollout_and_its_checkpoint(tmp_path):
    options = {"num_envs": 4, "unroll_length": 8, "num_steps": 64, "epochs": 1}
    with Trainer("ppo_env.yaml", **options) as trainer:
        assert trainer.name == "ppo_env"
        assert [result["env_steps"] for result in trainer] == [32, 64]
        saved = trainer.save(tmp_path / "checkpoint")
    with Trainer.restore(saved) as again:
        assert again._running.algorithm.epochs == 1
        assert again.train()["env_steps"] == 96


MODEL = """
from brayx.nets.policy import policy_for
import numpy as np

def build_model(name, config):
    return policy_for(np.zeros(4, np.float32), num_actions=config["own"]["actions"])
"""
JOB = """
project: mine
trial: one
own: {kind: config, actions: 2}
model: {kind: model, module: my_own_model, engine: torch}
rollout: {kind: rollout, env: CartPole-v1, model: model, buffer: buffer, num_envs: 2, mode: blocking}
buffer: {kind: buffer, batch_size: 4, unroll_length: 8}
trainer: {kind: trainer, model: model, buffers: [buffer], num_steps: 64}
"""


def test_a_job_with_a_model_of_its_own_and_what_a_trainer_has_not(tmp_path):
    (tmp_path / "my_own_model.py").write_text(MODEL)
    (tmp_path / "job.yaml").write_text(JOB)
    with Trainer(tmp_path / "job.yaml") as trainer:
        assert trainer._running.training.num_envs == 4, "a batch is a run of all environments"
        assert len(list(trainer)) == 2
        assert trainer.act(np.zeros(4)) in (0, 1)
    (tmp_path / "job.yaml").write_text(JOB.replace("num_steps: 64", "num_steps: 64, initial_weights: runs:/x"))
    with pytest.raises(ConfigError, match=r"no trainer\.initial_weights") as refused:
        Trainer(tmp_path / "job.yaml")
    assert refused.value.details["key"] == "initial_weights"


@pytest.mark.parametrize("algorithm", ["ppo", "sac"])
def test_a_job_has_the_options_that_it_was_made_of(algorithm):
    config = brayx.local.training.with_options(brayx.algorithms.build.algorithm_options(algorithm), {"gamma": 0.9})[0]
    training = Training(
        num_envs=8, num_steps=20_000, learning_rate=0.1, seed=3, engine="torch", env_options={"g": 9.0},
        target_return=-5.0, normalise_obs=True, capacity=5_120, min_columns=10,
    )  # fmt: skip
    components = as_job("Pendulum-v1", config, training, num_workers=2)
    env, algorithm, model, options = of_job(JobConfig.of({"project": "pendulum", "trial": "one", **components}, ""))
    assert (env, algorithm, model) == ("Pendulum-v1", config, None)
    settled = training.of(config)
    again = Training(**options).of(config)
    table = settled.sampler != "fifo"
    apart = {"network", "batch_size"} | ({"blocking"} if table else {"capacity", "min_columns"})
    assert {name for name in Training.model_fields if getattr(again, name) != getattr(settled, name)} <= apart
