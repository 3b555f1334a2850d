"""Evaluation episodes of a training: their environments, failures, limits and end."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import numpy as np
import pytest

from brayx.algorithms.ppo import PPOConfig
from brayx.local.train import train_local
from brayx.local.training import Training
from tests.unit.local.games import QUICK, Right
from tests.unit.rollout.worlds import Counting


def test_an_evaluation_has_the_environments_to_itself():
    """What collects beside the learner is in the middle of a run when the target is reached."""
    steppers = []

    class Slow(Right):
        def step(self, action):
            steppers.append(threading.current_thread().name)
            time.sleep(0.001)
            return super().step(action)

    training = Training(
        num_steps=20_000, num_envs=4, unroll_length=64, target_return=0.0, target_games=5, blocking=False,
        evaluation_episodes=20,
    )  # fmt: skip
    assert train_local(Slow, PPOConfig(epochs=1), training).reason == "target_return"
    assert [name for name, _ in itertools.groupby(steppers)] == ["brayx-collector", threading.current_thread().name]


class Evaluated(Counting):
    """Knows by its seed whether it is evaluated."""

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.evaluated = seed >= 10_000
        return super().reset()


def test_a_reward_that_is_not_finite_makes_the_return_of_its_evaluation_episode_nan() -> None:
    class Late(Evaluated):
        def reset(self, *, seed=None, options=None):
            self.first = seed is not None
            return super().reset(seed=seed)

        def step(self, action):
            obs, reward, *rest = super().step(action)
            return obs, np.inf if self.evaluated and self.first and reward == 2 else reward, *rest

    evaluation = train_local(Late, PPOConfig(epochs=1), Training(**QUICK, evaluation_episodes=8)).evaluation
    np.testing.assert_array_equal([episode.ret for episode in evaluation.episodes], [np.nan] * 4 + [6] * 4)
    assert np.isnan(evaluation.mean)


@pytest.mark.parametrize("blocking", [True, False])
def test_an_environment_that_raises_in_its_evaluation_costs_no_more_than_that(blocking, caplog) -> None:
    class Breaking(Evaluated):
        def step(self, action):
            if self.evaluated:
                raise RuntimeError("out of order")
            return super().step(action)

    training = Training(**QUICK, blocking=blocking, evaluation_episodes=8)
    result = train_local(Breaking, PPOConfig(epochs=1), training)
    assert (result.reason, result.evaluation) == ("num_steps", None)
    assert result.return_mean == 6
    assert "there is no evaluation: the environment raised RuntimeError in step: out of order" in caplog.text


class Endless(Counting):
    """Its first environment never ends an episode, and gives 1 for each step."""

    made = 0

    def __init__(self) -> None:
        super().__init__()
        self.number, Endless.made = Endless.made, Endless.made + 1

    def step(self, action: Any) -> Any:
        if self.number:
            return super().step(action)
        return np.zeros(2), 1.0, False, False, {}


@pytest.mark.parametrize(("blocking", "limit"), [(True, 100), (False, 100), (True, 5)])
def test_an_evaluation_episode_that_never_ends_is_cut_and_counts_its_return_so_far(blocking, limit, caplog) -> None:
    Endless.made = 0
    training = Training(**QUICK, blocking=blocking, evaluation_episodes=8, evaluation_steps=limit)
    result = train_local(Endless, PPOConfig(epochs=1), training)
    evaluation = result.evaluation
    assert (result.reason, evaluation.cut) == ("num_steps", 1)
    assert [episode.ret for episode in evaluation.episodes if episode.env] == [6.0] * 6
    (cut,) = [episode for episode in evaluation.episodes if not episode.env]
    assert cut.ret == cut.length == limit
    assert evaluation.mean == (limit + 36) / 7
    assert f"1 of 7 episodes had not ended after {limit} steps" in caplog.text


def test_an_evaluation_is_given_up_when_it_is_stopped() -> None:
    """It would play a thousand million episodes; what was learned stays."""
    stop, steps = threading.Event(), 0

    class Stopping(Counting):
        def step(self, action):
            nonlocal steps
            steps += 1
            if steps > 2_000:
                stop.set()
            return super().step(action)

    result = train_local(Stopping, training=Training(**QUICK, evaluation_episodes=10**9), stop=stop)
    assert (result.reason, result.evaluation) == ("num_steps", None)
    assert result.updates > 0
