"""Actions from logits."""

import math
import random

import numpy as np
import pytest

from brayx.actor.decode import sample_categorical
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
