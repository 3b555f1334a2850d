"""The magnet of PPO in self-play: one policy in both seats of games where the policy gradient alone cycles.

No door, host or league (see `test_league_learns`): batches come from games in arrays, and NashConv from OpenSpiel.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from brayx.algorithms.build import build
from brayx.algorithms.ppo import PPOConfig
from brayx.nets.policy import NetworkConfig, policy_for
from tests.learning.games import Tree, probabilities
from tests.learning.rows import Rows, printed

pytestmark = pytest.mark.learning
SEEDS = pytest.mark.parametrize("seed", range(int(os.environ.get("SEEDS", "3"))))
RECIPE: dict[str, Any] = {
    "gamma": 1.0, "gae_lambda": 1.0, "entropy_coef": 0.0, "epochs": 4, "minibatch_size": 512,
    "learning_rate_schedule": "linear",
}  # fmt: skip


@pytest.fixture(scope="module")
def rows(request: pytest.FixtureRequest) -> Iterator[Rows]:
    yield from printed(request)


def trained(tree: Tree, config: PPOConfig, seed: int, *, updates: int, games: int, learning_rate: float) -> np.ndarray:
    """Probabilities ``[I, A]`` of the last policy."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    example: Any = tree.observed(np.zeros((), int))
    example = {k: v.numpy() for k, v in example.items()} if isinstance(example, dict) else example.numpy()
    module: nn.Module = policy_for(example, num_actions=tree.legal.shape[1], network=NetworkConfig())[0]
    optimizer = torch.optim.Adam(module.parameters(), lr=learning_rate, eps=1e-5)
    ppo = build(config, module, optimizer)
    points = tree.observed(np.arange(len(tree.obs)))
    for index in range(updates):
        with torch.no_grad():
            probs = probabilities(module(points))
        ppo.update(tree.play(probs, games, rng), index / updates)
    with torch.no_grad():
        return probabilities(module(points))


BEATS = np.array([[0.0, -1.0, 1.0], [1.0, 0.0, -1.0], [-1.0, 1.0, 0.0]], np.float32)
"""Reward of rock, paper and scissors (rows) against each (columns)."""


def rock_paper_scissors(config: PPOConfig, seed: int, updates: int = 1000, games: int = 512) -> np.ndarray:
    """Probabilities ``[updates, 3]`` of the policy after each update of self-play, from a policy that prefers rock."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    module, _ = policy_for(np.zeros(1, np.float32), num_actions=3, network=NetworkConfig())
    with torch.no_grad():
        module.head.logits.bias += torch.tensor([1.5, 0.0, -1.5])
    ppo = build(config, module, torch.optim.Adam(module.parameters(), lr=1e-3, eps=1e-5))
    history = np.zeros((updates, 3))
    columns = (2 * games, 2)
    for index in range(updates):
        with torch.no_grad():
            probs = probabilities(module(torch.ones(1, 1)))[0]
        moves = rng.choice(3, (games, 2), p=probs)
        arrays = {
            "action": np.repeat(moves.reshape(-1, 1), 2, 1),
            "reward": np.repeat(BEATS[moves, moves[:, ::-1]].reshape(-1, 1), 2, 1),
            "log_prob": np.repeat(np.log(probs)[moves].reshape(-1, 1), 2, 1).astype(np.float32),
            "mask": np.tile(np.array([1, 0], np.float32), (2 * games, 1)),
            "terminated": np.ones(columns, bool),
            "truncated": np.zeros(columns, bool),
            "obs": np.ones((*columns, 1), np.float32),
        }
        ppo.update({name: torch.from_numpy(array) for name, array in arrays.items()}, index / updates)
        with torch.no_grad():
            history[index] = probabilities(module(torch.ones(1, 1)))[0]
    return history


@SEEDS
def test_rock_paper_scissors(rows: Rows, seed: int) -> None:
    """The magnet leads to uniform play; without it the policy goes round, up to single moves."""
    magnet = rock_paper_scissors(PPOConfig(**RECIPE, magnet_coef=0.5), seed)
    plain = rock_paper_scissors(PPOConfig(**RECIPE), seed)
    found = {
        name: f"{history[-1].round(2).tolist()}, {np.abs(history[-100:] - 1 / 3).max():.2f}"
        for name, history in (("magnet", magnet), ("plain", plain))
    }
    rows.add("Rock-paper-scissors: last policy, largest distance from 1/3 in the last 100 updates", seed=seed, **found)
    assert np.abs(magnet[-1] - 1 / 3).max() <= 0.1
    assert np.abs(plain[-100:] - 1 / 3).max() > 0.3


@SEEDS
def test_kuhn_poker(rows: Rows, seed: int) -> None:
    tree = Tree("kuhn_poker")
    assert tree.nash_conv(np.full((12, 2), 0.5)) == pytest.approx(11 / 12)
    found = {
        name: tree.nash_conv(
            trained(tree, PPOConfig(**RECIPE, **options), seed, updates=500, games=512, learning_rate=1e-3)
        )
        for name, options in (("magnet", {"magnet_coef": 0.5, "magnet_decay": 0.98}), ("plain", {}))
    }
    rows.add("Kuhn poker: NashConv", seed=seed, **{name: f"{value:.3f}" for name, value in found.items()})
    assert found["magnet"] <= 0.1
    assert found["plain"] > 2 * found["magnet"]
