"""The clerk: its metrics and checkpoints reach MLflow, resumed trials continue, and errors there are raised here."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import threading
import time
from pathlib import Path
from urllib.parse import unquote, urlparse

import mlflow
import numpy as np
import psutil
import pytest
from mlflow import MlflowClient

from brayx.errors import TrackingError
from brayx.metrics import Recorder
from brayx.tracking import Trial, clerk_process, tracking_uri
from brayx.tracking.clerk import Clerk, may_resume
from brayx.tracking.clerk_process import ClerkProcess, started_early
from brayx.tracking.options import Options
from brayx.tracking.trials import trials
from brayx.urls import sqlite_path
from tests.waiting import until


def part(**values):
    recorder = Recorder()
    for name, value in values.items():
        recorder.add(name, value)
    return recorder.drain()


@contextlib.contextmanager
def closing_process(clerk):
    """A clerk whose process ends with the context."""
    try:
        yield clerk
    finally:
        clerk.end()


def kill(clerk):
    """Kills a clerk's process, as the system does when memory is short."""
    process = psutil.Process(clerk._process.child.pid)
    process.kill()
    until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE, "it ends")


def checkpoint(tmp_path, number):
    folder = tmp_path / f"made-{number}"
    folder.mkdir()
    np.savez(folder / "weights.npz", number=number)
    return folder


@pytest.mark.slow  # starts MLflow in a separate process
def test_a_trial_that_ends_before_mlflow_starts_still_has_a_curve(tracking_db, monkeypatch):
    monkeypatch.setattr("brayx.tracking.clerk.SEND_EVERY_S", 0.0)
    clerk = Clerk("project", "short", tracking_db, Options({}, {}))
    try:
        for value in (1.0, 2.0, 3.0):
            clerk.push(part(env_steps=10, episode_return=value))
        assert clerk.early_curve() == [(10.0, 1.0), (20.0, 1.5), (30.0, 2.0)]
        trial = clerk.close("FINISHED")
        assert clerk.early_curve() == []
    finally:
        clerk.end()
    history = mlflow.MlflowClient(tracking_db).get_metric_history(trial.run_id, "return/mean")
    assert [(point.step, point.value) for point in history] == [(10, 1.0), (20, 2.0), (30, 3.0)]


@pytest.mark.usefixtures("shared_mlflow")
def test_a_trial_is_saved_interrupted_and_resumed(tmp_path, tracking_db, monkeypatch):
    uri = tracking_db
    assert not may_resume(tracking_uri(tmp_path / "none.db"), "project", "name")
    assert not may_resume(uri, "project", "name")
    clerk = Clerk("project", "name", uri, Options({}, {"lr": 0.5}))
    try:
        assert clerk.latest() is None
        clerk.push(part(env_steps=100, episode_return=3.0))
        for number in range(4):
            clerk.save(checkpoint(tmp_path, number), number, {"episode_return": -float(number)})
        exchange, late = clerk._process.exchange, [4]

        def exchange_late(verb, *arguments):
            """A learner that is too slow for the interrupt saves while its trial's last metrics are written."""
            if verb == "write" and late:
                clerk.save(checkpoint(tmp_path, 4), late.pop(), {"episode_return": -4.0})
            if verb == "finish":
                with pytest.raises(TrackingError, match="too late"):
                    clerk.save(checkpoint(tmp_path, 5), 5, {})
            return exchange(verb, *arguments)

        with monkeypatch.context() as patch:
            patch.setattr(clerk._process, "exchange", exchange_late)
            clerk.settle()
            assert not late
            trial = clerk.close("KILLED")
    finally:
        clerk.end()
    assert trial.metrics()["replay/env_steps"] == 100
    assert trial.status == "KILLED"
    assert [saved.step for saved in trial.checkpoints()] == [0, 3, 4]  # the best, and the newest two
    assert not list(tmp_path.glob("brayx-temporary-checkpoints-*"))

    assert may_resume(uri, "project", "name")
    assert not may_resume(uri, "project", "other")
    again = Clerk("project", "name", uri, Options({}, {"lr": 0.5}))
    try:
        assert int(np.load(again.latest() / "weights.npz")["number"]) == 4
        assert int(np.load(again.best() / "weights.npz")["number"]) == 0
        again.push(part(env_steps=50))
        assert again.close("FINISHED").run_id == trial.run_id
    finally:
        again.end()
    assert trial.metrics()["replay/env_steps"] == 150
    assert Trial.attach(uri, trial.run_id).status == "FINISHED"
    assert not may_resume(uri, "project", "name")


@pytest.mark.slow  # starts MLflow in a separate process
def test_nothing_waits_for_mlflow_to_start(tmp_path, tracking_db):
    clerk = Clerk("project", "name", tracking_db, Options({}, {}))
    try:
        os.kill(clerk._process.child.pid, signal.SIGSTOP)
        for number in range(12):
            clerk.save(checkpoint(tmp_path, number), number, {"episode_return": -abs(number - 4.0)})
            clerk.push(part(env_steps=10))
        assert not clerk.opened()
        waiting_s = time.time()
        assert len(list(clerk._pending.folder.iterdir())) == 3, "checkpoints that are neither new nor best go"
        clerk.save(checkpoint(tmp_path, 12), 11, {})  # an interrupt's, after the same update
        os.kill(clerk._process.child.pid, signal.SIGCONT)
        clerk.settle()
        assert clerk.opened()
        trial = clerk.trial()
        assert [saved.step for saved in trial.checkpoints()] == [4, 11]
        assert int(np.load(trial.latest_checkpoint() / "weights.npz")["number"]) == 12
        assert trial.metrics()["replay/env_steps"] == 120
        assert trials(tracking_db)[0].began_s < waiting_s, "it began before MLflow had started"
        assert clerk.totals() == {}, "of a trial that is not resumed"
        clerk.close("FINISHED")
        assert "learner/checkpoints_failed" not in trial.metrics()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(clerk._process.child.pid, signal.SIGCONT)
        clerk.end()


@pytest.mark.usefixtures("shared_mlflow")
def test_the_clerks_process_does_the_work_that_needs_mlflow(tmp_path, tracking_db):
    clerk = Clerk("project", "name", tracking_db, Options({}, {}))
    try:
        clerk.call(Trial.set_tag, "called", "yes")
        with pytest.raises(TrackingError, match=r"cannot call: .*Trial"):
            clerk.call(len)
        assert clerk.in_background(lambda trial: None).exception() is not None, "it does not pickle, and says so"
        clerk.in_background(Trial.set_tag, "beside", "yes").result(60)
        goes_on = threading.Event()
        clerk._process.submit(lambda: goes_on.wait(60))
        with pytest.raises(TrackingError, match=r"busy for 0\.01 s"):
            clerk.call(Trial.set_tag, "called", "late", start_s=0.01)
        goes_on.set()
        tags = clerk.close("FINISHED").tags()
        assert (tags["called"], tags["beside"]) == ("yes", "yes")
    finally:
        clerk.end()


@pytest.mark.usefixtures("shared_mlflow")
def test_a_checkpoint_that_cannot_be_kept_costs_neither_the_next_nor_the_trials_end(tmp_path, tracking_db):
    clerk = Clerk("project", "name", tracking_db, Options({}, {}))
    try:
        trial = clerk.trial()
        artifacts = Path(unquote(urlparse(MlflowClient(tracking_db).get_run(trial.run_id).info.artifact_uri).path))
        artifacts.mkdir(parents=True, exist_ok=True)
        in_the_way = artifacts / "checkpoints"
        in_the_way.write_text("where a folder should be")
        clerk.save(checkpoint(tmp_path, 1), 1, {"episode_return": 1.0})
        with pytest.raises(TrackingError):
            clerk.settle()
        assert not list(clerk._pending.folder.iterdir()), "nothing of it is left where it was copied to"
        in_the_way.unlink()
        clerk.save(checkpoint(tmp_path, 2), 2, {"episode_return": 1.0})
        clerk.settle()
        assert [saved.step for saved in trial.checkpoints()] == [2]
        in_the_way.rename(artifacts / "aside")
        in_the_way.write_text("once more")
        clerk.save(checkpoint(tmp_path, 3), 3, {"episode_return": 1.0})
        with pytest.raises(TrackingError):
            clerk.close("FINISHED")
    finally:
        clerk.end()
    assert trial.status == "FINISHED"
    assert trial.metrics()["learner/checkpoints_failed"] == 2


@pytest.mark.usefixtures("shared_mlflow")
def test_a_store_that_cannot_be_opened_is_an_error(tmp_path):
    (tmp_path / "mlflow.db").write_text("this is no database, " * 100)
    clerk = Clerk("project", "name", tracking_uri(tmp_path / "mlflow.db"), Options({}, {}))
    try:
        with pytest.raises(TrackingError, match=r"mlflow\.db cannot be used"):
            clerk.trial()
        with pytest.raises(TrackingError, match=r"mlflow\.db cannot be used"):
            clerk.check()
    finally:
        clerk.end()


def test_an_unused_clerk_leaves_nothing(tmp_path):
    clerk = Clerk("project", "name", tracking_uri(tmp_path / "mlflow.db"), Options({}, {}))
    with pytest.raises(TrackingError, match="no trial was opened"):
        clerk.close("FAILED")
    assert not psutil.pid_exists(clerk._process.child.pid)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow  # starts MLflow in separate processes
def test_a_killed_process_is_restarted_and_continues_the_same_runs(tmp_path, tracking_db, caplog):
    with closing_process(Clerk("project", "league", tracking_db, Options({}, {}))) as parent:
        children = [parent.child(name, Options({}, {"name": name})) for name in ("one", "two")]
        clerks = [parent, *children]
        for number, clerk in enumerate(clerks):
            clerk.push(part(env_steps=10 + number))
            clerk.save(checkpoint(tmp_path, number), 1, {})
            clerk.settle()
        trials = [clerk.trial() for clerk in clerks]
        kill(parent)
        for number, clerk in enumerate(reversed(clerks)):
            clerk.push(part(env_steps=100))
            clerk.save(checkpoint(tmp_path, 10 + number), 2, {})
        for clerk in clerks:
            clerk.settle()
            clerk.check()
        assert [Trial.attach(tracking_db, trial.run_id).status for trial in trials] == ["RUNNING"] * 3

        # Killed twice in a row: the second restart comes later, what is asked waits for it, and nothing is lost.
        process, killed = parent._process.child, parent._process.child.pid
        process.restart_s = 2.0
        kill(parent)
        children[0].save(checkpoint(tmp_path, 15), 2, {})
        until(lambda: process.pid != killed, "a restart")
        kill(parent)
        for number in range(5):
            children[0].save(checkpoint(tmp_path, 20 + number), 3 + number, {})
            children[0].push(part(env_steps=1))
        children[0].check()
        parent.close("FINISHED")
    assert "was killed by SIGKILL (the system does this when memory runs out): it is restarted" in caplog.text
    assert [trial.status for trial in trials] == ["FINISHED"] * 3
    assert [trial.metrics()["replay/env_steps"] for trial in trials] == [110, 116, 112]
    assert [[saved.step for saved in trial.checkpoints()] for trial in trials] == [[1, 2], [6, 7], [1, 2]]
    assert len(MlflowClient(tracking_db).search_runs(["1"])) == 3


@pytest.mark.slow  # starts MLflow in a separate process
def test_a_locked_database_delays_nothing_and_lost_checkpoints_are_counted(tmp_path, tracking_db, capfd):
    with (
        closing_process(Clerk("project", "name", tracking_db, Options({}, {}))) as clerk,
        contextlib.closing(sqlite3.connect(sqlite_path(tracking_db), isolation_level=None)) as other,
    ):
        trial = clerk.trial()
        clerk.push(part(env_steps=1))
        clerk.settle()
        other.execute("BEGIN EXCLUSIVE")
        for number in range(20):
            clerk.save(checkpoint(tmp_path, number), number, {"episode_return": -float(number)})
            clerk.push(part(env_steps=1))
        assert len(list(clerk._pending.folder.iterdir())) <= 4, "the best, two new ones, and one that is being saved"
        until(lambda: clerk._pending.error is not None, "a save that the lock fails")
        clerk.check()
        other.execute("ROLLBACK")
        clerk.save(checkpoint(tmp_path, 20), 20, {"episode_return": 1.0})
        clerk.close("FINISHED")
    assert trial.metrics()["replay/env_steps"] == 21
    assert trial.metrics()["learner/checkpoints_failed"] >= 1
    assert trial.checkpoints()[-1].step == 20
    assert "Traceback" not in capfd.readouterr().err


class Unreadable(str):
    """A note that MLflow's process cannot unpickle."""

    def __getitem__(self, _):
        return self

    def __reduce__(self):
        return int, ("no number",)


@pytest.mark.usefixtures("shared_mlflow")
def test_a_trial_ends_even_if_its_last_metrics_cannot_be_written(tracking_db):
    recorder = Recorder()
    recorder.add("env_steps", 1.0, note=Unreadable("note"))
    with closing_process(Clerk("project", "name", tracking_db, Options({}, {}))) as clerk:
        trial = clerk.trial()
        clerk.push(recorder.drain())
        with pytest.raises(TrackingError, match=r"request.*no number"):
            clerk.close("FINISHED")
    assert trial.status == "FINISHED"


def test_a_process_that_is_started_early_is_the_next_trials_or_ends() -> None:
    with started_early():
        (early,) = clerk_process._early
        assert early.runs
    assert not early.runs
    with started_early():
        (early,) = clerk_process._early
        process = ClerkProcess()
        early.close()  # it need not import MLflow
    assert process.child is early
    assert not clerk_process._early
    process.end()
