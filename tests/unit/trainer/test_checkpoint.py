"""A learner's checkpoint: what it holds, and one that is broken or of another model."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from brayx.algorithms.sac import SACConfig
from brayx.engines.base import load_weights
from brayx.engines.scaling import Scaling, from_weights, learned
from brayx.errors import BadWeights, TrackingError
from brayx.nets.mlp import ActorCritic
from brayx.nets.policy import NetworkConfig
from brayx.nets.soft import SoftActorCritic
from brayx.trainer.config import TrainerConfig
from brayx.trainer.hooks import Hooks
from brayx.trainer.loop import LearnerLoop
from tests.unit.trainer.parts import BATCH_STEPS, Folders, Numbers, Weights, batches, run

SMALL = NetworkConfig(hidden=[8], activation="relu", distribution="squashed")


class Moments:
    """A normaliser of one number."""

    def __init__(self):
        self.mean = np.zeros(2)

    def scalings(self):
        return {path: Scaling(self.mean[:1], np.full(1, 2.0), 10.0) for path in ("obs", "obs/not-the-model's")}

    def state_dict(self):
        return {"obs/image:mean": self.mean.copy(), "count": np.asarray(3)}

    def load_state_dict(self, state):
        assert int(state["count"]) == 3
        self.mean = state["obs/image:mean"]


def soft_batches(count):
    """Batches of a task in which actions near 0.5 are good."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        shape = (16, 2)
        action = rng.uniform(-0.99, 0.99, (*shape, 1)).astype(np.float32)
        yield {
            "obs": rng.normal(size=(*shape, 3)).astype(np.float32),
            "action": action,
            "log_prob": np.zeros(shape, np.float32),
            "reward": -np.square(action[..., 0] - 0.5),
            "terminated": rng.random(shape) < 0.1,
            "truncated": np.zeros(shape, bool),
            "mask": np.repeat(np.array([[1.0, 0.0]], np.float32), 16, 0),
            "policy_version": np.ones(shape, np.int64),
            "index": rng.permutation(100)[:16],
        }


def soft(keeper, stream, seed, normaliser, feedback):
    """Trains SAC, which has its own targets and temperature and draws actions while it learns."""
    torch.manual_seed(seed)
    weights, numbers = Weights(), Numbers()
    LearnerLoop(
        TrainerConfig(model="model", buffers=["buffer"], algorithm=SACConfig(tau=0.1), num_steps=1000),
        SoftActorCritic(np.zeros(3, np.float32), 1, SMALL),
        (np.zeros((1, 3), np.float32),),
        batches=iter(stream),
        publisher=lambda newest: weights,
        numbers=numbers,
        keeper=keeper,
        normaliser=normaliser,
        feedback=lambda index, priorities: feedback.append((index, priorities)),
    ).run()
    return weights.published[-1][2], numbers.samples


def test_targets_temperature_and_moments_continue_in_a_resumed_trial(tmp_path):
    stream, feedback = list(soft_batches(8)), []
    whole, numbers = soft(Folders(tmp_path / "whole"), stream, 0, Moments(), feedback)
    keeper, moments, again = Folders(tmp_path / "parts"), Moments(), Moments()
    moments.mean = np.array([1.5, -2.0])
    soft(keeper, stream[:4], 0, moments, [])
    parts, numbers_again = soft(keeper, stream[4:], 99, again, [])
    for key, array in learned(whole).items():
        np.testing.assert_array_equal(parts[key], array)
    assert numbers_again["learner/alpha"] == numbers["learner/alpha"][4:]
    assert numbers_again["learner/critic_loss"] == numbers["learner/critic_loss"][4:]
    np.testing.assert_array_equal(again.mean, moments.mean)
    # Publishes and checkpoints carry the normalisation of the model's observations.
    for weights in (parts, load_weights(keeper.latest() / "weights.npz")):
        (path, scaling) = next(iter(from_weights(weights).items()))
        assert (path, scaling.mean.tolist(), scaling.limit) == ("obs", [1.5], 10.0)
        assert len(from_weights(weights)) == 1
    # Priorities are returned with the batch's index.
    assert len(feedback) == 8
    for (index, priorities), batch in zip(feedback, stream, strict=True):
        np.testing.assert_array_equal(index, batch["index"])
        assert (priorities.shape, priorities.dtype) == ((16,), np.float32)
        assert (priorities > 0).all()


def test_a_checkpoint_without_an_algorithm_state_is_accepted(tmp_path):
    keeper = Folders(tmp_path)
    run(keeper, count=1)
    file = keeper.latest() / "trainer.pt"
    state = torch.load(file, weights_only=True)
    del state["algorithm"]
    torch.save(state, file)
    summary, *_ = run(keeper, count=1)
    assert (summary.resumed, summary.updates) == (True, 2)


def test_a_broken_checkpoint_is_named(tmp_path):
    keeper = Folders(tmp_path)
    run(keeper, count=1)
    (keeper.latest() / "trainer.pt").write_bytes(b"half")
    with pytest.raises(TrackingError, match=str(keeper.latest())):
        run(keeper, count=1)


def test_weights_of_another_model_are_refused(tmp_path):
    keeper = Folders(tmp_path)
    run(keeper, count=1)
    config = TrainerConfig(model="model", buffers=["buffer"])
    with pytest.raises(BadWeights, match="policy"):
        LearnerLoop(
            config,
            ActorCritic(3, 5, hidden=(16,)),
            (np.zeros((1, 3), np.float32),),
            batches=batches(1),
            publisher=Weights,
            numbers=Numbers(),
            keeper=keeper,
        ).run()


def test_weights_with_nan_are_never_saved(tmp_path):
    """A finite loss may have a NaN gradient. Nothing is published here, so only the checkpoint can notice it."""

    def loss(outputs, obs):
        count.append(1)
        return (outputs["logits"] * 0).sum().sqrt() if len(count) > 2 else 0 * outputs["logits"].sum()  # 1/sqrt(0)

    count, keeper = [], Folders(tmp_path)
    with pytest.raises(BadWeights):
        run(
            keeper, count=3, hooks=Hooks(loss=loss), algorithm={"epochs": 1, "minibatch_size": BATCH_STEPS},
            checkpoint_interval_s=1e-6, weights_publish_interval=100,
        )  # fmt: skip
    assert [step for step, _, _ in keeper.saved] == [BATCH_STEPS, 2 * BATCH_STEPS]
