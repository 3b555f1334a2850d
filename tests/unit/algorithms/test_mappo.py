"""`brayx.algorithms.mappo`: PPO's update with a value of the game's state, which acting does without."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import optree
import pytest
import torch
from torch import nn

from brayx.algorithms.mappo import MAPPO, MAPPOConfig
from brayx.algorithms.ppo import PPO, PPOConfig
from brayx.errors import ConfigError
from brayx.nets.central import central_policy_for
from brayx.nets.distributions import sample
from brayx.nets.policy import NetworkConfig
from tests.unit.algorithms.ppo_cases import CASES, make_batch, slow_update
from tests.unit.algorithms.tables import moved, random_batch, sgd


class StateValue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.from_numpy(np.random.default_rng(1).normal(size=5)))

    def forward(self, state):
        return self.table[state]


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.policy = nn.Parameter(torch.from_numpy(np.random.default_rng(0).normal(size=(7, 3))))
        self.critic = StateValue()

    def forward(self, obs):
        return {"logits": self.policy[obs]}


class SharedForPPO(Shared):
    """The same tables for PPO, which sees both the observation and the state."""

    def forward(self, obs, world):
        return {"logits": self.policy[obs], "value": self.critic(world)}


OPTIONS = {"epochs": 2, "minibatch_size": 20, "max_grad_norm": None}


class PolicyAndCritic(nn.Module):
    """A policy and its critic as one module, for the slow PPO, which passes everything as one observation."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, obs):
        observed = {name: leaf for name, leaf in obs.items() if name != "state"}
        outputs = self.module({"obs": observed["x"] if list(observed) == ["x"] else observed})
        return {**outputs, "value": self.module.critic(obs["state"])}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("options", [{}, {"normalise_value": True}, {"clip_value": 0.05}, {"accumulate": 3}])
@pytest.mark.parametrize("case", ["entropy", "masked", "gaussian", "squashed", "hybrid"])
def test_an_update_matches_the_paper_with_a_value_of_states(case, options, seed):
    """Compared with the slow step-by-step PPO, on the ready-made networks, whose value sees only the step's state."""
    own_obs, actions, network, more = CASES[case]
    batch = make_batch(case, seed=seed)
    state = torch.from_numpy(np.random.default_rng(seed + 1).normal(size=(*batch["mask"].shape, 4)))
    torch.manual_seed(seed)
    obs = {"obs": own_obs, "state": np.zeros(4, np.float32)}
    module, _ = central_policy_for(obs, **actions, network=NetworkConfig(hidden=[6], **network))
    module.double()
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.3 * torch.randn_like(p))
        if case == "squashed":  # away from the edges, where float64 has digits that float32 has not
            module.head.both.bias[2:] -= 1.5
        shown = optree.tree_map(lambda x: x.flatten(0, 1), batch["obs"])
        drawn, near = sample(module({"obs": shown}))  # acted much as it would now
        batch["action"] = drawn.unflatten(0, batch["mask"].shape)
        batch["log_prob"] = (near + 0.3 * torch.randn_like(near)).view_as(batch["mask"])
    plain = {"epochs": 1, "minibatch_size": 10_000, "max_grad_norm": None, "entropy_coef": 0.0}
    config = MAPPOConfig(**{**plain, **more, **options})
    mappo = MAPPO(module, sgd(module), config)
    leaves = batch["obs"] if isinstance(batch["obs"], dict) else {"x": batch["obs"]}
    slow = SimpleNamespace(module=PolicyAndCritic(module), config=config, optimise=mappo.optimise)
    want, measured_want = slow_update(slow, {**batch, "obs": {**leaves, "state": state}})
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    measured = mappo.update({**batch, "obs": {"obs": batch["obs"]}, "obs/state": state}, 0.0)
    for name, p in module.named_parameters():
        torch.testing.assert_close(p.detach(), want[f"module.{name}"], rtol=0, atol=1e-9)
        assert (p - before[name]).abs().max() > 1e-6, f"{name} is learned"
    if case == "squashed":  # whose entropy torch does not know
        measured_want.pop("entropy")
    assert {name: measured[name] for name in measured_want} == pytest.approx(measured_want, abs=1e-9)


def test_an_update_equals_ppos_with_the_critics_value():
    batch = random_batch()
    state = torch.randint(0, 5, (5, 10))
    shared, other = Shared(), SharedForPPO()
    torch.manual_seed(0)
    ours = moved(
        shared, lambda: MAPPO(shared, sgd(shared), MAPPOConfig(**OPTIONS)).update({**batch, "obs/state": state}, 0.0)
    )
    torch.manual_seed(0)
    theirs = moved(
        other, lambda: PPO(other, sgd(other), PPOConfig(**OPTIONS)).update({**batch, "obs": (batch["obs"], state)}, 0.0)
    )
    assert np.abs(ours["critic.table"]).max() > 1e-3
    for name in theirs:
        np.testing.assert_array_equal(ours[name], theirs[name])


def test_a_critic_with_a_column_output_is_refused():
    """Values ``[N, 1]`` have as many elements as there are rewards, but would be broadcast against all targets."""
    module = Shared()
    module.critic.table = nn.Parameter(module.critic.table.detach()[:, None])
    batch = {**random_batch(), "obs/state": torch.randint(0, 5, (5, 10))}
    with pytest.raises(ValueError, match=r"value: .*\(50,\), .*\(50, 1\)"):
        MAPPO(module, sgd(module), MAPPOConfig(**OPTIONS)).update(batch, 0.0)


def test_unsuitable_models_and_batches_are_refused():
    module = Shared()
    with pytest.raises(ConfigError, match="obs/state: missing"):
        MAPPO(module, sgd(module), MAPPOConfig()).update(random_batch(), 0.0)
    with pytest.raises(ValueError, match="critic"):
        MAPPO(nn.Linear(2, 2), torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0), MAPPOConfig())
