"""The chaos tests' verdict: a kill excuses only the sessions that it hit, and only at its time."""

from __future__ import annotations

import pytest

from tests.chaos.ledger import Event
from tests.chaos.verdict import SETTLE_S, Interruption, Records, check_ends, check_interruptions


def begin(at: float, run: str, *, before: str = "") -> Event:
    return Event(at, "begin", "s", run, 0, "", before)


def end(at: float, run: str, reason: str) -> Event:
    return Event(at, "end", "s", run, 0, reason, "")


def interruption(at: float, code: str, run: str, reason: str = "") -> Interruption:
    return Interruption("s", at, code, reason, run)


LOST = interruption(20.0, "session_lost", "1.1", "owner_died")
RESUMED = interruption(20.0, "session_resumed", "1.1")


@pytest.mark.parametrize(
    ("seen", "interruptions", "killed", "right"),
    [
        ([begin(10.0, "1.1")], [LOST], {1: 15.0}, True),
        ([begin(10.0, "1.1")], [LOST], {2: 15.0}, False),  # another replica was hit
        ([begin(10.0, "1.1")], [LOST], {1: 25.0}, False),  # it was hit later
        ([], [LOST], {1: 15.0}, False),  # no replica ever ran it
        ([begin(10.0, "1.1"), begin(16.0, "2.1", before="1.1")], [RESUMED], {1: 15.0}, True),
        ([begin(10.0, "1.1"), begin(16.0, "2.1", before="1.1")], [RESUMED], {3: 15.0}, False),
        ([begin(10.0, "1.1"), begin(16.0, "2.1", before="1.1")], [LOST], {1: 15.0}, False),  # it had gone on in 2
        ([begin(10.0, "1.1"), begin(16.0, "2.1", before="1.1")], [RESUMED, RESUMED], {1: 15.0}, False),  # twice for one
    ],
)
def test_a_kill_explains_what_it_hit(
    seen: list[Event], interruptions: list[Interruption], killed: dict[int, float], right: bool
) -> None:
    assert (not check_interruptions(Records(interruptions=interruptions), seen, killed, killed)) == right


@pytest.mark.parametrize(("since", "ended", "right"), [(15.0, True, True), (25.0, True, False), (15.0, False, False)])
def test_a_drained_session_needs_a_replica_that_was_ending(since: float, ended: bool, right: bool) -> None:
    seen = [begin(10.0, "1.1"), *([end(19.0, "1.1", "drained")] if ended else [])]
    records = Records(interruptions=[interruption(20.0, "session_lost", "1.1", "drained")])
    assert (not check_interruptions(records, seen, {}, {1: since})) == right


@pytest.mark.parametrize(
    ("seen", "stopped", "killed", "right"),
    [
        ([begin(10.0, "1.1"), end(12.0, "1.1", "stop")], {"s": 12.0}, {}, True),
        ([begin(10.0, "1.1")], {}, {1: 15.0}, True),
        ([begin(10.0, "1.1")], {}, {2: 15.0}, False),
        ([begin(10.0, "1.1")], {"s": 12.0}, {1: 12.0 + SETTLE_S - 1}, True),  # hit before it notified its actor
        ([begin(10.0, "1.1")], {"s": 12.0}, {1: 12.0 + SETTLE_S + 1}, False),  # a later kill excuses nothing
        ([begin(10.0, "1.1"), end(11.0, "1.1", "idle")], {"s": 12.0}, {1: 13.0}, False),
        ([begin(10.0, "1.1"), end(11.0, "1.1", "stop"), end(11.5, "1.1", "lost")], {}, {}, False),
        ([begin(10.0, "1.1"), begin(11.0, "2.1", before="1.1"), end(12.0, "2.1", "stop")], {"s": 12.0}, {}, True),
    ],
)
def test_every_session_has_one_reason(
    seen: list[Event], stopped: dict[str, float], killed: dict[int, float], right: bool
) -> None:
    wrong, _ = check_ends(Records(stopped=stopped), seen, killed)
    assert (not wrong) == right


def test_a_session_reported_lost_has_no_other_end() -> None:
    seen = [begin(10.0, "1.1"), end(12.0, "1.1", "idle")]
    assert check_ends(Records(interruptions=[LOST]), seen, {1: 15.0})[0]
    assert not check_ends(Records(interruptions=[LOST]), [begin(10.0, "1.1")], {1: 15.0})[0]
