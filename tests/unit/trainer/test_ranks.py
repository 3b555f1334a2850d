"""Several ranks, or several parts of a batch, learn the same as one from the whole: gloo processes, no Ray."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch

from brayx.algorithms.bc import BCConfig
from brayx.algorithms.impala import ImpalaConfig
from brayx.algorithms.mappo import MAPPOConfig
from brayx.algorithms.mixed import MixedConfig
from brayx.algorithms.ppo import PPOConfig
from brayx.algorithms.sac import SACConfig
from brayx.engines.torch import module_weights
from brayx.nets.central import CentralisedPolicy
from brayx.nets.encoders import Numbers as Flat
from brayx.nets.mlp import ActorCritic
from brayx.nets.normaliser import Normalised
from brayx.nets.policy import NetworkConfig
from brayx.nets.soft import SoftActorCritic
from brayx.trainer.config import TrainerConfig
from brayx.trainer.loop import LearnerLoop
from brayx.trainer.ranks import Processes
from brayx.types import DEMONSTRATION
from tests.unit.trainer.parts import Folders, Numbers, Weights

ROOT = Path(__file__).parents[3]
UPDATES = 10
COLUMNS, STEPS = 4, 8
PPO_ONCE = {"epochs": 1, "minibatch_size": 10**6, "entropy_coef": 0.01}
ALGORITHMS = {
    "ppo": PPOConfig(**PPO_ONCE, learning_rate_final=0.5),
    "impala": ImpalaConfig(entropy_coef=0.01),
    "bc": BCConfig(),
    "mappo": MAPPOConfig(**PPO_ONCE),
    "sac": SACConfig(tau=0.1),
}
VARIANTS = ALGORITHMS | {
    "ppo of scaled values": PPOConfig(
        **PPO_ONCE | {"epochs": 3}, normalise_value=True, clip_value=0.2, kl_target=0.01, kl_reaction="learning_rate"
    ),
    "ppo with a magnet": PPOConfig(**PPO_ONCE | {"epochs": 3}, magnet_coef=0.3, magnet_decay=0.5),
    "bc with some held out": BCConfig(holdout=0.3),
    "sac of several steps": SACConfig(tau=0.1, n_step=3),
}
IN_RANKS = VARIANTS | {
    f"{name} in parts": ALGORITHMS[name].model_copy(update={"accumulate": 3}) for name in ("ppo", "impala", "bc", "sac")
}
IN_ONE_RANK = {
    "mixed": MixedConfig(reinforcement=PPOConfig(**PPO_ONCE), fit_value=0.5, imitation_columns=3),
    "mixed with impala": MixedConfig(reinforcement=ImpalaConfig(), imitation_columns=3),
    "ppo in minibatches": PPOConfig(epochs=2, minibatch_size=2 * STEPS),
}
"""Each rank shuffles its own columns, so two ranks have other minibatches than one."""
SMALL = NetworkConfig(hidden=[16])
WEIGHED = ("impala", "bc", "sac")


class Normalising(torch.nn.Module):
    """Its moments are of the batches of all ranks."""

    def __init__(self):
        super().__init__()
        self.seen = Normalised(Flat((3,)), (3,), "")
        self.policy = ActorCritic(3, 2, hidden=(16,))

    def forward(self, obs):
        return self.policy(self.seen(obs))


def model(algorithm):
    """The algorithm's model, and example arguments."""
    obs = np.zeros(3, np.float32)
    if algorithm.name == "mappo":
        return CentralisedPolicy(obs, obs, num_actions=2, network=SMALL), ({"obs": obs[None]},)
    if algorithm.name == "impala":
        return Normalising(), (obs[None],)
    module = SoftActorCritic(obs, 1, SMALL) if algorithm.name == "sac" else ActorCritic(3, 2, hidden=(16,))
    return module, (obs[None],)


def with_extra_keys(batch, algorithm):
    """The batch with the keys that the algorithm needs in addition."""
    if algorithm.name == "mappo":
        return {**batch, "obs/obs": batch["obs"], "obs/state": batch["obs"][..., ::-1].copy()}
    if algorithm.name == "sac":
        batch = {**batch, "action": (batch["action"][..., None] - 0.5).astype(np.float32)}
    if algorithm.name in WEIGHED:  # importance weights, as from a prioritised buffer
        return {**batch, "weight": 1 / (1 + 10 * batch["mask"].mean(1))}
    return batch


def batch(seed, columns):
    """A batch whose columns have different numbers of unmasked steps, so that means of means would be wrong."""
    rng = np.random.default_rng(seed)
    shape = (columns, STEPS + 1)
    mask = (np.arange(STEPS + 1) < rng.integers(1, STEPS, (columns, 1))).astype(np.float32)
    return {
        "obs": rng.normal(size=(*shape, 3)).astype(np.float32),
        "action": rng.integers(0, 2, shape),
        "log_prob": np.full(shape, -np.log(2), np.float32),
        "reward": rng.normal(size=shape).astype(np.float32),
        "terminated": rng.random(shape) < 0.1,
        "truncated": np.zeros(shape, bool),
        "mask": mask,
        "policy_version": np.ones(shape, np.int64),
    }


def joined(seed):
    parts = [batch(seed + 1000 * rank, COLUMNS) for rank in range(2)]
    return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}


def seeded_batches(stream, algorithm, rank):
    """Batches for the algorithm. Random numbers are seeded for each batch: a rank draws its columns' part of what a
    single rank draws."""
    for number, batch in enumerate(stream):
        torch.manual_seed(number)
        torch.randn(rank * COLUMNS * STEPS * 2)
        batch = with_extra_keys(batch, algorithm)
        yield {**batch, DEMONSTRATION: batch["mask"]} if algorithm.name == "mixed" and number % 3 == 0 else batch


def learned(folder, algorithm, stream, ranks=None):
    """The weights after the stream, and the summary."""
    torch.manual_seed(0)
    module, forward_args = model(algorithm)
    summary = LearnerLoop(
        TrainerConfig(model="model", buffers=["buffer"], algorithm=algorithm, learning_rate=1e-2, num_steps=10**4),
        module,
        forward_args,
        batches=seeded_batches(stream, algorithm, 0 if ranks is None else ranks.rank),
        publisher=lambda newest: Weights(),
        numbers=Numbers(),
        keeper=Folders(folder),
        ranks=ranks,
    ).run()
    return module_weights(module), summary


def rank_of_two(rank, folder):
    """Learns with each algorithm in turn, as one process of two; writes weights and counts to ``folder``."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    try:
        for name, algorithm in IN_RANKS.items():
            stream = [batch(seed + 1000 * rank, COLUMNS) for seed in range(UPDATES)]
            weights, summary = learned(Path(folder) / name / str(rank), algorithm, stream, Processes())
            np.savez(f"{folder}/{name}{rank}.npz", **weights)
            Path(folder, f"{name}{rank}").write_text(f"{summary.env_steps} {summary.updates}")
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.cluster
@pytest.mark.slow
def test_two_ranks_learn_the_same_as_one_with_twice_the_batch(tmp_path):
    call = "from tests.unit.trainer.test_ranks import rank_of_two; rank_of_two({}, {!r})"
    ranks = [subprocess.Popen([sys.executable, "-c", call.format(rank, str(tmp_path))], cwd=ROOT) for rank in range(2)]
    try:
        for rank in ranks:
            assert rank.wait(120) == 0
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for name, algorithm in IN_RANKS.items():
        whole, summary = learned(tmp_path / "one" / name, algorithm, [joined(seed) for seed in range(UPDATES)])
        assert summary.updates == UPDATES
        for rank in range(2):
            assert (tmp_path / f"{name}{rank}").read_text() == f"{summary.env_steps} {UPDATES}"
        close(np.load(tmp_path / f"{name}1.npz"), np.load(tmp_path / f"{name}0.npz"))
        close(np.load(tmp_path / f"{name}0.npz"), whole)
        initial, _ = learned(tmp_path / "initial" / name, algorithm, [])
        assert max(np.abs(whole[key] - initial[key]).max() for key in whole) > 0.01, "training changed the weights"


@pytest.mark.parametrize("parts", [2, 3, 8])
@pytest.mark.parametrize("name", [*VARIANTS, *IN_ONE_RANK])
def test_parts_of_a_batch_learn_the_same_as_the_whole(tmp_path, name, parts):
    stream, algorithm = [joined(seed) for seed in range(UPDATES)], (VARIANTS | IN_ONE_RANK)[name]
    whole, _ = learned(tmp_path / "whole", algorithm, stream)
    options = {"accumulate": parts}
    if isinstance(algorithm, MixedConfig):
        options = {"reinforcement": algorithm.reinforcement.model_copy(update=options)}
    cut, _ = learned(tmp_path / "parts", algorithm.model_copy(update=options), stream)
    close(cut, whole)
    initial, _ = learned(tmp_path / "initial", algorithm, [])
    assert max(np.abs(whole[key] - initial[key]).max() for key in whole) > 0.01, "training changed the weights"


def close(got, expected):
    assert set(got) == set(expected)
    for key, array in expected.items():
        np.testing.assert_allclose(got[key], array, rtol=0, atol=1e-5)
