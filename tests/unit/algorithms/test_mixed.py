"""`brayx.algorithms.mixed`: each gradient is the reinforcement's plus the imitation's times its current weight."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from brayx.algorithms.bc import BC, BCConfig
from brayx.algorithms.impala import Impala, ImpalaConfig
from brayx.algorithms.mixed import Mixed, MixedConfig
from brayx.algorithms.ppo import PPO, PPOConfig
from brayx.errors import ConfigError
from tests.unit.algorithms.tables import Table, moved, random_batch, sgd

IMPALA = ImpalaConfig(max_grad_norm=None, learning_rate_schedule="constant")
PPO_ONCE = PPOConfig(epochs=1, minibatch_size=1000, max_grad_norm=None, learning_rate_schedule="constant")


def demonstrations(seed=1, columns=4):
    return {**random_batch(seed=seed, columns=columns), "demonstration": torch.ones(columns, 10)}


def slow_returns(batch, worth, gamma):
    """Returns ``[B, T]``, step by step: the rewards that follow in the column, bootstrapped where it was truncated."""
    arrays = {key: tensor.numpy() for key, tensor in batch.items()}
    columns, steps = arrays["action"].shape
    sums = np.zeros((columns, steps - 1))
    for b in range(columns):
        for t in range(steps - 1):
            factor = 1.0
            for k in range(t, steps - 1):
                sums[b, t] += factor * arrays["reward"][b, k]
                factor *= gamma
                over, cut = arrays["terminated"][b, k], arrays["truncated"][b, k]
                if not over and (cut or k == steps - 2):
                    sums[b, t] += factor * worth[arrays["obs"][b, k + 1]]
                if over or cut:
                    break
    return sums


def slow_value_fit(batch, worth, gamma):
    """Half the mean squared error to `slow_returns`, and its gradient by state."""
    target, mask, obs = slow_returns(batch, worth, gamma), batch["mask"].numpy(), batch["obs"].numpy()
    loss, gradient, count = 0.0, np.zeros_like(worth), mask[:, :-1].sum()
    for b, t in zip(*np.nonzero(mask[:, :-1]), strict=True):
        error = worth[obs[b, t]] - target[b, t]
        loss += 0.5 * error**2 / count
        gradient[obs[b, t]] += error / count
    return loss, gradient


def gradient_of(algorithm, batch, progress=0.0):
    return moved(algorithm.module, lambda: algorithm.update(batch, progress))


@pytest.mark.parametrize(
    ("reinforcement", "alone"),
    [
        *[(IMPALA.model_copy(update={"accumulate": parts}), Impala) for parts in (1, 2, 8)],  # of 5 columns
        *[(PPO_ONCE.model_copy(update={"accumulate": parts}), PPO) for parts in (1, 64)],  # of 45 steps
    ],
)
def test_the_gradient_is_the_sum_of_both(reinforcement, alone):
    config = MixedConfig(
        reinforcement=reinforcement, imitation_coef=0.5, imitation_final=0.2, imitation_until=0.5, imitation_columns=4
    )
    for progress, coef in [(0.0, 0.5), (0.25, 0.3), (0.5, 0.1), (1.0, 0.1)]:
        table, played, demo = Table(7, 3), Table(7, 3), Table(7, 3)
        mixed = Mixed(table, sgd(table), config)
        mixed._played = True  # no gradient of demonstrations alone
        assert mixed.update(demonstrations(), progress) == {"imitation_coef": pytest.approx(coef)}
        both = gradient_of(mixed, random_batch(), progress)
        first = gradient_of(alone(played, sgd(played), reinforcement), random_batch(), progress)
        clone = BCConfig(max_grad_norm=None, learning_rate_schedule="constant")
        second = gradient_of(BC(demo, sgd(demo), clone), demonstrations(), progress)
        assert np.abs(second["policy"]).max() > 1e-3
        for name in both:
            np.testing.assert_allclose(both[name], first[name] + coef * second[name], rtol=0, atol=1e-9)


@pytest.mark.parametrize("fit_value", [0.0, 0.3])
def test_only_the_agents_own_moves_are_imitated(fit_value):
    """The value is fitted at every step, as in reinforcement learning."""
    turn = torch.rand(4, 10, generator=torch.Generator().manual_seed(0)) < 0.5
    options = {"imitation_coef": 0.5, "imitation_columns": 4, "imitation_until": 1.0, "fit_value": fit_value}
    gradients = {}
    for name, demos in (
        ("turns", {**demonstrations(), "turn": turn}),
        ("hidden", {**demonstrations(), "mask": demonstrations()["mask"] * turn}),
        ("all", demonstrations()),
    ):
        table = Table(7, 3)
        mixed = Mixed(table, sgd(table), MixedConfig(reinforcement=IMPALA, **options))
        mixed._played = True  # no gradient of demonstrations alone
        mixed.update(demos, 0.0)
        gradients[name] = gradient_of(mixed, {**random_batch(), "turn": torch.ones(5, 10, dtype=torch.bool)})
    np.testing.assert_allclose(gradients["turns"]["policy"], gradients["hidden"]["policy"], rtol=0, atol=1e-12)
    np.testing.assert_allclose(gradients["turns"]["worth"], gradients["all"]["worth"], rtol=0, atol=1e-12)
    assert np.abs(gradients["turns"]["policy"] - gradients["all"]["policy"]).max() > 1e-3


def test_demonstrations_are_learned_before_any_play_and_only_kept_after_it():
    table, demo = Table(7, 3), Table(7, 3)
    mixed = Mixed(table, sgd(table), MixedConfig(reinforcement=IMPALA))
    clone = BCConfig(max_grad_norm=None, learning_rate_schedule="constant")
    expected = gradient_of(BC(demo, sgd(demo), clone), demonstrations())
    measured = {}
    update = moved(table, lambda: measured.update(mixed.update(demonstrations(), 0.0)))
    np.testing.assert_allclose(update["policy"], expected["policy"], rtol=0, atol=1e-12)
    assert {"imitation_loss", "imitation_accuracy"} <= set(measured)
    measured = mixed.update(random_batch(), 0.0)
    assert {"policy_loss", "imitation_loss", "imitation_coef"} <= set(measured)
    assert not any(change.any() for change in gradient_of(mixed, demonstrations()).values())


@pytest.mark.parametrize(
    "reinforcement", [IMPALA, PPO_ONCE, *(IMPALA.model_copy(update={"accumulate": parts}) for parts in (2, 8))]
)
def test_fitting_the_value_adds_the_gradient_of_its_error(reinforcement):
    options = {"reinforcement": reinforcement, "imitation_coef": 0.5, "imitation_until": 1.0, "imitation_columns": 4}
    updates, measured = {}, {}
    for fit_value in (0.0, 0.3):
        table = Table(7, 3)
        mixed = Mixed(table, sgd(table), MixedConfig(**options, fit_value=fit_value))
        mixed._played = True  # no gradient of demonstrations alone
        mixed.update(demonstrations(), 0.5)
        updates[fit_value] = moved(table, lambda m=mixed: measured.update(m.update(random_batch(), 0.5)))
    loss, expected = slow_value_fit(demonstrations(), Table(7, 3).worth.detach().numpy(), reinforcement.gamma)
    assert np.abs(expected).max() > 1e-2
    moved_by = updates[0.3]["worth"] - updates[0.0]["worth"]
    np.testing.assert_allclose(moved_by, 0.25 * 0.3 * expected, rtol=0, atol=1e-9)
    np.testing.assert_array_equal(updates[0.3]["policy"], updates[0.0]["policy"])
    assert measured["imitation_value_loss"] == pytest.approx(loss, abs=1e-9)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_value_is_fitted_before_any_play(accumulate):
    reinforcement = IMPALA.model_copy(update={"accumulate": accumulate})
    table, demo = Table(7, 3), Table(7, 3)
    mixed = Mixed(table, sgd(table), MixedConfig(reinforcement=reinforcement, fit_value=0.3))
    measured = {}
    update = moved(table, lambda: measured.update(mixed.update(demonstrations(), 0.0)))
    clone = BCConfig(max_grad_norm=None, learning_rate_schedule="constant")
    policy = gradient_of(BC(demo, sgd(demo), clone), demonstrations())["policy"]
    loss, worth = slow_value_fit(demonstrations(), Table(7, 3).worth.detach().numpy(), reinforcement.gamma)
    np.testing.assert_allclose(update["policy"], policy, rtol=0, atol=1e-12)
    np.testing.assert_allclose(update["worth"], 0.3 * worth, rtol=0, atol=1e-9)
    assert measured["imitation_value_loss"] == pytest.approx(loss, abs=1e-9)


@pytest.mark.parametrize("option", [{"normalise_value": True}, {"reward_heads": [{}, {}]}])
def test_fit_value_is_refused_with_options_that_change_the_value(option):
    MixedConfig(reinforcement={"name": "ppo", **option})
    with pytest.raises(ValidationError, match=f"reinforcement without {next(iter(option))}"):
        MixedConfig(reinforcement={"name": "ppo", **option}, fit_value=0.5)


def test_a_weight_of_zero_is_pure_reinforcement():
    table, other_table = Table(7, 3), Table(7, 3)
    mixed = Mixed(table, sgd(table), MixedConfig(reinforcement=IMPALA, imitation_coef=0.0))
    mixed._played = True
    mixed.update(demonstrations(), 0.0)
    both = gradient_of(mixed, random_batch())
    alone = gradient_of(Impala(other_table, sgd(other_table), IMPALA), random_batch())
    for name in both:
        np.testing.assert_array_equal(both[name], alone[name])


def test_kept_demonstrations_are_bounded_and_sampled():
    table = Table(7, 3)
    mixed = Mixed(table, sgd(table), MixedConfig(reinforcement=IMPALA, demonstrations_kept=2, imitation_columns=3))
    for seed in range(4):
        mixed.update(demonstrations(seed), 0.0)
    drawn = [mixed._drawn()["obs"] for _ in range(50)]
    assert {obs.shape for obs in drawn} == {(3, 10)}
    known = {tuple(row.tolist()) for seed in (2, 3) for row in demonstrations(seed)["obs"]}
    assert {tuple(row.tolist()) for obs in drawn for row in obs} == known


def test_it_continues_from_a_saved_state():
    table = Table(7, 3)
    mixed = Mixed(table, sgd(table), MixedConfig(reinforcement=IMPALA))
    mixed.update(random_batch(), 0.0)
    other = Mixed(table, sgd(table), MixedConfig(reinforcement=IMPALA))
    other.load_state_dict(mixed.state_dict())
    assert set(other.update(demonstrations(), 0.0)) == {"imitation_coef"}


def test_imitation_is_completed_before_play_is_learned():
    """Play that arrives early triggers the remaining imitation updates, from kept demonstrations. The play itself is
    neither learned nor counted."""
    table, cloned = Table(7, 3), Table(7, 3)
    mixed = Mixed(table, sgd(table), MixedConfig(reinforcement=IMPALA, imitation_updates=5, imitation_coef=0.0))
    clone = BC(cloned, sgd(cloned), BCConfig(max_grad_norm=None, learning_rate_schedule="constant"))
    mixed.update(demonstrations(), 0.0)
    measured = mixed.update(random_batch(seed=3), 0.0)
    assert (mixed.learned, mixed.counts) == (True, False)
    assert "imitation_loss" in measured
    for _ in range(5):
        clone.update(demonstrations(), 0.0)
    for parameter, expected in zip(table.parameters(), cloned.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=0, atol=1e-12)
    assert "policy_loss" in mixed.update(random_batch(seed=4), 0.0)
    assert mixed.counts


def test_demonstrations_after_play_start_all_imitation_updates_at_once():
    table, cloned = Table(7, 3), Table(7, 3)
    mixed = Mixed(table, sgd(table), MixedConfig(reinforcement=IMPALA, imitation_updates=4, imitation_coef=0.0))
    clone = BC(cloned, sgd(cloned), BCConfig(max_grad_norm=None, learning_rate_schedule="constant"))
    mixed.update(random_batch(), 0.0)
    mixed.update(demonstrations(), 0.0)
    assert (mixed.learned, mixed.counts) == (True, False)
    for _ in range(4):
        clone.update(demonstrations(), 0.0)
    for parameter, expected in zip(table.parameters(), cloned.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=0, atol=1e-12)
    assert set(mixed.update(demonstrations(), 0.0)) == {"imitation_coef"}
    assert not mixed.learned
    assert "policy_loss" in mixed.update(random_batch(seed=4), 0.0)


def test_play_waits_for_the_first_demonstrations_up_to_a_limit(monkeypatch):
    """After a restart demonstrations are read again, and games may arrive first."""
    table = Table(7, 3)
    mixed = Mixed(table, sgd(table), MixedConfig(reinforcement=IMPALA, imitation_updates=105))
    assert set(mixed.update(random_batch(), 0.0)) == {"imitation_coef"}
    assert not mixed.learned
    mixed.update(demonstrations(), 0.0)
    assert "policy_loss" not in mixed.update(random_batch(seed=2), 0.0)
    assert mixed.learned
    assert "policy_loss" in mixed.update(random_batch(seed=2), 0.0)

    monkeypatch.setattr("brayx.algorithms.mixed._PATIENCE", 3)
    alone = Mixed(table, sgd(table), MixedConfig(reinforcement=IMPALA, imitation_updates=5))
    for _ in range(3):
        alone.update(random_batch(), 0.0)
    with pytest.raises(ConfigError, match=r"imitation_updates is 5, .*4 batches"):
        alone.update(random_batch(), 0.0)


def test_unfinished_imitation_continues_after_a_restart():
    table = Table(7, 3)
    config = MixedConfig(reinforcement=IMPALA, imitation_updates=400)
    mixed = Mixed(table, sgd(table), config)
    mixed.update(demonstrations(), 0.0)
    mixed.update(random_batch(), 0.0)
    other = Mixed(table, sgd(table), config)
    other.load_state_dict(mixed.state_dict())
    other.update(random_batch(), 0.0)
    other.update(demonstrations(), 0.0)
    assert "policy_loss" not in other.update(random_batch(), 0.0)
    assert "policy_loss" not in other.update(random_batch(), 0.0)
    assert "policy_loss" in other.update(random_batch(), 0.0)
