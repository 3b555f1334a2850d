"""`brayx.regression.game`: each seat gets its recorded replies while they fit, and what does not is named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from brayx.actor.agent import State
from brayx.errors import BadRecording, ConfigError, NotDeterministic
from brayx.metrics import Recorder
from brayx.recording import open as open_recordings
from brayx.recording.config import RecordingConfig
from brayx.recording.reader import Recording
from brayx.recording.recorder import SessionRecorder
from brayx.regression.game import RecordedGame
from brayx.regression.resimulate import sessions_of

WAIT_S = 60.0

START = b"go"

TICKS = 4


@pytest.fixture
def record(tmp_path: Path) -> Callable[..., list[Recording]]:
    """Records sessions by agent, each with this number of ticks, except one that is lost: bodies 0, 1, ..., and replies
    AGENT 0, AGENT 1, ..."""

    def recorded(events: Sequence[str] = (), end: str = "stop", lost: int = -1, **lengths: int) -> list[Recording]:
        recorder = SessionRecorder(RecordingConfig(folder=str(tmp_path)), Recorder())
        for agent, length in lengths.items():
            log = recorder.open(f"old-agent-{agent}", START, reply=f"{agent} started".encode())
            assert log is not None
            for number in [tick for tick in range(length) if tick != lost]:
                log.tick(State("s", tick=number), b"%d" % number, f"{agent} {number}".encode(), 0.0, 0.0)
            for event in events:
                log.event(event, last=True)
            log.end(end, None)
        recorder.close(WAIT_S)
        return list(open_recordings(str(tmp_path)))

    return recorded


class Play:
    """Plays a recorded game; the agents answer ``new``."""

    def __init__(self, episodes: Sequence[Recording], from_tick: int, name: str = "old", started: str = "") -> None:
        self.game = RecordedGame(*sessions_of(episodes, name), from_tick)
        for agent in started:
            self.game.started(f"new-agent-{agent}", START)

    def tick(self, agent: str, body: bytes) -> str:
        seat = self.game.tick(f"new-agent-{agent}", body)
        return (b"new" if seat is None else self.game.replied(seat, b"new")).decode()

    def ticks(self, agent: str, *bodies: bytes) -> list[str]:
        return [self.tick(agent, body) for body in bodies]


def test_every_seat_gets_its_recorded_replies_up_to_the_tick(record) -> None:
    play = Play(record(a=TICKS, b=TICKS), 2, started="ab")
    assert play.ticks("a", b"0", b"1") == ["a 0", "a 1"]
    assert play.ticks("b", b"0", b"1") == ["b 0", "b 1"]
    assert not play.game.diverged
    assert play.ticks("a", b"2", b"other") == ["new", "new"]
    assert play.tick("b", b"2") == "new"
    assert [seat.first for seat in play.game.seats] == [2, 2]
    for agent in "ab":
        assert not play.game.over.is_set()
        play.game.ended(f"new-agent-{agent}", "stop", 1.5)
    assert play.game.over.is_set()
    assert [(seat.ticks, seat.end, seat.result) for seat in play.game.seats] == [(4, "stop", 1.5), (3, "stop", 1.5)]


def test_a_start_gets_its_recorded_reply_if_its_body_is_the_recorded_one(record) -> None:
    play = Play(record(a=TICKS, b=TICKS), 0, "old-agent-a")
    assert play.game.started("other-agent-a", b"other") is None
    assert play.game.started("new-agent-a", START) == b"a started"
    assert play.tick("a", b"0") == "new"
    assert play.game.started("new-agent-b", b"other") is None


def test_a_seat_that_is_not_played_gets_them_until_its_bodies_differ(record) -> None:
    play = Play(record(a=TICKS, b=TICKS), 1, "old-agent-a", started="ab")
    assert play.ticks("a", b"0", b"1") == ["a 0", "new"]
    assert play.ticks("b", b"0", b"1", b"2") == ["b 0", "b 1", "b 2"]
    assert play.ticks("b", b"other", b"4") == ["new", "new"]
    assert [(seat.is_played, seat.follows, seat.first) for seat in play.game.seats] == [
        (True, True, 1),
        (False, False, 3),
    ]


def test_a_body_that_differs_before_any_reply_does_is_refused(record) -> None:
    episodes = record(a=TICKS, b=TICKS)
    play = Play(episodes, 2, started="ab")
    assert play.tick("a", b"0") == "a 0"
    with pytest.raises(NotDeterministic, match=r"body .* is x, .* is 0,") as refused:
        play.tick("b", b"x")
    assert refused.value.details["tick"] == 0
    assert play.game.failure is refused.value
    assert play.game.over.is_set()
    play = Play(episodes, 0, "old-agent-a", started="ab")
    assert play.tick("a", b"0") == "new"
    assert play.tick("b", b"x") == "new", "after another reply it may differ"
    play = Play(episodes, 2, started="a")
    with pytest.raises(NotDeterministic, match=r"start .*'new-agent-b' is x, .* is go"):
        play.game.started("new-agent-b", b"x")


def test_a_seat_that_ended_earlier_is_only_asked_for_its_own_ticks(record) -> None:
    play = Play(record(a=TICKS, b=2), 3, started="ab")
    assert play.ticks("b", b"0", b"1") == ["b 0", "b 1"]
    with pytest.raises(NotDeterministic, match=r"tick 2 .* is none"):
        play.tick("b", b"2")
    assert play.game.over.is_set()


def test_a_seat_that_is_not_recorded_is_named(record) -> None:
    episodes = record(a=TICKS)
    play = Play(episodes, 1)
    play.game.started("new-agent-b", START)
    play.game.started("new-agent-a", START)
    assert play.tick("a", b"0") == "a 0"
    with pytest.raises(BadRecording, match=r"seat 'b' .*'old-agent-a'"):
        play.tick("b", b"0")
    play = Play(episodes, 0, started="ab")
    assert play.ticks("a", b"0") == ["new"]
    assert play.tick("b", b"0") == "new", "in another game than the recorded one, others may play"


def test_games_before_it_are_not_the_recorded_one(record) -> None:
    play = Play(record(a=TICKS), 1)
    play.game.started("first-agent-a", b"other")
    assert play.game.tick("first-agent-a", b"x") is None
    assert not play.game.has_started
    assert "go; the last start was other" in play.game.expected_start
    play.game.started("new-agent-a", START)
    play.game.started("third-agent-a", START)
    assert play.game.tick("third-agent-a", b"x") is None
    assert play.tick("a", b"0") == "a 0"


def test_what_cannot_be_played_again_is_said(record) -> None:
    episodes = record(a=TICKS, b=2)
    for from_tick in (-1, TICKS):
        with pytest.raises(ConfigError, match="has ticks 0 to 3"):
            Play(episodes, from_tick)
    with pytest.raises(ConfigError, match="has ticks 0 to 1"):
        Play(episodes, 2, "old-agent-b")
    with pytest.raises(BadRecording, match="no session 'nobody'"):
        sessions_of(episodes, "nobody")
    twice = record(a=TICKS)
    with pytest.raises(BadRecording, match=r"'old-agent-a' .*more than once"):
        Play(twice, 1)


@pytest.mark.parametrize(
    ("end", "why"),
    [("", "died"), ("moved", "moved")],
)
def test_a_session_without_its_end_is_played_up_to_its_last_tick(record, end: str, why: str) -> None:
    episodes = record(a=TICKS, b=2, end=end)
    with pytest.raises(BadRecording, match=f"'old-agent-a' .*{why}.*--from-tick up to 3") as refused:
        Play(episodes, TICKS)
    assert refused.value.details["tick"] == TICKS
    play = Play(episodes, 3, "old-agent-a", started="ab")
    assert play.ticks("a", b"0", b"1", b"2", b"3") == ["a 0", "a 1", "a 2", "new"]
    play = Play(episodes, 3, "old-agent-a", started="ab")
    assert play.ticks("b", b"0", b"1") == ["b 0", "b 1"]
    with pytest.raises(BadRecording, match=r"'old-agent-b' .* 0 to 1"):
        play.tick("b", b"2")


def test_a_session_with_a_gap_is_played_up_to_it(record) -> None:
    episodes = record(a=TICKS, lost=1)
    assert episodes[0].read().number.tolist() == [0, 2, 3]
    with pytest.raises(BadRecording, match=r"'old-agent-a' .*--from-tick up to 0") as refused:
        Play(episodes, 2)
    assert refused.value.details["tick"] == 1
    assert Play(episodes, 0, started="a").tick("a", b"0") == "new"
    with pytest.raises(BadRecording, match="'old-agent-b'") as refused:
        Play(record(b=TICKS, lost=0), 0, "old-agent-b")
    assert refused.value.details["tick"] == 0
    assert "--from-tick" not in refused.value.message


def test_a_reply_that_the_game_did_not_get_cannot_be_given_again(record) -> None:
    episodes = record(["fallback"], a=TICKS, b=2)
    with pytest.raises(BadRecording, match=r"tick 1 .*'old-agent-b' .*'fallback'"):
        Play(episodes, 2, started="ab")
    play = Play(episodes, 0, "old-agent-a", started="ab")
    assert play.ticks("b", b"0", b"1") == ["b 0", "new"]
