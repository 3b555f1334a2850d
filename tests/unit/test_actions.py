"""Actions: drawn with the model's frequencies and densities, and within the environment's bounds."""

from __future__ import annotations

import math

import gymnasium
import numpy as np
import pytest

from brayx import actions
from brayx.actions import ActionSpec
from brayx.errors import ConfigError, ModelError

COUNT = 40_000


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def many(*rows):
    return np.tile(np.asarray(rows, np.float32), (COUNT, 1))


def test_categories_occur_with_their_probability():
    logits = many([0.0, 1.0, -1.0])
    action, log_prob = actions.sample({"logits": logits, "value": logits[:, 0]}, rng())
    probability = np.exp([0.0, 1.0, -1.0]) / np.exp([0.0, 1.0, -1.0]).sum()
    assert action.shape == (COUNT,)
    assert action.dtype == np.int64
    assert log_prob.dtype == np.float32
    np.testing.assert_allclose(np.bincount(action) / COUNT, probability, atol=0.01)
    np.testing.assert_allclose(np.exp(log_prob), probability[action], rtol=1e-5)


def test_a_masked_action_is_never_drawn_and_no_logit_overflows():
    logits = many([-1e9, 3e4, -1e9, 3e4])
    action, log_prob = actions.sample({"logits": logits}, rng())
    assert set(action.tolist()) == {1, 3}
    np.testing.assert_allclose(log_prob, math.log(0.5), rtol=1e-5)


def test_heads_are_independent_and_their_log_probs_add():
    heads = (many([0.0, 1.0]), many([0.0, 0.0, 2.0]))
    action, log_prob = actions.sample({"logits": heads}, rng())
    assert action.shape == (COUNT, 2)
    expected = sum(actions.log_prob({"logits": head}, action[:, i]) for i, head in enumerate(heads))
    np.testing.assert_allclose(log_prob, expected, rtol=1e-5)
    joint = np.mean((action[:, 0] == 1) & (action[:, 1] == 2))
    assert joint == pytest.approx(np.mean(action[:, 0] == 1) * np.mean(action[:, 1] == 2), abs=0.01)


def test_a_gaussian_has_its_mean_its_deviation_and_its_density():
    outputs = {"mean": many([1.0, -2.0]), "log_std": many([0.0, math.log(0.5)])}
    action, log_prob = actions.sample(outputs, rng())
    assert action.dtype == log_prob.dtype == np.float32
    np.testing.assert_allclose(action.mean(0), [1, -2], atol=0.02)
    np.testing.assert_allclose(action.std(0), [1, 0.5], rtol=0.02)
    at_mean = actions.log_prob(outputs, outputs["mean"])
    np.testing.assert_allclose(np.exp(at_mean), 1 / (2 * math.pi * 0.5), rtol=1e-5)
    assert np.exp(log_prob).max() <= np.exp(at_mean).max() + 1e-6


def test_a_squashed_gaussians_density_integrates_to_one():
    grid = np.linspace(-1, 1, 20_001, dtype=np.float32)[1:-1, None]
    outputs = {"tanh_mean": np.full_like(grid, 0.3), "tanh_log_std": np.full_like(grid, -0.5)}
    density = np.exp(actions.log_prob(outputs, grid).astype(np.float64))
    assert density.sum() * 1e-4 == pytest.approx(1.0, abs=1e-3)
    action, _ = actions.sample({"tanh_mean": many([0.3]), "tanh_log_std": many([-0.5])}, rng())
    share = (density[grid[:, 0] < 0.3] * 1e-4).sum()
    assert np.mean(action < 0.3) == pytest.approx(share, abs=0.01)


def test_a_squashed_action_at_the_very_end_has_a_finite_density():
    outputs = {"tanh_mean": np.zeros((2, 1), np.float32), "tanh_log_std": np.zeros((2, 1), np.float32)}
    assert np.isfinite(actions.log_prob(outputs, np.asarray([[1.0], [-1.0]], np.float32))).all()


@pytest.mark.parametrize("single", [False, True])
def test_a_hybrid_action_is_its_categories_and_then_its_values(single):
    heads = (many([0.0, 1.0]),) if single else (many([0.0, 1.0]), many([0.0, 0.0, 2.0]))
    logits, gaussian = heads[0] if single else heads, {"mean": many([1.0, -2.0]), "log_std": many([0.0, -1.0])}
    outputs = {"logits": logits, **gaussian, "value": many([0.0])}
    action, log_prob = actions.sample(outputs, rng())
    assert (action.shape, action.dtype, log_prob.dtype) == ((COUNT, len(heads) + 2), np.float32, np.float32)
    categories, values = action[:, : len(heads)].astype(np.int64), action[:, len(heads) :]
    np.testing.assert_allclose(
        log_prob, actions.log_prob({"logits": heads}, categories) + actions.log_prob(gaussian, values), rtol=1e-5
    )
    np.testing.assert_allclose(np.mean(categories[:, 0]), math.e / (1 + math.e), atol=0.01)
    np.testing.assert_allclose(values.mean(0), [1, -2], atol=0.02)
    assert actions.greedy(outputs)[0].tolist() == ([1, 1, -2] if single else [1, 2, 1, -2])
    cold = actions.tempered(outputs, 0.0)
    assert isinstance(cold["logits"], tuple) != single
    np.testing.assert_allclose(actions.sample(cold, rng())[0], actions.greedy(outputs), atol=1e-5)
    other = {"logits": logits, **gaussian, "mean": gaussian["mean"] + 1}
    np.testing.assert_allclose(
        actions.kl_divergence(outputs, other), actions.kl_divergence(gaussian, {**gaussian, "mean": other["mean"]})
    )
    with pytest.raises(ModelError, match=r"one has logits \[2\].* and mean \[2\], the other"):
        actions.kl_divergence(outputs, gaussian)


def test_noise_that_depends_on_the_state_has_the_marginal_deviation():
    latent, sde_std = many([0.6, 0.8]), np.tile(np.asarray([[[2.0], [1.0]]], np.float32), (COUNT, 1, 1))
    deviation = math.sqrt((0.6 * 2) ** 2 + 0.8**2)
    outputs = {"mean": many([5.0]), "log_std": many([math.log(deviation)]), "latent": latent, "sde_std": sde_std}
    action, log_prob = actions.sample(outputs, rng())
    assert action.shape == (COUNT, 1)
    assert action.mean() == pytest.approx(5, abs=0.03)
    assert action.std() == pytest.approx(deviation, rel=0.02)
    np.testing.assert_allclose(
        log_prob, actions.log_prob({"mean": outputs["mean"], "log_std": outputs["log_std"]}, action)
    )


@pytest.mark.parametrize(
    "outputs",
    [
        {"logits": many([0.0, 2.0])[:7]},
        {"logits": (many([0.0, 2.0])[:7], many([1.0, 0.0, 0.5])[:7])},
        {"mean": many([0.0, 2.0])[:7], "log_std": many([0.0, 0.0])[:7]},
        {"tanh_mean": many([0.0, 2.0])[:7], "tanh_log_std": many([0.0, 0.0])[:7]},
        {"logits": many([0.0, 2.0])[:7], "mean": many([0.0])[:7], "log_std": many([0.0])[:7]},
        {"logits": many([0.0, 2.0])[:7], "tanh_mean": many([0.0])[:7], "tanh_log_std": many([0.0])[:7]},
    ],
)
def test_noise_for_many_steps_draws_what_one_step_draws(outputs):
    drawn = actions.noise(outputs, rng(), steps=5)
    step = tuple(g[2] for g in drawn) if isinstance(drawn, tuple) else drawn[2]
    action = actions.choose(outputs, step)
    assert action.shape == actions.greedy(outputs).shape
    assert len({actions.choose(outputs, tuple(g[t] for g in drawn) if isinstance(drawn, tuple) else drawn[t]).tobytes()
                for t in range(5)}) > 1  # fmt: skip


def test_greedy_takes_the_mode():
    assert actions.greedy({"logits": np.asarray([[0.0, 1.0], [2.0, 2.0]])}).tolist() == [1, 0]
    assert actions.greedy({"mean": np.asarray([[3.0]]), "log_std": np.zeros((1, 1))}).tolist() == [[3.0]]
    assert actions.greedy({"tanh_mean": np.asarray([[0.5]])}).tolist() == [[math.tanh(0.5)]]


def test_outputs_without_a_policy_are_refused_by_name():
    with pytest.raises(ModelError, match=r"got \['value'\]"):
        actions.sample({"value": np.zeros(3)}, rng())


def probabilities(logits):
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0, 1e6])
def test_a_temperature_raises_probabilities_to_its_inverse_and_forbids_what_was_forbidden(temperature):
    logits = np.asarray([0.0, 2.0, -3e4, -np.inf, -1.0], np.float32)
    tempered = actions.tempered({"logits": logits, "value": 7.0}, temperature)
    expected = probabilities(logits.astype(np.float64)) ** (1 / temperature)
    np.testing.assert_allclose(probabilities(tempered["logits"]), expected / expected.sum(), rtol=1e-5, atol=1e-12)
    assert np.isfinite(tempered["logits"]).all()
    assert tempered["value"] == 7.0
    assert tempered["logits"].dtype == np.float32


def test_at_temperature_0_the_best_action_alone_is_left():
    heads = (np.asarray([0.0, 2.0, 1.0], np.float32), np.asarray([[3.0, -3e4]], np.float32))
    first, second = actions.tempered({"logits": heads}, 0.0)["logits"]
    assert probabilities(first).tolist() == [0.0, 1.0, 0.0]
    assert probabilities(second).tolist() == [[1.0, 0.0]]


@pytest.mark.parametrize("names", [("mean", "log_std"), ("tanh_mean", "tanh_log_std")])
def test_a_gaussians_variance_is_multiplied_by_its_temperature(names):
    mean, log_std = names
    outputs = {mean: np.ones(2, np.float32), log_std: np.asarray([0.0, -1.0], np.float32)}
    tempered = actions.tempered(outputs, 4.0)
    np.testing.assert_allclose(np.exp(tempered[log_std]) ** 2, 4.0 * np.exp(outputs[log_std]) ** 2, rtol=1e-6)
    assert np.isfinite(actions.tempered(outputs, 0.0)[log_std]).all()


@pytest.mark.parametrize("outputs", [{"value": 1.0}, {"mean": np.ones(1), "sde_std": np.ones((1, 1))}])
def test_what_is_no_policy_has_no_temperature(outputs):
    with pytest.raises(ModelError):
        actions.tempered(outputs, 2.0)


SPACES = gymnasium.spaces


@pytest.mark.parametrize(
    ("space", "kind", "sizes", "shape"),
    [
        (SPACES.Discrete(3), "discrete", (3,), ()),
        (SPACES.Discrete(3, start=-1), "discrete", (3,), ()),
        (SPACES.MultiDiscrete([2, 3]), "multi_discrete", (2, 3), (2,)),
        (SPACES.MultiDiscrete([[2, 3], [4, 5]]), "multi_discrete", (2, 3, 4, 5), (4,)),
        (SPACES.MultiDiscrete([2, 3], start=[1, 5]), "multi_discrete", (2, 3), (2,)),
        (SPACES.MultiBinary(4), "multi_discrete", (2, 2, 2, 2), (4,)),
        (SPACES.Box(-2.0, 2.0, (1,), np.float32), "box", (), (1,)),
        (SPACES.Box(-np.inf, np.inf, (2, 3), np.float64), "box", (), (6,)),
        (SPACES.Box(-0.1, 0.1, (2,), np.float64), "box", (), (2,)),
        (SPACES.Box(0.0, 0.7, (1,), np.float64), "box", (), (1,)),
        (SPACES.Box(-3e38, 3e38, (1,), np.float32), "box", (), (1,)),
        (SPACES.Box(-1, 60_000, (2,), np.float16), "box", (), (2,)),
        (SPACES.Discrete(3, dtype=np.int32), "discrete", (3,), ()),
        (SPACES.Discrete(3, start=250, dtype=np.uint8), "discrete", (3,), ()),
        (SPACES.MultiDiscrete([2, 3], dtype=np.int8), "multi_discrete", (2, 3), (2,)),
    ],
)
@pytest.mark.parametrize("scale", [False, True])
def test_every_sampled_action_is_in_the_space(space, kind, sizes, shape, scale):
    """The way back gives the same action, unless it was clipped."""
    spec = ActionSpec.of(space, scale=scale)
    assert (spec.kind, spec.sizes, spec.shape) == (kind, sizes, shape)
    if kind == "box":
        drawn = rng().standard_normal((50, *shape)).astype(np.float32) * 10
        drawn[:2] = [[-1], [1]]
    else:
        drawn = np.stack([rng().integers(0, sizes) for _ in range(50)]).reshape(50, *shape)
    before = drawn.copy()
    acted = spec.to_env(drawn)
    assert acted.dtype == space.dtype
    for action in acted:
        assert space.contains(action), action
    assert np.array_equal(drawn, before)
    again = spec.to_policy(acted)
    assert np.array_equal(spec.to_env(again), acted) or space.dtype.kind == "f"
    if kind != "box":
        assert np.array_equal(again, drawn)
    elif scale and spec.bounded:
        np.testing.assert_allclose(again, np.clip(drawn, -1, 1), rtol=2e-3, atol=2e-3)
        assert np.array_equal(again[:2], drawn[:2])


def test_scaled_actions_span_the_bounds():
    space = SPACES.Box(np.asarray([-2.0, 0.0]), np.asarray([2.0, 10.0]), dtype=np.float64)
    policy = np.asarray([[-1.0, -1.0], [0.0, 0.0], [1.0, 1.0], [-3.0, 3.0]], np.float32)
    scaled, unscaled = ActionSpec.of(space, scale=True), ActionSpec.of(space)
    assert scaled.to_env(policy).tolist() == [[-2, 0], [0, 5], [2, 10], [-2, 10]]
    assert unscaled.to_env(policy).tolist() == [[-1, 0], [0, 0], [1, 1], [-2, 3]]
    assert scaled.to_policy(np.asarray([[-2.0, 10.0], [1.0, 2.5]])).tolist() == [[-1, 1], [0.5, -0.5]]
    assert unscaled.to_policy(np.asarray([[-2.0, 10.0]])).tolist() == [[-2, 10]]


@pytest.mark.parametrize(
    ("space", "action", "message"),
    [
        (SPACES.Box(0, 10, (2,)), [[3.0, 4.0], [5.0, 10.5]], r"action: 10\.5 at \[1, 1\], expected 0 to 10"),
        (SPACES.Box(0, 10, (2,)), [[3.0, np.nan]], r"action: nan at \[0, 1\], expected 0 to 10"),
        (SPACES.Box(0, 10, (2,)), [3.0], r"action: expected the environment's shape \[2\] a step, got \[\]"),
        (SPACES.Discrete(3, start=5), [5, 0], r"action: 0 at \[1\], expected 5 to 7"),
        (SPACES.MultiDiscrete([2, 3], start=[1, 5]), [[1, 8]], r"action: 8 at \[0, 1\], expected 5 to 7"),
    ],
)
def test_a_recorded_action_outside_the_space_is_refused(space, action, message):
    with pytest.raises(ConfigError, match=message):
        ActionSpec.of(space, scale=True).to_policy(np.asarray(action))


def test_other_spaces_are_refused():
    with pytest.raises(ConfigError, match="expected Discrete"):
        ActionSpec.of(SPACES.Text(5))
