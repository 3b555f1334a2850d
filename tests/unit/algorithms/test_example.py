"""The single-file PPO of docs/examples takes the library's steps, and plays."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path

import pytest
import torch

from brayx.algorithms.ppo import PPO, PPOConfig

FILE = Path(__file__).parents[3] / "docs/examples/ppo.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("example_ppo", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("minibatch_size", [10_000, 24])
def test_an_update_equals_the_librarys(example, minibatch_size, monkeypatch):
    """In float64, over all epochs and minibatches: the loss within 1e-9, every parameter within 1e-9."""
    monkeypatch.setattr(example, "MINIBATCH_SIZE", minibatch_size)
    torch.manual_seed(0)
    steps, columns = 15, 7
    ended = torch.rand(steps, columns)
    batch = {
        "obs": torch.randn(steps + 1, columns, 4, dtype=torch.float64),
        "action": torch.randint(0, 2, (steps, columns)),
        "log_prob": -0.7 + 0.3 * torch.randn(steps, columns, dtype=torch.float64),
        "reward": torch.randn(steps, columns, dtype=torch.float64),
        "terminated": ended < 0.1,
        "truncated": ended > 0.9,
        "mask": (torch.rand(steps, columns) < 0.9).double(),
    }
    theirs = {key: torch.cat([x, torch.zeros_like(x[:1])]) if key != "obs" else x for key, x in batch.items()}
    theirs = {key: x.transpose(0, 1) for key, x in theirs.items()}
    module = example.ActorCritic(4, 2).double()
    other = copy.deepcopy(module)
    config = PPOConfig(
        gamma=example.GAMMA,
        gae_lambda=example.GAE_LAMBDA,
        clip_param=example.CLIP_PARAM,
        value_coef=example.VALUE_COEF,
        entropy_coef=example.ENTROPY_COEF,
        max_grad_norm=example.MAX_GRAD_NORM,
        epochs=example.EPOCHS,
        minibatch_size=minibatch_size,
        decoupled=False,  # the example acts and learns in turns
    )
    optimizers = [torch.optim.Adam(net.parameters(), lr=1e-2, eps=1e-5) for net in (module, other)]
    torch.manual_seed(1)
    loss = example.update(module, optimizers[0], batch)
    torch.manual_seed(1)
    measured = PPO(other, optimizers[1], config).update(theirs, 0.0)
    assert loss == pytest.approx(measured["loss"], abs=1e-9)
    for mine, library in zip(module.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, library, rtol=0, atol=1e-9)


def test_it_trains(example, capsys):
    episodes_return = example.train(total_steps=2 * example.ENVS * example.STEPS)
    assert episodes_return >= 8, "CartPole's shortest episode"
    assert "2048 steps" in capsys.readouterr().out
