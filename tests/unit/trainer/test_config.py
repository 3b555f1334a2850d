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
        ({"where": "child"}, True),
    ],
)
def test_a_single_rank_without_a_gpu_learns_in_the_jobs_process(options: dict[str, Any], in_process: bool) -> None:
    assert TrainerConfig(kind="trainer", model="model", buffers=["buffer"], **options).in_process is in_process


@pytest.mark.parametrize("options", [{"prefetch": 1}, {"eval_buffers": ["other"]}, {"num_workers": 2}])
def test_a_child_refuses_what_it_cannot_do(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="where is child"):
        TrainerConfig(kind="trainer", model="model", buffers=["buffer"], where="child", **options)
