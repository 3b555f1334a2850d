"""Losses on held-out data: those of the current model, which stays unchanged."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from brayx.algorithms.mixed import MixedConfig
from brayx.algorithms.ppo import PPOConfig
from brayx.nets.mlp import ActorCritic
from tests.unit.trainer.parts import batches, run
from tests.unit.trainer.test_loop import ELSEWHERE, OnDevice, demonstrated


class Held:
    """Evaluation batches; learning waits until they are all there."""

    def __init__(self, **held):
        self._there = [threading.Event() for _ in held]
        pairs = zip(held.items(), self._there, strict=True)
        self.streams = {name: self._signalled(list(batches), asked_again) for (name, batches), asked_again in pairs}

    @staticmethod
    def _signalled(batches, asked_again):
        yield from batches
        asked_again.set()  # the stream asks for the next batch, so earlier ones are ready

    def then(self, stream):
        assert all(asked_again.wait(30) for asked_again in self._there)
        yield from stream


@pytest.mark.parametrize("device", ELSEWHERE)
def test_losses_on_the_training_batch_equal_those_of_the_next_update(tmp_path, device):
    (batch,) = batches(1)
    held_out = Held(same=[batch])
    _, _, numbers, *_ = run(
        tmp_path,
        stream=held_out.then([batch] * 4),
        algorithm={"epochs": 1, "minibatch_size": 1024},
        learning_rate=1e-2,
        eval_interval=1,
        eval_batches=2,
        evaluate=held_out.streams,
        ranks=OnDevice(device),
    )
    for name in ("loss", "policy_loss", "value_loss", "entropy", "approx_kl", "explained_variance"):
        evaluated, learned = numbers.samples[f"eval/{name}"], numbers.samples[name]
        np.testing.assert_allclose(evaluated[:3], learned[1:], rtol=1e-3, atol=1e-6)
    assert np.ptp(numbers.samples["eval/value_loss"]) > 1e-4
    assert not {"eval/learning_rate", "eval/grad_norm"} & numbers.samples.keys()


def test_evaluation_does_not_change_learning(tmp_path):
    _, plain, *_ = run(tmp_path / "plain", count=5)
    held_out = Held(a=batches(3), b=batches(3, seed=7))
    _, weights, numbers, *_ = run(
        tmp_path / "evaluated", stream=held_out.then(batches(5)), eval_interval=2, evaluate=held_out.streams
    )
    assert len(numbers.samples["eval/loss.a"]) == len(numbers.samples["eval/loss.b"]) == 2, "one metric each"
    for key, array in plain.published[-1][2].items():
        np.testing.assert_array_equal(weights.published[-1][2][key], array)


def test_a_buffer_without_batches_does_not_delay_learning(tmp_path):
    summary, _, numbers, *_ = run(tmp_path, count=3, eval_interval=1, evaluate={"dry": iter([])})
    assert summary.updates == 3
    assert not [name for name in numbers.samples if name.startswith("eval/")]


def test_the_newest_batches_are_kept_until_others_come(tmp_path):
    held_out = Held(one=batches(1))
    _, _, numbers, *_ = run(
        tmp_path, stream=held_out.then(batches(6)), eval_interval=2, eval_batches=2, evaluate=held_out.streams
    )
    assert len(numbers.samples["eval/loss"]) == 3


def test_demonstrations_are_measured_with_the_loss_of_cloning_before_and_after_play(tmp_path):
    (shown,) = demonstrated(batches(1, seed=5))
    measured = {}
    for name, learned in {"cloned": demonstrated(batches(4)), "played": batches(4)}.items():
        held_out = Held(shown=[shown])
        _, weights, numbers, *_ = run(
            tmp_path / name,
            stream=held_out.then(learned),
            algorithm=MixedConfig(reinforcement=PPOConfig(epochs=2, minibatch_size=16)),
            learning_rate=1e-2,
            eval_interval=1,
            evaluate=held_out.streams,
        )
        actions = shown["action"][:, :-1][shown["mask"][:, :-1] > 0]
        for evaluated, (_, _, arrays) in zip(
            numbers.samples["eval/imitation_loss"], weights.published[1:], strict=True
        ):
            with torch.no_grad():
                module = ActorCritic(3, 2, hidden=(16,))
                module.load_state_dict({key: torch.from_numpy(array) for key, array in arrays.items()})
                logits = module(torch.ones(1, 3))["logits"].log_softmax(-1)[0]
            assert evaluated == pytest.approx(-logits[actions].mean().item(), rel=1e-5)
        assert "eval/imitation_accuracy" in numbers.samples
        assert not [name for name in numbers.samples if name.startswith("eval/") and name.endswith("_rate")]
        measured[name] = numbers.samples["eval/imitation_loss"]
    assert np.ptp(measured["played"]) > 1e-3
