"""`brayx.algorithms.bc`: the gradient of the likelihood, and held-out steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from brayx.algorithms.bc import BC, METRICS, BCConfig, held_out, mistaken
from tests.unit.algorithms.ppo_cases import make, make_batch, two_episodes
from tests.unit.algorithms.tables import Table, moved, random_batch, sgd


@pytest.mark.parametrize("accumulate", [1, 3])
def test_an_update_follows_the_gradient_of_the_cross_entropy(accumulate):
    batch, table = random_batch(seed=2), Table(7, 3)
    batch["weight"] = torch.rand(5, dtype=torch.float64)
    policy = table.policy.detach().numpy()
    softmax = np.exp(policy) / np.exp(policy).sum(-1, keepdims=True)
    arrays = {key: tensor.numpy() for key, tensor in batch.items()}
    expected, loss, right = np.zeros_like(policy), 0.0, 0.0
    count = arrays["mask"][:, :-1].sum()
    for b, t in zip(*np.nonzero(arrays["mask"][:, :-1]), strict=True):
        state, action, share = arrays["obs"][b, t], arrays["action"][b, t], arrays["weight"][b] / count
        loss -= share * np.log(softmax[state, action])
        expected[state] += share * (softmax[state] - np.eye(3)[action])
        right += share * (policy[state].argmax() != action)
    measured = {}
    config = BCConfig(max_grad_norm=None, accumulate=accumulate)
    gradient = moved(table, lambda: measured.update(BC(table, sgd(table), config).update(batch, 0.0)))
    np.testing.assert_allclose(gradient["policy"], expected, rtol=0, atol=1e-9)
    assert not gradient["worth"].any()
    assert measured["loss"] == pytest.approx(loss, abs=1e-9)
    assert measured["accuracy"] == pytest.approx(1 - right, abs=1e-9)
    assert set(measured) == {*METRICS, "learning_rate"}


def test_other_players_moves_are_not_imitated():
    batch, table, other_table = random_batch(seed=3), Table(7, 3), Table(7, 3)
    turn = torch.rand(5, 10) < 0.5
    config = BCConfig(max_grad_norm=None, holdout=0.3)
    measured, expected = {}, {}
    got = moved(table, lambda: measured.update(BC(table, sgd(table), config).update({**batch, "turn": turn}, 0.0)))
    hidden = {**batch, "mask": batch["mask"] * turn}
    want = moved(other_table, lambda: expected.update(BC(other_table, sgd(other_table), config).update(hidden, 0.0)))
    assert np.abs(want["policy"]).max() > 1e-2
    np.testing.assert_allclose(got["policy"], want["policy"], rtol=0, atol=1e-12)
    assert measured == pytest.approx(expected)
    none = {**batch, "turn": torch.zeros(5, 10, dtype=torch.bool)}
    assert not moved(table, lambda: BC(table, sgd(table), config).update(none, 0.0))["policy"].any()


class Gaussian(nn.Module):
    """The same for all observations; ``kind`` begins the names of its outputs."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.kind = kind
        self.mean = nn.Parameter(torch.tensor([0.3, -0.2], dtype=torch.float64))
        self.log_std = nn.Parameter(torch.tensor([0.1, -0.4], dtype=torch.float64))

    def forward(self, obs):
        shape = (*obs.shape, 2)
        return {f"{self.kind}mean": self.mean.expand(shape), f"{self.kind}log_std": self.log_std.expand(shape)}


def test_continuous_actions_have_the_gaussians_likelihood():
    batch, module = random_batch(), Gaussian()
    batch["action"] = torch.randn(5, 10, 2, dtype=torch.float64)
    seen = batch["action"][batch["mask"] > 0].numpy()
    mean, std = np.array([0.3, -0.2]), np.exp([0.1, -0.4])
    z = (seen - mean) / std
    measured = {}
    gradient = moved(
        module, lambda: measured.update(BC(module, sgd(module), BCConfig(max_grad_norm=None)).update(batch, 0.0))
    )
    expected = (0.5 * z**2 + np.log(std) + 0.5 * np.log(2 * np.pi)).sum(-1).mean()
    assert measured["loss"] == pytest.approx(expected, abs=1e-9)
    assert measured["error"] == pytest.approx(np.abs(seen - mean).mean(), abs=1e-9)
    np.testing.assert_allclose(gradient["mean"], -(z / std).mean(0), rtol=0, atol=1e-9)
    np.testing.assert_allclose(gradient["log_std"], (1 - z**2).mean(0), rtol=0, atol=1e-9)


def test_several_heads_have_their_joint_cross_entropy():
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            rng = np.random.default_rng(5)
            self.left = nn.Parameter(torch.from_numpy(rng.normal(size=(7, 2))))
            self.right = nn.Parameter(torch.from_numpy(rng.normal(size=(7, 4))))

        def forward(self, obs):
            return {"logits": (self.left[obs], self.right[obs])}

    batch, module = random_batch(seed=6), Heads()
    rng = np.random.default_rng(6)
    batch["action"] = torch.from_numpy(np.stack([rng.integers(0, 2, (5, 10)), rng.integers(0, 4, (5, 10))], -1))
    mask, obs, action = (batch[key].numpy() for key in ("mask", "obs", "action"))
    tables = {name: p.detach().numpy().copy() for name, p in module.named_parameters()}
    expected, loss = {name: np.zeros_like(table) for name, table in tables.items()}, 0.0
    for b, t in zip(*np.nonzero(mask), strict=True):
        for head, (name, table) in enumerate(tables.items()):
            logits = table[obs[b, t]]
            softmax = np.exp(logits) / np.exp(logits).sum()
            loss -= np.log(softmax[action[b, t, head]]) / mask.sum()
            expected[name][obs[b, t]] += (softmax - np.eye(len(logits))[action[b, t, head]]) / mask.sum()
    measured = {}
    config = BCConfig(max_grad_norm=None)
    gradient = moved(module, lambda: measured.update(BC(module, sgd(module), config).update(batch, 0.0)))
    assert measured["loss"] == pytest.approx(loss, abs=1e-9)
    for name, want in expected.items():
        np.testing.assert_allclose(gradient[name], want, rtol=0, atol=1e-9)


def test_squashed_actions_have_the_squashed_gaussians_likelihood():
    """Haarnoja et al. 2018, appendix C: the Gaussian's, less the logarithm of the slope."""
    batch, module = random_batch(), Gaussian("tanh_")
    rng = np.random.default_rng(2)
    batch["action"] = torch.from_numpy(rng.uniform(-0.95, 0.95, (5, 10, 2)))
    mean, log_std = np.array([0.3, -0.2]), np.array([0.1, -0.4])
    seen = batch["action"][batch["mask"] > 0].numpy()
    loss, by_mean, by_log_std = 0.0, np.zeros(2), np.zeros(2)
    for action in seen:
        z = (np.arctanh(action) - mean) / np.exp(log_std)
        density = -0.5 * z**2 - log_std - 0.5 * np.log(2 * np.pi) - np.log(1 - action**2)
        loss -= density.sum() / len(seen)
        by_mean -= z / np.exp(log_std) / len(seen)
        by_log_std -= (z**2 - 1) / len(seen)
    measured = {}
    config = BCConfig(max_grad_norm=None)
    gradient = moved(module, lambda: measured.update(BC(module, sgd(module), config).update(batch, 0.0)))
    assert measured["loss"] == pytest.approx(loss, abs=1e-9)
    np.testing.assert_allclose(gradient["mean"], by_mean, rtol=0, atol=1e-9)
    np.testing.assert_allclose(gradient["log_std"], by_log_std, rtol=0, atol=1e-9)


@pytest.mark.parametrize("case", ["categorical", "gaussian", "memory"])
def test_packed_episodes_equal_separate_episodes(case):
    together, apart = two_episodes(make_batch(case, columns=1, steps=8))
    a, b = make(case).module, make(case).module
    config = BCConfig(max_grad_norm=None)
    ours = moved(a, lambda: BC(a, sgd(a), config).update(together, 0.0))
    theirs = moved(b, lambda: BC(b, sgd(b), config).update(apart, 0.0))
    assert max(np.abs(gradient).max() for gradient in ours.values()) > 1e-3
    for name in ours:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=0, atol=1e-9)


def test_a_fully_masked_head_stays_finite_and_has_no_gradient():
    batch, module = make_batch("masked"), make("masked").module
    batch["obs"]["action_mask"][:] = 0
    measured = {}
    gradient = moved(module, lambda: measured.update(BC(module, sgd(module), BCConfig()).update(batch, 0.0)))
    assert np.isfinite(list(measured.values())).all()
    assert not any(change.any() for change in gradient.values())


def test_two_ranks_equal_one_rank_with_both_batches():
    batch, config = random_batch(columns=6), BCConfig(max_grad_norm=None, holdout=0.3)
    batch["mask"][:2, 3:] = 0
    whole = Table(7, 3)
    together = moved(whole, lambda: BC(whole, sgd(whole), config).update(batch, 0.0))
    hidden = held_out(batch["obs"], batch["action"], 0.3)
    mask = batch["mask"]
    counts = torch.stack([(mask * ~hidden).sum(), (mask * hidden).sum()])

    class Both:
        size = 2

        def sum(self, x):
            return counts

    ranks = []
    for part in (slice(0, 3), slice(3, 6)):
        table = Table(7, 3)
        mine = {key: tensor[part] for key, tensor in batch.items()}
        ranks.append(moved(table, lambda t=table, m=mine: BC(t, sgd(t), config, Both()).update(m, 0.0)))
    np.testing.assert_allclose((ranks[0]["policy"] + ranks[1]["policy"]) / 2, together["policy"], rtol=0, atol=1e-12)


def test_held_out_steps_are_measured_and_not_learned():
    batch, table = random_batch(columns=20, steps=50, states=400), Table(400, 3)
    hidden = held_out(batch["obs"], batch["action"], 0.25)
    learned = set(batch["obs"][(batch["mask"] > 0) & ~hidden].tolist())
    measured = {}
    config = BCConfig(holdout=0.25, max_grad_norm=None)
    gradient = moved(table, lambda: measured.update(BC(table, sgd(table), config).update(batch, 0.0)))["policy"]
    changed = set(np.flatnonzero(gradient.any(-1)).tolist())
    assert changed == learned
    seen = (batch["mask"] > 0) & hidden
    right = Table(400, 3).policy[batch["obs"][seen]].argmax(-1) == batch["action"][seen]
    assert measured["holdout_accuracy"] == pytest.approx(right.double().mean().item(), abs=1e-6)
    assert {"holdout_loss", "accuracy"} <= set(measured)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.uint8])
def test_packing_does_not_change_which_steps_are_held_out(dtype):
    torch.manual_seed(0)
    obs = {"a": (torch.randn(40, 30, 3) * 100).to(dtype), "b": torch.randint(0, 9, (40, 30))}
    action = torch.randint(0, 4, (40, 30))
    hidden = held_out(obs, action, 0.2)
    assert 0.15 < hidden.float().mean() < 0.25
    other = held_out({name: leaf.flip(0)[:, 7:] for name, leaf in obs.items()}, action.flip(0)[:, 7:], 0.2)
    assert torch.equal(other, hidden.flip(0)[:, 7:])
    assert not torch.equal(held_out(obs, (action + 1) % 4, 0.2), hidden)
    assert not held_out(obs, action, 0.0).any()
    assert held_out(obs, action, 1.0).all()


def test_one_wrong_head_makes_the_action_wrong():
    outputs = {"logits": (torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([[0.0, 0.0, 1.0]] * 2))}
    assert mistaken(outputs, torch.tensor([[0, 2], [0, 1]])).tolist() == [0.0, 1.0]


def test_the_error_of_a_hybrid_action_is_the_mean_over_its_parts():
    outputs = {"logits": torch.tensor([[0.0, 0.0, 1.0]] * 2), "mean": torch.zeros(2, 3), "log_std": torch.zeros(2, 3)}
    action = torch.tensor([[2.0, 0.5, -0.5, 0.0], [0.0, 0.0, 0.0, 2.0]])
    assert mistaken(outputs, action).tolist() == [0.25, 0.75]
    batch, module = make_batch("hybrid"), make("hybrid").module
    assert BC(module, sgd(module), BCConfig()).update(batch, 0.0)["error"] > 0
