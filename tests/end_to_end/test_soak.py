"""A short version of the soak in `tests/chaos/test_soak.py`: a leak per update or fragment shows in a minute."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.soak import soak


@pytest.mark.slow
def test_what_every_process_holds_stays_flat_for_a_while(tmp_path: Path) -> None:
    """With the learner in a separate process, which updates more often: the other is in the longer soak."""
    soak(tmp_path, "process", 40.0, warm_up_s=25.0)
