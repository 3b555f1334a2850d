"""A rollout in a thread of this process: the data in the buffer and its versions, and the losses by failures."""

from __future__ import annotations

import sys
import textwrap
import uuid

import numpy as np
import pytest

from brayx.engines.torch import module_weights
from brayx.errors import ConfigError, DeadlineExceeded, EnvironmentFailed
from brayx.local.buffer import LocalBuffer
from brayx.local.rollouts import LocalMoments, LocalRollout
from brayx.metrics import Recorder
from brayx.model.config import ModelConfig
from brayx.nets.mlp import ActorCritic
from brayx.replay.config import BufferConfig
from brayx.rollout.component import RolloutComponent
from brayx.rollout.moments import Moments, to_arrays
from brayx.rollout.spec import RolloutSpec, check_rollout
from brayx.rollout.worker import Newest
from tests.waiting import until

FILES = """
    import threading
    import gymnasium
    import numpy as np
    import torch
    from brayx.nets.mlp import ActorCritic

    def build_model(name, config):
        return ActorCritic(4, 2, hidden=(8,)), (torch.zeros(1, 4),)

    seeds = []
    hold, trips = threading.Event(), []
    hold.set()

    class Odd(gymnasium.Wrapper):
        def reset(self, *, seed=None, options=None):
            if seed is not None:
                seeds.append(seed)
            return super().reset(seed=seed, options=options)

        def step(self, action):
            hold.wait(60.0)
            obs, reward, *rest = super().step(action)
            kind = trips.pop() if trips else ""
            if kind == "raise":
                raise ValueError("it tripped")
            return obs, np.nan if kind == "nan" else reward, *rest

    def odd(name, config):
        return Odd(gymnasium.make("CartPole-v1"))
"""
T = 8
ENVS = 4


class Job:
    """A rollout, and a learner's part played by the test."""

    def __init__(self, folder, sampling=None, size=4, moments=None, **options):
        name = f"rollouts_{uuid.uuid4().hex[:8]}"
        (folder / f"{name}.py").write_text(textwrap.dedent(FILES))
        if "func" in options:
            options["module"] = name
        else:
            options.setdefault("env", "CartPole-v1")
        columns = ENVS * options.get("num_workers", 1)
        config = BufferConfig(size=size, batch_size=columns, unroll_length=T, **(sampling or {}))
        self.sink, self.newest, self.moments, self.version = Recorder(), Newest(), moments, 0
        self.buffer = LocalBuffer(config, None, self.sink)
        self.spec = RolloutSpec(
            name="games",
            config=RolloutComponent(model="model", buffer="buffer", num_envs=ENVS, **options),
            model_name="model",
            model=ModelConfig(module=name, engine="torch"),
            buffer_config=config,
            folder=str(folder),
            job={},
            update_columns=columns,
        )
        self.name = name

    @property
    def code(self):
        """The module of the user's function."""
        return sys.modules[self.name]

    def rollout(self):
        return LocalRollout(self.spec, newest=self.newest, buffer=self.buffer, numbers=self.sink, moments=self.moments)

    def publish(self):
        self.version += 1
        self.buffer.published(self.version)
        self.newest.put(self.version, module_weights(ActorCritic(4, 2, hidden=(8,))))
        return self.version

    def take(self):
        """The next batch, as a learner takes it."""
        batch = None

        def came():
            nonlocal batch
            batch = self.buffer.pop()
            return batch is not None

        until(came, "a batch")
        return batch


def test_a_blocking_rollout_collects_one_update_with_each_version(tmp_path):
    made = Job(tmp_path, mode="blocking")
    with made.rollout() as rollout:
        for version in (1, 2, 3):
            assert made.publish() == version
            batch = made.take()
            assert set(batch["policy_version"][batch["mask"] > 0]) == {version}
            assert batch["obs"].shape == (ENVS, T + 1, 4)
        until(lambda: rollout.collected.fragments == 3, "it has counted them")
        assert made.buffer.pop() is None, "nothing is collected a second time with the same weights"
        assert (rollout.collected.version, rollout.collected.overdue) == (3, 0)
    assert rollout.error is None
    assert made.sink.summary()["acting_version.model"] == 3


def test_several_workers_take_turns_in_the_thread_and_play_other_episodes(tmp_path):
    made = Job(tmp_path, mode="blocking", func="odd", num_workers=3)
    with made.rollout() as rollout:
        for version in (1, 2):
            made.publish()
            batch = made.take()
            assert set(batch["policy_version"][:, :-1].flat) == {version}
            assert len(batch["obs"]) == 3 * ENVS
        until(lambda: rollout.collected.fragments == 6, "it has counted them")
        assert made.buffer.pop() is None
    assert len(set(made.code.seeds)) == len(made.code.seeds) == 3 * ENVS
    assert made.sink.summary()["rollout_workers.games"] == 3


def test_a_blocking_rollout_masks_out_an_environment_whose_steps_are_not_finite(tmp_path):
    made = Job(tmp_path, mode="blocking", func="odd")
    with made.rollout():
        until(lambda: hasattr(sys.modules.get(made.name), "odd"), "the module of its environments is loaded")
        made.code.trips.append("nan")
        made.publish()
        batch = made.take()
        assert set(batch["policy_version"][batch["mask"] > 0]) == {1}
        assert (batch["mask"].sum(axis=1) == 0).sum() == 1
    summary = made.sink.summary()
    assert 0 < summary["replay_dropped.bad_fragment"] <= T
    assert made.sink.notes()["fragments_dropped.refused"].startswith("BadFragment: reward")


def test_a_rollout_without_a_learner_waits_for_room(tmp_path):
    made = Job(tmp_path, size=2)
    made.publish()
    with made.rollout() as rollout:
        until(lambda: rollout.collected.fragments == 2, "the buffer is full")
        made.take()
        until(lambda: rollout.collected.fragments == 3, "it went on")
    assert "replay_dropped.full" not in made.sink.summary(), "what has no room is not collected"


def test_a_wait_that_is_too_long_is_given_up_and_counted(tmp_path):
    made = Job(tmp_path, mode="blocking", wait_s=0.05)
    made.publish()
    with made.rollout():
        first, second = made.take(), made.take()
    assert set(first["policy_version"].flat) == set(second["policy_version"].flat) == {1}
    assert made.sink.summary()["rollout_waits_overdue"] >= 1


def test_environments_that_fail_are_made_anew_with_other_seeds_and_counted(tmp_path):
    made = Job(tmp_path, func="odd", max_failures=1, size=10**5)
    made.publish()
    with made.rollout() as rollout:
        until(lambda: rollout.running, "it collects")
        begun = rollout.collected.fragments
        made.code.trips.append("raise")
        until(lambda: rollout.failures == 1 and rollout.collected.fragments > begun + 1, "it goes on")
        assert rollout.error is None
        assert len(set(made.code.seeds)) == len(made.code.seeds) == 2 * ENVS
        made.code.trips.append("raise")
        until(lambda: rollout.error is not None, "it was given up")
    assert isinstance(rollout.error, EnvironmentFailed)
    said = f"rollout 'games' ({made.name}.odd): the environment raised ValueError in step: it tripped"
    assert rollout.error.message.startswith(said)
    assert rollout.messages[0].startswith(said)
    summary = made.sink.summary()
    assert summary["rollout_workers_lost.failed"] == 2
    assert summary["rollout_steps_lost.failed"] == 2 * ENVS * T


def test_a_fragment_that_hangs_is_an_error_and_is_not_waited_for(tmp_path):
    made = Job(tmp_path, func="odd", fragment_timeout_s=0.2, size=10**5)
    made.publish()
    with made.rollout() as rollout:
        until(lambda: rollout.running, "it collects")
        made.code.hold.clear()
        until(lambda: rollout.error is not None, "it hangs")
        assert isinstance(rollout.error, DeadlineExceeded)
        assert "rollout 'games'" in rollout.error.message
        rollout.stop(0.1)
        made.code.hold.set()
        until(lambda: not rollout._thread.is_alive(), "it ends, so that it is not counted again")
    assert made.sink.summary()["rollout_steps_lost.stopped"] == ENVS * T


def test_rollouts_normalise_by_the_moments_of_all_and_by_those_of_a_checkpoint(tmp_path):
    seen = Moments((4,))
    seen.add(np.random.default_rng(0).normal(100.0, 1.0, (100_000, 4)))
    moments = LocalMoments()
    first, second = (Job(tmp_path, moments=moments, normalise_obs=True, mode="blocking") for _ in range(2))
    with first.rollout(), second.rollout():
        moments.load_state_dict(to_arrays({"obs": seen}))  # as a learner does before it publishes
        for made in (first, second):
            made.publish()
            obs = made.take()["obs"]
            assert (obs == -10.0).all(), "CartPole's observations are far below 100"
        until(lambda: moments.state_dict()["obs:count"] == 100_000 + 2 * ENVS * T, "the moments of both rollouts")
    assert set(moments.scalings()) == {"obs"}


def test_what_waits_for_room_at_the_end_is_counted_as_dropped(tmp_path):
    made = Job(tmp_path, mode="blocking", size=1)
    made.publish()
    with made.rollout() as rollout:
        until(lambda: rollout.collected.fragments == 1, "a batch waits")
        made.publish()
        until(lambda: rollout.collected.fragments == 2, "another one has no room")
    summary = made.sink.summary()
    assert 0 < summary["replay_dropped.closed"] == rollout.collected.steps - summary["env_steps"]


def test_a_stream_that_ends_with_the_training_is_no_warning(tmp_path, caplog):
    made = Job(tmp_path, mode="non_blocking", size=64)
    made.publish()
    with made.rollout() as rollout:
        until(lambda: rollout.collected.fragments >= 1, "it collects")
        made.buffer.end()
        ended = rollout.collected.fragments
        until(lambda: rollout.collected.fragments >= ended + 2, "it has met the end")
    assert rollout.error is None
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == []


def test_what_cannot_work_is_said_before_anything_starts(tmp_path):
    with pytest.raises(ConfigError, match=r"rollout 'games' \(NoGame-v7\): .*NoGame"):
        check_rollout(Job(tmp_path, env="NoGame-v7").spec)
    with pytest.raises(ConfigError, match=r"'games' \(Pendulum-v1\): obs: .*\[3\]"):
        check_rollout(Job(tmp_path, env="Pendulum-v1").spec)
    check_rollout(Job(tmp_path).spec)
