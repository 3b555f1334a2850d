"""Checkpoints of named models: their schedule, their contents, and initial weights."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

from brayx.engines.base import save_weights
from brayx.errors import BadWeights, ModelError
from brayx.model.checkpoints import Checkpoints, checked_interval, read_checkpoint, starting_weights
from brayx.tracking import Trial

OWN = {"w": np.zeros(2, np.float32)}


def weights(value):
    return {"w": np.full(2, value, np.float32)}


@pytest.fixture
def trial(tracking_db):
    return Trial.open("brayx-models", "one", tracking_db)


def written(checkpoints):
    """Waits until nothing is being written."""
    if checkpoints._writing is not None:
        checkpoints._writing.result(30)


def test_by_steps(trial):
    checkpoints = Checkpoints(trial, 10)
    accepted = []
    for version, step in enumerate((0, 5, 9, 10, 19, 25), start=1):
        accepted.append(checkpoints.offer(weights(step), version, step))
        written(checkpoints)
    assert accepted == [True, False, False, True, False, True]
    checkpoints.close()
    assert [checkpoint.step for checkpoint in trial.checkpoints()] == [10, 25], "the newest two"
    assert read_checkpoint(trial.latest_checkpoint())[0] == 6
    version, step, newest = starting_weights(OWN, trial, None, "")
    assert (version, step, newest["w"].tolist()) == (6, 25, [25, 25])


def test_by_time(trial):
    often, seldom = Checkpoints(trial, timedelta.resolution), Checkpoints(trial, timedelta(days=1))
    for step in (1, 2):
        assert often.offer(weights(1), step, step)
        assert seldom.offer(weights(1), step, step) == (step == 1)
        written(often)
        written(seldom)
    often.close()
    seldom.close()


@pytest.mark.parametrize("given", [None, 1, np.int64(7), timedelta.resolution])
def test_an_interval_is_stored_in_plain_numbers(given):
    stored = checked_interval(given)
    assert stored == given
    assert stored is None or type(stored) in (int, timedelta)


def test_without_a_trial_nothing_is_due():
    checkpoints = Checkpoints(None, 1)
    assert not checkpoints.offer(weights(1), 1, 1)
    checkpoints.close()


def test_weights_that_arrive_during_a_write_are_skipped_and_the_write_uses_a_copy(trial, monkeypatch):
    started, go_on = threading.Event(), threading.Event()
    save = Trial.save_checkpoint

    def slow(self, folder, step):
        started.set()
        assert go_on.wait(60)
        return save(self, folder, step)

    monkeypatch.setattr(Trial, "save_checkpoint", slow)
    checkpoints = Checkpoints(trial, 1)
    mine = weights(1)
    assert checkpoints.offer(mine, 1, 1)
    mine["w"][:] = 9
    assert started.wait(60)
    assert not checkpoints.offer(weights(2), 2, 2)
    go_on.set()
    checkpoints.close()
    assert starting_weights(OWN, trial, None, "")[2]["w"].tolist() == [1, 1]


def test_a_failed_write_is_logged_and_the_next_is_tried(trial, monkeypatch, caplog):
    checkpoints = Checkpoints(trial, 1)
    with monkeypatch.context() as broken:
        broken.setattr(Trial, "save_checkpoint", lambda *_: 1 / 0)
        assert checkpoints.offer(weights(1), 1, 1)
        written(checkpoints)
    assert "step 1 was not written" in caplog.text
    assert checkpoints.offer(weights(2), 2, 2)
    checkpoints.close()
    assert [checkpoint.step for checkpoint in trial.checkpoints()] == [2]


def test_initial_weights_of_a_model(tmp_path: Path, trial):
    assert starting_weights(OWN, None, None, "") == (0, 0, OWN)
    assert starting_weights(OWN, trial, None, "") == (0, 0, OWN), "no checkpoint yet"
    save_weights(tmp_path / "weights.npz", weights(4))
    assert starting_weights(OWN, trial, str(tmp_path), "")[2]["w"].tolist() == [4, 4]
    with pytest.raises(BadWeights, match="nowhere"):
        starting_weights(OWN, None, str(tmp_path / "nowhere"), "")
    with pytest.raises(BadWeights, match="no weights to start with"):
        starting_weights(None, trial, None, "")
    folder = tmp_path / "broken"
    folder.mkdir()
    save_weights(folder / "weights.npz", weights(4))
    (folder / "meta.json").write_text("{}")
    trial.save_checkpoint(folder, 1)
    with pytest.raises(ModelError, match=r"meta\.json cannot be read"):
        starting_weights(OWN, trial, None, "")
