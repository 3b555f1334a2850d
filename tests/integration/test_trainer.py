"""The learner against real actors, a real trial and a real `TorchTrainer`: to the end, killed, stopped, two ranks."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import math
import os
import signal
import textwrap
import threading
import uuid

import httpx
import numpy as np
import pytest
import ray
import torch
from ray.experimental.internal_kv import _internal_kv_list

from brayx.algorithms.ppo import PPOConfig
from brayx.cluster.cluster import Cluster
from brayx.cluster.hub import HubClient, create_hub
from brayx.cluster.job import train
from brayx.cluster.learner import Learner, LearnerSpec, TrialNumbers
from brayx.cluster.remote_buffer import RemoteBuffer
from brayx.cluster.shards import Shards
from brayx.cluster.weight_store import create_weight_store
from brayx.engines.base import load_weights, save_weights
from brayx.engines.torch import module_weights
from brayx.errors import BadWeights, ConfigError, ModelNotFound, StartupError
from brayx.jobs.config import JobConfig
from brayx.jobs.shipped import TEMPLATES
from brayx.jobs.stored_models import INITIAL_TAG
from brayx.model.build import build_model
from brayx.ports import free_port
from brayx.replay.config import BufferConfig
from brayx.tracking import Trial, register
from brayx.trainer.config import TrainerConfig
from brayx.types import Fragment
from tests.end_to_end.console_jobs import Console, new_keys
from tests.processes import ours
from tests.waiting import until

MODEL = """
    from __future__ import annotations
    import torch
    from brayx.nets.mlp import ActorCritic

    def build_model(name, config):
        return ActorCritic(2, 2, hidden=(8,)), (torch.zeros(1, 2),)
"""
STEPS = 32


def fragment():
    rng = np.random.default_rng()
    action = rng.integers(0, 2, STEPS)
    return Fragment(
        obs=np.ones((STEPS + 1, 2), np.float32),
        action=action,
        log_prob=np.full(STEPS, -math.log(2), np.float32),
        reward=action.astype(np.float32),
        terminated=True,
        truncated=False,
        policy_version=np.ones(STEPS, np.int64),
    )


class Job:
    """Everything around a learner, and a thread that plays."""

    def __init__(self, tracking_db, folder, **options):
        name = uuid.uuid4().hex[:8]
        module = f"bandit_{name}"
        (folder / f"{module}.py").write_text(textwrap.dedent(MODEL))
        self.trial = Trial.open("trainer", name, tracking_db)
        self.hub = create_hub(f"hub-{name}", self.trial)
        self.store = create_weight_store(f"store-{name}")
        buffer = BufferConfig(size=4, batch_size=2, unroll_length=16, max_in_flight=2)
        shards = Shards.start(f"buffer-{name}", buffer, hub=f"hub-{name}")
        self.buffer = shards[0].actor
        self.spec = LearnerSpec(
            config=TrainerConfig(
                model="model",
                buffers=["buffer"],
                algorithm=PPOConfig(gamma=0.0, epochs=2, minibatch_size=16),
                # Without options only the last checkpoint is saved, however long a busy machine takes.
                **{"checkpoint_interval_s": 1e6, **options},
            ),
            model_name="model",
            model_module=module,
            model_folder=str(folder),
            buffer=f"buffer-{name}",
            weight_store=f"store-{name}",
            hub=f"hub-{name}",
            trial=self.trial,
        )
        self.storage = str(folder / "ray")
        self.numbers = TrialNumbers(self.hub)
        self._playing = threading.Event()
        self._player = threading.Thread(target=self._play, daemon=True)
        self._player.start()

    def _play(self):
        remote = RemoteBuffer.attach(self.spec.buffer)
        while not self._playing.wait(0.02):
            remote.push(fragment())

    def learner(self):
        learner = Learner(self.spec, self.storage, self.numbers)
        learner.start()
        return learner

    def newest(self):
        newest = ray.get(self.store.newest.remote())
        return 0 if newest is None else newest[0]

    def close(self):
        self._playing.set()
        self._player.join(5)
        self.numbers.close()
        ray.get(self.hub.close.remote())
        for actor in (self.buffer, self.store, self.hub):
            ray.kill(actor)


@pytest.fixture
def job(ray_cluster, tracking_db, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")  # 2 s by default, and each change waits for it
    monkeypatch.setenv("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")  # a separate process for each training
    with contextlib.ExitStack() as stack:

        def make(**options):
            made = Job(tracking_db, tmp_path, **options)
            stack.callback(made.close)
            return made

        yield make


HOOKS = """
    from brayx import record

    def handle(batch):
        record("handled", 1, kind="sum")
        return batch

    def loss(outputs, obs):
        return 1e-3 * outputs["logits"].square().mean()

    def evaluate(model, step):
        return {"steps": step}
"""


def test_in_process_to_the_end_with_hooks_and_an_evaluation_buffer(job, tmp_path):
    name = f"hooks_{uuid.uuid4().hex[:8]}"
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(HOOKS))
    options = {"hooks": name, "eval_buffers": ["held"], "eval_interval": 5, "prefetch": 1}
    job = job(where="process", num_steps=20 * STEPS, **options)
    buffer_name = f"held-{name}"
    remote = RemoteBuffer(buffer_name, batch_size=2, unroll_length=16)
    job.spec = dataclasses.replace(job.spec, eval_buffers={"held": buffer_name})
    remote.push(fragment(), fragment())
    assert remote.flush(60)
    summary = job.learner().result(120)
    assert (summary.reason, summary.env_steps, summary.updates) == ("num_steps", 20 * STEPS, 20)
    assert job.newest() == summary.policy_version == 21
    (checkpoint,) = job.trial.checkpoints()
    assert checkpoint.step == 20 * STEPS
    assert job.numbers.flush(60), "the learner's last numbers are in the hub"
    until(lambda: ray.get(job.hub.snapshot.remote()).get("env_steps", 0) >= 20 * STEPS, "the buffer's are, too")
    snapshot = ray.get(job.hub.snapshot.remote())
    assert snapshot["policy_version"] == 21
    assert {"loss", "entropy", "update_seconds.p50", "lag_versions", "learner_wait_fraction"} <= snapshot.keys()
    assert {"eval/loss", "eval/steps"} <= snapshot.keys()
    assert 0 <= snapshot["learner_idle_fraction"] <= 1
    assert snapshot["handled"] >= 20
    assert remote.shards.ended(), "a reader that waits for more returns"
    remote.shards.kill()


def test_stopped_and_resumed_in_process(job):
    job = job(where="process", num_steps=10**9)
    learner = job.learner()
    until(lambda: job.newest() > 5, timeout_s=120)
    learner.stop()
    first = learner.result(120)
    assert first.reason == "stream_ended"
    assert [checkpoint.step for checkpoint in job.trial.checkpoints()] == [first.env_steps]
    again = job.learner()  # the buffer has ended: it saves at once
    second = again.result(120)
    assert (second.resumed, second.env_steps) == (True, first.env_steps)
    assert second.policy_version > first.policy_version


def test_the_target_return_ends_it_and_marks_the_checkpoint(job):
    job = job(where="process", num_steps=10**9, target_return=10.0, target_games=3)
    games = HubClient(job.hub)
    for _ in range(5):
        games.add("episode_return", 12.0)
    games.close()
    summary = job.learner().result(120)
    assert (summary.reason, summary.return_mean) == ("target_return", 12.0)
    assert job.trial.best_checkpoint("episode_return").metrics["episode_return"] == 12.0


def test_a_module_that_is_not_a_model_is_named(job, tmp_path):
    job = job(where="process")
    (tmp_path / f"{job.spec.model_module}.py").write_text("def build_model(name, config):\n    return 1\n")
    with pytest.raises(ConfigError, match="build_model must return"):
        job.learner().result(120)


@pytest.mark.cluster
def test_ray_train_ranks_learn_as_one_and_resume_from_their_checkpoint_when_one_is_killed(job, monkeypatch):
    """Its one failure is more than ``max_failures``, and far from any other."""
    monkeypatch.setattr("brayx.cluster.learner.FAILURE_WINDOW_S", 0.1)
    job = job(where="train", num_workers=2, num_steps=10**9, checkpoint_interval_s=0.5, max_failures=0)
    learner = job.learner()
    until(lambda: newest_step(job.trial) > 0 or not learner.running, timeout_s=120)
    before, version = newest_step(job.trial), job.newest()
    victim, _ = _train_workers()
    os.kill(victim, signal.SIGKILL)
    until(lambda: job.newest() > version + 20 or not learner.running, timeout_s=120)
    until(lambda: job.numbers.newest().get("ranks_failed"), "the failure was recorded")
    assert ray.get(job.hub.notes.remote())["ranks_failed"].startswith("rank ")
    learner.stop()
    summary = learner.result(120)
    assert summary.resumed
    assert summary.reason == "stream_ended"
    assert summary.env_steps > before
    assert summary.env_steps == 2 * STEPS * summary.updates, "each update learns from a batch of either rank"
    assert summary.policy_version > version + 20
    assert job.trial.checkpoints()[-1].step == summary.env_steps
    assert len(job.trial.checkpoints()) <= 3


@pytest.mark.cluster
def test_ray_train_tries_a_config_error_once_and_reports_it_in_one_line(job, tmp_path):
    job = job(where="train", num_workers=2)
    (tmp_path / f"{job.spec.model_module}.py").write_text(
        textwrap.dedent(f"""
            from brayx.errors import ConfigError

            def build_model(name, config):
                with open({str(tmp_path / "tries")!r}, "a") as file:
                    file.write("x")
                raise ConfigError("hidden is 0, expected 1 or more")
        """)
    )
    with pytest.raises(ConfigError) as caught:
        assert job.learner().result(300) is not None, "it is still being tried"
    assert caught.value.message == "the learner failed: hidden is 0, expected 1 or more"
    assert 1 <= len((tmp_path / "tries").read_text()) <= 2


@pytest.mark.cluster
def test_ranks_that_cannot_start_are_not_tried_for_ever(job, monkeypatch):
    monkeypatch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "3")
    job = job(where="train", cpus_per_worker=1000, max_failures=1)
    learner = job.learner()
    assert "has published no weights yet: ranks: 1, each needs 1000 CPU; Ray has" in learner.state()
    with pytest.raises(StartupError, match="the learner failed: ") as caught:
        assert learner.result(120) is not None, "it is still being tried"
    assert "startup timed out" in caught.value.message
    assert "\n" not in caught.value.message
    assert learner.state() == "has ended"


@pytest.mark.cluster
def test_a_job_that_starts_from_registered_weights_and_is_stopped_in_its_console_leaves_nothing_in_ray(
    ray_cluster, tracking_db, tmp_path
):
    """A wrong name or wrong weights end it before anything has started."""
    registered, port, headers = registered_weights(tracking_db, tmp_path), free_port(), new_keys(tmp_path / "keys.txt")
    before = remembered()
    few = ["rollout.num_workers=1", "buffer.batch_size=8", "trainer.target_return=null", "trainer.num_steps=1000000000"]
    few += [f"console_port={port}", f"console_keys_file={tmp_path / 'keys.txt'}"]
    few += ["trainer.learning_rate=1e-12", "trainer.checkpoint_interval=1"]

    def job(reference, *more):
        return JobConfig.load(TEMPLATES / "ppo_env.yaml", [*few, f"trainer.initial_weights={reference}", *more])

    for reference, more, error, said in (
        ("models:/nothing/1", [], ModelNotFound, "'nothing'"),
        ("models:/clone/1", ["network.hidden=[8]"], BadWeights, "models:/clone/1 does not fit this job's model"),
    ):
        with pytest.raises(error, match=rf"^trainer\.initial_weights: .*{said}"):
            train(job(reference, *more), tracking=tracking_db, cluster=Cluster(ingress=None))

    over = threading.Event()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        visit = pool.submit(stop_in_console, f"http://127.0.0.1:{port}", headers, tracking_db, over)
        try:
            done = train(job("models:/clone@champion"), tracking=tracking_db, cluster=Cluster(ingress=None))
        finally:
            over.set()
        assert visit.result() == done.trial.run_id
    assert not done.finished
    assert done.trial.tags()[INITIAL_TAG] == "models:/clone/1"
    learned = load_weights(done.trial.latest_checkpoint() / "weights.npz")
    for name, array in registered.items():
        np.testing.assert_allclose(learned[name], array, atol=1e-6, err_msg=name)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}")
    until(lambda: not ours("brayx.console.serve"), "the console's process has ended")
    assert remembered() == before


def registered_weights(uri, folder):
    """Registers weights of the job's model as version 1 of ``clone``, and returns them."""
    config = JobConfig.load(TEMPLATES / "ppo_env.yaml")
    torch.manual_seed(7)
    module, _ = build_model(config.folder, config.models["model"].module, "model", config.as_dict())
    (folder / "clone").mkdir()
    save_weights(folder / "clone" / "weights.npz", module_weights(module))
    trial = Trial.open("clones", "t", uri)
    register(trial, trial.save_checkpoint(folder / "clone", 1), "clone")
    return module_weights(module)


def stop_in_console(url, headers, uri, over):
    """Stops the training in its console once it has a checkpoint; returns the trial's id.

    It runs in a thread, because Ctrl-C reaches the main one, which trains until it comes, unless ``over`` is set.
    """
    reader, console = (Console(url, headers=headers[scope]) for scope in ("read", "control"))

    def opened():
        assert not over.is_set()
        with contextlib.suppress(httpx.TransportError):
            return reader.get("/api/job")["numbers"].get("env_steps", 0) > 0

    try:
        until(opened, "the training's console shows that it learns", timeout_s=120)
        job = reader.get("/api/job")
        assert (job["mode"], job["project"], job["can_stop"]) == ("train", "ppo_env", True)
        assert reader.refusal("GET", "/api/sessions") == (400, "bad_config"), "it has no actor"
        (model,) = reader.get("/api/models")
        assert (model["name"], [version["version"] for version in model["versions"]]) == ("clone", [1])
        (run_id,) = [trial["run_id"] for trial in reader.get("/api/trials") if trial["can_stop"]]
        until(Trial.attach(uri, run_id).checkpoints, "a checkpoint", timeout_s=60)
        stop = f"/api/trials/{run_id}/stop"
        assert reader.refusal("POST", stop) == (403, "forbidden")
        console.post(stop)
    except BaseException:
        if not over.is_set():
            os.kill(os.getpid(), signal.SIGINT)
        raise
    return run_id


def remembered():
    """Keys of what weight stores would find after a restart."""
    return set(_internal_kv_list("", namespace="brayx-weights"))


def newest_step(trial):
    """Env steps of the newest checkpoint; -1: there is none."""
    return max((checkpoint.step for checkpoint in trial.checkpoints()), default=-1)


def _train_workers():
    return [process.pid for process in ours("RayTrainWorker")]
