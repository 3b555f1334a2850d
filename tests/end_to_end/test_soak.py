"""The soak of `tests/chaos/test_soak.py`, shortened: what leaks with every update or fragment shows in a minute."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.soak import soak


@pytest.mark.slow
def test_memory_of_every_process_stays_flat_for_a_while(tmp_path: Path) -> None:
    soak(tmp_path, 40.0, warm_up_s=25.0)
