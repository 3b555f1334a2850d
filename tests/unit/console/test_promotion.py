"""What a canary's results say about it."""

from __future__ import annotations

import math

import pytest

from brayx.console import verdict
from brayx.console.documents import ResultDocument
from brayx.console.overview import ArmDocument, judged_canary, with_results


def arm(alias: str, version: int, mean: float, games: float) -> ArmDocument:
    """A version whose games have a standard deviation of 10."""
    return ArmDocument(
        model="model",
        alias=alias,
        version=version,
        result=ResultDocument(mean=mean, error=10.0 / games**0.5, games=games),
    )


@pytest.mark.parametrize(
    ("mean", "games", "said"),
    [
        (110.0, 19, "shows when each has finished 20 games"),
        (110.0, 100, "Version 4 is better than version 8: its return is 10 higher"),
        (90.0, 100, "Version 4 is worse than version 8: its return is 10 lower"),
        (102.0, 100, "it is 2, which takes about 193 games of each"),  # 1.96² (10² + 10²) / 2²
        (100.0, 100, "both have the same return"),
    ],
)
def test_which_of_two_versions_is_better(mean: float, games: float, said: str) -> None:
    judged = judged_canary(
        [arm("champion", 8, 100.0, 100), arm("candidate", 4, mean, games), arm("champion", 4, 0.0, 1)],
        {"champion": 8, "candidate": 4},
        "candidate",
    )
    assert judged is not None
    assert said in judged.text
    assert judged.reason in verdict.REASONS
    assert (judged.state == "worse") == (mean < 100.0)


@pytest.mark.parametrize("error", [None, math.nan])
def test_no_version_is_called_worse_if_an_error_is_not_known(error: float | None) -> None:
    lower = ResultDocument(mean=9.999, error=error, games=500)
    judged = judged_canary(
        [arm("champion", 8, 10.0, 500), arm("candidate", 4, 0.0, 1).model_copy(update={"result": lower})],
        {"champion": 8, "candidate": 4},
        "candidate",
    )
    assert judged is not None
    assert (judged.state, judged.reason, judged.advice) == ("unsure", verdict.UNMEASURED, "")


def test_an_arm_is_told_when_its_alias_has_moved() -> None:
    arms = [arm("champion", 8, 1.0, 9), arm("champion", 4, 2.0, 9), arm("candidate", 4, 2.0, 9)]
    assert [each.former for each in with_results(arms, {}, {"champion": 4, "candidate": 4})] == [True, False, False]
