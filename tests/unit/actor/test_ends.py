"""Reasons of ended sessions: which request gets one, and which gets it again."""

from __future__ import annotations

import pytest

from brayx.actor.ends import BETWEEN, Ends, may_be_repeat
from brayx.errors import Overloaded, SessionLost, SessionUnknown
from brayx.gamecore.protocol import StepKind, StepRequest


def request(kind: StepKind = StepKind.TICK, seq: int | None = None) -> StepRequest:
    return StepRequest(kind, "game", b"", seq=seq)


def test_a_request_that_is_no_repeat_gets_the_reason_once() -> None:
    ends = Ends()
    ends.add("game", "idle")
    lost = ends.error(request())
    assert isinstance(lost, SessionLost)
    assert lost.details == {"reason": "idle"}
    assert isinstance(ends.error(request()), SessionUnknown)


@pytest.mark.parametrize("repeat", [request(seq=3), request(StepKind.STOP)])
def test_a_request_that_may_be_a_repeat_gets_the_reason_each_time(repeat: StepRequest) -> None:
    ends = Ends()
    ends.add("game", "idle")
    assert may_be_repeat(repeat)
    for _ in range(2):
        assert isinstance(ends.error(repeat), SessionLost)


def test_a_session_that_is_moving_is_asked_for_again_and_its_id_is_not_ending() -> None:
    ends = Ends()
    ends.add("game", "moved")
    for _ in range(2):
        error = ends.error(request())
        assert isinstance(error, Overloaded)
        assert error.details["layer"] == BETWEEN
    assert not ends.is_ending("game")


def test_only_the_newest_reasons_are_kept() -> None:
    ends = Ends()
    for number in range(5000):
        ends.add(str(number), "idle")
    assert "0" not in ends
    assert "4999" in ends
    assert sum(str(number) in ends for number in range(5000)) == 4096
