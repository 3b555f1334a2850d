"""When a learner saves its checkpoints, and a checkpoint that cannot be kept."""

from __future__ import annotations

import pytest

from brayx.errors import TrackingError
from tests.unit.trainer.parts import BATCH_STEPS, Folders, run


def test_checkpoints_follow_their_interval(tmp_path):
    *_, keeper, _ = run(tmp_path, count=5, checkpoint_interval_s=1e-6, newest={"env_steps": 7.0})
    assert [step for step, _, _ in keeper.saved] == [BATCH_STEPS * n for n in (1, 2, 3, 4, 5, 5)]
    assert [metrics for _, metrics, _ in keeper.saved] == [{"env_steps": 7.0}] * 6, "those played"


class FailingFolders(Folders):
    """Fails to save all but the checkpoints numbered in ``good``."""

    def __init__(self, root, good):
        super().__init__(root)
        self.good = good
        self.tried = 0

    def save(self, folder, step, metrics):
        self.tried += 1
        if self.tried not in self.good:
            raise TrackingError("the disk is full")
        super().save(folder, step, metrics)


def test_a_failed_checkpoint_is_counted_and_training_continues(tmp_path, caplog):
    keeper = FailingFolders(tmp_path, good={3, 6})
    summary, _, numbers, *_ = run(keeper, count=5, checkpoint_interval_s=1e-6)
    assert summary.updates == 5
    assert [step // BATCH_STEPS for step, _, _ in keeper.saved] == [3, 5]
    assert len(numbers.samples["checkpoints_failed"]) == 4
    assert len([record for record in caplog.records if "the disk is full" in record.message]) == 2, "once in a row"


def test_the_last_checkpoint_must_be_saved(tmp_path):
    with pytest.raises(TrackingError, match="the disk is full"):
        run(FailingFolders(tmp_path, good={1}), count=1, checkpoint_interval_s=1e-6)
