"""Rollout workers on a real Ray: their data and its versions; killed, scaled, refused and restarted workers."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import textwrap
import time
import uuid
from collections import Counter

import numpy as np
import psutil
import pytest
import ray

from brayx.cluster.named import result_or
from brayx.cluster.rollout import _STOP_S, Workers
from brayx.cluster.rollout_worker import RolloutWorker, WorkerSpec
from brayx.cluster.shards import Shards
from brayx.cluster.statistics import create_moments
from brayx.cluster.stream import read_buffer
from brayx.cluster.weight_store import create_weight_store
from brayx.cluster.weights import WeightPublisher
from brayx.engines.torch import module_weights
from brayx.errors import ConfigError, EnvironmentFailed
from brayx.model.config import ModelConfig
from brayx.nets.mlp import ActorCritic
from brayx.replay.config import BufferConfig
from brayx.rollout.component import RolloutComponent
from brayx.rollout.moments import Moments
from tests.waiting import until

FILES = """
    from __future__ import annotations
    import os
    import time
    import gymnasium
    import numpy as np
    import torch
    from brayx.nets.mlp import ActorCritic

    def build_model(name, config):
        return ActorCritic(4, 2, hidden=(8,)), (torch.zeros(1, 4),)

    class Breaking(gymnasium.Wrapper):
        steps = 0

        def step(self, action):
            Breaking.steps += 1
            if Breaking.steps > 100:
                raise ValueError("the pole is broken\\nin two")
            return super().step(action)

    def breaking(name, config):
        return Breaking(gymnasium.make("CartPole-v1"))

    class Slipping(gymnasium.Wrapper):
        steps = 0

        def step(self, action):
            Slipping.steps += 1
            obs, reward, *rest = super().step(action)
            return obs, np.nan if Slipping.steps == 3 else reward, *rest

    class Holding(gymnasium.Wrapper):
        def step(self, action):
            here = os.path.dirname(os.path.abspath(__file__))
            while os.path.exists(os.path.join(here, "hold")):
                open(os.path.join(here, "held"), "w").close()
                time.sleep(0.01)
            return super().step(action)

    class Staying(gymnasium.Wrapper):
        def close(self):
            while os.path.exists(os.path.join(os.path.dirname(os.path.abspath(__file__)), "stay")):
                time.sleep(0.01)
            super().close()

    def staying(name, config):
        return Staying(gymnasium.make("CartPole-v1"))

    def holding(name, config):
        return Holding(gymnasium.make("CartPole-v1"))

    class Tripping(gymnasium.Wrapper):
        def step(self, action):
            trip = os.path.join(os.path.dirname(os.path.abspath(__file__)), "trip")
            if os.path.exists(trip):
                os.remove(trip)
                raise ValueError("it tripped")
            return super().step(action)

    def tripping(name, config):
        return Tripping(gymnasium.make("CartPole-v1"))

    def slipping(name, config):
        return Slipping(gymnasium.make("CartPole-v1"))
"""
T = 8
ENVS = 4
WAIT_S = 120.0
"""A worker's process imports torch and exports its model, which takes long on a busy machine."""


class Job:
    """The actors around some workers; the test plays the learner."""

    def __init__(self, folder, **options):
        name = uuid.uuid4().hex[:8]
        module = f"rollout_{name}"
        (folder / f"{module}.py").write_text(textwrap.dedent(FILES))
        self.buffer_config = BufferConfig(
            size=options.pop("size", 4), batch_size=8, unroll_length=T, max_in_flight=1, **options.pop("sampling", {})
        )
        self.buffer = Shards.start(f"buffer-{name}", self.buffer_config)[0].actor
        self.store = create_weight_store(f"store-{name}")
        normalises = options.get("normalise_obs") or options.get("normalise_reward")
        self.moments = create_moments(f"moments-{name}") if normalises else None
        self.publisher = WeightPublisher(self.store)
        self.events = Counter()
        if "func" in options:
            options["module"] = module
        else:
            options.setdefault("env", "CartPole-v1")
        self.spec = WorkerSpec(
            name="games",
            config=RolloutComponent(model="model", buffer="buffer", num_envs=ENVS, **options),
            model_name="model",
            model=ModelConfig(module=module, engine="torch"),  # each worker would take seconds for its export to ONNX
            buffer_config=self.buffer_config,
            folder=str(folder),
            job={},
            buffer=f"buffer-{name}",
            weight_store=f"store-{name}",
            moments=f"moments-{name}" if normalises else "",
            update_columns=8,
        )
        self._reader = ray.get(self.buffer.attach.remote())

    def publish(self):
        return self.publisher.publish(module_weights(ActorCritic(4, 2, hidden=(8,))), 0)

    def workers(self, count=1):
        return Workers(self.spec, self, count, lease_s=0.2)

    def add(self, name, value, *, label):
        """As `Recorder.add`."""
        if name != "rollout_workers":
            self.events[f"{name}.{label}"] += value

    def stats(self):
        return ray.get(self.buffer.stats.remote())

    def take(self):
        """The next batch, as a learner takes it."""
        batch = None

        def came():
            nonlocal batch
            batch = ray.get(self.buffer.next_batch.remote(self._reader, 1.0)).batch
            return batch is not None

        until(came, "a batch", WAIT_S)
        ray.get(self.buffer.ack.remote(1))
        return batch

    def close(self):
        for actor in filter(None, (self.buffer, self.store, self.moments)):
            ray.kill(actor)


@pytest.fixture
def job(ray_cluster, tmp_path):
    with contextlib.ExitStack() as stack:

        def make(**options):
            made = Job(tmp_path, **options)
            stack.callback(made.close)
            return made

        yield make


@pytest.mark.cluster
def test_a_worker_can_join_while_a_shard_and_the_moments_restart(job):
    made = job(normalise_obs=True)
    made.publish()
    for actor in (made.buffer, made.moments):
        os.kill(ray.get(actor.__ray_call__.remote(lambda self: os.getpid()), timeout=60), signal.SIGKILL)
    worker = RolloutWorker(made.spec, 0, 0)
    try:
        until(lambda: worker.collect(0.5, 1).fragments, "a fragment", WAIT_S)
    finally:
        worker.leave()
    assert made.stats()["pushed"] >= ENVS * T
    until(lambda: ray.get(made.moments.get.remote()).get("obs", Moments()).count, "what it has seen")


def test_blocking_workers_collect_one_update_with_each_version(job):
    made = job(mode="blocking", num_workers=2)
    with made.workers(2) as workers:
        for version in (1, 2, 3):
            assert made.publish() == version
            batch = made.take()
            assert set(batch["policy_version"][batch["mask"] > 0]) == {version}
            assert batch["obs"].shape == (8, T + 1, 4)
            until(
                lambda count=2 * version: workers.collected.fragments == count, "both workers have reported it", WAIT_S
            )
        stats = made.stats()
    assert (stats["batches"], stats["waiting"]) == (0, 0), "no worker collects twice with the same weights"
    assert workers.collected.overdue == 0
    assert not workers.failures


def test_a_blocking_worker_masks_out_an_environment_whose_steps_are_not_finite(job):
    made, masked = job(mode="blocking", func="slipping", num_workers=2), []
    with made.workers(2) as workers:
        for version in (1, 2):
            assert made.publish() == version
            batch = made.take()
            assert set(batch["policy_version"][batch["mask"] > 0]) == {version}
            masked.append(int((batch["mask"].sum(axis=1) == 0).sum()))
        until(lambda: workers.collected.fragments == 4, "both workers have reported it", WAIT_S)
        stats = made.stats()
    assert masked == [2, 0], "one of each worker's environments slips once"
    assert (stats["batches"], stats["waiting"]) == (0, 0), "no further batch"
    assert workers.collected.overdue == 0, "no worker waited for a batch that would never be full"


def test_batches_have_the_newest_version_again_after_an_abandoned_wait(job):
    """Otherwise the data collected meanwhile would stay ahead of all new data."""
    made = job(mode="blocking", num_workers=2, wait_s=1.0, sampling={"max_policy_lag": 0})
    stream = read_buffer(made.spec.buffer, timeout_s=WAIT_S)
    stream.holds = True
    seen = []
    with made.workers(2) as workers:
        for version in range(1, 6):
            assert made.publish() == version
            stream.published(version)
            batch = next(stream)
            seen.append(sorted(set(batch["policy_version"][batch["mask"] > 0].tolist())))
            stream.took()
            if version == 1:  # the learner is busy for a long time
                until(lambda: made.stats()["batches"] > 0, "another batch with the same version waits", WAIT_S)
        until(lambda: workers.collected.overdue > 0, "the workers have reported it", WAIT_S)
    stream.close()
    assert seen == [[1], [2], [3], [4], [5]]
    assert made.stats()["dropped.policy_lag"] > 7 * T, "a batch, except the rows that are not learned from"


def test_a_worker_without_a_learner_waits_for_room(job):
    made = job(size=2)
    made.publish()
    with made.workers() as workers:
        until(lambda: made.stats()["batches"] == 2, "the buffer is full", WAIT_S)
        before = workers.collected.fragments
        made.take()
        until(lambda: workers.collected.fragments > before and made.stats()["batches"] == 2, "it went on", WAIT_S)
        assert "dropped.full" not in made.stats(), "a worker does not collect without room"


@pytest.mark.cluster
def test_nothing_is_lost_when_the_rate_allows_less_than_one_worker_brings(job):
    """A sample makes room for one column, workers bring four each."""
    made = job(size=64, sampling={"sampler": "uniform", "samples_per_insert": 8.0, "min_columns": 8})
    made.publish()
    with made.workers(2) as workers:
        until(lambda: made.take() is not None and workers.running == 2, "both collect", WAIT_S)
        for _ in range(20):
            made.take()
        stats = made.stats()
    assert not [name for name in stats if name.startswith("dropped")], stats
    assert stats["samples"] > 8 * (stats["inserts"] - 8) - 40, "waiting data keeps the rate"


@pytest.mark.cluster
def test_a_killed_worker_is_replaced_and_loses_only_its_fragment_and_others_join_and_leave(job):
    made = job(size=64)
    made.publish()
    with made.workers(2) as workers:
        until(lambda: made.take() is not None and workers.running == 2, "both collect", WAIT_S)
        victim, other = (pids(workers)[index] for index in (0, 1))
        os.kill(victim, signal.SIGKILL)
        until(lambda: workers.lost["died"] == 1, "it was missed", WAIT_S)
        until(lambda: made.take() is not None and workers.running == 2, "another one collects", WAIT_S)
        before = pids(workers)
        assert before[1] == other, "the other one went on"
        assert before[0] not in (victim, other)
        events = {"rollout_workers_lost.died": 1, "rollout_steps_lost.died": 2 * ENVS * T}
        assert made.events == events
        assert workers.error is None
        assert "worker 0 of rollout 'games' (CartPole-v1) died" in workers.messages[0]

        failures = workers.failures
        workers.scale(3)
        until(lambda: made.take() is not None and workers.running == 3, "three collect", WAIT_S)
        workers.scale(1)
        until(lambda: len(pids(workers)) == 1, "two have left", WAIT_S)
        assert pids(workers)[0] == before[0]
        collected = workers.collected
        until(lambda: made.take() is not None and workers.collected.steps > collected.steps, "the last goes on", WAIT_S)
        assert workers.failures == failures
        assert made.events == events, "joining and leaving lose nothing"


def pids(workers):
    """Process id of each worker that answers, by index."""
    handles = {slot.index: slot.handle for slot in list(workers._slots.values()) if slot.handle is not None}
    calls = {
        index: handle.__ray_call__.options(concurrency_group="control").remote(lambda worker: os.getpid())
        for index, handle in handles.items()
    }
    return {index: pid for index, answer in calls.items() if (pid := result_or(None, answer, 5.0)) is not None}


def at_a_fragment(made, workers, folder):
    """Holds the only worker in the middle of a fragment, after its first; returns its process id."""
    until(lambda: workers.running == 1, "it collects", WAIT_S)
    (pid,) = pids(workers).values()
    (folder / "hold").touch()
    until((folder / "held").exists, "it is in a fragment", WAIT_S)
    return pid


@pytest.mark.cluster
def test_a_leaving_worker_may_finish_its_fragment(job, tmp_path):
    made = job(func="holding", size=10**5)
    made.publish()
    with made.workers() as workers:
        pid = at_a_fragment(made, workers, tmp_path)
        workers.scale(0)
        until(lambda: not pids(workers), "it is to leave", WAIT_S)
        before = workers.collected.fragments
        time.sleep(_STOP_S + 1)  # longer than an ending job waits for it
        assert psutil.pid_exists(pid)
        (tmp_path / "hold").unlink()
        until(lambda: not psutil.pid_exists(pid), "it has left", WAIT_S)
        until(lambda: workers.collected.fragments > before, "its last fragment is reported", WAIT_S)
        assert made.stats()["pushed"] == workers.collected.steps, "its last fragment is in the buffer"
    assert not made.events
    assert not workers.messages


@pytest.mark.cluster
def test_a_worker_that_takes_too_long_to_leave_is_ended_and_its_lost_steps_are_counted(job, tmp_path):
    made = job(func="holding", size=10**5, fragment_timeout_s=5.0)
    made.publish()
    with made.workers() as workers:
        pid = at_a_fragment(made, workers, tmp_path)
        workers.scale(0)
        until(lambda: not psutil.pid_exists(pid), "it was ended", WAIT_S)
        until(lambda: made.events, "it was counted", WAIT_S)
    assert made.events == {"rollout_steps_lost.scaled": 2 * ENVS * T}
    assert "worker 0 of rollout 'games'" in workers.messages[0]
    assert "was surplus, and lost its current fragment: it took longer than" in workers.messages[0]
    assert not workers.failures


@pytest.mark.cluster
def test_pushes_of_a_worker_that_takes_too_long_to_leave_are_not_lost(job, tmp_path):
    made = job(func="staying", size=10**5, fragment_timeout_s=5.0)
    made.publish()
    (tmp_path / "stay").touch()
    with made.workers() as workers:
        until(lambda: workers.running == 1, "it collects", WAIT_S)
        (pid,) = pids(workers).values()
        workers.scale(0)
        until(lambda: not psutil.pid_exists(pid), "it was ended", WAIT_S)
        until(lambda: made.events, "it was counted", WAIT_S)
        assert made.stats()["pushed"] == workers.collected.steps
    assert made.events == {"rollout_steps_lost.scaled": ENVS * T}, "one push at most: it was in no fragment any more"


@pytest.mark.cluster
def test_a_fragment_that_is_lost_when_its_job_ends_is_counted_once(job, tmp_path):
    made = job(func="holding", size=10**5)
    made.publish()
    with made.workers() as workers:
        pid = at_a_fragment(made, workers, tmp_path)
    until(lambda: not psutil.pid_exists(pid), "it was ended", WAIT_S)
    assert made.events == {"rollout_steps_lost.stopped": 2 * ENVS * T}
    assert not workers.failures
    done = workers.collected
    workers.stop()
    assert (workers.collected, len(made.events)) == (done, 1), "it is not counted again"


@pytest.mark.cluster
def test_an_environment_that_raises_ends_the_rollout_by_name_after_the_failures_allowed(job):
    made = job(func="breaking", max_failures=1, size=64)
    made.publish()
    with made.workers() as workers:
        until(lambda: workers.error is not None, "it was given up", WAIT_S)
    assert isinstance(workers.error, EnvironmentFailed)
    name = f"{made.spec.config.module}.breaking"
    said = f"worker 0 of rollout 'games' ({name}): the environment raised ValueError in step: the pole is broken"
    assert re.fullmatch(rf"{re.escape(said)} \(\S+:\d+\)", workers.error.message)
    assert workers.lost == {"failed": 2}


@pytest.mark.cluster
def test_errors_of_an_environment_that_are_far_apart_do_not_end_the_rollout(job, tmp_path, monkeypatch):
    monkeypatch.setattr("brayx.rollout.worker.FAILURE_WINDOW_S", 1e-6)
    made = job(func="tripping", max_failures=1, size=10**5)
    made.publish()
    with made.workers() as workers:
        for times in (1, 2):
            until(lambda: workers.running == 1, "it collects", WAIT_S)
            (tmp_path / "trip").touch()
            until(lambda times=times: workers.lost["failed"] == times, "it tripped", WAIT_S)
        assert workers.error is None


def test_scaling_redistributes_an_update_among_blocking_workers(job):
    made = job(mode="blocking", num_workers=2)
    with made.workers(2) as workers:
        with pytest.raises(ConfigError, match=r"3 workers x 4 environments .* 12 columns"):
            workers.scale(3)
        workers.scale(1)
        for version in (1, 2):
            assert made.publish() == version
            assert set(made.take()["policy_version"][:, :-1].flat) == {version}
        until(lambda: workers.collected.fragments == 4, "one did the work of two", WAIT_S)
        assert made.stats()["batches"] == 0


@pytest.mark.cluster
def test_a_worker_uses_moments_that_its_learner_restores_later(job):
    made = job(normalise_obs=True)
    seen = Moments((4,))
    seen.add(np.random.default_rng(0).normal(100.0, 1.0, (100_000, 4)))
    with made.workers() as workers:
        until(lambda: workers.collected.waited_s > 0, "it waits for the first weights", WAIT_S)
        ray.get(made.moments.restore.remote({"obs": seen}))
        made.publish()
        obs = made.take()["obs"]
    assert (obs == -10.0).all(), "CartPole's observations are far below 100"


@pytest.mark.cluster
def test_workers_share_their_moments_and_a_restarted_store_gets_them_back(job):
    made = job(normalise_obs=True, normalise_reward=True)
    made.publish()

    def seen():
        try:
            counted = ray.get(made.moments.get.remote())
        except ray.exceptions.RayError:  # it is being restarted
            return {}
        return {name: moments.count for name, moments in counted.items()}

    with made.workers(2) as workers:
        until(lambda: made.take() is not None and workers.running == 2, "both collect", WAIT_S)
        until(lambda: made.take() is not None and seen().get("obs", 0) > 2000, "they are in there", WAIT_S)
        before = seen()
        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(made.moments, no_restart=False)
        until(lambda: made.take() is not None and seen().get("obs", 0) > before["obs"], "it is back", WAIT_S)
    batch = made.take()
    assert abs(batch["obs"][batch["mask"] > 0].mean()) < 1.0
    assert np.isfinite(batch["reward"]).all()
