"""An hour of training, `BRAYX_SOAK_S` seconds if that is set: the memory of every process stays flat."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.chaos.soak import soak

SECONDS = float(os.environ.get("BRAYX_SOAK_S", "3600"))


@pytest.mark.chaos
def test_memory_of_every_process_stays_flat(tmp_path: Path) -> None:
    print(soak(tmp_path, SECONDS, warm_up_s=max(30.0, SECONDS / 10)))
