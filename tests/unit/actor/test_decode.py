"""Actions from the outputs of a policy."""

import math
import random
from typing import Any

import numpy as np
import pytest

import brayx.actions as actions
from brayx.actor.decode import sample_action, sample_categorical
from brayx.errors import ModelError


def test_frequencies_and_log_probs_are_the_softmax() -> None:
    logits = np.asarray([0.5, -1.0, 2.0], np.float32)
    expected = np.exp(logits - logits.max())
    expected /= expected.sum()
    rng = random.Random(0)
    counts = np.zeros(3)
    for _ in range(20_000):
        action, log_prob = sample_categorical(logits, rng)
        counts[action] += 1
        assert log_prob == pytest.approx(math.log(expected[action]), abs=1e-6)
    np.testing.assert_allclose(counts / counts.sum(), expected, atol=0.015)


def test_greedy_takes_the_most_probable() -> None:
    action, log_prob = sample_categorical(np.asarray([0.0, 3.0]), random.Random(0), greedy=True)
    assert action == 1
    assert log_prob == pytest.approx(-math.log1p(math.exp(-3.0)))


def test_a_masked_action_is_never_taken() -> None:
    rng = random.Random(1)
    logits = np.asarray([-np.inf, 0.0, -np.inf, 0.0])
    assert {sample_categorical(logits, rng)[0] for _ in range(500)} == {1, 3}


@pytest.mark.parametrize("logits", [[-np.inf, -np.inf], [np.nan, 0.0], [0.0, np.nan], [np.inf, 0.0]])
def test_logits_that_allow_nothing_are_refused(logits: list[float]) -> None:
    with pytest.raises(ModelError):
        sample_categorical(np.asarray(logits), random.Random(0))


def _heads(*sizes: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(1)
    return tuple(rng.standard_normal(size).astype(np.float32) for size in sizes)


_MEAN, _LOG_STD = np.asarray([0.5, -2.0], np.float32), np.asarray([-1.0, 0.3], np.float32)
_POLICIES: dict[str, dict[str, Any]] = {
    "one head": {"logits": _heads(3)[0]},
    "two heads": {"logits": _heads(3, 2)},
    "a wide head": {"logits": _heads(200)[0]},
    "numbers": {"mean": _MEAN, "log_std": _LOG_STD},
    "many numbers": {"mean": np.tile(_MEAN, 40), "log_std": np.tile(_LOG_STD, 40)},
    "hybrid": {"logits": _heads(2), "mean": _MEAN, "log_std": _LOG_STD},
    "squashed hybrid": {"logits": _heads(2), "tanh_mean": _MEAN, "tanh_log_std": _LOG_STD},
    "squashed": {"tanh_mean": _MEAN, "tanh_log_std": _LOG_STD},
}


@pytest.mark.parametrize("policy", _POLICIES.values(), ids=_POLICIES)
def test_an_action_of_any_policy_is_as_that_of_a_batch(policy: dict[str, Any]) -> None:
    batch = {
        name: tuple(head[None] for head in output) if isinstance(output, tuple) else output[None]
        for name, output in policy.items()
    }
    rng = np.random.default_rng(0)
    expected = actions.sample(batch, rng)[0][0]
    for _ in range(20):
        action, log_prob = sample_action(policy, rng)
        assert (action.shape, action.dtype) == (expected.shape, expected.dtype)
        assert log_prob == pytest.approx(float(actions.log_prob(batch, action[None])[0]), rel=1e-4, abs=1e-4)
    best, _ = sample_action(policy, rng, greedy=True)
    np.testing.assert_array_equal(best, actions.greedy(batch)[0])


def test_numbers_are_drawn_from_their_distribution() -> None:
    rng = np.random.default_rng(0)
    drawn = np.stack([sample_action(_POLICIES["hybrid"], rng)[0] for _ in range(20_000)])
    np.testing.assert_allclose(drawn[:, 1:].mean(0), _MEAN, atol=0.05)
    np.testing.assert_allclose(drawn[:, 1:].std(0), np.exp(_LOG_STD), rtol=0.03)
    shifted = np.exp(_heads(2)[0])
    assert drawn[:, 0].mean() == pytest.approx(shifted[1] / shifted.sum(), abs=0.015)


def test_outputs_of_no_policy_are_refused() -> None:
    with pytest.raises(ModelError):
        sample_action({}, np.random.default_rng(0))


@pytest.mark.parametrize("log_std", [800.0, -800.0, math.nan, math.inf])
def test_a_deviation_that_no_number_has_is_the_model_s_fault(log_std: float) -> None:
    policy = {"mean": np.zeros(2, np.float32), "log_std": np.array([0.0, log_std], np.float32)}
    with pytest.raises(ModelError, match="log_std"):
        sample_action(policy, np.random.default_rng(0))
