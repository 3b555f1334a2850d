"""A killed training continues as if it had not been killed: real environments, real normalisers, every schedule."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from brayx.algorithms.ppo import PPOConfig
from brayx.algorithms.sac import SACConfig
from brayx.engines.scaling import learned
from brayx.nets.policy import NetworkConfig, policy_for
from brayx.nets.soft import SoftActorCritic
from brayx.rollout.collector import Collector
from brayx.rollout.envs import make_envs
from brayx.rollout.policy import RolloutPolicy
from brayx.trainer.config import TrainerConfig
from brayx.trainer.loop import LearnerLoop
from tests.unit.trainer.parts import Folders, Numbers, Weights

ENVS, STEPS, RUNS = 4, 16, 10
KILLED, SAVED_EVERY = 8, 3
FROM = KILLED // SAVED_EVERY * SAVED_EVERY
"""Updates in the newest checkpoint; later ones are lost and repeated."""
SCHEDULE = {"learning_rate_schedule": "cosine", "learning_rate_warmup": 0.3, "learning_rate_final": 0.1}
NETWORK = NetworkConfig(hidden=[16])
OBS = np.zeros(3, np.float32)


def ppo():
    """PPO with everything it keeps between updates, and shuffled minibatches."""
    config = PPOConfig(
        **SCHEDULE, epochs=3, minibatch_size=16, normalise_value=True, kl_target=0.01, kl_reaction="learning_rate"
    )
    return config, policy_for(OBS, action_size=1, network=NETWORK)[0]


def ppo_with_magnet():
    return PPOConfig(**SCHEDULE, epochs=3, minibatch_size=16, magnet_coef=0.3, magnet_decay=0.7), policy_for(
        OBS, action_size=1, network=NETWORK
    )[0]


def sac():
    return SACConfig(**SCHEDULE, tau=0.1, n_step=2), SoftActorCritic(OBS, 1, NETWORK)


class Killed(BaseException):
    pass


def train(keeper, make, runs, seed):
    """Learns from its own play, in several runs; returns the last weights, moments and metrics.

    Checkpoints do not save environments, so each run resets them with its own seed; None means that the run is killed.
    """
    torch.manual_seed(seed)
    algorithm, module = make()
    policy = RolloutPolicy(module, (OBS[None],), engine="torch")
    collector = Collector(
        make_envs("Pendulum-v1", ENVS), policy, STEPS, seed=seed, normalise_obs=True, normalise_reward=True
    )
    weights, numbers = Weights(), Numbers()

    def publisher(newest):
        weights.version = newest
        return weights

    def played():
        for run in runs:
            if run is None:
                raise Killed
            collector.begin_again(run)
            version, _, newest = weights.published[-1]
            collector.load(newest, version)
            yield dict(collector.collect().arrays)

    options = {"learning_rate": 1e-2, "num_steps": RUNS * ENVS * STEPS, "checkpoint_interval": SAVED_EVERY}
    try:
        summary = LearnerLoop(
            TrainerConfig(model="model", buffers=["buffer"], algorithm=algorithm, **options),
            module,
            (OBS[None],),
            batches=played(),
            publisher=publisher,
            numbers=numbers,
            keeper=keeper,
            normaliser=collector,
        ).run()
    finally:
        collector.close()
    return summary, learned(weights.published[-1][2]), collector.state_dict(), numbers.samples


@pytest.mark.parametrize("make", [ppo, ppo_with_magnet, sac])
def test_a_killed_training_resumes_bit_for_bit(tmp_path, make):
    runs = list(range(100, 100 + RUNS))
    whole, whole_weights, whole_moments, whole_numbers = train(Folders(tmp_path / "whole"), make, runs, seed=0)
    assert (whole.reason, whole.updates) == ("num_steps", RUNS)

    keeper = Folders(tmp_path / "killed")
    with pytest.raises(Killed):
        train(keeper, make, [*runs[:KILLED], None], seed=0)
    assert [step for step, _, _ in keeper.saved] == [ENVS * STEPS * updates for updates in (3, 6)]
    summary, weights, moments, numbers = train(keeper, make, runs[FROM:], seed=99)
    assert (summary.resumed, summary.reason) == (True, "num_steps")
    assert (summary.env_steps, summary.updates) == (whole.env_steps, whole.updates)

    assert set(weights) == set(whole_weights)
    for name, array in whole_weights.items():
        np.testing.assert_array_equal(weights[name], array)
    assert {name.split(":")[0] for name in moments} == {"obs", "reward"}
    for name, array in whole_moments.items():
        np.testing.assert_array_equal(moments[name], array)
    for name in ("learning_rate", "loss", "grad_norm"):
        assert numbers[name] == whole_numbers[name][FROM:]
    assert len(set(whole_numbers["learning_rate"])) == RUNS, "the schedule rises and falls"
