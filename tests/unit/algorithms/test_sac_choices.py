"""`brayx.algorithms.sac` with discrete and hybrid actions: the update against NumPy written like the papers."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from brayx.algorithms.sac import SAC, SACConfig
from brayx.nets.heads import masked
from tests.unit.algorithms.tables import moved, random_batch, sgd
from tests.unit.algorithms.test_sac import gradient_of

OBS, HIDDEN = 3, 4
KINDS = {"one choice": ((3,), 0), "two choices": ((3, 2), 0), "hybrid": ((3, 2), 2)}
"""Sizes of the heads, and the number of numbers."""
COLUMNS, STEPS = 4, 5


class Critics(nn.Module):
    def __init__(self, sizes, numbers):
        super().__init__()
        self.inner = nn.Parameter(torch.randn(OBS + numbers, HIDDEN, dtype=torch.float64))
        self.outer = nn.Parameter(torch.randn(HIDDEN, 2, sum(sizes), dtype=torch.float64))

    def forward(self, obs, numbers):
        return torch.einsum("nh,hca->nca", torch.tanh(torch.cat([obs["x"], numbers], -1) @ self.inner), self.outer)


class Soft(nn.Module):
    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.sizes, numbers = KINDS[kind]
        self.logits = nn.Parameter(torch.randn(OBS, sum(self.sizes), dtype=torch.float64))
        if numbers:
            self.mean = nn.Parameter(0.5 * torch.randn(OBS, numbers, dtype=torch.float64))
            self.log_std = nn.Parameter(0.5 * torch.randn(OBS, numbers, dtype=torch.float64))
        self.numbers = numbers
        self.critic = Critics(self.sizes, numbers)

    def forward(self, obs):
        heads = masked(obs["x"] @ self.logits, obs["action_mask"]).split(self.sizes, -1)
        outputs = {"logits": heads if len(heads) > 1 else heads[0]}
        if self.numbers:
            outputs |= {"tanh_mean": obs["x"] @ self.mean, "tanh_log_std": obs["x"] @ self.log_std}
        return outputs


def batch_of(kind, seed=0):
    """Every head's first choice is allowed, the others as it happens; each transition took a choice that it had."""
    sizes, numbers = KINDS[kind]
    batch = random_batch(columns=COLUMNS, steps=STEPS, seed=seed)
    rng, shape = np.random.default_rng(seed), (COLUMNS, STEPS + 1)
    masks = [(rng.random((*shape, size)) < 0.5) | (np.arange(size) == 0) for size in sizes]
    action = np.stack([(rng.random(mask.shape) * mask).argmax(-1) for mask in masks], -1)
    if numbers:
        action = np.concatenate([action, rng.uniform(-0.9, 0.9, (*shape, numbers))], -1)
    batch["obs"] = {"x": rng.normal(size=(*shape, OBS)), "action_mask": np.concatenate(masks, -1).astype(np.int8)}
    batch["obs"] = {name: torch.from_numpy(leaf) for name, leaf in batch["obs"].items()}
    batch["action"] = torch.from_numpy(action if action.shape[-1] > 1 else action[..., 0])
    return {**batch, "weight": torch.tensor([0.2, 1.0, 0.7, 0.5], dtype=torch.float64)}


def numpy_q(critic, x, numbers):
    """Each critic's values of all choices, ``[2, choices]``."""
    return np.einsum("h,hca->ca", np.tanh(np.concatenate([x, numbers]) @ critic["inner"]), critic["outer"])


def numpy_policy(p, kind, x, mask, noise):
    """Each head's probabilities of its allowed choices by index; the numbers, and their log-probability."""
    heads, first = [], 0
    for size in KINDS[kind][0]:
        allowed = [first + choice for choice in range(size) if mask[first + choice]]
        odds = np.exp(x @ p["logits"][:, allowed])
        heads.append(dict(zip(allowed, odds / odds.sum(), strict=True)))
        first += size
    if not KINDS[kind][1]:
        return heads, np.zeros(0), 0.0
    log_std = x @ p["log_std"]
    u = x @ p["mean"] + np.exp(log_std) * noise[-KINDS[kind][1] :]
    density = -0.5 * noise[-KINDS[kind][1] :] ** 2 - log_std - 0.5 * np.log(2 * np.pi)
    return heads, np.tanh(u), (density - np.log(1 - np.tanh(u) ** 2)).sum()


def numpy_value(p, critic, kind, x, mask, noise, alpha):
    """Haarnoja's equation 3 with Christodoulou's expectation over choices: the mean over heads of
    ``pi(s)^T (min Q(s) - alpha log pi(s))``, less the numbers' ``alpha log pi``."""
    heads, numbers, log_prob = numpy_policy(p, kind, x, mask, noise)
    q = numpy_q(critic, x, numbers)
    of_heads = [
        sum(prob * (np.minimum(q[0, a], q[1, a]) - temperature * np.log(prob)) for a, prob in head.items())
        for head, temperature in zip(heads, alpha, strict=False)
    ]
    return sum(of_heads) / len(of_heads) - (alpha[-1] * log_prob if KINDS[kind][1] else 0.0)


def papers_losses(p, slow, kind, batch, noises, alpha, gamma):
    """The losses of one-step returns, each as a function of all parameters (critics fixed in the second), and the
    gradient of the temperatures' logarithms."""
    live = {name.removeprefix("critic."): p[name] for name in p if name.startswith("critic.")}
    arrays = {key: tensor.numpy() for key, tensor in batch.items() if key != "obs"}
    xs, masks = batch["obs"]["x"].numpy(), batch["obs"]["action_mask"].numpy()
    starts = [(b, t) for b in range(COLUMNS) for t in range(STEPS)]
    share = {start: arrays["mask"][start] / sum(arrays["mask"][start] for start in starts) for start in starts}
    offsets = np.cumsum([0, *KINDS[kind][0][:-1]])

    def critics(p):
        critic = {name.removeprefix("critic."): p[name] for name in p if name.startswith("critic.")}
        loss = 0.0
        for b, t in starts:
            value = numpy_value(started, slow, kind, xs[b, t + 1], masks[b, t + 1], noises[b, t, 0], alpha)
            target = arrays["reward"][b, t] + (0.0 if arrays["terminated"][b, t] else gamma) * value
            action = np.atleast_1d(arrays["action"][b, t])
            taken = action[: len(offsets)].astype(int) + offsets
            for q in numpy_q(critic, xs[b, t], action[len(offsets) :]):
                loss += share[b, t] * arrays["weight"][b] * 0.5 * (q[taken].mean() - target) ** 2
        return loss

    def policy(p):
        values = {(b, t): numpy_value(p, live, kind, xs[b, t], masks[b, t], noises[b, t, 1], alpha) for b, t in starts}
        return -sum(share[start] * value for start, value in values.items())

    started, gradient = p, np.zeros(len(alpha))
    for b, t in starts:
        heads, numbers, log_prob = numpy_policy(p, kind, xs[b, t], masks[b, t], noises[b, t, 1])
        for index, head in enumerate(heads):
            entropy = -sum(prob * np.log(prob) for prob in head.values())
            gradient[index] += share[b, t] * (entropy - 0.3 * np.log(len(head)))
        if len(numbers):
            gradient[-1] += share[b, t] * (-log_prob + len(numbers))
    return critics, policy, gradient


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_an_update_follows_the_papers_gradient(kind, accumulate):
    """Also that of the temperatures, one for each head and one for the numbers, whose targets see the masks."""
    module, batch = Soft(kind), batch_of(kind, seed=7)
    sac = SAC(module, sgd(module), SACConfig(gamma=0.9, accumulate=accumulate, target_entropy_scale=0.3))
    alpha = np.array([0.3, 0.6, 0.1][: len(KINDS[kind][0]) + bool(KINDS[kind][1])])
    state = sac.state_dict() | {"log_alpha": torch.from_numpy(np.log(alpha)).squeeze()}
    torch.manual_seed(6)
    state["slow"] = {name: tensor + 0.5 * torch.randn_like(tensor) for name, tensor in state["slow"].items()}
    sac.load_state_dict(state)
    p = {name: tensor.detach().numpy().copy() for name, tensor in module.named_parameters()}
    slow = {name: tensor.numpy() for name, tensor in state["slow"].items()}
    torch.manual_seed(5)
    noises = torch.randn(COLUMNS, STEPS, 2, *batch["action"].shape[2:], dtype=torch.float64).numpy()
    critics, policy, of_alpha = papers_losses(p, slow, kind, batch, noises, alpha, 0.9)
    torch.manual_seed(5)
    measured = {}
    gradient = moved(module, lambda: measured.update(sac.update(batch, 0.0)))
    assert measured["critic_loss"] == pytest.approx(critics(p), abs=1e-9)
    assert measured["policy_loss"] == pytest.approx(policy(p), abs=1e-9)
    assert measured["alpha"] == pytest.approx(alpha.mean())
    for name in p:
        expected = gradient_of(critics if name.startswith("critic") else policy, p, name)
        assert np.abs(expected).max() > 1e-3
        np.testing.assert_allclose(gradient[name], expected, rtol=0, atol=1e-9)
    assert np.abs(of_alpha).min() > 1e-3
    np.testing.assert_allclose(np.atleast_1d(sac._log_alpha.grad), of_alpha, rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", ["two choices", "hybrid"])
def test_a_forbidden_choice_gets_no_gradient_and_its_values_do_not_matter(kind):
    changes = {}
    for value in (0.0, 1e6):
        module, batch = Soft(kind), batch_of(kind)
        batch["obs"]["action_mask"][..., 1:3] = 0  # of the first head only the first choice is left
        batch["action"][..., 0] = 0
        with torch.no_grad():
            module.critic.outer[..., 1:3] = value
        torch.manual_seed(0)
        changes[value] = moved(
            module, lambda module=module, batch=batch: SAC(module, sgd(module), SACConfig()).update(batch, 0.0)
        )
        assert not changes[value]["logits"][:, :3].any()
        assert not changes[value]["critic.outer"][..., 1:3].any()
        assert changes[value]["logits"][:, 3:].any()
    for name in changes[0.0]:
        np.testing.assert_array_equal(changes[0.0][name], changes[1e6][name])


def test_forced_moves_do_not_raise_the_temperature():
    """The target of a head without a choice is its entropy, 0. Each head's temperature follows that head alone."""
    module, batch = Soft("two choices"), batch_of("two choices")
    batch["obs"]["action_mask"][..., 1:3] = 0
    sac = SAC(module, sgd(module), SACConfig(alpha_initial=0.5))
    for _ in range(3):
        sac.update(batch, 0.0)
    forced, free = sac.state_dict()["log_alpha"].exp().tolist()
    assert forced == pytest.approx(0.5)
    assert abs(free - 0.5) > 0.1


def test_a_restored_state_continues_exactly():
    whole, resumed = (SAC(module, sgd(module), SACConfig(tau=0.1)) for module in (Soft("hybrid"), Soft("hybrid")))
    for number in range(4):
        if number == 2:
            resumed.module.load_state_dict(whole.module.state_dict())
            resumed.load_state_dict(copy.deepcopy(whole.state_dict()))
        torch.manual_seed(number)
        ours = whole.update(batch_of("hybrid", number), 0.0)
        torch.manual_seed(number)
        assert number < 2 or resumed.update(batch_of("hybrid", number), 0.0) == ours
    assert len({*whole.state_dict()["log_alpha"].tolist()}) == 3


def test_a_critic_of_other_choices_is_refused():
    module = Soft("two choices")
    forward = module.critic.forward
    module.critic.forward = lambda obs, numbers: forward(obs, numbers)[..., :4]
    with pytest.raises(ValueError, match=r"critic: .*\[20, critics, 5\], .*\(20, 2, 4\)"):
        SAC(module, sgd(module), SACConfig()).update(batch_of("two choices"), 0.0)
