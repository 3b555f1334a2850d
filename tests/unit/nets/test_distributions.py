"""`brayx.nets.distributions` against `torch.distributions` and against what densities must do."""

from __future__ import annotations

import math

import numpy as np
import optree
import pytest
import torch
from torch import distributions as reference

from brayx import actions
from brayx.nets.distributions import log_prob_entropy, mode, sample
from brayx.nets.heads import StateDependent

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
    each = [reference.Categorical(logits=head) for head in heads]
    close(log_prob, sum(d.log_prob(action[:, i]) for i, d in enumerate(each)))
    close(entropy, sum(d.entropy() for d in each))
    assert torch.equal(mode({"logits": heads}), torch.stack([head.argmax(-1) for head in heads], -1))


def test_gaussian():
    mean, log_std, action = torch.randn(3, N, D)
    log_prob, entropy = log_prob_entropy({"mean": mean, "log_std": log_std}, action)
    normal = reference.Independent(reference.Normal(mean, log_std.exp()), 1)
    close(log_prob, normal.log_prob(action))
    close(entropy, normal.entropy())
    assert mode({"mean": mean, "log_std": log_std}) is mean


def test_state_dependent_exploration_is_its_marginal():
    """The density of mean + latent @ noise, whose noise is drawn with ``sde_std``, seen from one state."""
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


def test_a_squashed_density_is_a_density():
    grid = torch.linspace(-1 + 1e-5, 1 - 1e-5, 200_001)
    ones = torch.ones(len(grid), 1)
    log_prob, _ = log_prob_entropy({"tanh_mean": 0.3 * ones, "tanh_log_std": -0.5 * ones}, grid.unsqueeze(-1))
    assert torch.trapezoid(log_prob.exp(), grid).item() == pytest.approx(1, abs=1e-3)


def test_squashing_keeps_its_digits_far_out():
    outputs = {"tanh_mean": torch.full((1, 1), 30.0), "tanh_log_std": torch.zeros(1, 1)}
    outputs["tanh_mean"].requires_grad_()
    action, log_prob = sample(outputs)
    log_prob.sum().backward()
    assert action.abs().item() <= 1
    assert math.isfinite(log_prob.item())
    assert outputs["tanh_mean"].grad.item() == pytest.approx(2, abs=1e-6)  # d/du of -log(1 - tanh(u)^2)


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


@pytest.mark.parametrize("kind", ["categorical", "heads", "gaussian", "sde", "squashed"])
def test_acting_has_the_same_distributions(kind):
    """`brayx.actions` is NumPy, and draws what is learned from here."""
    rng = np.random.default_rng(0)
    outputs = {
        "categorical": {"logits": torch.randn(N, 5)},
        "heads": {"logits": (torch.randn(N, 5), torch.randn(N, 2))},
        "gaussian": {"mean": torch.randn(N, D), "log_std": torch.randn(N, D)},
        "sde": StateDependent(4, D)(torch.randn(N, 4)),
        "squashed": {"tanh_mean": torch.randn(N, D), "tanh_log_std": torch.randn(N, D).clamp(-2, 0)},
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
    ("outputs", "action", "said"),
    [
        ({"value": 0}, torch.zeros(N), r"got \['value'\]"),
        ({"logits": torch.zeros(N, 2)}, torch.zeros(N, 1), r"\(7,\)"),
        ({"logits": (torch.zeros(N, 2),) * 2}, torch.zeros(N, 3), r"\(7, 2\)"),
        ({"mean": torch.zeros(N, D), "log_std": torch.zeros(N, D)}, torch.zeros(N), r"\(7, 3\)"),
    ],
)
def test_outputs_and_actions_that_do_not_fit_are_refused(outputs, action, said):
    with pytest.raises(ValueError, match=said):
        log_prob_entropy(outputs, action)
