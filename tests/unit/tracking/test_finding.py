"""`brayx.tracking.finding`: a trial is found by its id, or by its name."""

from __future__ import annotations

import pytest

from brayx.errors import ConfigError
from brayx.tracking import Trial, find_trial
from brayx.tracking.finding import newest_runs


def opened(uri, *names):
    """Trials that have ended, each in a project of its own."""
    trials = [Trial.open(f"project {number}", name, uri) for number, name in enumerate(names)]
    for trial in trials:
        trial.finish()
    return trials


def test_a_trial_is_found_by_id_and_by_name_the_newest(tracking_db, caplog):
    trials = opened(tracking_db, "first", "second", "second")
    assert find_trial(trials[1].run_id, tracking_db).run_id == trials[1].run_id
    assert find_trial("first", tracking_db).run_id == trials[0].run_id
    assert not caplog.messages
    assert find_trial("second", tracking_db).run_id == trials[2].run_id
    assert f"several trials are called 'second': the newest is used, {trials[2].run_id}" in caplog.text
    trials[2].finish("FAILED")
    assert find_trial("second", tracking_db).run_id == trials[1].run_id, "a failed one comes last"
    with pytest.raises(ConfigError, match="'third'"):
        find_trial("third", tracking_db)
    with pytest.raises(ConfigError, match="no MLflow database"):
        find_trial("first", tracking_db.replace("mlflow.db", "none.db"))


def test_the_newest_runs_are_of_all_projects_or_of_one(tracking_db):
    first, second = opened(tracking_db, "one", "two")
    projects, runs = newest_runs(tracking_db)
    assert [run.info.run_id for run in runs] == [second.run_id, first.run_id]
    assert {"project 0", "project 1"} <= set(projects.values())
    assert [run.info.run_id for run in newest_runs(tracking_db, "project 0")[1]] == [first.run_id]
    with pytest.raises(ConfigError, match=r"'project 2'.*project 0"):
        newest_runs(tracking_db, "project 2")
