"""Batches and modules for the PPO tests, in float64, and a slow step-by-step PPO written like the paper."""

from __future__ import annotations

import copy

import numpy as np
import optree
import torch
from torch import distributions

from brayx.algorithms.config import RewardHead
from brayx.algorithms.ppo import PPO, PPOConfig
from brayx.nets.distributions import sample
from brayx.nets.policy import NetworkConfig, policy_for

FLAT = np.zeros(3, np.float32)
HEADS = [RewardHead(gamma=0.9, gae_lambda=0.7, weight=1.0), RewardHead(gamma=0.5, gae_lambda=1.0, weight=-0.3)]

# name: (observation, action, network, options of PPO)
CASES = {
    "categorical": (FLAT, {"num_actions": 3}, {}, {}),
    "entropy": (FLAT, {"num_actions": 3}, {}, {"entropy_coef": 0.3}),
    "raw advantage": (FLAT, {"num_actions": 3}, {}, {"normalise_advantage": False}),
    "heads": (FLAT, {"num_actions": [3, 2]}, {}, {"entropy_coef": 0.1}),
    "masked": ({"action_mask": np.zeros(5, np.int8), "x": FLAT}, {"num_actions": [3, 2]}, {}, {"entropy_coef": 0.1}),
    "gaussian": (FLAT, {"action_size": 2}, {}, {"entropy_coef": 0.1}),
    "sde": (FLAT, {"action_size": 2}, {"distribution": "sde"}, {"entropy_coef": 0.1}),
    "squashed": (FLAT, {"action_size": 2}, {"distribution": "squashed"}, {}),
    "hybrid": (
        {"action_mask": np.zeros(5, np.int8), "x": FLAT},
        {"num_actions": [3, 2], "action_size": 2},
        {},
        {"entropy_coef": 0.1},
    ),
    "reward heads": (FLAT, {"num_actions": 3}, {"value_heads": 2}, {"reward_heads": HEADS}),
    "clipped value": (FLAT, {"num_actions": 3}, {}, {"clip_value": 0.05}),
    "clipped value heads": (FLAT, {"num_actions": 3}, {"value_heads": 2}, {"reward_heads": HEADS, "clip_value": 0.05}),
    "normalised value": (FLAT, {"num_actions": 3}, {}, {"normalise_value": True}),
    "magnet": (FLAT, {"num_actions": 3}, {}, {"magnet_coef": 0.7, "magnet_decay": 0.5}),
    "memory": (FLAT, {"num_actions": 3}, {"lstm": 4}, {"entropy_coef": 0.1}),
    "decoupled": (FLAT, {"num_actions": 3}, {}, {"decoupled": True}),
    "decoupled hybrid": (FLAT, {"num_actions": [3, 2], "action_size": 2}, {}, {"decoupled": True, "entropy_coef": 0.1}),
    "decoupled memory": (FLAT, {"num_actions": 3}, {"lstm": 4}, {"decoupled": True}),
    "memory, reward heads": (FLAT, {"action_size": 2}, {"lstm": 4, "value_heads": 2}, {"reward_heads": HEADS}),
}


def make(case, seed=0, lr=0.1, across=None, **more):
    """PPO with plain gradient descent, so that a step is the gradient."""
    obs, action, network, options = CASES[case]
    torch.manual_seed(seed)
    module, _ = policy_for(obs, **action, network=NetworkConfig(hidden=[6], **network))
    module.double()
    with torch.no_grad():
        for p in module.parameters():  # further from uniform than a fresh policy
            p.add_(0.3 * torch.randn(p.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)))
        if case == "squashed":  # away from the edges, where float64 has digits that float32 has not
            module.head.both.bias[2:] -= 1.5
    plain = {"epochs": 1, "minibatch_size": 10_000, "max_grad_norm": None, "entropy_coef": 0.0, "decoupled": False}
    config = PPOConfig(**{**plain, **options, **more})
    optimizer = torch.optim.SGD(module.parameters(), lr=lr)
    return PPO(module, optimizer, config) if across is None else PPO(module, optimizer, config, across)


def make_batch(case, columns=5, steps=9, seed=0):
    """A batch with episode ends of every kind, with and without a bootstrap or reset step after them."""
    obs, _, network, options = CASES[case]
    rng = np.random.default_rng(seed)
    shape = (columns, steps + 1)
    end = rng.random(shape) < 0.25
    terminated = end & (rng.random(shape) < 0.5)
    truncated = end & ~terminated
    mask = np.ones(shape)
    mask[:, 1:][truncated[:, :-1]] = 0
    mask[:, 1:][terminated[:, :-1] & (rng.random((columns, steps)) < 0.5)] = 0
    mask[:, -1] = 0
    batch = {
        "reward": rng.normal(size=shape),
        "terminated": terminated,
        "truncated": truncated,
        "mask": mask,
        "log_prob": np.zeros(shape),
    }
    batch = {key: torch.from_numpy(array) for key, array in batch.items()}
    x = torch.from_numpy(rng.normal(size=(*shape, 3)))
    batch["obs"] = x
    if isinstance(obs, dict):
        allowed = (rng.random((*shape, 5)) < 0.6).astype(np.int8)
        allowed[..., 3] = 1
        batch["obs"] = {"action_mask": torch.from_numpy(allowed), "x": x}
    if "reward_heads" in options:
        batch["reward_heads"] = torch.from_numpy(rng.normal(size=(*shape, 2)))
    module = make(case, seed=seed).module  # the acting policy's own, with noise on its log-probabilities
    torch.manual_seed(seed)
    flat = (
        {"x": x.flatten(0, 1), "action_mask": batch["obs"]["action_mask"].flatten(0, 1)}
        if isinstance(obs, dict)
        else x.flatten(0, 1)
    )
    if network.get("lstm"):
        batch["state"] = {key: torch.from_numpy(rng.normal(size=(*shape, 4))) for key in ("h", "c")}
        outputs = module(flat, {key: value.flatten(0, 1) for key, value in batch["state"].items()})
    else:
        outputs = module(flat)
    drawn, log_prob = sample({key: value for key, value in outputs.items() if key != "state"})
    batch["action"] = drawn.detach().unflatten(0, shape)
    batch["log_prob"] = (log_prob.detach() + 0.3 * torch.randn(log_prob.shape, dtype=torch.float64)).unflatten(0, shape)
    return batch


def distribution(outputs, index=0):
    """torch's distributions for the outputs of one observation: a list of heads, and of dimensions beside heads."""
    if "logits" in outputs:
        heads = outputs["logits"] if isinstance(outputs["logits"], tuple) else (outputs["logits"],)
        parts = [distributions.Categorical(logits=head[index]) for head in heads]
        if "mean" in outputs:
            pairs = zip(outputs["mean"][index], outputs["log_std"][index].exp(), strict=True)
            parts += [distributions.Normal(*pair) for pair in pairs]
        return parts
    prefix = "tanh_" if "tanh_mean" in outputs else ""
    base = distributions.Normal(outputs[f"{prefix}mean"][index], outputs[f"{prefix}log_std"][index].exp())
    return [distributions.TransformedDistribution(base, distributions.TanhTransform()) if prefix else base]


def slow_outputs(module, batch):
    """Outputs ``[column][step]``, of one observation each; a recurrent state is carried or reset at each step."""
    columns, steps = batch["mask"].shape
    outputs_of = []
    for b in range(columns):
        outputs_of.append([])
        state = None
        for t in range(steps):
            obs = (
                {k: v[b, t][None] for k, v in batch["obs"].items()}
                if isinstance(batch["obs"], dict)
                else batch["obs"][b, t][None]
            )
            if "state" not in batch:
                outputs_of[b].append(module(obs))
                continue
            before = t - 1
            fresh = (
                t == 0
                or batch["mask"][b, before] == 0
                or batch["terminated"][b, before]
                or (batch["truncated"][b, before] and batch["mask"][b, t] == 1)
            )
            if fresh:
                state = {key: value[b, t][None] for key, value in batch["state"].items()}
            outputs = module(obs, state)
            state = outputs["state"]
            outputs_of[b].append(outputs)
    return outputs_of


def slow_advantage(batch, value, b, t, gamma, lam, reward):
    """Equation 16 of Schulman et al. 2016, as an explicit sum."""
    total, weight = 0.0, 1.0
    for k in range(t, batch["mask"].shape[1] - 1):
        bootstrap = 0.0 if batch["terminated"][b, k] else value[b][k + 1]
        total += weight * (reward[b, k] + gamma * bootstrap - value[b][k])
        if batch["terminated"][b, k] or batch["truncated"][b, k]:
            break
        weight *= gamma * lam
    return total


def slow_update(ppo, batch, magnet=None):
    """The parameters after one step of gradient descent on the whole batch, and the metrics; does not change `ppo`.
    ``magnet``: the reference policy, a module; None: no magnet."""
    module, config = copy.deepcopy(ppo.module), ppo.config
    lr = ppo.optimise.optimizer.param_groups[0]["initial_lr"]
    outputs = slow_outputs(module, batch)
    references = None if magnet is None else slow_outputs(magnet, batch)
    magnet_kl = torch.zeros(())
    columns, steps = batch["mask"].shape
    learn = [(b, t) for b in range(columns) for t in range(steps - 1) if batch["mask"][b, t] == 1]
    heads = config.reward_heads or [RewardHead(gamma=config.gamma, gae_lambda=config.gae_lambda)]
    advantage, target, seen = {}, {}, {}
    for k, head in enumerate(heads):
        value = [[o["value"].reshape(-1)[k].item() for o in row] for row in outputs]
        reward = batch["reward_heads"][..., k] if config.reward_heads else batch["reward"]
        for place in learn:
            estimate = float(slow_advantage(batch, value, *place, head.gamma, head.gae_lambda, reward))
            advantage[place] = advantage.get(place, 0.0) + head.weight * estimate
            target[place, k], seen[place, k] = estimate + value[place[0]][place[1]], value[place[0]][place[1]]
    if config.normalise_value:
        for k in range(len(heads)):
            every = np.array([target[place, k] for place in learn])
            for place in learn:
                target[place, k] = (target[place, k] - every.mean()) / every.std()
    if config.normalise_advantage:
        every = np.array([advantage[place] for place in learn])
        advantage = {place: (a - every.mean()) / (every.std() + 1e-8) for place, a in advantage.items()}
    policy_loss = value_loss = kl = 0.0
    entropy = torch.zeros(())
    clipped = 0
    for place in learn:
        out, action = outputs[place[0]][place[1]], batch["action"][place]
        parts = distribution(out)
        joint = len(parts) > 1
        log_prob = sum((d.log_prob(action[i] if joint else action)).sum() for i, d in enumerate(parts))
        if not isinstance(parts[0], distributions.TransformedDistribution):
            entropy = entropy + sum(d.entropy().sum() for d in parts) / len(learn)
        if references is not None:
            pairs = zip(parts, distribution(references[place[0]][place[1]]), strict=True)
            magnet_kl = magnet_kl + sum(distributions.kl_divergence(*pair).sum() for pair in pairs) / len(learn)
        acted, trust = batch["log_prob"][place], 1.0
        if config.decoupled:
            acted, trust = log_prob.detach(), min(1.0, float((log_prob.detach() - acted).exp()))
        log_ratio = log_prob - acted
        ratio = log_ratio.exp()
        low, high = 1 - config.clip_param, 1 + config.clip_param
        gain = trust * min(ratio * advantage[place], ratio.clamp(low, high) * advantage[place])
        policy_loss = policy_loss - gain / len(learn)
        kl += (ratio - 1 - log_ratio).item() / len(learn)
        clipped += bool(ratio < low or ratio > high) / len(learn)
        for k in range(len(heads)):
            value = out["value"].reshape(-1)[k]
            error = (value - target[place, k]) ** 2
            if config.clip_value is not None:
                near = seen[place, k] + (value - seen[place, k]).clamp(-config.clip_value, config.clip_value)
                error = max(error, (near - target[place, k]) ** 2)
            value_loss = value_loss + 0.5 * error / len(learn)
    loss = policy_loss + config.value_coef * value_loss - config.entropy_coef * entropy
    loss = loss + config.magnet_coef * magnet_kl
    loss.backward()
    norm = sum(p.grad.square().sum() for p in module.parameters()).sqrt()
    parameters = {name: (p - lr * p.grad).detach() for name, p in module.named_parameters()}
    return parameters, {
        "loss": loss.item(),
        "policy_loss": policy_loss.item(),
        "value_loss": value_loss.item(),
        "entropy": entropy.item(),
        "approx_kl": kl,
        "clip_fraction": clipped,
        "grad_norm": float(norm),
        **({} if magnet is None else {"magnet_kl": magnet_kl.item()}),
    }


def two_episodes(batch):
    """Two batches of the same two episodes: one column with both in a row, and two columns of one episode each."""
    batch["terminated"][:] = False
    batch["truncated"][:] = False
    batch["mask"][:] = 1
    batch["mask"][:, -1] = 0
    batch["truncated"][:, 3] = True  # step 4 bootstraps, step 5 starts a new episode
    batch["mask"][:, 4] = 0
    first = optree.tree_map(lambda x: x[:, :5].clone(), batch)
    second = optree.tree_map(lambda x: torch.cat([x[:, 5:], x[:, -1:]], 1), batch)
    second["mask"][:, -2:] = 0
    second["truncated"][:, -3] = True
    return batch, optree.tree_map(lambda x, y: torch.cat([x, y]), first, second)


def parameters(module):
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def same(got, want, atol=1e-9):
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(
            got[name], want[name], rtol=0, atol=atol, msg=lambda text, label=name: f"{label}: {text}"
        )


class Stepwise(torch.nn.Module):
    """A recurrent module that is called once per step."""

    is_recurrent = True

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, obs, state):
        return self.inner(obs, state)
