"""The categorical helpers against literal numbers, torch's own distribution, and frequencies."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from brayx.nets.distributions import entropy, greedy, log_prob, sample

LOGITS = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]], np.float32))


def test_literal_numbers():
    logits = torch.from_numpy(LOGITS)
    torch.testing.assert_close(log_prob(logits, torch.tensor([0, 2])).exp(), torch.tensor([0.5, 0.7]))
    torch.testing.assert_close(entropy(logits)[0], torch.tensor(1.0397208))  # 0.5 ln 2 + 0.5 ln 4


def test_agrees_with_torch_at_any_leading_axes():
    logits = torch.randn(5, 4, 6) * 3
    action = torch.randint(6, (5, 4))
    oracle = torch.distributions.Categorical(logits=logits)
    torch.testing.assert_close(log_prob(logits, action), oracle.log_prob(action))
    torch.testing.assert_close(entropy(logits), oracle.entropy())


def test_masked_actions_have_no_entropy_and_are_not_taken():
    logits = torch.tensor([[0.0, -torch.inf, 0.0]], requires_grad=True)
    value = entropy(logits)
    torch.testing.assert_close(value, torch.tensor([np.log(2)], dtype=torch.float32))
    action, _ = sample(np.array([[0.0, -np.inf, 0.0]] * 500), np.random.default_rng(0))
    assert set(action.tolist()) == {0, 2}


def test_sample_follows_the_distribution_and_reports_its_log_prob():
    action, logp = sample(np.broadcast_to(LOGITS[1], (20_000, 3)), np.random.default_rng(0))
    assert action.dtype == np.int64
    assert logp.dtype == np.float32
    np.testing.assert_allclose(np.bincount(action) / 20_000, [0.1, 0.2, 0.7], atol=0.015)
    np.testing.assert_allclose(np.exp(logp), np.array([0.1, 0.2, 0.7])[action], rtol=1e-5)


def test_sample_of_one_observation_is_a_scalar_array():
    action, logp = sample(LOGITS[0], np.random.default_rng(0))
    assert action.shape == ()
    assert logp.shape == ()


@pytest.mark.parametrize("bad", [[np.nan, 0.0], [-np.inf, -np.inf], [np.inf, 0.0]])
def test_sample_refuses_logits_that_are_no_distribution(bad):
    with pytest.raises(ValueError, match="logits"):
        sample(np.array(bad), np.random.default_rng(0))


def test_greedy_takes_the_first_of_equals():
    assert greedy(LOGITS).tolist() == [0, 2]
    assert greedy(np.zeros(3)) == 0


def test_log_prob_checks_its_shapes():
    with pytest.raises(ValueError, match="action must be"):
        log_prob(torch.zeros(5, 3), torch.zeros(4, dtype=torch.int64))
