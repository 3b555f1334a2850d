"""The soak of `tests/chaos/test_soak.py`, shortened: what leaks with every update or fragment shows in a minute."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.soak import LEARNERS, soak


@pytest.mark.slow
@pytest.mark.parametrize("learner", LEARNERS)
def test_what_every_process_holds_stays_flat_for_a_while(tmp_path: Path, learner: str) -> None:
    soak(tmp_path, learner, 40.0, warm_up_s=25.0)
