"""`brayx.algorithms.impala`: the update of tables against the paper's gradient, written down step by step."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from brayx.algorithms.impala import METRICS, Impala, ImpalaConfig, impala_loss
from tests.unit.algorithms.ppo_cases import make, make_batch, two_episodes
from tests.unit.algorithms.tables import Recurrent, Table, moved, random_batch, sgd
from tests.unit.algorithms.test_returns import paper_vtrace

OPTIONS = {
    "gamma": 0.97,
    "clip_rho": 1.5,
    "clip_pg_rho": 1.2,
    "max_grad_norm": None,
}


def paper_gradient(table, batch, config):
    """Section 4.2's gradients, computed step by step, for a tabular softmax policy and value."""
    policy, worth = table.policy.detach().numpy(), table.worth.detach().numpy()
    arrays = {key: tensor.numpy() for key, tensor in batch.items()}
    columns, steps = arrays["mask"].shape[0], arrays["mask"].shape[1] - 1
    turn = arrays.get("turn", np.ones((columns, steps + 1), bool))
    weight = arrays.get("weight", np.ones(columns))
    softmax = np.exp(policy) / np.exp(policy).sum(-1, keepdims=True)
    obs, action, mask = arrays["obs"], arrays["action"], arrays["mask"][:, :-1]
    acted = mask * turn[:, :-1]
    log_rho = np.zeros((columns, steps))
    for b, t in zip(*np.nonzero(acted), strict=True):
        log_rho[b, t] = np.log(softmax[obs[b, t], action[b, t]]) - arrays["log_prob"][b, t]
    target, advantage = paper_vtrace(
        arrays["reward"][:, :-1].T,
        arrays["terminated"][:, :-1].T,
        arrays["truncated"][:, :-1].T,
        worth[obs].T,
        log_rho.T,
        turn[:, 1:].T,
        lam=1.0,
        clips=(config.clip_rho, 1.0, config.clip_pg_rho),
        gamma=config.gamma,
    )
    d_policy, d_worth, loss = np.zeros_like(policy), np.zeros_like(worth), 0.0
    for b in range(columns):
        for t in range(steps):
            state = obs[b, t]
            if acted[b, t]:
                share = weight[b] / acted.sum()
                pi = softmax[state]
                entropy = -(pi * np.log(pi)).sum()
                d_log_prob = np.eye(len(pi))[action[b, t]] - pi
                d_entropy = -pi * (np.log(pi) + entropy)
                d_policy[state] -= share * (advantage[t, b] * d_log_prob + config.entropy_coef * d_entropy)
                loss -= share * (advantage[t, b] * np.log(pi[action[b, t]]) + config.entropy_coef * entropy)
            if mask[b, t]:
                share = weight[b] / mask.sum()
                error = worth[state] - target[t, b]
                d_worth[state] += share * config.value_coef * error
                loss += share * config.value_coef * 0.5 * error**2
    return loss, d_policy, d_worth


@pytest.mark.parametrize("extra", ["nothing", "turn", "weight"])
@pytest.mark.parametrize("accumulate", [1, 2, 5])
def test_an_update_follows_the_papers_gradient(extra, accumulate):
    rng = np.random.default_rng(3)
    batch, table = random_batch(seed=3), Table(7, 3)
    if extra == "turn":
        batch["turn"] = torch.from_numpy(rng.random((5, 10)) < 0.6)
    if extra == "weight":
        batch["weight"] = torch.from_numpy(rng.random(5))
    config = ImpalaConfig(**OPTIONS, accumulate=accumulate)
    loss, d_policy, d_worth = paper_gradient(table, batch, config)
    impala = Impala(table, sgd(table), config)
    measured = {}
    gradient = moved(table, lambda: measured.update(impala.update(batch, 0.0)))
    assert measured["loss"] == pytest.approx(loss, abs=1e-9)
    np.testing.assert_allclose(gradient["policy"], d_policy, rtol=0, atol=1e-9)
    np.testing.assert_allclose(gradient["worth"], d_worth, rtol=0, atol=1e-9)


def test_loss_and_gradients_match_the_paper():
    """Section 4.2 step by step, with every gradient derived by hand; masked steps may hold anything."""
    rng = np.random.default_rng(4)
    log_prob, entropy, value, advantage, target = rng.normal(size=(5, 40))
    acted, seen = rng.random((2, 40)) < 0.7
    policy_weight, value_weight = acted * rng.random(40), seen * rng.random(40)
    log_prob[~acted] = -np.inf
    policy = value_loss = mean_entropy = 0.0
    by_log_prob, by_entropy, by_value = np.zeros((3, 40))
    for i in range(40):
        if acted[i]:
            policy -= policy_weight[i] * advantage[i] * log_prob[i]
            by_log_prob[i] = -policy_weight[i] * advantage[i]
            mean_entropy += policy_weight[i] * entropy[i]
            by_entropy[i] = -0.02 * policy_weight[i]
        value_loss += 0.5 * value_weight[i] * (value[i] - target[i]) ** 2
        by_value[i] = 0.3 * value_weight[i] * (value[i] - target[i])
    arrays = log_prob, entropy, value, advantage, target, policy_weight, value_weight
    tensors = [torch.tensor(x) for x in arrays]
    for tensor in tensors[:3]:
        tensor.requires_grad_()
    loss, parts = impala_loss(*tensors, value_coef=0.3, entropy_coef=0.02)
    loss.backward()
    total = policy + 0.3 * value_loss - 0.02 * mean_entropy
    assert parts.tolist() == pytest.approx([total, policy, value_loss, mean_entropy], abs=1e-9)
    assert loss.item() == pytest.approx(total, abs=1e-9)
    for tensor, want in zip(tensors, (by_log_prob, by_entropy, by_value), strict=False):
        np.testing.assert_allclose(tensor.grad.numpy(), want, rtol=0, atol=1e-9)


@pytest.mark.parametrize("case", ["categorical", "gaussian", "memory"])
def test_packed_episodes_equal_separate_episodes(case):
    """One column of two episodes, the first truncated, equals two columns of one episode each."""
    config = ImpalaConfig(**OPTIONS)
    together, apart = two_episodes(make_batch(case, columns=1, steps=8))
    a, b = make(case).module, make(case).module
    ours = moved(a, lambda: Impala(a, sgd(a), config).update(together, 0.0))
    theirs = moved(b, lambda: Impala(b, sgd(b), config).update(apart, 0.0))
    assert max(np.abs(gradient).max() for gradient in ours.values()) > 1e-3
    for name in ours:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=0, atol=1e-9)


def test_a_fully_masked_head_stays_finite_and_has_no_gradient():
    batch, module = make_batch("masked"), make("masked").module
    batch["obs"]["action_mask"][:] = 0
    batch["log_prob"][:] = -np.log(6)
    measured = {}
    config = ImpalaConfig(value_coef=0.0, entropy_coef=0.3, max_grad_norm=None)
    gradient = moved(module, lambda: measured.update(Impala(module, sgd(module), config).update(batch, 0.0)))
    assert np.isfinite(list(measured.values())).all()
    assert measured["entropy"] == pytest.approx(np.log(6))
    assert not any(change.any() for change in gradient.values())


def test_two_ranks_equal_one_rank_with_both_batches():
    batch, config = random_batch(columns=6), ImpalaConfig(**OPTIONS)
    batch["mask"][:2, 3:] = 0  # one rank has fewer steps
    whole = Table(7, 3)
    together = moved(whole, lambda: Impala(whole, sgd(whole), config).update(batch, 0.0))

    class TwoRanks:
        """Stands in for the all-reduce: adds the other rank's step counts to each sum."""

        size = 2

        def sum(self, x):
            return torch.stack([batch["mask"].sum(), batch["mask"].sum()])

    ranks = []
    for part in (slice(0, 3), slice(3, 6)):
        table = Table(7, 3)
        mine = {key: tensor[part] for key, tensor in batch.items()}
        ranks.append(moved(table, lambda t=table, m=mine: Impala(t, sgd(t), config, TwoRanks()).update(m, 0.0)))
    for name, gradient in together.items():
        mean = (ranks[0][name] + ranks[1][name]) / 2  # which is what DistributedDataParallel does
        np.testing.assert_allclose(mean, gradient, rtol=0, atol=1e-12)


def test_masked_steps_change_nothing():
    batch = random_batch(seed=1)
    nonsense = {key: tensor.clone() for key, tensor in batch.items()}
    hidden = batch["mask"] == 0
    nonsense["reward"][hidden] = 1e9
    nonsense["log_prob"][hidden] = -1e9
    nonsense["action"][hidden] = 2
    a, b = Table(7, 3), Table(7, 3)
    ours = moved(a, lambda: Impala(a, sgd(a), ImpalaConfig(max_grad_norm=None)).update(batch, 0.0))
    theirs = moved(b, lambda: Impala(b, sgd(b), ImpalaConfig(max_grad_norm=None)).update(nonsense, 0.0))
    for name in ours:
        np.testing.assert_array_equal(ours[name], theirs[name])


def test_a_fully_masked_batch_changes_nothing():
    batch, table = random_batch(), Table(7, 3)
    batch["mask"].zero_()
    measured = {}
    gradient = moved(table, lambda: measured.update(Impala(table, sgd(table), ImpalaConfig()).update(batch, 0.0)))
    assert all(np.isfinite(list(measured.values())))
    assert not any(change.any() for change in gradient.values())


def test_priorities_are_mean_absolute_errors():
    batch, table = random_batch(), Table(7, 3)
    config = ImpalaConfig(**OPTIONS, accumulate=2)
    impala = Impala(table, sgd(table), config)
    worth = table.worth.detach().numpy().copy()
    log_pi = table.policy.detach().log_softmax(-1).numpy()
    impala.update(batch, 0.0)
    assert impala.priorities is None
    table = Table(7, 3)
    impala = Impala(table, sgd(table), config)
    impala.update({**batch, "index": torch.arange(5)}, 0.0)
    arrays = {key: tensor.numpy() for key, tensor in batch.items()}
    mask = arrays["mask"][:, :-1]
    log_rho = (log_pi[arrays["obs"], arrays["action"]] - arrays["log_prob"])[:, :-1] * mask
    target, _ = paper_vtrace(
        *(arrays[key][:, :-1].T for key in ("reward", "terminated", "truncated")),
        worth[arrays["obs"]].T,
        log_rho.T,
        np.ones_like(mask.T, bool),
        lam=1.0,
        clips=(1.5, 1.0, 1.2),
        gamma=0.97,
    )
    error = np.abs(target.T - worth[arrays["obs"]][:, :-1]) * mask
    np.testing.assert_allclose(impala.priorities.numpy(), error.sum(1) / mask.sum(1), rtol=0, atol=1e-9)


def test_on_policy_data_of_a_recurrent_policy_has_ratios_of_one():
    torch.manual_seed(0)
    module, batch = Recurrent(), random_batch(columns=3, steps=6)
    batch = {key: tensor.float() if tensor.dtype == torch.float64 else tensor for key, tensor in batch.items()}
    obs, stored = torch.randn(3, 7, 2), torch.zeros(3, 7, 4)
    for b in range(3):
        state = {"sum": torch.ones(1, 4)}
        for t in range(7):
            if t > 0 and (batch["terminated"][b, t - 1] or batch["mask"][b, t - 1] == 0):
                state = {"sum": torch.zeros(1, 4)}
            stored[b, t] = state["sum"][0].detach()
            outputs = module(obs[b, t : t + 1], state)
            batch["log_prob"][b, t] = outputs["logits"].log_softmax(-1)[0, batch["action"][b, t]].detach()
            state = outputs["state"]
    batch |= {"obs": obs, "state": {"sum": stored}}
    measured = Impala(module, sgd(module), ImpalaConfig()).update(batch, 0.0)
    assert measured["rho"] == pytest.approx(1, abs=1e-5)
    assert measured["approx_kl"] == pytest.approx(0, abs=1e-5)
    assert set(measured) == {*METRICS, "learning_rate"}


def test_half_precision_learns_almost_the_same():
    torch.manual_seed(0)
    batch = random_batch(columns=8, steps=16)
    batch = {key: tensor.float() if tensor.dtype == torch.float64 else tensor for key, tensor in batch.items()}
    batch |= {"obs": torch.randn(8, 17, 2), "state": {"sum": torch.zeros(8, 17, 4)}}
    gradients = []
    for precision in ("fp32", "bf16"):
        module = Recurrent()
        config = ImpalaConfig(precision=precision, max_grad_norm=None)
        gradients.append(moved(module, lambda m=module, c=config: Impala(m, sgd(m), c).update(batch, 0.0)))
    for name, gradient in gradients[0].items():
        assert gradients[1][name].dtype == np.float32
        assert not np.array_equal(gradients[1][name], gradient)
        np.testing.assert_allclose(gradients[1][name], gradient, rtol=0.1, atol=0.02)
