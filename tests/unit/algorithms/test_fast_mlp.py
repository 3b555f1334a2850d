"""PPO's closed-form gradient and Adam on flat parameters equal autograd and torch's Adam, digit for digit."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from brayx.algorithms.adam import Adam
from brayx.algorithms.build import build
from brayx.algorithms.fast_mlp import FlatAdam, accelerate
from brayx.algorithms.mappo import MAPPOConfig
from brayx.algorithms.ppo import PPO, PPOConfig
from brayx.nets.central import central_policy_for
from brayx.nets.encoders import Numbers, OneHot
from brayx.nets.mlp import ActorCritic
from brayx.nets.normaliser import Normalised, follow
from brayx.nets.policy import NetworkConfig, policy_for
from brayx.trainer.hooks import Hooks, WithLoss
from tests.unit.algorithms.ppo_cases import CASES, make_batch

FLAT = np.zeros(3, np.float32)
BATCHES = {
    "discrete": "categorical",
    "gaussian": "gaussian",
    "relu": "categorical",
    "ready": "categorical",
    "encoded": "categorical",
    "encoded gaussian": "gaussian",
    "central": "categorical",
    "central gaussian": "gaussian",
    "central heads": "heads",
    "masked": "masked",
    "hybrid": "hybrid",
}


class Derived(torch.nn.Module):
    """The same network as a subclass, which the fast path does not recognise."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        if hasattr(inner, "critic"):
            self.critic = inner.critic

    def forward(self, obs):
        return self.inner(obs)


def network(kind):
    torch.manual_seed(0)
    if kind == "ready":
        return ActorCritic(3, 3, hidden=(6, 5)).double()
    action = {"action_size": 2} if "gaussian" in kind else {"num_actions": [3, 2] if "heads" in kind else 3}
    options = NetworkConfig(hidden=[6, 5], activation="relu" if kind == "relu" else "tanh")
    if "central" in kind:
        seen = {"obs": FLAT, "state": torch.zeros(4).numpy()}
        return central_policy_for(seen, **action, network=options)[0].double()
    if "encoded" in kind:
        module, _ = policy_for({"kind": np.int64(0), "x": FLAT}, **action, encoders=encoder_of, network=options)
        follow(module, {"x": 3 * torch.randn(50, 3)}, torch.ones(50), lambda x: x)
        return module.double()
    if kind in ("masked", "hybrid"):
        obs, action, _, _ = CASES[kind]
        return policy_for(obs, **action, network=options)[0].double()
    return policy_for(FLAT, **action, network=options)[0].double()


def encoder_of(name):
    return OneHot(2) if name == "kind" else Normalised(Numbers((3,)), (3,), "x")


def a_batch(kind, seed):
    batch = make_batch(BATCHES[kind], seed=seed)
    if "central" in kind:
        state = torch.from_numpy(np.random.default_rng(seed).normal(size=(*batch["mask"].shape, 4)))
        batch |= {"obs": {"obs": batch["obs"]}, "obs/state": state}
    if "encoded" in kind:
        batch["obs"] = {"kind": (batch["reward"] > 0).long(), "x": batch["obs"]}
    return batch


def make(kind, closed, *, optimizer=Adam, **options):
    net = network(kind)
    module = net if closed else Derived(net)
    config = MAPPOConfig if "central" in kind else PPOConfig
    chosen = config(**{"epochs": 3, "minibatch_size": 17, "entropy_coef": 0.1, **options})
    return build(chosen, module, optimizer(module.parameters(), lr=1e-2)), net


def same(a, b, atol=1e-9):
    for (name, x), y in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=atol, msg=lambda text, label=name: f"{label}: {text}")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"minibatch_size": 1000},
        {"entropy_coef": 0.0},
        {"max_grad_norm": None},
        {"magnet_coef": 0.3, "magnet_decay": 0.5},
        {"magnet_coef": 0.3, "magnet": "fixed", "max_grad_norm": None},
    ],
)
@pytest.mark.parametrize("optimizer", [Adam, torch.optim.SGD])
@pytest.mark.parametrize("kind", BATCHES)
def test_updates_equal_autograds(kind, optimizer, options):
    fast, fast_net = make(kind, True, optimizer=optimizer, **options)
    slow, slow_net = make(kind, False, optimizer=optimizer, **options)
    for seed in range(2):
        batch = a_batch(kind, seed)
        torch.manual_seed(seed)
        a = fast.update(batch, seed / 5)
        torch.manual_seed(seed)
        b = slow.update(batch, seed / 5)
        assert a == pytest.approx(b, rel=1e-9, abs=1e-9)
    assert fast.closed_form is not None
    assert isinstance(fast.optimise, FlatAdam) == (optimizer is Adam)
    assert slow.closed_form is None
    same(fast_net, slow_net)


@pytest.mark.parametrize("optimizer", [Adam, torch.optim.Adam])
def test_a_checkpoint_continues_either_way(optimizer):
    """The optimiser's state has torch's format: saved on one path and restored on the other, the run is the same."""
    fast, fast_net = make("discrete", True, optimizer=optimizer)
    for seed in range(2):
        torch.manual_seed(seed)
        fast.update(make_batch("categorical", seed=seed), 0.0)
    weights, moments = copy.deepcopy((fast_net.state_dict(), fast.optimise.optimizer.state_dict()))
    for closed in (True, False):
        other, net = make("discrete", closed, optimizer=optimizer)
        other.update(make_batch("categorical", seed=9), 0.0)  # parameters that the fast path adopted must be released
        net.load_state_dict(weights)
        other.optimise.optimizer.load_state_dict(copy.deepcopy(moments))
        again, again_net = make("discrete", True, optimizer=optimizer)
        again_net.load_state_dict(weights)
        again.optimise.optimizer.load_state_dict(copy.deepcopy(moments))
        for ppo in (other, again):
            torch.manual_seed(5)
            ppo.update(make_batch("categorical", seed=5), 0.0)
        same(net, again_net)


@pytest.mark.parametrize(
    "options", [{"clip_value": 0.2}, {"accumulate": 2}, {"precision": "bf16"}], ids=lambda options: next(iter(options))
)
def test_unsupported_options_use_autograd(options):
    ppo, _ = make("discrete", True, **options)
    batch = make_batch("categorical")
    if "precision" in options:
        ppo.module.float()
        batch = {key: x.float() if x.dtype == torch.float64 else x for key, x in batch.items()}
    ppo.update(batch, 0.0)
    assert ppo.closed_form is None


def test_only_plain_networks_report_towers():
    class Twisted(ActorCritic):
        pass

    assert ActorCritic(3, 2).towers() is not None
    assert Twisted(3, 2).towers() is None
    flat = FLAT
    masked = {"x": flat, "action_mask": np.ones(2, np.int8)}
    assert policy_for({"x": flat, "y": flat}, num_actions=2)[0].towers() is not None
    assert policy_for(masked, num_actions=2)[0].towers() is not None
    units = {"x": flat, "units": np.zeros((4, 3), np.float32)}
    assert policy_for(units, num_actions=2, network=NetworkConfig(entities=["units"]))[0].towers() is None
    for action, options in (
        ({"num_actions": 2}, {"shared": True}),
        ({"action_size": 2}, {"distribution": "squashed"}),
        ({"num_actions": 2, "action_size": 2}, {"distribution": "sde"}),
    ):
        assert policy_for(flat, **action, network=NetworkConfig(**options))[0].towers() is None
    for observed in ({"a": flat}, masked):
        assert central_policy_for({"obs": observed, "state": flat}, num_actions=2)[0].towers() is None
    frozen = ActorCritic(3, 2)
    frozen.policy.layers[0].weight.requires_grad_(False)
    assert build(PPOConfig(), frozen, torch.optim.Adam(frozen.value.parameters())).closed_form is None


def test_a_subclass_of_ppo_keeps_autograd():
    """It may have a different loss."""

    class Other(PPO):
        pass

    net = network("discrete")
    other = Other(net, Adam(net.parameters(), lr=1e-2), PPOConfig())
    accelerate(other)
    assert other.closed_form is None


def test_added_loss_terms_are_not_lost():
    """Imitation adds a loss term, and so does the user's own loss, which wraps the module."""
    moved = []
    for added in (False, True):
        net = network("discrete")
        config = PPOConfig(epochs=3, minibatch_size=17, entropy_coef=0.1)
        learner = PPO(net, Adam(net.parameters(), lr=1e-2), config)
        if added:
            learner.optimise.terms.append(lambda net=net: 10 * net.head.logits.bias[0])
        accelerate(learner)
        assert (learner.closed_form is None) == added
        learner.update(make_batch("categorical"), 0.0)
        moved.append(net.head.logits.bias[0].item())
    assert moved[1] < moved[0] - 0.01
    hooked = WithLoss(network("discrete"), Hooks(loss=lambda outputs, obs: 10 * outputs["logits"][:, 0].mean()))
    build(config, hooked, Adam(hooked.parameters(), lr=1e-2)).update(make_batch("categorical"), 0.0)
    assert hooked.head.logits.bias[0].item() < moved[0] - 0.01
