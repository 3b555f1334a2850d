"""Options of a learner that are derived from others."""

from __future__ import annotations

from typing import Any

import pytest

from brayx.trainer.config import TrainerConfig


@pytest.mark.parametrize(
    ("options", "in_process"),
    [
        ({}, True),
        ({"num_workers": 2}, False),
        ({"use_gpu": True}, False),
        ({"where": "process", "use_gpu": True}, True),
        ({"where": "train"}, False),
    ],
)
def test_a_single_rank_without_a_gpu_learns_in_the_jobs_process(options: dict[str, Any], in_process: bool) -> None:
    assert TrainerConfig(kind="trainer", model="model", buffers=["buffer"], **options).in_process is in_process
