"""`brayx.algorithms.ppo`: the loss against the paper, and the effects of an update."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from brayx.algorithms.ppo import METRICS, PPO, PPOConfig
from brayx.nets.policy import NetworkConfig, policy_for


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 16)
        self.logits, self.value = nn.Linear(16, 3), nn.Linear(16, 1)

    def forward(self, obs):
        hidden = torch.tanh(self.body(obs))
        return {"logits": self.logits(hidden), "value": self.value(hidden).squeeze(-1)}


def make_batch(columns=4, steps=8, seed=0):
    rng = np.random.default_rng(seed)
    shape = (columns, steps + 1)
    terminated = rng.random(shape) < 0.1
    arrays = {
        "obs": rng.normal(size=(*shape, 4)).astype(np.float32),
        "action": rng.integers(0, 3, shape),
        "log_prob": np.full(shape, -np.log(3), np.float32),
        "reward": rng.normal(size=shape).astype(np.float32),
        "terminated": terminated,
        "truncated": ~terminated & (rng.random(shape) < 0.1),
        "mask": (rng.random(shape) < 0.9).astype(np.float32),
    }
    arrays["mask"][:, -1] = 0
    return {key: torch.from_numpy(array) for key, array in arrays.items()}


def make_ppo(config=None, lr=1e-3, seed=0):
    torch.manual_seed(seed)
    net = Net()
    return PPO(net, torch.optim.Adam(net.parameters(), lr=lr, eps=1e-5), config or PPOConfig(epochs=3))


def weights(ppo):
    return {name: p.detach().clone() for name, p in ppo.module.named_parameters()}


def test_masked_steps_change_nothing():
    batch = make_batch()
    nonsense = {key: value.clone() for key, value in batch.items()}
    hidden = batch["mask"] == 0
    hidden[:, -1] = False  # the last step bootstraps
    # A masked step stands between trajectories: whatever comes before it must be cut off from it.
    for side in (batch, nonsense):
        before = hidden[:, 1:] & ~side["terminated"][:, :-1]
        side["truncated"][:, :-1] |= before
    nonsense["reward"][hidden] = 1e6
    nonsense["log_prob"][hidden] = -50.0
    nonsense["action"][hidden] = 2
    a, b = make_ppo(), make_ppo()
    a.update(batch, 0.0)
    b.update(nonsense, 0.0)
    for x, y in zip(weights(a).values(), weights(b).values(), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-7)


def test_a_fully_masked_batch_gives_finite_metrics():
    batch = make_batch()
    batch["mask"].zero_()
    ppo = make_ppo()
    before = weights(ppo)
    metrics = ppo.update(batch, 0.0)
    assert all(np.isfinite(list(metrics.values())))
    assert all(torch.equal(x, y) for x, y in zip(before.values(), weights(ppo).values(), strict=True))


def test_update_reports_every_metric_and_does_not_change_the_batch():
    batch = make_batch()
    copies = {key: value.clone() for key, value in batch.items()}
    metrics = make_ppo(PPOConfig(epochs=2, minibatch_size=10)).update(batch, 0.0)
    assert set(metrics) == {*METRICS, "learning_rate", "epochs"}
    assert all(torch.equal(batch[key], copies[key]) for key in batch)


def test_learning_rate_and_clip_fall_linearly():
    ppo = make_ppo(PPOConfig(epochs=1, learning_rate_schedule="linear", learning_rate_final=0.1))
    assert ppo.update(make_batch(), 0.0)["learning_rate"] == pytest.approx(1e-3)
    assert ppo.update(make_batch(), 0.5)["learning_rate"] == pytest.approx(0.55e-3)
    assert ppo.update(make_batch(), 7.0)["learning_rate"] == pytest.approx(1e-4)


def test_a_better_action_becomes_more_likely():
    torch.manual_seed(0)
    batch = make_batch(columns=8, steps=32)
    batch["reward"] = (batch["action"] == 1).float()
    batch["terminated"] = torch.ones_like(batch["terminated"])
    batch["truncated"] = torch.zeros_like(batch["truncated"])
    ppo = make_ppo(PPOConfig(epochs=10), lr=3e-3)
    chosen = lambda: ppo.module(batch["obs"])["logits"].softmax(-1)[..., 1].mean().item()  # noqa: E731
    before = chosen()
    ppo.update(batch, 0.0)
    assert chosen() > before + 0.02


def test_gradients_are_clipped():
    batch = make_batch()
    batch["reward"] *= 1e4
    net = Net()
    ppo = PPO(net, torch.optim.SGD(net.parameters(), lr=1.0), PPOConfig(epochs=1, max_grad_norm=0.5))
    before = weights(ppo)
    metrics = ppo.update(batch, 0.0)
    moved = sum((x - y).square().sum() for x, y in zip(before.values(), weights(ppo).values(), strict=True)).sqrt()
    assert metrics["grad_norm"] > 0.5
    assert moved.item() == pytest.approx(0.5, rel=1e-3)


def test_an_observation_of_several_leaves():
    class Pair(Net):
        def forward(self, left, right):
            return super().forward(torch.cat([left, right["x"]], -1))

    batch = make_batch()
    whole = dict(batch)
    batch["obs"] = (whole["obs"][..., :1], {"x": whole["obs"][..., 1:]})
    torch.manual_seed(0)
    net = Pair()
    a, b = PPO(net, torch.optim.Adam(net.parameters(), lr=1e-3, eps=1e-5), PPOConfig(epochs=3)), make_ppo()
    assert a.update(batch, 0.0)["loss"] == pytest.approx(b.update(whole, 0.0)["loss"], rel=1e-6)


def test_a_wrong_batch_is_refused():
    batch = make_batch()
    batch["mask"] = batch["mask"][:, 0]
    with pytest.raises(ValueError, match="mask"):
        make_ppo().update(batch, 0.0)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("minibatch_size", [8, 1000])
def test_an_update_on_a_device_equals_the_one_on_the_cpu(device, minibatch_size):
    """The minibatches are the same; results agree up to the float32 order of summation."""
    config = PPOConfig(epochs=3, minibatch_size=minibatch_size)
    on_cpu, on_device = make_ppo(config), make_ppo(config)
    on_device.module.to(device)
    batch = make_batch()
    torch.manual_seed(1)
    measured_here = on_cpu.update(batch, 0.0)
    torch.manual_seed(1)
    measured_there = on_device.update({key: tensor.to(device) for key, tensor in batch.items()}, 0.0)
    assert measured_there == pytest.approx(measured_here, rel=1e-3, abs=1e-5)
    for name, tensor in weights(on_device).items():
        assert tensor.device.type == device
        torch.testing.assert_close(tensor.cpu(), weights(on_cpu)[name], rtol=1e-3, atol=1e-5)


class Ended(Exception):
    pass


@pytest.mark.parametrize("minibatch_size", [8, 1000])
def test_an_update_creates_all_tensors_on_the_modules_device(minibatch_size, monkeypatch):
    """Torch's meta device needs no GPU. Its tensors hold no values, so the test ends where metrics are read."""
    read = []

    def tolist(tensor):
        read.append(tensor)
        raise Ended

    monkeypatch.setattr(torch.Tensor, "tolist", tolist)
    ppo = make_ppo(PPOConfig(epochs=2, minibatch_size=minibatch_size))
    ppo.module.to("meta")
    ppo = PPO(ppo.module, torch.optim.Adam(ppo.module.parameters()), ppo.config)
    with pytest.raises(Ended):
        ppo.update({key: tensor.to("meta") for key, tensor in make_batch().items()}, 0.0)
    assert read[0].device.type == "meta"
    assert read[0].shape == (len(METRICS),)


def test_image_values_computed_in_pieces_equal_the_whole(monkeypatch):
    batch = make_batch(columns=8, steps=15)
    shape = (8, 16, 3, 20, 20)
    batch["obs"] = torch.from_numpy(np.random.default_rng(1).integers(0, 256, shape, np.uint8))
    seen = []

    def updated():
        torch.manual_seed(0)
        net = policy_for(np.zeros(shape[2:], np.uint8), num_actions=3, network=NetworkConfig(convolutions="impala"))[0]
        net.register_forward_pre_hook(lambda _, args: seen.append(args[0].nbytes))
        ppo = PPO(net, torch.optim.SGD(net.parameters(), lr=0.1), PPOConfig(epochs=1, minibatch_size=32))
        ppo.update(dict(batch), 0.0)
        return weights(ppo)

    whole, most = updated(), max(seen)
    monkeypatch.setattr("brayx.algorithms.columns._PIECE_BYTES", 50_000)
    seen.clear()
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(whole.values(), updated().values(), strict=True))
    assert max(seen) <= 50_000 < most
