"""A full disk, a killed driver: earlier checkpoints stay complete, and the trial continues from them."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from mlflow.tracking import MlflowClient

from brayx.algorithms.ppo import PPOConfig
from brayx.cluster.learner import CheckpointKeeper
from brayx.engines.base import load_weights
from brayx.errors import TrackingError
from brayx.metrics import Recorder
from brayx.nets.mlp import ActorCritic
from brayx.tracking import Trial
from brayx.tracking.hub import Hub
from brayx.trainer import checkpoint
from brayx.trainer.config import TrainerConfig
from brayx.trainer.loop import LearnerLoop
from tests.unit.trainer.parts import BATCH_STEPS, Numbers, Weights, batches
from tests.waiting import until

ROOT = Path(__file__).parents[3]
MIB = 2**20
HIDDEN = (1000, 1000)


@contextlib.contextmanager
def room_for_files_of(mib):
    """Lets the kernel refuse files beyond this size, with the error of a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (mib * MIB, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def module(hidden):
    torch.manual_seed(0)
    return ActorCritic(3, 2, hidden=hidden)


def train(trial, stream, numbers, hidden=(8,), **options):
    weights = Weights()

    def publisher(newest):
        weights.version = newest
        return weights

    algorithm = PPOConfig(epochs=1, minibatch_size=1024)
    return LearnerLoop(
        TrainerConfig(
            model="model", buffers=["buffer"], algorithm=algorithm, **{"checkpoint_interval_s": 1e-6, **options}
        ),
        module(hidden),
        (np.zeros((1, 3), np.float32),),
        batches=stream,
        publisher=publisher,
        numbers=numbers,
        keeper=CheckpointKeeper(trial, 2),
    ).run()


def files_below(folder):
    return sorted(path for path in Path(folder).rglob("*") if path.is_file())


@pytest.mark.parametrize("mib", [4, 12])
def test_on_a_full_disk_the_previous_checkpoint_stays_and_training_continues(tracking_db, tmp_path, monkeypatch, mib):
    """Weights take 8 MiB and the optimiser's state 16, so the first or the second file does not fit."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    trial, numbers = Trial.open("project", "trial", tracking_db), Numbers()

    def stream():
        yield from itertools.islice(batches(9), 1)
        until(lambda: len(trial.checkpoints()) == 1)
        with room_for_files_of(mib):
            yield from batches(3, seed=1)
        before = trial.latest_checkpoint()
        assert [checkpoint.step for checkpoint in trial.checkpoints()] == [BATCH_STEPS], "none since"
        optimizer = torch.optim.Adam((fresh := module(HIDDEN)).parameters())
        assert checkpoint.restore(before, fresh, optimizer).counters.updates == 1
        yield from batches(1, seed=2)

    summary = train(trial, stream(), numbers, HIDDEN)
    assert summary.updates == 5
    assert len(numbers.samples["checkpoints_failed"]) == 3
    assert trial.checkpoints()[-1].step == 5 * BATCH_STEPS, "after there is room again"
    assert not list(tmp_path.glob("brayx-checkpoint-*"))


def test_an_incomplete_checkpoint_leaves_nothing_and_the_previous_one_stays(tracking_db, tmp_path):
    """The trial's disk is full, not the one where the checkpoint was written."""
    trial = Trial.open("project", "trial", tracking_db)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    np.savez(folder / "a.npz", x=np.arange(3))
    np.savez(folder / "weights.npz", x=np.ones(MIB, np.float32))
    trial.save_checkpoint(folder, 1)
    checkpoint = trial.latest_checkpoint()
    assert checkpoint.is_relative_to(tmp_path / "mlartifacts"), "no copy of it"
    files = files_below(tmp_path / "mlartifacts")
    with room_for_files_of(2), pytest.raises(TrackingError, match=r"checkpoint .* File too large"):
        trial.save_checkpoint(folder, 2)
    assert trial.latest_checkpoint() == checkpoint
    assert files_below(tmp_path / "mlartifacts") == files
    np.testing.assert_array_equal(load_weights(checkpoint / "a.npz")["x"], [0, 1, 2])
    # The same step again: the previous checkpoint stays, too.
    with room_for_files_of(2), pytest.raises(TrackingError):
        trial.save_checkpoint(folder, 1)
    assert trial.latest_checkpoint() == checkpoint
    assert len(load_weights(checkpoint / "weights.npz")["x"]) == MIB


def drive(uri, num_steps):
    """A training whose driver the test kills."""
    trial = Trial.open("project", "driven", uri)
    hub = Hub(trial, interval_s=0.1, x_axis="updates")

    class ToHub(Numbers):
        def add(self, name, value, **how):
            part = Recorder()
            part.add(name, value, **how)
            hub.push(part.drain())

    stream = itertools.chain.from_iterable(batches(20, seed=seed) for seed in itertools.count())
    summary = train(trial, stream, ToHub(), num_steps=num_steps, checkpoint_interval_s=0.05)
    hub.close()
    trial.finish()
    print(summary.env_steps, summary.resumed, trial.run_id)


@pytest.mark.cluster
@pytest.mark.slow
def test_after_its_driver_is_killed_a_trial_continues_in_the_same_run(tracking_db, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # a killed process leaves its unfinished files
    call = "from tests.unit.trainer.test_survive import drive; drive({!r}, {})"
    command = [sys.executable, "-c", call.format(tracking_db, 10**9)]
    driver = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        until(lambda: checkpoints_of(tracking_db) >= 3 or driver.poll() is not None, timeout_s=120)
        assert driver.poll() is None
    finally:
        os.kill(driver.pid, signal.SIGKILL)
        driver.wait()
    (run,) = runs_of(tracking_db)
    trial = Trial.attach(tracking_db, run.info.run_id)
    assert trial.status == "RUNNING", "a killed process cannot change its status"
    saved, before = trial.checkpoints()[-1].step, trial.history("learner/updates")
    target = saved + 3 * BATCH_STEPS
    command = [sys.executable, "-c", call.format(tracking_db, target)]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True).stdout
    assert output.split() == [str(target), "True", trial.run_id]
    assert len(runs_of(tracking_db)) == 1
    after = trial.history("learner/updates")
    assert after[: len(before)] == before
    assert after[-1][1] > before[-1][1]
    assert trial.status == "FINISHED"


def runs_of(uri):
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("project")
    return [] if experiment is None else list(client.search_runs([experiment.experiment_id]))


def checkpoints_of(uri):
    return sum(name.startswith("brayx.checkpoint.") for run in runs_of(uri) for name in run.data.tags)
