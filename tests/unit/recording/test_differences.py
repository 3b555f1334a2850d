"""`brayx.recording.differences` against oracles: two policies, tick by tick."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from brayx import actions
from brayx.errors import BadRecording, ModelError
from brayx.recording.differences import Decisions, differences
from tests.unit.recording.oracles import N, normals, oracle_kl, rng

POLICIES: dict[str, Callable[[int], dict[str, Any]]] = {
    "one head": lambda seed: {"logits": normals(4, seed=seed)},
    "heads": lambda seed: {"logits": (normals(3, seed=seed), normals(2, seed=seed + 9))},
    "masked": lambda seed: {"logits": np.where(np.arange(4) % 2, actions.MASKED, normals(4, seed=seed))},
    "forbidden": lambda seed: {"logits": np.where(np.arange(4) == 1, -np.inf, normals(4, seed=seed))},
    "gaussian": lambda seed: {"mean": normals(2, seed=seed), "log_std": 0.3 * normals(2, seed=seed + 9)},
    "hybrid": lambda seed: {
        "logits": (normals(4, seed=seed), normals(2, seed=seed + 5)),
        "mean": normals(2, seed=seed),
        "log_std": 0.3 * normals(2, seed=seed + 9),
    },
    "squashed hybrid": lambda seed: {
        "logits": normals(4, seed=seed),
        "tanh_mean": normals(2, seed=seed),
        "tanh_log_std": 0.3 * normals(2, seed=seed + 9),
    },
    "squashed": lambda seed: {"tanh_mean": normals(2, seed=seed), "tanh_log_std": 0.3 * normals(2, seed=seed + 9)},
}


@pytest.mark.parametrize("kind", POLICIES)
def test_known_distributions_are_compared_as_the_oracle_does(kind: str) -> None:
    p, q = POLICIES[kind](0), POLICIES[kind](1)
    difference = differences(Decisions.most_likely({**p, "value": normals(seed=3)}), {**q, "value": normals(seed=4)})
    expected = [oracle_kl(p, q, tick) for tick in range(N)]
    np.testing.assert_allclose(difference.kl, expected, rtol=1e-5, atol=1e-7)
    assert difference.exact
    ours, theirs = actions.greedy(p), actions.greedy(q)
    equal = [np.abs(a - b).max() <= 1e-3 for a, b in zip(ours, theirs, strict=True)]
    assert difference.equal.tolist() == equal
    np.testing.assert_allclose(difference.value, normals(seed=4) - normals(seed=3), rtol=1e-6)
    same = differences(Decisions.most_likely(p), p)
    assert (same.equal.all(), same.kl.max()) == (True, 0.0)


@pytest.mark.parametrize("kind", [name for name in POLICIES if name != "forbidden"])
def test_the_divergence_is_the_learners(kind: str) -> None:
    from brayx.nets import distributions

    def tensors(outputs: dict[str, Any]) -> dict[str, Any]:
        return {
            name: tuple(map(torch.as_tensor, output)) if isinstance(output, tuple) else torch.as_tensor(output)
            for name, output in outputs.items()
        }

    p, q = POLICIES[kind](0), POLICIES[kind](1)
    expected = distributions.kl_divergence(tensors(p), tensors(q))
    np.testing.assert_allclose(actions.kl_divergence(p, q), expected, rtol=1e-4, atol=1e-6)


def test_an_action_that_only_one_policy_forbids_has_a_large_finite_divergence() -> None:
    free, masked = {"logits": np.zeros((1, 2))}, {"logits": np.asarray([[0.0, -np.inf]])}
    assert actions.kl_divergence(free, masked).item() == pytest.approx(-0.5 * actions.MASKED, rel=1e-3)
    assert actions.kl_divergence(masked, free).item() == pytest.approx(math.log(2))


@pytest.mark.parametrize("kind", POLICIES)
def test_without_the_distribution_the_divergence_is_estimated_from_log_probabilities(kind: str) -> None:
    p, q = POLICIES[kind](0), POLICIES[kind](1)
    action, log_prob = actions.sample(p, rng(2))
    difference = differences(Decisions(action, None, log_prob), q)
    ratios = [math.exp(b - a) for a, b in zip(log_prob.tolist(), actions.log_prob(q, action).tolist(), strict=True)]
    expected = [ratio - 1 - math.log(ratio) for ratio in ratios]
    np.testing.assert_allclose(difference.kl, expected, rtol=1e-4, atol=1e-5)
    assert not difference.exact
    assert differences(Decisions(action, None, log_prob), p).kl.max() < 1e-9
    assert np.isnan(differences(Decisions(action), q).kl).all(), "nothing is known"
    assert np.isnan(differences(Decisions(action), q).value).all()


def test_the_estimates_mean_is_the_divergence() -> None:
    p, q = ({"logits": np.tile(np.asarray([row], np.float32), (40_000, 1))} for row in ([0.0, 1.0, 0.5], [0.4, 0.2, 0]))
    action, log_prob = actions.sample(p, rng())
    kl = differences(Decisions(action, None, log_prob), q).kl.astype(np.float64)
    error = kl.std() / math.sqrt(len(kl))
    assert kl.mean() == pytest.approx(oracle_kl(p, q, 0), abs=float(5 * error))


def test_continuous_actions_are_equal_within_the_tolerance() -> None:
    outputs = {"mean": np.zeros((3, 2), np.float32), "log_std": np.zeros((3, 2), np.float32)}
    done = Decisions(np.asarray([[0, 0.0009], [0.0011, 0], [-0.5, 0.5]], np.float32))
    assert differences(done, outputs).equal.tolist() == [True, False, False]
    assert differences(done, outputs, tolerance=0.5).equal.all()


@pytest.mark.parametrize("kind", POLICIES)
def test_no_ticks_have_no_differences(kind: str) -> None:
    def none(outputs: dict[str, Any]) -> dict[str, Any]:
        return {
            name: tuple(head[:0] for head in output) if isinstance(output, tuple) else output[:0]
            for name, output in outputs.items()
        }

    p = none({**POLICIES[kind](0), "value": normals()})
    acted = Decisions.most_likely(p)
    for done in (acted, Decisions(acted.action, None, np.zeros(0, np.float32), acted.value)):
        difference = differences(done, p)
        assert difference.equal.shape == difference.kl.shape == difference.value.shape == (0,)
        assert difference.equal.dtype == np.bool_


@pytest.mark.parametrize(
    ("action", "outputs", "error", "message"),
    [
        (np.zeros(3, np.int64), {"value": np.zeros(3)}, ModelError, "logits, mean with log_std"),
        (np.zeros((3, 2), np.int64), {"logits": np.zeros((3, 4))}, BadRecording, r"int64 \[2\], .* discrete"),
        (np.zeros(3, np.float32), {"logits": np.zeros((3, 4))}, BadRecording, "float32 .* discrete"),
        (np.asarray([0, 4, 1]), {"logits": np.zeros((3, 4))}, BadRecording, "0 to 4, .* 4$"),
        (np.asarray([0, -1, 1]), {"logits": np.zeros((3, 4))}, BadRecording, "-1 to 1"),
        (np.zeros(3, np.int64), {"mean": np.zeros((3, 1)), "log_std": np.zeros((3, 1))}, BadRecording, "continuous"),
        (np.zeros(3, np.int64), {"logits": np.full((3, 4), np.nan)}, ModelError, "logits .* 3 of 3"),
    ],
)
def test_what_does_not_fit_is_refused(action, outputs, error, message) -> None:
    with pytest.raises(error, match=message):
        differences(Decisions(action), outputs)


def test_recorded_policies_are_found_by_their_names() -> None:
    assert Decisions.recorded({"action": np.zeros(1), "mean": np.zeros(1)}).policy is None, "a number of the game's own"
    heads = Decisions.recorded(
        {"action": np.zeros(1), "logits/0": np.zeros((1, 2)), "logits/1": np.ones((1, 3))}
    ).policy
    assert heads is not None
    assert [head.shape[1] for head in heads["logits"]] == [2, 3]
    for names in (("mean", "log_std"), ("tanh_mean", "tanh_log_std")):
        numbers = {name: np.zeros((1, 2)) for name in names}
        hybrid = {"action": np.zeros((1, 3), np.float32), "logits": np.zeros((1, 2)), **numbers}
        for arrays in (hybrid, {**hybrid, "action": np.zeros(1, np.int64)}):
            is_hybrid = arrays is hybrid  # else the numbers are the game's own
            assert set(Decisions.recorded(arrays).policy or ()) == {"logits", *(names if is_hybrid else ())}
    with pytest.raises(BadRecording, match="'action'"):
        Decisions.recorded({"obs": np.zeros(1)})
    with pytest.raises(ModelError, match=r"logits \[2\], .* logits \[3\]"):
        differences(Decisions(np.zeros(1, np.int64), {"logits": np.zeros((1, 2))}), {"logits": np.zeros((1, 3))})
