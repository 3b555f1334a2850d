"""A network that normalises its observations learns each batch as it was acted, and publishes and keeps its moments."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn

from brayx.algorithms.ppo import PPOConfig
from brayx.nets.encoders import Numbers
from brayx.nets.mlp import ActorCritic
from brayx.nets.normaliser import Normalised
from brayx.trainer.config import TrainerConfig
from brayx.trainer.loop import LearnerLoop
from tests.unit.trainer.parts import BATCH_STEPS, Folders, Weights, batches
from tests.unit.trainer.parts import Numbers as Metrics


class Network(nn.Module):
    """Notes how many observations its moments were of at each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = Normalised(Numbers((3,)), (3,), "")
        self.policy = ActorCritic(3, 2, hidden=(4,))
        self.counts: list[int] = []

    def forward(self, obs: torch.Tensor) -> dict[str, torch.Tensor]:
        self.counts.append(int(self.seen.count))
        return self.policy(self.seen(obs))


def learn(folders: Folders, count: int) -> tuple[Network, Weights]:
    config = TrainerConfig(model="model", buffers=["buffer"], algorithm=PPOConfig(epochs=1, minibatch_size=10**6))
    module, weights = Network(), Weights()
    LearnerLoop(
        config,
        module,
        (np.zeros((1, 3), np.float32),),
        batches=batches(count),
        publisher=lambda newest: weights,
        numbers=Metrics(),
        keeper=folders,
    ).run()
    return module, weights


def test_moments_come_before_the_first_update_and_after_later_ones(tmp_path: Path) -> None:
    module, weights = learn(Folders(tmp_path), 4)
    assert sorted(set(module.counts)) == [BATCH_STEPS * seen for seen in (1, 2, 3)]
    assert module.counts == sorted(module.counts)
    counts = [int(published["seen.count"]) for _, _, published in weights.published]
    assert counts == [BATCH_STEPS * seen for seen in (0, 1, 2, 3, 4)]
    assert weights.published[0][2]["seen.mean"].tolist() == [0, 0, 0]
    assert weights.published[-1][2]["seen.mean"].tolist() == [1, 1, 1]


def test_a_resumed_training_goes_on_from_its_moments(tmp_path: Path) -> None:
    folders = Folders(tmp_path)
    learn(folders, 2)
    module, _ = learn(folders, 1)
    assert set(module.counts) == {2 * BATCH_STEPS}
    assert int(module.seen.count) == 3 * BATCH_STEPS
