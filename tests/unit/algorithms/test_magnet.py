"""`brayx.algorithms.magnet` and its term in PPO's loss: against a slow computation, and what it keeps and where."""

from __future__ import annotations

import copy
import io

import numpy as np
import pytest
import torch

from brayx.algorithms.magnet import Magnet, bare
from brayx.algorithms.mixed import Mixed, MixedConfig
from brayx.algorithms.ppo import PPO, PPOConfig, ppo_loss
from brayx.nets.mlp import ActorCritic
from brayx.trainer.hooks import Hooks, WithLoss
from tests.unit.algorithms.ppo_cases import CASES, make, make_batch, parameters, same, slow_update
from tests.unit.algorithms.tables import Table, random_batch, sgd

KINDS = [case for case in CASES if case not in ("normalised value", "magnet")]
"""Moments of values are of all batches, and the slow computation sees one."""


def test_the_loss_adds_the_weighted_divergence():
    rng = np.random.default_rng(0)
    steps = [torch.from_numpy(rng.normal(size=8)) for _ in range(6)]
    weight = torch.from_numpy(rng.random(8))
    divergence = torch.from_numpy(rng.random(8)).requires_grad_()
    options = {"clip_param": 0.2, "value_coef": 0.5, "entropy_coef": 0.1}
    without = ppo_loss(*steps, weight, **options)
    loss = ppo_loss(*steps, weight, **options, magnet_kl=divergence, magnet_coef=0.3)
    kl = sum(w * d for w, d in zip(weight.tolist(), divergence.tolist(), strict=True))
    assert loss.total.item() == pytest.approx(without.total.item() + 0.3 * kl, abs=1e-12)
    assert loss.parts.tolist() == pytest.approx([*without.parts.tolist(), kl], abs=1e-12)
    loss.total.backward()
    torch.testing.assert_close(divergence.grad, 0.3 * weight)


@pytest.mark.parametrize("case", KINDS)
def test_an_update_towards_a_fixed_magnet_matches_the_slow_one(case):
    """The magnet is the policy before the first update, also after the second."""
    ppo = make(case, lr=0.003 if case == "squashed" else 0.3, magnet_coef=0.7, magnet="fixed")
    start = copy.deepcopy(ppo.module)
    for seed in range(3):
        batch = make_batch(case, seed=seed)
        want, measured_want = slow_update(ppo, batch, magnet=start)
        measured = ppo.update(batch, 0.0)
        same(parameters(ppo.module), want)
        if case == "squashed":  # whose entropy torch does not know
            measured_want.pop("entropy")
        assert {name: measured[name] for name in measured_want} == pytest.approx(measured_want, abs=1e-9)
        assert (measured["magnet_kl"] > 1e-5) == (seed > 0)  # it moves slowly in the decoupled case


@pytest.mark.parametrize("case", ["masked", "memory"])
def test_an_average_magnet_keeps_a_share_of_itself_at_each_update(case):
    ppo = make(case, lr=0.3, magnet_coef=0.7, magnet_decay=0.6)
    slow = copy.deepcopy(ppo.module)
    for seed in range(3):
        batch = make_batch(case, seed=seed)
        want, measured_want = slow_update(ppo, batch, magnet=slow)
        measured = ppo.update(batch, 0.0)
        same(parameters(ppo.module), want)
        assert measured["magnet_kl"] == pytest.approx(measured_want["magnet_kl"], abs=1e-9)
        with torch.no_grad():
            for old, new in zip(slow.parameters(), ppo.module.parameters(), strict=True):
                old.copy_(0.6 * old + 0.4 * new)
        same(parameters(slow), {name: ppo.state_dict()["magnet"][name] for name in parameters(slow)})


def test_a_larger_weight_keeps_the_policy_nearer_to_its_magnet():
    moved = {}
    for coef in (0.0, 0.5, 5.0):
        ppo = make("masked", lr=0.1, epochs=4, minibatch_size=11, magnet_coef=coef, magnet="fixed")
        start = parameters(ppo.module)
        torch.manual_seed(0)
        for _ in range(5):
            ppo.update(make_batch("masked"), 0.0)
        now = parameters(ppo.module)
        moved[coef] = sum((now[name] - start[name]).square().sum().item() for name in now if "value" not in name)
    assert moved[5.0] < moved[0.5] < moved[0.0]


@pytest.mark.parametrize("case", ["categorical", "memory"])
def test_a_weight_of_zero_changes_nothing(case):
    without = make(case, epochs=3, minibatch_size=11)
    zero = make(case, epochs=3, minibatch_size=11, magnet_coef=0.0, magnet="fixed", magnet_decay=0.1)
    for seed in range(2):
        batch = make_batch(case, seed=seed)
        torch.manual_seed(seed)
        measured = without.update(batch, 0.0)
        torch.manual_seed(seed)
        assert zero.update(batch, 0.0) == measured
    assert "magnet_kl" not in measured
    assert zero.state_dict().keys() == without.state_dict().keys() == {"optimise"}
    same(parameters(zero.module), parameters(without.module), atol=0)


@pytest.mark.parametrize("magnet", ["fixed", "average"])
@pytest.mark.parametrize("case", ["masked", "memory"])
def test_a_resumed_training_equals_an_uninterrupted_one(case, magnet):
    def learner():
        return make(case, epochs=2, minibatch_size=13, magnet_coef=0.5, magnet=magnet, magnet_decay=0.8)

    def update(ppo, seed):
        torch.manual_seed(seed)
        return ppo.update(make_batch(case, seed=seed), 0.0)

    whole = learner()
    for seed in range(3):
        update(whole, seed)
    saved = io.BytesIO()
    torch.save({"module": whole.module.state_dict(), "algorithm": whole.state_dict()}, saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=True)
    resumed = learner()
    update(resumed, 9)  # its own magnet is replaced
    resumed.module.load_state_dict(loaded["module"])
    resumed.load_state_dict(loaded["algorithm"])
    for seed in range(3, 6):
        assert update(resumed, seed) == update(whole, seed)
    same(parameters(resumed.module), parameters(whole.module), atol=0)


def test_a_checkpoint_without_a_magnet_starts_one_at_its_own_weights():
    before = make("categorical")
    before.update(make_batch("categorical"), 0.0)
    after = make("categorical", magnet_coef=0.5)
    after.update(make_batch("categorical", seed=1), 0.0)
    after.module.load_state_dict(before.module.state_dict())
    after.load_state_dict(before.state_dict())
    assert "magnet" not in after.state_dict()
    assert after.update(make_batch("categorical", seed=2), 0.0)["magnet_kl"] == 0
    without = make("categorical")
    without.load_state_dict(after.state_dict())  # and the option may be switched off again
    assert "magnet" not in without.state_dict()


def test_imitation_comes_before_the_magnet():
    """A policy cloned from demonstrations is the magnet of the play that follows."""
    table = Table(7, 3)
    options = PPOConfig(epochs=1, magnet_coef=0.5, magnet="fixed")
    mixed = Mixed(table, sgd(table), MixedConfig(reinforcement=options))
    for seed in range(2):
        mixed.update({**random_batch(seed=seed), "demonstration": torch.ones(5, 10)}, 0.0)
    cloned = parameters(table)
    assert "magnet" not in mixed.state_dict()["inner"]
    measured = mixed.update(random_batch(), 0.0)
    assert "magnet_kl" in measured
    same({name: mixed.state_dict()["inner"]["magnet"][name] for name in cloned}, cloned, atol=0)


def test_the_magnet_is_a_copy_of_the_module_inside_its_wrappers():
    net = ActorCritic(3, 3)
    seen = []

    def loss(outputs, obs):
        seen.append(len(outputs["logits"]))
        return 0 * outputs["logits"].sum()

    hooked = WithLoss(net, Hooks(loss=loss))
    assert bare(hooked) is bare(net) is net
    ppo = PPO(hooked, torch.optim.SGD(net.parameters(), lr=0.1), PPOConfig(epochs=1, magnet_coef=0.5))
    batch = {key: x.float() if x.dtype == torch.float64 else x for key, x in make_batch("categorical").items()}
    ppo.update(batch, 0.0)
    assert seen == [45], "the user's loss does not see the magnet's forward"
    assert set(ppo.state_dict()["magnet"]) == set(net.state_dict())


def test_buffers_follow_and_the_copy_never_trains():
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.nn.Dropout(0.5))
    averaged, fixed = Magnet(net, decay=0.5), Magnet(net)
    net(torch.randn(16, 2))
    x = torch.randn(4, 2)
    with torch.no_grad():
        start = fixed.forward(x)
    averaged.follow()
    fixed.follow()
    assert int(averaged.state_dict()["1.num_batches_tracked"]) == 1
    assert int(fixed.state_dict()["1.num_batches_tracked"]) == 0
    torch.testing.assert_close(fixed.forward(x), start)  # no dropout
    assert not fixed.forward(x).requires_grad
