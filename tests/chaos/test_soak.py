"""An hour of training, or `BRAYX_SOAK_S` seconds: the memory of every process stays flat."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.chaos.soak import JOBS, soak

SECONDS = float(os.environ.get("BRAYX_SOAK_S", "3600"))


@pytest.mark.chaos
@pytest.mark.parametrize("job", JOBS)
def test_what_every_process_holds_stays_flat(tmp_path: Path, job: str) -> None:
    # MLflow's process grows for two minutes.
    print(soak(tmp_path, JOBS[job], SECONDS, warm_up_s=max(180.0, SECONDS / 10)))
