"""`Trainees`: one model or several players as one learner; the learners are stand-ins."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from brayx.errors import BrayxError, Diverged
from brayx.jobs.trainee import Trainees


@dataclass
class Learner:
    """Ends when it is stopped."""

    summary: str
    running: bool = True
    error: BrayxError | None = None

    def stop(self) -> None:
        self.running = False

    def wait(self, timeout_s: float) -> bool:
        return not self.running

    def state(self) -> str:
        return "runs" if self.running else "has ended"

    def result(self, timeout_s: float | None = None) -> str | None:
        if self.error is not None:
            raise self.error
        return None if self.running else self.summary


def learning(mains: list[str], **learners: Learner) -> Any:
    made: Any = Trainees.__new__(Trainees)
    made.trainees, made.mains = {name: SimpleNamespace(learner=learner) for name, learner in learners.items()}, mains
    return made


def test_one_model_is_its_own_learner() -> None:
    learner = Learner("done")
    single: Any = Trainees(SimpleNamespace(), SimpleNamespace(learner=learner))  # type: ignore[arg-type,type-var]
    assert (single.state(), single.running, single.wait(0.0), single.result(0.0)) == ("runs", True, False, None)
    single.stop()
    assert (single.state(), single.running, single.wait(0.0), single.result(0.0)) == ("has ended", False, True, "done")


def test_players_end_with_the_main_players() -> None:
    main, other = Learner("of main"), Learner("of other")
    league = learning(["main"], other=other, main=main)
    assert league.state() == "of other runs, of main runs"
    assert not league.wait(0.0)
    assert other.running
    main.stop()
    assert league.wait(0.0)
    assert league.result(0.0) == "of main"


def test_only_a_main_player_s_error_ends_a_league() -> None:
    failed = Diverged("loss is NaN")
    main, other = Learner("of main", running=False), Learner("of other", running=False, error=failed)
    assert learning(["main"], main=main, other=other).result(0.0) == "of main"
    with pytest.raises(Diverged, match="loss is NaN"):
        learning(["other", "main"], main=main, other=other).result(0.0)
