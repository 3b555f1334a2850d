"""The summary of a training."""

from __future__ import annotations

import pytest

from brayx.tracking import Trial
from pipelines.result import TrainResult


@pytest.mark.parametrize(
    ("failed", "finished", "more"),
    [(0.0, True, ""), (1.0, True, "; 1 more game failed"), (3.0, True, "; 3 more games failed"), (3.0, False, "")],
)
def test_failed_games_are_beside_the_return_of_the_others(failed: float, finished: bool, more: str) -> None:
    ended = "num_steps 1,000 reached: mean return 21.5 over the last 40 games"
    trial, numbers = Trial("sqlite:///none.db", "id", "p", "t"), {"games_failed_in_window": failed}
    result = TrainResult(trial, numbers, finished, "p", None, 1.0, [], "", ended=ended)
    assert result.summary().splitlines()[-1].strip() == ended + more
