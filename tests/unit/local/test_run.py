"""One run of a training in process: what a resumed one goes on with, its numbers, and rewards that are not finite."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control import CartPoleEnv

from brayx.algorithms.impala import ImpalaConfig
from brayx.algorithms.mixed import MixedConfig
from brayx.algorithms.ppo import PPOConfig
from brayx.algorithms.sac import SACConfig
from brayx.engines.base import load_weights
from brayx.engines.torch import module_weights
from brayx.errors import Diverged, EnvironmentFailed
from brayx.local.train import LocalTraining, train_local
from brayx.local.training import Training
from brayx.metrics import Recorder
from brayx.types import Weights
from tests.clocks import Clock
from tests.unit.local.games import QUICK, TABLE, Kept, Odd, Right, Shown, written
from tests.unit.rollout.worlds import Counting


class Flawed(Right):
    """One in sixteen of its episodes has an observation or a reward that is not finite."""

    observation_space = gymnasium.spaces.Box(-10.0, 10.0, (1,), np.float32)
    made = 0

    def __init__(self):
        self.number, Flawed.made = Flawed.made, Flawed.made + 1
        self.episode = 0

    def reset(self, *, seed=None, options=None):
        super().reset()
        self.episode += 1
        return np.zeros(1, np.float32), {}

    def step(self, action):
        tick, reward, *rest = super().step(action)
        flawed = (self.episode + self.number) % 16 == 3 and tick == 2
        obs = np.full(1, np.nan if flawed and self.number % 2 else tick, np.float32)
        return obs, np.inf if flawed and not self.number % 2 else reward, *rest


@pytest.mark.parametrize("options", [{}, {"sampler": "uniform", "batch_size": 8, "min_columns": 8}])
@pytest.mark.parametrize("blocking", [True, False])
def test_data_that_are_not_finite_are_dropped_and_counted_and_the_rest_is_learned_from(options, blocking, caplog):
    numbers = {}
    result = train_local(
        Flawed,
        PPOConfig(epochs=1) if not options else ImpalaConfig(),
        Training(
            num_steps=2_000, num_envs=4, unroll_length=8, normalise_obs=True, normalise_reward=True, engine="torch",
            samples_per_insert=2.0, blocking=blocking, **options,
        ),
        on_update=lambda runs, steps, newest: numbers.update(newest),
    )  # fmt: skip
    assert result.reason == "num_steps"
    assert 0 < result.dropped < 800
    assert numbers["replay_dropped.bad_fragment"] == result.dropped
    assert result.updates > 50
    assert all(torch.isfinite(parameter).all() for parameter in result.module.parameters())
    assert all(np.isfinite(array).all() for array in result.normaliser.values())
    assert result.return_mean > 0
    assert re.search(r"not learned from: \w+: holds NaN or infinity in environment \d of 4", caplog.text)
    assert 0 < numbers["fragments_lost_in_window"] < 0.5 * numbers["fragments_in_window"]


def test_an_error_in_the_collectors_thread_is_raised():
    class Breaking(Counting):
        def step(self, action):
            if self._episode > 3:
                raise RuntimeError("out of order")
            return super().step(action)

    with pytest.raises(
        EnvironmentFailed,
        match=r"RuntimeError in step.*test_run\.py:\d+",
    ):
        train_local(Breaking, training=Training(**QUICK, blocking=False))


@pytest.mark.parametrize("blocking", [True, False])
def test_imitation_comes_before_the_first_run_and_is_not_counted(tmp_path: Path, blocking: bool) -> None:
    """So the first run is played as the demonstrations were, and is learned from."""
    seen: dict[int, tuple[int, Mapping[str, float]]] = {}
    config = MixedConfig(reinforcement=PPOConfig(epochs=1), imitation_updates=150, fit_value=0.5)
    result = train_local(
        Odd,
        config,
        Training(
            num_steps=2_000, num_envs=4, unroll_length=40, batch_size=8, learning_rate=1e-2, blocking=blocking,
        ),
        demonstrations=written(tmp_path / "expert.npz"),
        on_update=lambda runs, steps, numbers: seen.setdefault(runs, (steps, dict(numbers))),
    )  # fmt: skip
    steps, numbers = seen[1]
    assert 100 < steps <= 4 * 40
    assert numbers["episode_return.last100"] > 4.5
    measured = {f"learner/imitation_{name}" for name in ("accuracy", "loss", "value_loss")}
    assert measured | {"policy_loss"} <= set(numbers)
    assert result.updates == 150 + len(seen)
    assert result.reason == "num_steps"


def test_a_resumed_training_does_not_imitate_again(tmp_path: Path) -> None:
    clerk, runs = Kept(tmp_path), []
    data = written(tmp_path / "expert.npz")
    for _ in range(2):
        stop = threading.Event()
        result = train_local(
            Odd, MixedConfig(imitation_updates=20), Training(**QUICK), demonstrations=data, clerk=clerk, stop=stop,
            on_update=lambda run, steps, numbers, stop=stop: (runs.append(run), run == 3 and stop.set()),
        )  # fmt: skip
    assert result.updates == 20 + len(runs)


def test_what_was_stopped_while_it_imitated_imitates_the_rest_before_it_plays(tmp_path: Path) -> None:
    data, stop = written(tmp_path / "expert.npz"), threading.Event()
    clerk = Kept(tmp_path)
    save = clerk.save

    def stopping(folder: Path, step: int, metrics: Mapping[str, float]) -> None:
        save(folder, step, metrics)
        stop.set()

    clerk.save = stopping
    config = MixedConfig(reinforcement=PPOConfig(epochs=1), imitation_updates=40)
    training = Training(**QUICK, batch_size=25, checkpoint_interval=10)
    Odd.stepped = 0
    train_local(Odd, config, training, demonstrations=data, clerk=clerk, stop=stop)
    assert Odd.stepped == 0
    stepped: list[tuple[int, int]] = []
    clerk.save = lambda folder, step, metrics: stepped.append((step, Odd.stepped))
    result = train_local(Odd, config, training, demonstrations=data, clerk=clerk)
    assert all(not steps for _, steps in stepped[:2]), stepped
    assert result.env_steps >= 200
    assert result.reason == "num_steps"


def test_a_stopped_training_goes_on_where_it_was(tmp_path: Path) -> None:
    """Env steps count on, with the schedules; the end comes when all of them are there."""
    clerk, seen = Kept(tmp_path), []
    for _ in range(5):  # twice after it is done
        stop = threading.Event()
        result = train_local(
            "CartPole-v1", training=Training(num_steps=1_200, num_envs=4, unroll_length=32), clerk=clerk, stop=stop,
            on_update=lambda runs, steps, numbers, stop=stop: stop.set() if runs == 4 else None,
        )  # fmt: skip
        seen.append((result.reason, round(result.env_steps, -2)))
    assert [reason for reason, _ in seen] == ["stopped", "stopped", *["num_steps"] * 3], seen
    assert [steps for _, steps in seen[:2]] == [500, 1000]
    assert 1_200 <= seen[2][1] == seen[3][1] == seen[4][1] <= 1_300


def test_a_training_that_a_viewer_finishes_has_its_result() -> None:
    with LocalTraining("CartPole-v1", training=Training(num_steps=10_000, num_envs=4, unroll_length=32)) as running:
        running.iterate()
        running.run.finish()
        assert not running.goes_on()
        result = running.result()
    assert (result.reason, result.updates) == ("num_steps", 1)


def test_the_checkpoint_that_is_registered_is_evaluated(tmp_path: Path) -> None:
    """With its own moments of observations; the result's module is the newest."""
    clerk, played = Kept(tmp_path), []
    training = Training(**QUICK, normalise_obs=True, evaluation_episodes=2, checkpoint_interval=1)
    save, best = clerk.save, tmp_path / "best"

    def saved(folder: Path, step: int, metrics: Mapping[str, float]) -> None:
        if not best.exists():
            shutil.copytree(folder, best)
        save(folder, step, metrics)

    clerk.save, clerk.best = saved, lambda: best
    with LocalTraining("CartPole-v1", PPOConfig(), training, clerk=clerk) as running:
        while running.goes_on():
            running.iterate()
        load = running.collector.load

        def loaded(weights: Weights, version: int) -> None:
            played.append((dict(weights), running.collector.state_dict()))
            load(weights, version)

        running.collector.load = loaded
        result = running.result()
    ((weights, moments),) = played
    for arrays, name in ((weights, "weights.npz"), (moments, "normaliser.npz")):
        np.testing.assert_equal(arrays, load_weights(best / name))
    newest = module_weights(result.module)
    assert any((newest[name] != weights[name]).any() for name in newest)
    assert result.evaluation is not None


class Starts(CartPoleEnv):
    """Remembers how each episode began."""

    seen: ClassVar[list[bytes]] = []

    def reset(self, **options):
        obs, info = super().reset(**options)
        Starts.seen.append(obs.tobytes())
        return obs, info


def test_a_resumed_training_plays_no_episode_a_second_time(tmp_path: Path) -> None:
    clerk, starts = Kept(tmp_path), []
    for _ in range(2):
        Starts.seen.clear()
        stop = threading.Event()
        train_local(
            Starts, training=Training(num_steps=10_000, num_envs=4, unroll_length=32), clerk=clerk, stop=stop,
            on_update=lambda runs, steps, numbers, stop=stop: stop.set() if runs == 4 else None,
        )  # fmt: skip
        starts.append(Starts.seen[5:] if starts else list(Starts.seen))  # it resets before it has the checkpoint
    assert starts[0]
    assert len(starts[1]) >= 4
    assert not set(starts[0]) & set(starts[1])


class Summed(Kept):
    """Adds up by itself what was recorded since `interval` was last replaced."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.interval = Recorder()

    def push(self, part: Any) -> None:
        self.interval.merge(part)

    def means(self) -> dict[str, float]:
        names = ("loss", "entropy", "approx_kl", "update_seconds.p50")
        return {name: value for name, value in self.interval.summary().items() if name in names}


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize(("algorithm", "options"), [(PPOConfig(epochs=1), {}), (ImpalaConfig(), TABLE)])
def test_reported_numbers_are_those_of_the_newest_run(algorithm, options, blocking, tmp_path: Path) -> None:
    clerk, reported = Summed(tmp_path), []

    def look(runs: int, steps: int, numbers: Mapping[str, float]) -> None:
        assert {name: numbers[name] for name in clerk.means()} == clerk.means()
        reported.append(numbers.get("entropy"))
        clerk.interval = Recorder()

    training = Training(num_steps=800, num_envs=2, unroll_length=8, learning_rate=1e-2, blocking=blocking, **options)
    train_local("CartPole-v1", algorithm, training, clerk=clerk, on_update=look)
    assert len(reported) >= 50
    assert len(set(reported)) > 20


@pytest.mark.parametrize("algorithm", [PPOConfig(epochs=1), ImpalaConfig(), SACConfig()])
def test_rewards_too_large_to_learn_from_are_named(algorithm: Any) -> None:
    options = QUICK | (TABLE if algorithm.name == "sac" else {})
    with pytest.raises(Diverged, match=r"update 1: .*1e\+30, .*normalise_reward"):
        train_local(lambda: Shown(reward=1e30), algorithm, Training(**options))
    training = Training(**options, normalise_reward=True)
    assert train_local(lambda: Shown(reward=1e30), algorithm, training).updates > 0


@pytest.mark.parametrize("reward", [np.inf, np.nan, 1e39, None])
@pytest.mark.parametrize(("algorithm", "options"), [(PPOConfig(epochs=1), {"blocking": False}), (SACConfig(), TABLE)])
def test_a_training_without_a_finite_reward_ends_and_names_them(algorithm, options, reward) -> None:
    quick = QUICK | options
    with pytest.raises(Diverged, match=r"all [\d,]+ transitions .*; reward: .*NaN") as diverged:
        train_local(lambda: Shown(reward=reward), algorithm, Training(**quick, evaluation_episodes=4))
    assert diverged.value.details == {"fields": ["reward"]}


@pytest.mark.parametrize("flawed", [1, 6])
def test_a_training_that_drops_most_of_its_steps_ends_and_says_how_many(flawed, monkeypatch) -> None:
    class Part(Shown):
        made = 0

        def __init__(self) -> None:
            super().__init__(reward=np.inf if Part.made < flawed else 1.0)
            Part.made += 1

    clock = Clock()
    monkeypatch.setattr("brayx.clock.now", clock)

    def train() -> LocalTraining:
        training = Training(**QUICK | {"num_envs": 8, "num_steps": 2_000})
        return train_local(
            Part, PPOConfig(epochs=1), training, on_update=lambda *_: setattr(clock, "now", clock.now + 5)
        )

    if flawed == 1:
        assert train().reason == "num_steps"
        return
    with pytest.raises(Diverged, match=r"^75% of the newest steps were dropped; reward: holds NaN or infinity in env"):
        train()
