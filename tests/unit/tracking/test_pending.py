"""Checkpoints that wait for MLflow."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import pytest

from brayx.cluster.learner import CheckpointKeeper
from brayx.errors import TrackingError
from brayx.tracking import Trial
from brayx.tracking.pending import BackgroundKeeper, Pending, PendingCheckpoints


def checkpoint(tmp_path: Path, number: int) -> Path:
    folder = tmp_path / f"made-{number}"
    folder.mkdir()
    (folder / "weights.npz").write_text(str(number))
    return folder


def test_the_newest_and_the_best_wait_and_others_are_deleted(tmp_path: Path) -> None:
    pending, tried, lost = PendingCheckpoints(2), [], []
    for step, score in enumerate((1.0, 5.0, 2.0, 3.0, 4.0)):
        pending.add(checkpoint(tmp_path, step), step, {"episode_return": score})
    assert len(list(pending.folder.iterdir())) == 3
    fails = [False, True, True, False]

    def save(pending: Pending) -> None:
        tried.append(pending.step)
        if fails.pop(0):
            raise TrackingError("down")

    pending.save(save, lost.append, may_retry=lambda: True)
    assert (tried, lost) == ([1, 3], []), "it stays for the next call"
    with pytest.raises(TrackingError, match="down"):
        pending.check()
    pending.save(save, lost.append)
    assert (tried, [str(error) for error in lost]) == ([1, 3, 3, 4], ["down"])
    pending.check()  # the last one is saved
    pending.end()
    with pytest.raises(TrackingError, match="too late"):
        pending.add(checkpoint(tmp_path, 5), 5, {})
    assert not list(pending.folder.iterdir())
    pending.close()


class _Unreadable:
    """A keeper that cannot read its first checkpoint."""

    def __init__(self) -> None:
        self.saved: list[int] = []

    def save(self, folder: Path, step: int, metrics: Mapping[str, float]) -> None:
        if step == 0:
            raise PermissionError(13, "Permission denied", str(folder))
        self.saved.append(step)

    def latest(self) -> Path | None:
        return None


def test_a_checkpoint_that_cannot_be_read_is_counted_and_does_not_stop_the_next(tmp_path: Path) -> None:
    keeper, lost = _Unreadable(), threading.Event()
    background = BackgroundKeeper(keeper, 2, lost.set)
    background.save(checkpoint(tmp_path, 0), 0, {})
    assert lost.wait(60)
    with pytest.raises(TrackingError, match=r"checkpoint: .*Permission denied"):
        background._pending.check()
    background.save(checkpoint(tmp_path, 1), 1, {})
    background.close(60.0)
    assert keeper.saved == [1]


class _Slow:
    """A trial whose saves wait for an event, as for a database that is locked."""

    def __init__(self, trial: Trial) -> None:
        self.keeper, self.may_save = CheckpointKeeper(trial, 2), threading.Event()

    def save(self, folder: Path, step: int, metrics: Mapping[str, float]) -> None:
        assert self.may_save.wait(60)
        self.keeper.save(folder, step, metrics)

    def latest(self) -> Path | None:
        return self.keeper.latest()


def test_save_never_waits_and_close_waits_for_the_last_checkpoint(tmp_path: Path, tracking_db: str) -> None:
    trial, lost = Trial.open("project", "trial", tracking_db), []
    slow = _Slow(trial)
    with BackgroundKeeper(slow, 2, lambda: lost.append(1)) as keeper:
        for step in range(20):
            keeper.save(checkpoint(tmp_path, step), step, {"episode_return": -abs(step - 5.0)})
        assert trial.checkpoints() == []
        slow.may_save.set()
    assert [saved.step for saved in trial.checkpoints()] == [5, 18, 19]
    assert not lost


def test_a_lost_checkpoint_is_counted_and_its_error_raised_at_the_end(tmp_path: Path, tracking_db: str) -> None:
    trial, lost = Trial.open("project", "trial", tracking_db), threading.Event()
    with closing(sqlite3.connect(tracking_db.removeprefix("sqlite:///"))) as other:
        full = "BEGIN SELECT RAISE(ABORT, 'database or disk is full'); END"
        other.execute(f"CREATE TRIGGER full BEFORE INSERT ON tags {full}")
    keeper = BackgroundKeeper(CheckpointKeeper(trial, 2), 2, lost.set)
    keeper.save(checkpoint(tmp_path, 1), 1, {})
    assert lost.wait(120)
    with pytest.raises(TrackingError, match=r"'trial'.*disk is full$"):
        keeper.close(60.0)
    assert not list(tmp_path.glob("mlartifacts/**/weights.npz"))
