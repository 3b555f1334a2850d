"""A clerk's children: trials of one process stay apart, fail and end separately, and resume with their parent."""

from __future__ import annotations

import os
import signal
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, urlparse

import numpy as np
import pytest
from mlflow import MlflowClient

from brayx.errors import ConfigError, TrackingError
from brayx.tracking import Trial
from brayx.tracking.clerk import Clerk, may_resume
from brayx.tracking.options import Options
from brayx.tracking.trial import PARENT_TAG
from tests.unit.tracking.test_clerk import checkpoint, part
from tests.waiting import until


@contextmanager
def league(uri, name="league", **options):
    """A clerk whose process ends with the context."""
    clerk = Clerk("project", name, uri, Options({}, {"role": "league"}), **options)
    try:
        yield clerk
    finally:
        clerk.end()


def params_of(trial):
    return MlflowClient(trial.uri).get_run(trial.run_id).data.params


def names_in(uri):
    client = MlflowClient(uri)
    return sorted(
        run.info.run_name for run in client.search_runs([client.get_experiment_by_name("project").experiment_id])
    )


def number_in(folder):
    return int(np.load(folder / "weights.npz")["number"])


def block_checkpoints(trial):
    """Puts a file where the folder of the trial's checkpoints would be."""
    artifacts = Path(unquote(urlparse(MlflowClient(trial.uri).get_run(trial.run_id).info.artifact_uri).path))
    artifacts.mkdir(parents=True, exist_ok=True)
    (artifacts / "checkpoints").write_text("where a folder should be")


def test_a_child_is_found_by_its_parent_and_its_name(tracking_db):
    left, right = (Trial.open("project", name, tracking_db) for name in ("left", "right"))
    child = Trial.open("project", "main", tracking_db, parent=left)
    assert child.tags()[PARENT_TAG] == left.run_id
    other = Trial.open("project", "main", tracking_db, parent=right)
    alone = Trial.open("project", "main", tracking_db)
    assert PARENT_TAG not in alone.tags()
    assert len({child.run_id, other.run_id, alone.run_id}) == 3
    for trial, parent in ((child, left), (other, right), (alone, None)):
        trial.finish("KILLED")
        again = Trial.open("project", "main", tracking_db, parent=parent)
        assert (again.run_id, again.resumed) == (trial.run_id, True)


def test_whether_a_child_may_resume_is_known_without_mlflow(tracking_db):
    left, _ = (Trial.open("project", name, tracking_db) for name in ("left", "right"))
    child = Trial.open("project", "main", tracking_db, parent=left)
    assert may_resume(tracking_db, "project", "left", "main")
    assert not may_resume(tracking_db, "project", "left", "other")
    assert not may_resume(tracking_db, "project", "right", "main"), "of another league"
    assert not may_resume(tracking_db, "project", "main"), "a trial without a parent"
    grandchild = Trial.open("project", "main", tracking_db, parent=child)
    assert grandchild.run_id != child.run_id
    assert may_resume(tracking_db, "project", "left", "main", "main")
    left.finish("FINISHED")
    assert not may_resume(tracking_db, "project", "left", "main"), "of a league that has ended"
    left.finish("KILLED")
    assert may_resume(tracking_db, "project", "left", "main")
    child.finish("FINISHED")
    assert not may_resume(tracking_db, "project", "left", "main")
    child.finish("KILLED")
    child.delete()
    assert not may_resume(tracking_db, "project", "left", "main")


@pytest.mark.usefixtures("shared_mlflow")
def test_trials_that_are_written_at_once_stay_apart(tmp_path, tracking_db):
    with league(tracking_db, kept=1) as parent:
        children = [parent.child(name, Options({}, {"role": name}), kept=2) for name in ("one", "two", "three")]
        clerks = [parent, *children]

        def write(number):
            clerk = clerks[number]
            for turn in range(40):
                clerk.push(part(env_steps=number + 1, episode_return=100.0 * number + turn))
                if turn % 10 == 0:
                    folder = checkpoint(tmp_path, 100 * number + turn)
                    clerk.save(folder, turn, {"episode_return": float(turn)})
            clerk.call(Trial.set_tag, "number", str(number))
            clerk.settle()

        with ThreadPoolExecutor(len(clerks)) as pool:
            list(pool.map(write, range(len(clerks))))
        trials = [clerk.trial() for clerk in clerks]
        assert len({clerk._process.child.pid for clerk in clerks}) == 1
        parent.close("FINISHED")
    for number, trial in enumerate(trials):
        metrics = trial.metrics()
        assert metrics["replay/env_steps"] == 40 * (number + 1)
        returns = [value for _, value in trial.history("return/mean")]
        assert returns
        assert all(100 * number <= value < 100 * number + 40 for value in returns)
        assert [saved.step for saved in trial.checkpoints()] == ([30] if number == 0 else [20, 30])
        assert number_in(trial.latest_checkpoint()) == 100 * number + 30
        assert trial.tags()["number"] == str(number)
        assert trial.tags().get(PARENT_TAG) == (None if number == 0 else trials[0].run_id)
        assert trial.status == "FINISHED", "children end with their parent"
    assert [params_of(trial) for trial in trials] == [{"role": role} for role in ("league", "one", "two", "three")]
    assert not list(tmp_path.glob("brayx-temporary-checkpoints-*"))


@pytest.mark.slow  # starts MLflow in separate processes
def test_a_killed_league_resumes_with_its_children(tmp_path, tracking_db):
    with league(tracking_db) as parent:
        children = [parent.child(name, Options({}, {})) for name in ("one", "two", "done")]
        for number, clerk in enumerate((parent, *children)):
            assert not clerk.may_resume
            assert clerk.latest() is None
            clerk.push(part(env_steps=10 * (number + 1)))
            clerk.save(checkpoint(tmp_path, number), number, {})
            clerk.settle()
        trials = [clerk.trial() for clerk in (parent, *children)]
        children[2].close("FINISHED")
        os.kill(parent._process.child.pid, signal.SIGKILL)  # with the job
    assert [trial.status for trial in trials] == ["RUNNING", "RUNNING", "RUNNING", "FINISHED"]

    with league(tracking_db) as parent:
        first, second, done, new = (parent.child(name, Options({}, {})) for name in ("one", "two", "done", "new"))
        assert [clerk.may_resume for clerk in (parent, first, second, done, new)] == [True, True, True, False, False]
        for number, clerk in enumerate((parent, first, second)):
            assert clerk.trial().run_id == trials[number].run_id
            assert clerk.trial().resumed
            assert number_in(clerk.latest()) == number
            assert clerk.totals()["env_steps"] == 10 * (number + 1)
            clerk.push(part(env_steps=1))
        for clerk in (done, new):
            assert not clerk.trial().resumed
            assert (clerk.latest(), clerk.totals()) == (None, {})
        assert done.trial().run_id != trials[3].run_id, "a finished child starts anew"
        parent.close("KILLED")
    assert [trial.metrics()["replay/env_steps"] for trial in trials] == [11, 21, 31, 40]
    assert [trial.status for trial in trials] == ["KILLED", "KILLED", "KILLED", "FINISHED"]


@pytest.mark.usefixtures("shared_mlflow")
def test_leagues_do_not_share_the_names_of_their_children(tmp_path, tracking_db):
    killed = {}
    for number, name in enumerate(("left", "right")):
        league_trial = Trial.open("project", name, tracking_db)
        killed[name] = Trial.open("project", "main", tracking_db, parent=league_trial)
        killed[name].save_checkpoint(checkpoint(tmp_path, number), 5)
        for trial in (league_trial, killed[name]):
            trial.finish("KILLED")
    with league(tracking_db, "left") as parent:
        child = parent.child("main", Options({}, {}))
        assert child.trial().run_id == killed["left"].run_id
        assert number_in(child.latest()) == 0
        parent.close("KILLED")
    with league(tracking_db, "right", resume=False) as parent:
        child = parent.child("main", Options({}, {}))
        assert not child.may_resume
        assert child.latest() is None
        assert child.trial().run_id not in {trial.run_id for trial in killed.values()}


@pytest.mark.slow  # starts MLflow in a separate process
def test_a_child_ends_alone_and_its_parent_ends_the_rest(tmp_path, tracking_db):
    with league(tracking_db) as parent:
        first, second, unused = (parent.child(name, Options({}, {})) for name in ("first", "second", "unused"))
        with pytest.raises(TrackingError, match=r"'league'.* open child 'first'"):
            parent.child("first", Options({}, {}))
        first.push(part(env_steps=1))
        trial = first.trial()
        assert names_in(tracking_db) == ["first", "league"], "a trial opens at its first request, its parent before"
        assert first.close("FINISHED") == trial
        first.end()
        assert (trial.status, trial.metrics()["replay/env_steps"]) == ("FINISHED", 1)
        first.push(part(env_steps=1))  # of a player that is still ending
        for closed in (
            lambda: first.call(Trial.tags),
            lambda: first.close("KILLED"),
            lambda: first.child("x", Options({}, {})),
        ):
            with pytest.raises(TrackingError, match="trial 'first' is closed"):
                closed()

        again = parent.child("first", Options({}, {}))  # as an exploiter that restarts
        assert again.trial().run_id != trial.run_id
        with pytest.raises(TrackingError, match="no trial was opened"):
            unused.close("FINISHED")
        second.end()
        second.push(part(env_steps=2))
        second.settle()
        parent.check()
        parent.close("FAILED")
        assert (again.trial().status, second.trial().status) == ("KILLED", "KILLED"), "they did not fail"
        assert parent.trial().status == "FAILED"
        for clerk in (parent, second):
            with pytest.raises(TrackingError, match="is closed"):
                clerk.close("FINISHED")
            with pytest.raises(TrackingError, match="was ended"):
                clerk.call(Trial.tags)
    assert trial.metrics()["replay/env_steps"] == 1
    assert names_in(tracking_db) == ["first", "first", "league", "second"]


@pytest.mark.usefixtures("shared_mlflow")
def test_what_fails_for_one_trial_does_not_affect_the_others(tmp_path, tracking_db):
    with league(tracking_db) as parent:
        bad, good, misnamed = (parent.child(name, Options({}, {})) for name in ("bad", "good", "mis/named"))
        with pytest.raises(ConfigError, match="trial is 'mis/named'"):
            misnamed.trial()
        with pytest.raises(ConfigError, match="trial is 'mis/named'"):
            misnamed.check()
        with pytest.raises(TrackingError, match="cannot call: "):
            bad.call(lambda trial: None)
        with pytest.raises(TrackingError, match=r"answer: .*weakref"):
            bad.call(weakref.ref)

        block_checkpoints(bad.trial())
        for number in range(2):
            bad.save(checkpoint(tmp_path, number), number, {})
            good.save(checkpoint(tmp_path, 10 + number), number, {})
        good.push(part(env_steps=3))
        good.settle()
        for clerk in (parent, bad, good):
            clerk.check()
        assert [saved.step for saved in good.trial().checkpoints()] == [0, 1]
        trials = [clerk.trial() for clerk in (parent, bad, good)]
        with pytest.raises(TrackingError, match=r"checkpoint .*'bad'"):
            parent.close("FINISHED")
    assert [trial.status for trial in trials] == ["FINISHED"] * 3
    assert [trial.metrics().get("learner/checkpoints_failed") for trial in trials] == [None, 2, None]
    assert trials[2].metrics()["replay/env_steps"] == 3


@pytest.mark.usefixtures("shared_mlflow")
def test_a_trials_metrics_are_sent_while_others_make_requests(tracking_db):
    with league(tracking_db) as parent:
        child = parent.child("quiet", Options({}, {}))
        trial = child.trial()
        child.push(part(env_steps=7))

        def is_written():
            parent.call(Trial.tags)
            return trial.metrics().get("replay/env_steps") == 7

        until(is_written, "a write of the quiet trial's metrics")


@pytest.mark.usefixtures("shared_mlflow")
def test_children_of_a_store_that_cannot_be_opened_report_it(tmp_path):
    (tmp_path / "mlflow.db").write_text("this is no database, " * 100)
    with league(f"sqlite:///{tmp_path}/mlflow.db") as parent:
        child = parent.child("main", Options({}, {}))
        child.push(part(env_steps=1))
        with pytest.raises(TrackingError, match=r"mlflow\.db cannot be used"):
            child.trial()
        for clerk in (child, parent):
            with pytest.raises(TrackingError, match=r"mlflow\.db cannot be used"):
                clerk.check()
        with pytest.raises(TrackingError, match=r"mlflow\.db cannot be used"):
            parent.close("FAILED")
