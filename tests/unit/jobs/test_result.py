"""The summary of a training."""

from __future__ import annotations

import pytest

from brayx.errors import ModelNotFound
from brayx.jobs.result import TrainResult
from brayx.tracking import Trial


@pytest.mark.parametrize(
    ("failed", "finished", "more"),
    [(0.0, True, ""), (1.0, True, "; 1 more game failed"), (3.0, True, "; 3 more games failed"), (3.0, False, "")],
)
def test_failed_games_are_beside_the_return_of_the_others(failed: float, finished: bool, more: str) -> None:
    ended = "num_steps 1,000 reached: mean return 21.5 over the last 40 games"
    trial, numbers = Trial("sqlite:///none.db", "id", "p", "t"), {"games_failed_in_window": failed}
    result = TrainResult(trial, numbers, finished, "p", None, 1.0, [], "", ended=ended)
    assert result.summary().splitlines()[-1].strip() == ended + more


def test_a_result_names_its_version_or_says_why_there_is_none() -> None:
    trial = Trial("sqlite:///none.db", "id", "p", "t")
    assert TrainResult(trial, {}, True, "cartpole", 3, 1.0, [], "").reference == "models:/cartpole/3"
    with pytest.raises(ModelNotFound, match="trial 't' registered no version: no champion: fewer than 20 games"):
        _ = TrainResult(trial, {}, True, "cartpole", None, 1.0, [], "no champion: fewer than 20 games").reference
