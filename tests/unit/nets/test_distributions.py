"""`brayx.nets.distributions` against `torch.distributions` and the properties of densities."""

from __future__ import annotations

import math

import numpy as np
import optree
import pytest
import torch
from torch import distributions as reference

from brayx import actions
from brayx.nets.distributions import distribution_outputs, is_discrete, kl_divergence, log_prob_entropy, mode, sample
from brayx.nets.heads import StateDependent, masked

N, D = 7, 3


@pytest.fixture(autouse=True)
def _in_float64():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def close(got, want, atol=1e-9):
    torch.testing.assert_close(got, want, rtol=0, atol=atol)


def test_categorical():
    logits, action = torch.randn(N, 5), torch.randint(0, 5, (N,))
    log_prob, entropy = log_prob_entropy({"logits": logits, "value": torch.zeros(N)}, action)
    close(log_prob, reference.Categorical(logits=logits).log_prob(action))
    close(entropy, reference.Categorical(logits=logits).entropy())
    assert torch.equal(mode({"logits": logits}), logits.argmax(-1))


def test_heads_are_joint():
    heads = (torch.randn(N, 5), torch.randn(N, 2), torch.randn(N, 3))
    action = torch.stack([torch.randint(0, head.shape[1], (N,)) for head in heads], -1)
    log_prob, entropy = log_prob_entropy({"logits": heads}, action)
    references = [reference.Categorical(logits=head) for head in heads]
    close(log_prob, sum(d.log_prob(action[:, i]) for i, d in enumerate(references)))
    close(entropy, sum(d.entropy() for d in references))
    assert torch.equal(mode({"logits": heads}), torch.stack([head.argmax(-1) for head in heads], -1))


def test_gaussian():
    mean, log_std, action = torch.randn(3, N, D)
    log_prob, entropy = log_prob_entropy({"mean": mean, "log_std": log_std}, action)
    normal = reference.Independent(reference.Normal(mean, log_std.exp()), 1)
    close(log_prob, normal.log_prob(action))
    close(entropy, normal.entropy())
    assert mode({"mean": mean, "log_std": log_std}) is mean


def hybrid(logits):
    return {"logits": logits, "mean": torch.randn(N, D), "log_std": torch.randn(N, D)}


@pytest.mark.parametrize("sizes", [[5], [5, 2]])
def test_a_hybrid_action_is_its_categories_and_then_its_values(sizes):
    """Log-probability, entropy and divergence are the sums of both parts'."""
    heads, others = (tuple(torch.randn(N, size) for size in sizes) for _ in range(2))
    outputs, other = (hybrid(heads if len(sizes) > 1 else heads[0]) for heads in (heads, others))
    categories = [reference.Categorical(logits=head) for head in heads]
    normal = reference.Independent(reference.Normal(outputs["mean"], outputs["log_std"].exp()), 1)
    action, drawn = sample(outputs)
    assert action.shape == (N, len(sizes) + D)
    log_prob, entropy = log_prob_entropy({**outputs, "value": torch.zeros(N)}, action)
    close(
        log_prob,
        sum(d.log_prob(action[:, i]) for i, d in enumerate(categories)) + normal.log_prob(action[:, len(sizes) :]),
    )
    close(entropy, sum(d.entropy() for d in categories) + normal.entropy())
    close(drawn, log_prob)
    close(mode(outputs), torch.cat([torch.stack([head.argmax(-1) for head in heads], -1), outputs["mean"]], -1))
    gaussians = [{name: part[name] for name in ("mean", "log_std")} for part in (outputs, other)]
    close(
        kl_divergence(outputs, other), kl_divergence({"logits": heads}, {"logits": others}) + kl_divergence(*gaussians)
    )
    assert set(distribution_outputs({**outputs, "value": torch.zeros(N)})) == set(outputs)
    assert not is_discrete(outputs)


def test_state_dependent_exploration_matches_its_marginal():
    """The density of mean + latent @ noise at one state; ``sde_std`` is the deviation of the noise."""
    mean, latent, sde_std = torch.randn(N, D), torch.randn(N, 4), torch.rand(N, 4, D) + 0.1
    log_std = 0.5 * torch.einsum("nl,nld->nd", latent.square(), sde_std.square()).log()
    action = torch.randn(N, D)
    outputs = {"mean": mean, "log_std": log_std, "latent": latent, "sde_std": sde_std}
    log_prob, _ = log_prob_entropy(outputs, action)
    close(log_prob, reference.Independent(reference.Normal(mean, log_std.exp()), 1).log_prob(action))
    drawn = mean + torch.einsum("nl,knld->knd", latent, torch.randn(20_000, N, 4, D) * sde_std)
    close(drawn.std(0), log_std.exp(), atol=0.2)


def test_squashed_gaussian():
    mean, log_std = torch.randn(N, D), torch.randn(N, D).clamp(-1.5, 0.5)
    outputs = {"tanh_mean": mean, "tanh_log_std": log_std}
    action, drawn = sample(outputs)
    squashed = reference.TransformedDistribution(
        reference.Independent(reference.Normal(mean, log_std.exp()), 1), reference.TanhTransform()
    )
    log_prob, entropy = log_prob_entropy(outputs, action)
    close(log_prob, squashed.log_prob(action), atol=1e-6)
    close(log_prob, drawn, atol=1e-4)
    many = squashed.sample((200_000,))
    close(entropy, -squashed.log_prob(many.clamp(-1 + 1e-12, 1 - 1e-12)).mean(0), atol=0.02)
    close(mode(outputs), mean.tanh())


def test_a_squashed_density_integrates_to_one():
    grid = torch.linspace(-1 + 1e-5, 1 - 1e-5, 200_001)
    ones = torch.ones(len(grid), 1)
    log_prob, _ = log_prob_entropy({"tanh_mean": 0.3 * ones, "tanh_log_std": -0.5 * ones}, grid.unsqueeze(-1))
    assert torch.trapezoid(log_prob.exp(), grid).item() == pytest.approx(1, abs=1e-3)


def test_squashing_is_accurate_far_from_zero():
    outputs = {"tanh_mean": torch.full((1, 1), 30.0), "tanh_log_std": torch.zeros(1, 1)}
    outputs["tanh_mean"].requires_grad_()
    action, log_prob = sample(outputs)
    log_prob.sum().backward()
    assert action.abs().item() <= 1
    assert math.isfinite(log_prob.item())
    assert outputs["tanh_mean"].grad.item() == pytest.approx(2, abs=1e-6)  # d/du of -log(1 - tanh(u)^2)


def slow_categorical_kl(logits, reference, allowed):
    """sum p log(p / q) over the allowed actions of each row."""
    kl = np.zeros(len(logits))
    for n, row in enumerate(allowed):
        possible = np.flatnonzero(row)
        p, q = (np.exp(x[n, possible]) / np.exp(x[n, possible]).sum() for x in (logits, reference))
        kl[n] = sum(a * np.log(a / b) for a, b in zip(p, q, strict=True))
    return kl


@pytest.mark.parametrize("hidden", [-1e9, -math.inf], ids=["by brayx's mask", "by infinity"])
def test_kl_of_masked_categoricals(hidden):
    rng = np.random.default_rng(0)
    logits, reference = rng.normal(scale=2, size=(2, N, 5))
    allowed = rng.random((N, 5)) < 0.6
    allowed[:, 2] = True
    allowed[0] = [False, False, True, False, False]  # a single action: no divergence

    def outputs(x, requires_grad=False):
        x = torch.from_numpy(x).requires_grad_(requires_grad)
        mask = torch.from_numpy(allowed)
        return x, {"logits": masked(x, mask) if hidden == -1e9 else x.masked_fill(~mask, hidden)}

    x, learning = outputs(logits, requires_grad=True)
    kl = kl_divergence(learning, outputs(reference)[1])
    np.testing.assert_allclose(kl.detach(), slow_categorical_kl(logits, reference, allowed), rtol=0, atol=1e-9)
    assert kl[0].item() == 0
    kl.sum().backward()
    assert not x.grad[~torch.from_numpy(allowed)].any(), "a masked action has no gradient"
    for n, a in zip(*np.nonzero(allowed), strict=True):
        step = np.zeros_like(logits)
        step[n, a] = 1e-5
        above, below = (slow_categorical_kl(logits + s, reference, allowed)[n] for s in (step, -step))
        assert x.grad[n, a].item() == pytest.approx((above - below) / 2e-5, abs=1e-7)


def test_kl_where_no_action_is_allowed_is_zero():
    none = torch.zeros(N, 5)
    logits = torch.randn(N, 5).requires_grad_()
    kl = kl_divergence({"logits": masked(logits, none)}, {"logits": masked(torch.randn(N, 5), none)})
    kl.sum().backward()
    close(kl.detach(), torch.zeros(N))
    assert not logits.grad.any()


def test_kl_of_heads_is_the_sum_of_the_heads():
    heads, others = ((torch.randn(N, 5), torch.randn(N, 2), torch.randn(N, 3)) for _ in range(2))
    kl = kl_divergence({"logits": heads}, {"logits": others})
    close(kl, sum(kl_divergence({"logits": a}, {"logits": b}) for a, b in zip(heads, others, strict=True)))
    joint, other = (
        (a[:, :, None, None] + b[:, None, :, None] + c[:, None, None, :]).flatten(1) for a, b, c in (heads, others)
    )
    close(kl, kl_divergence({"logits": joint}, {"logits": other}))


@pytest.mark.parametrize("prefix", ["", "tanh_"])
def test_kl_of_gaussians_by_the_integral_of_its_definition(prefix):
    """Squashing changes both densities by the same factor, so the integral may be taken before it."""
    mean, log_std, other_mean, other_log_std = 0.5 * np.random.default_rng(0).normal(size=(4, N, D))
    want = np.zeros(N)
    grid = np.linspace(-60, 60, 60_001)
    for n in range(N):
        for d in range(D):
            log_p, log_q = (
                -0.5 * ((grid - m[n, d]) / np.exp(s[n, d])) ** 2 - s[n, d] - 0.5 * np.log(2 * np.pi)
                for m, s in ((mean, log_std), (other_mean, other_log_std))
            )
            want[n] += np.trapezoid(np.exp(log_p) * (log_p - log_q), grid)
    learning, reference = (
        {f"{prefix}mean": torch.from_numpy(m), f"{prefix}log_std": torch.from_numpy(s)}
        for m, s in ((mean, log_std), (other_mean, other_log_std))
    )
    close(kl_divergence(learning, reference), torch.from_numpy(want))
    close(kl_divergence(learning, learning), torch.zeros(N))
    names = list(learning)
    assert torch.autograd.gradcheck(
        lambda *leaves: kl_divergence(dict(zip(names, leaves, strict=True)), reference),
        [leaf.clone().requires_grad_() for leaf in learning.values()],
    )


def test_kl_of_different_distributions_is_refused():
    with pytest.raises(ValueError, match=r"categorical .*gaussian"):
        kl_divergence({"logits": torch.zeros(N, 2)}, {"mean": torch.zeros(N, D), "log_std": torch.zeros(N, D)})


def test_distribution_outputs_drop_everything_else():
    outputs = StateDependent(4, D)(torch.randn(N, 4)) | {"value": torch.zeros(N)}
    assert set(distribution_outputs(outputs)) == {"mean", "log_std"}


@pytest.mark.parametrize("kind", ["categorical", "heads", "gaussian"])
def test_samples_follow_their_probabilities(kind):
    count = 40_000
    if kind == "gaussian":
        mean, log_std = torch.tensor([[0.5, -1.0]]).expand(count, 2), torch.tensor([[-0.5, 0.3]]).expand(count, 2)
        action, log_prob = sample({"mean": mean, "log_std": log_std})
        close(action.mean(0), mean[0], atol=0.05)
        close(action.std(0), log_std[0].exp(), atol=0.05)
        close(log_prob, log_prob_entropy({"mean": mean, "log_std": log_std}, action)[0])
        return
    heads = [torch.randn(1, a).expand(count, a) for a in ((4,) if kind == "categorical" else (4, 2))]
    outputs = {"logits": heads[0] if kind == "categorical" else tuple(heads)}
    action, log_prob = sample(outputs)
    close(log_prob, log_prob_entropy(outputs, action)[0])
    for index, head in enumerate(heads):
        chosen = action if kind == "categorical" else action[:, index]
        often = torch.bincount(chosen, minlength=head.shape[1]) / count
        close(often, head[0].softmax(-1), atol=0.02)


@pytest.mark.parametrize(
    "kind", ["categorical", "heads", "gaussian", "sde", "squashed", "hybrid", "squashed hybrid", "hybrid sde"]
)
def test_acting_uses_the_same_distributions(kind):
    """`brayx.actions` is the NumPy counterpart and draws the actions while acting."""
    rng = np.random.default_rng(0)
    outputs = {
        "categorical": {"logits": torch.randn(N, 5)},
        "heads": {"logits": (torch.randn(N, 5), torch.randn(N, 2))},
        "gaussian": {"mean": torch.randn(N, D), "log_std": torch.randn(N, D)},
        "sde": StateDependent(4, D)(torch.randn(N, 4)),
        "squashed": {"tanh_mean": torch.randn(N, D), "tanh_log_std": torch.randn(N, D).clamp(-2, 0)},
        "hybrid": hybrid((torch.randn(N, 5), torch.randn(N, 2))),
        "squashed hybrid": {
            "logits": torch.randn(N, 5),
            "tanh_mean": torch.randn(N, D),
            "tanh_log_std": torch.randn(N, D).clamp(-2, 0),
        },
        "hybrid sde": {"logits": torch.randn(N, 5), **StateDependent(4, D)(torch.randn(N, 4))},
    }[kind]
    acting = optree.tree_map(lambda x: x.detach().numpy().astype(np.float32), outputs)
    action, log_prob = actions.sample(acting, rng)
    learned, _ = log_prob_entropy(outputs, torch.from_numpy(action))
    close(learned.detach().float(), torch.from_numpy(log_prob), atol=1e-3 if kind == "squashed" else 1e-4)
    close(mode(outputs).detach().float(), torch.from_numpy(actions.greedy(acting)).float(), atol=1e-5)


def test_half_precision_is_computed_in_float32():
    log_prob, entropy = log_prob_entropy({"logits": torch.randn(N, 5, dtype=torch.bfloat16)}, torch.zeros(N).long())
    assert log_prob.dtype == entropy.dtype == torch.float32


@pytest.mark.parametrize(
    ("outputs", "action", "message"),
    [
        ({"value": 0}, torch.zeros(N), r"got \['value'\]"),
        ({"logits": torch.zeros(N, 2)}, torch.zeros(N, 1), r"\(7,\)"),
        ({"logits": (torch.zeros(N, 2),) * 2}, torch.zeros(N, 3), r"\(7, 2\)"),
        ({"mean": torch.zeros(N, D), "log_std": torch.zeros(N, D)}, torch.zeros(N), r"\(7, 3\)"),
        (
            {"logits": torch.zeros(N, 2), "mean": torch.zeros(N, D), "log_std": torch.zeros(N, D)},
            torch.zeros(N, D),
            r"\(7, 4\)",
        ),
    ],
)
def test_mismatched_outputs_and_actions_are_refused(outputs, action, message):
    with pytest.raises(ValueError, match=message):
        log_prob_entropy(outputs, action)
