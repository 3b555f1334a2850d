"""`brayx.algorithms.sac`: the update against NumPy written like the paper, its gradient by complex steps."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from brayx.algorithms.sac import METRICS, SAC, SACConfig
from brayx.replay.packing import BatchPacker
from brayx.types import Fragment
from tests.unit.algorithms.tables import moved, random_batch, sgd

OBS, ACT, HIDDEN = 3, 2, 4


class Critics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Parameter(torch.randn(OBS + ACT, HIDDEN, dtype=torch.float64))
        self.outer = nn.Parameter(torch.randn(HIDDEN, 2, dtype=torch.float64))

    def forward(self, obs, action):
        return torch.tanh(torch.cat([obs, action], -1) @ self.inner) @ self.outer


class Soft(nn.Module):
    def __init__(self, seed=0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.mean = nn.Parameter(0.5 * torch.randn(OBS, ACT, dtype=torch.float64))
        self.log_std = nn.Parameter(0.5 * torch.randn(OBS, ACT, dtype=torch.float64))
        self.critic = Critics()

    def forward(self, obs):
        return {"tanh_mean": obs @ self.mean, "tanh_log_std": obs @ self.log_std}


def soft_batch(columns=4, steps=5, seed=0, **more):
    batch = random_batch(columns=columns, steps=steps, seed=seed)
    rng = np.random.default_rng(seed)
    batch["obs"] = torch.from_numpy(rng.normal(size=(columns, steps + 1, OBS)))
    batch["action"] = torch.from_numpy(rng.uniform(-0.9, 0.9, size=(columns, steps + 1, ACT)))
    return {**batch, **more}


def numpy_q(p, obs, action):
    return np.tanh(np.concatenate([obs, action], -1) @ p["critic.inner"]) @ p["critic.outer"]


def numpy_sample(p, obs, noise):
    mean, log_std = obs @ p["mean"], obs @ p["log_std"]
    u = mean + np.exp(log_std) * noise
    density = -0.5 * noise**2 - log_std - 0.5 * np.log(2 * np.pi)
    return np.tanh(u), (density - np.log(1 - np.tanh(u) ** 2)).sum(-1)


def papers_losses(p, slow, batch, config, noises, alpha):
    """Equations 5 and 9, step by step; each as a function of all parameters (critics fixed in the second).

    Targets use the ``slow`` critics and the current policy ``p``; no gradient flows through them.
    """
    live = {name: p[name] for name in slow}
    arrays = {key: tensor.numpy() for key, tensor in batch.items()}
    columns, steps = arrays["mask"].shape[0], arrays["mask"].shape[1] - 1
    weight = arrays.get("weight", np.ones(columns))
    starts = [(b, t) for b in range(columns) for t in range(steps)]
    count = sum(arrays["mask"][b, t] for b, t in starts)
    targets = []
    for row, (b, t) in enumerate(starts):
        reward, discount, k = 0.0, 1.0, t
        while True:
            reward += discount * arrays["reward"][b, k]
            discount *= 0.0 if arrays["terminated"][b, k] else config.gamma
            k += 1
            if k in (t + config.n_step, steps) or arrays["terminated"][b, k - 1] or arrays["truncated"][b, k - 1]:
                break
        action, log_prob = numpy_sample(p, arrays["obs"][b, k], noises[0][row])
        q = numpy_q(slow, arrays["obs"][b, k], action).min()
        targets.append(reward + discount * (q - alpha * log_prob))

    def critics(p):
        loss = 0.0
        for row, (b, t) in enumerate(starts):
            for q in numpy_q(p, arrays["obs"][b, t], arrays["action"][b, t]):
                loss += arrays["mask"][b, t] / count * weight[b] * 0.5 * (q - targets[row]) ** 2
        return loss

    def policy(p):
        loss = 0.0
        fixed = {**p, **live}
        for row, (b, t) in enumerate(starts):
            action, log_prob = numpy_sample(fixed, arrays["obs"][b, t], noises[1][row])
            q = numpy_q(fixed, arrays["obs"][b, t], action).min()
            loss += arrays["mask"][b, t] / count * (alpha * log_prob - q)
        return loss

    return critics, policy


def gradient_of(function, p, name, step=1e-30):
    """The gradient by complex steps, which avoid cancellation (Squire and Trapp 1998)."""
    gradient = np.zeros_like(p[name])
    for index in np.ndindex(gradient.shape):
        moved_by = {key: array.astype(complex) for key, array in p.items()}
        moved_by[name][index] += 1j * step
        gradient[index] = function(moved_by).imag / step
    return gradient


@pytest.mark.parametrize(("n_step", "steps", "accumulate"), [(1, 1, 1), (1, 4, 1), (3, 3, 1), (2, 5, 1), (2, 5, 4)])
def test_an_update_follows_the_papers_gradient(n_step, steps, accumulate):
    module = Soft()
    batch = soft_batch(steps=steps, seed=7, weight=torch.tensor([0.2, 1.0, 0.7, 0.5], dtype=torch.float64))
    config = SACConfig(n_step=n_step, alpha=0.3, gamma=0.9, accumulate=accumulate)
    sac = SAC(module, sgd(module), config)
    state = sac.state_dict()
    torch.manual_seed(6)
    state["slow"] = {name: tensor + 0.5 * torch.randn_like(tensor) for name, tensor in state["slow"].items()}
    sac.load_state_dict(state)
    p = {name: tensor.detach().numpy().copy() for name, tensor in module.named_parameters()}
    slow = {f"critic.{name}": tensor.numpy() for name, tensor in state["slow"].items()}
    torch.manual_seed(5)
    noises = torch.randn(4 * steps, 2, ACT, dtype=torch.float64).unbind(1)
    critics, policy = papers_losses(p, slow, batch, config, [noise.numpy() for noise in noises], 0.3)
    torch.manual_seed(5)
    measured = {}
    gradient = moved(module, lambda: measured.update(sac.update(batch, 0.0)))
    assert measured["critic_loss"] == pytest.approx(critics(p), abs=1e-9)
    assert measured["policy_loss"] == pytest.approx(policy(p), abs=1e-9)
    for name in p:
        expected = gradient_of(critics if name.startswith("critic") else policy, p, name)
        assert np.abs(expected).max() > 1e-3
        np.testing.assert_allclose(gradient[name], expected, rtol=0, atol=1e-9)


def test_target_critics_follow_at_rate_tau():
    module = Soft()
    before = module.critic.inner.detach().clone()
    sac = SAC(module, torch.optim.SGD(module.parameters(), lr=0.01), SACConfig(tau=0.25))
    sac.update(soft_batch(), 0.0)
    after = module.critic.inner.detach()
    assert not torch.equal(after, before)
    torch.testing.assert_close(sac.state_dict()["slow"]["inner"], before + 0.25 * (after - before))


@pytest.mark.parametrize("target", [-20.0, 20.0])
def test_the_temperature_holds_the_entropy_at_its_target(target):
    module, config = Soft(), SACConfig(target_entropy=target, alpha_initial=0.5)
    sac = SAC(module, torch.optim.SGD(module.parameters(), lr=0.01), config)
    first = sac.update(soft_batch(), 0.0)
    second = sac.update(soft_batch(), 0.0)
    assert first["alpha"] == pytest.approx(0.5)
    # Adam's first step has the size of the learning rate, against the gradient: entropy less its target.
    assert np.log(second["alpha"] / 0.5) == pytest.approx(-0.01 * np.sign(first["entropy"] - target), rel=1e-5)


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("target", [None, 0.7])
def test_the_temperature_follows_the_papers_gradient(target, accumulate):
    """Section 5's J(alpha) over the unmasked steps, with the logarithm of alpha as in the authors' code, then Adam's
    steps written out. Weights of columns apply to the critics only."""
    module = Soft()
    batch = soft_batch(seed=3, weight=torch.tensor([0.2, 1.0, 0.7, 0.5], dtype=torch.float64))
    sac = SAC(
        module,
        torch.optim.SGD(module.parameters(), lr=0.01),
        SACConfig(target_entropy=target, alpha_initial=0.3, gamma=0.9, accumulate=accumulate),
    )
    starts = [(b, t) for b in range(4) for t in range(5)]
    count = batch["mask"][:, :-1].sum().item()
    log_alpha, first, second = np.log(0.3), 0.0, 0.0
    for step in (1, 2, 3):
        p = {name: tensor.detach().numpy().copy() for name, tensor in module.named_parameters()}
        torch.manual_seed(step)
        noise = torch.randn(4, 5, 2, ACT, dtype=torch.float64)[:, :, 1].numpy()  # the other half is for the targets

        def objective(log_alpha, p=p, noise=noise):
            loss = 0.0
            for b, t in starts:
                _, log_prob = numpy_sample(p, batch["obs"][b, t].numpy(), noise[b, t])
                loss -= (
                    batch["mask"][b, t].item() / count * log_alpha * (log_prob + (-ACT if target is None else target))
                )
            return loss

        gradient = objective(log_alpha + 1e-30j).imag / 1e-30
        torch.manual_seed(step)
        assert sac.update(batch, 0.0)["alpha"] == pytest.approx(np.exp(log_alpha), abs=1e-9)
        assert abs(gradient) > 1e-3
        assert sac._log_alpha.grad.item() == pytest.approx(gradient, abs=1e-9)
        first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
        log_alpha -= 0.01 * (first / (1 - 0.9**step)) / (np.sqrt(second / (1 - 0.999**step)) + 1e-8)
        assert sac.state_dict()["log_alpha"].item() == pytest.approx(log_alpha, abs=1e-9)


def test_a_fixed_temperature_stays():
    module = Soft()
    sac = SAC(module, torch.optim.SGD(module.parameters(), lr=0.01), SACConfig(alpha=0.0))
    assert [sac.update(soft_batch(), 0.0)["alpha"] for _ in range(2)] == [0.0, 0.0]


def test_done_means_terminated_only():
    """A truncated transition has the same target as one without an end; a terminated one has only its reward."""
    losses = {}
    for end in ("neither", "truncated", "terminated"):
        module, batch = Soft(), soft_batch(steps=1)
        batch["terminated"].zero_()
        batch["truncated"].zero_()
        if end != "neither":
            batch[end][:, 0] = True
        torch.manual_seed(0)
        losses[end] = SAC(module, sgd(module), SACConfig()).update(batch, 0.0)["critic_loss"]
        if end == "terminated":
            p = {name: tensor.detach().numpy() for name, tensor in Soft().named_parameters()}
            q = numpy_q(p, batch["obs"][:, 0].numpy(), batch["action"][:, 0].numpy())
            expected = 0.5 * ((q - batch["reward"][:, :1].numpy()) ** 2).sum(-1).mean()
            assert losses[end] == pytest.approx(expected, abs=1e-9)
    assert losses["neither"] == losses["truncated"] != losses["terminated"]


@pytest.mark.parametrize("steps", [3, 5])
def test_the_last_transitions_of_an_episode_are_learned_from(steps):
    """Also the last transition of an episode that ends within the first return of its column."""
    module, batch = Soft(), soft_batch(columns=1, steps=steps)
    for key in ("terminated", "truncated", "mask", "reward"):
        batch[key].zero_()
    batch["reward"][0, 1], batch["terminated"][0, 1], batch["mask"][0, 1] = 2.0, True, 1.0
    q = numpy_q(
        {name: tensor.detach().numpy() for name, tensor in module.named_parameters()},
        batch["obs"][0, 1].numpy(),
        batch["action"][0, 1].numpy(),
    )
    measured = SAC(module, sgd(module), SACConfig(n_step=3, alpha=0.0)).update(batch, 0.0)
    assert measured["critic_loss"] == pytest.approx(0.5 * ((q - 2.0) ** 2).sum(), abs=1e-9)


def packed(episodes, steps):
    """One column of whole episodes, as replay packs it; rewards and masks in float64."""
    packer = BatchPacker(1, steps)
    for episode in episodes:
        assert not list(packer.add(episode))
    return {
        key: torch.from_numpy(array.astype(np.float64) if array.dtype == np.float32 else array)
        for key, array in packer.flush().items()
    }


@pytest.mark.parametrize("n_step", [1, 2, 3, 7])
def test_packed_episodes_equal_separate_episodes(n_step):
    """No return takes a reward of another episode, nor bootstraps from one's observation: neither across a termination,
    behind which the next episode begins at once, nor across a truncation, whose last observation stands between."""
    rng = np.random.default_rng(n_step)
    ends = [
        (5, "terminated"),
        (1, "truncated"),
        (7, "truncated"),
        (1, "terminated"),
        (4, "terminated"),
        (3, "truncated"),
    ]
    episodes = []
    for length, end in ends:
        obs = rng.normal(size=(length + 1, OBS))
        obs[:, 0] = 1.0
        episodes.append(
            Fragment(
                obs=obs,
                action=rng.uniform(-0.9, 0.9, size=(length, ACT)),
                log_prob=np.zeros(length, np.float32),
                reward=rng.normal(size=length).astype(np.float32),
                terminated=end == "terminated",
                truncated=end == "truncated",
                policy_version=np.zeros(length, np.int64),
            )
        )
    together = packed(episodes, 30)
    columns = [packed([episode], 30) for episode in episodes]
    apart = {key: torch.cat([column[key] for column in columns]) for key in together}
    assert together["mask"].sum() == apart["mask"].sum() == sum(length for length, _ in ends)

    def gradient_from(batch):
        module = Soft()
        with torch.no_grad():  # hardly any spread, as the two draw other noise
            module.log_std.zero_()
            module.log_std[0] = -50.0
        sac = SAC(module, sgd(module), SACConfig(n_step=n_step, alpha=0.0, gamma=0.9))
        measured = {}
        gradient = moved(module, lambda: measured.update(sac.update(batch, 0.0)))
        return gradient, measured["td_error"]

    (ours, error), (theirs, error_apart) = gradient_from(together), gradient_from(apart)
    assert error == pytest.approx(error_apart, abs=1e-12)
    for name in ("mean", "critic.inner", "critic.outer"):
        assert np.abs(theirs[name]).max() > 1e-3
        np.testing.assert_allclose(ours[name], theirs[name], rtol=0, atol=1e-12)


def test_priorities_are_mean_absolute_errors_of_the_columns():
    module, batch = Soft(), soft_batch(steps=1, index=torch.arange(4))
    batch["terminated"][:, 0], batch["truncated"][:, 0] = True, False
    batch["mask"][:, 0] = 1
    batch["mask"][2, 0] = 0
    p = {name: tensor.detach().numpy().copy() for name, tensor in module.named_parameters()}
    sac = SAC(module, sgd(module), SACConfig())
    sac.update(batch, 0.0)
    q = numpy_q(p, batch["obs"][:, 0].numpy(), batch["action"][:, 0].numpy())
    expected = np.abs(q - batch["reward"][:, :1].numpy()).mean(-1) * batch["mask"][:, 0].numpy()
    np.testing.assert_allclose(sac.priorities.numpy(), expected, rtol=0, atol=1e-9)


def test_a_restored_state_continues_exactly():
    batches = [soft_batch(seed=seed) for seed in range(4)]

    def make():
        module = Soft()
        return SAC(module, torch.optim.SGD(module.parameters(), lr=0.01), SACConfig(tau=0.1))

    whole, resumed = make(), make()
    for batch in batches[:2]:
        torch.manual_seed(1)
        whole.update(batch, 0.0)
    resumed.module.load_state_dict(whole.module.state_dict())
    resumed.load_state_dict(copy.deepcopy(whole.state_dict()))
    for batch in batches[2:]:
        torch.manual_seed(2)
        ours = whole.update(batch, 0.0)
        torch.manual_seed(2)
        assert resumed.update(batch, 0.0) == ours


@pytest.mark.parametrize(
    ("before", "config", "expected"),
    [
        (SACConfig(alpha=0.5), SACConfig(alpha=0.2), 0.2),
        (SACConfig(alpha_initial=0.5), SACConfig(alpha=0.0), 0.0),
        (SACConfig(alpha_initial=0.5), SACConfig(), 0.5),
        (SACConfig(alpha=0.0), SACConfig(alpha_initial=0.7), 0.7),
    ],
)
def test_a_fixed_temperature_overrides_a_restored_one(before, config, expected):
    """A learned temperature continues from its saved value, except from 0, which it could not leave."""
    module = Soft()
    state = SAC(module, sgd(module), before).state_dict()
    resumed = SAC(module, sgd(module), config)
    resumed.load_state_dict(state)
    assert resumed.update(soft_batch(), 0.0)["alpha"] == pytest.approx(expected)


def test_a_fully_masked_batch_changes_nothing():
    batch, module = soft_batch(), Soft()
    batch["mask"].zero_()
    sac = SAC(module, sgd(module), SACConfig())
    measured = {}
    gradient = moved(module, lambda: measured.update(sac.update(batch, 0.0)))
    assert set(measured) == {*METRICS, "learning_rate"}
    assert all(np.isfinite(list(measured.values())))
    assert not any(change.any() for change in gradient.values())
    assert sac.update(batch, 0.0)["alpha"] == 1.0


def test_a_critic_without_a_critic_axis_is_refused():
    module = Soft()
    forward = module.critic.forward
    module.critic.forward = lambda obs, action: forward(obs, action)[..., 0]
    with pytest.raises(ValueError, match=r"critic: .*\[20, critics\], .*\(20,\)"):
        SAC(module, sgd(module), SACConfig()).update(soft_batch(), 0.0)


def test_unsuitable_models_and_batches_are_refused():
    with pytest.raises(ValueError, match="critic"):
        SAC(nn.Linear(2, 2), torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0), SACConfig())
    module = Soft()
    with pytest.raises(ValueError, match="T >= 3"):
        SAC(module, sgd(module), SACConfig(n_step=3)).update(soft_batch(steps=2), 0.0)
