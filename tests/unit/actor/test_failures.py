"""What fails in one session: hooks and load, and each game counted once, for its first reason."""

from __future__ import annotations

import asyncio

import pytest

from brayx.actor.failures import SessionFailures
from brayx.errors import BadLimits, DeadlineExceeded, Overloaded
from brayx.metrics import OVERLOADED, Recorder


class Kept(Recorder):
    """Keeps the label and the note of each count, by metric."""

    def __init__(self):
        super().__init__()
        self.counts = {}

    def add(self, name, value, *, label="", note="", **more):
        self.counts.setdefault(name, []).append((label, note))


@pytest.fixture
def recorder():
    return Kept()


def test_an_exception_of_a_hook_is_counted_with_its_place_and_raised(recorder):
    failures = SessionFailures(recorder)
    with pytest.raises(ZeroDivisionError), failures.counted("mine", "on_tick"):
        1 / 0  # noqa: B018
    ((hook, note),) = recorder.counts["agent_errors"]
    assert hook == "on_tick"
    assert "'mine'" in note
    assert "test_failures.py" in note
    assert failures


@pytest.mark.parametrize("load", [Overloaded("full"), DeadlineExceeded("late")])
def test_load_is_no_error_of_the_hook_but_fails_the_game(recorder, load):
    failures = SessionFailures(recorder)
    failures.add("mine", "on_tick", load)
    failures.count_game()
    assert "agent_errors" not in recorder.counts
    assert recorder.counts["games_failed"][0][0] == OVERLOADED


def test_limits_that_cannot_be_kept_fail_nothing(recorder):
    failures = SessionFailures(recorder)
    failures.add("mine", "on_tick", BadLimits("no action is left"))
    assert not failures
    assert recorder.counts == {}


def test_a_game_fails_for_its_first_reason(recorder):
    failures = SessionFailures(recorder)
    failures.fail("on_tick", "first")
    failures.fail("on_episode", "second")
    failures.count_game()
    assert recorder.counts["games_failed"] == [("on_tick", "first")]


def test_a_hook_that_was_cut_off_counts_only_if_nothing_else_failed(recorder):
    failures = SessionFailures(recorder)
    failures.cut_off("on_tick", "was cut off")
    assert failures.why(asyncio.CancelledError()) == "was cut off"
    failures.ended_by_error()
    failures.ended_by_error()
    assert recorder.counts["agent_errors"] == [("on_tick", "was cut off")]


@pytest.mark.parametrize(
    ("stop", "shown"),
    [
        (b"", "no body"),
        (b"\x81", "\N{REPLACEMENT CHARACTER}"),
        (b"[1]", "[1]"),
        (b"{}", "neither terminated nor truncated"),
        (b'{"obs": [' + b"0.12, " * 99 + b'0], "reward": 1}', "neither terminated nor truncated besides obs, reward"),
        (b'{"obs": [0.1], "terminated": false, "reward": 3}', "terminated: false besides obs, reward"),
    ],
)
def test_what_a_stop_without_a_return_has_and_lacks_is_noted(recorder, stop, shown):
    SessionFailures(recorder).count_without_return(stop)
    assert recorder.counts["games_without_return"] == [("", f"its stop had {shown}")]
