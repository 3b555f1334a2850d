"""`brayx replay --resimulate` of a game of several seats: the replies of each seat, and games of connect four."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import brayx
from brayx.actor.agent import State
from brayx.errors import BadRecording, ConfigError, NotDeterministic
from brayx.gamecore.protocol import game_of
from brayx.jobs.config import JobConfig
from brayx.jobs.shipped import TEMPLATES
from brayx.metrics import Recorder
from brayx.model.build import build_model
from brayx.recording import open as open_recordings
from brayx.recording.config import RecordingConfig
from brayx.recording.copying import copy
from brayx.recording.reader import Recording
from brayx.recording.recorder import SessionRecorder
from brayx.regression.game import RecordedGame
from brayx.regression.resimulate import sessions_of
from brayx.tracking import Trial, register
from brayx.trainer import checkpoint
from brayx.trainer.checkpoint import Counters
from tests.unit.conftest import Run
from tests.waiting import until

WAIT_S = 60.0
START = b"go"
TICKS = 4

# Which replies each seat gets


@pytest.fixture
def record(tmp_path: Path) -> Callable[..., list[Recording]]:
    """Records sessions by agent, each with this number of ticks, except one that is lost: bodies 0, 1, ..., and replies
    AGENT 0, AGENT 1, ..."""

    def actor(events: Sequence[str] = (), end: str = "stop", lost: int = -1, **lengths: int) -> list[Recording]:
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

    return actor


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


# Connect four

FOLDER = TEMPLATES / "league"
GAME = f"python {FOLDER / 'four_game.py'} {{tcp_url}} --games 1"


@dataclass(frozen=True)
class Four:
    """Two versions of a model, and a game that the first one played with itself.

    Attributes:
        folder: has ``recordings``.
        uri: tracking URI.
        name: the game's.
    """

    folder: Path
    uri: str
    name: str


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory, new_tracking_db) -> Four:
    folder = tmp_path_factory.mktemp("four")
    uri = new_tracking_db(folder)
    config = JobConfig.load(FOLDER / "four.yaml", ["network.channels=8", "network.hidden=16"])
    trial = Trial.open("four", "made", uri)
    for number in (1, 2):
        torch.manual_seed(number)
        module, _ = build_model(config.folder, config.models["model"].module, "model", config.as_dict())
        with torch.no_grad():
            for parameter in module.parameters():  # new policies are almost uniform, and so almost equal
                parameter.add_(0.3 * torch.randn(parameter.shape))
        (folder / f"{number}").mkdir()
        about = {"job": config.as_dict(), "folder": config.folder}
        counters = Counters(env_steps=number, policy_version=number)
        checkpoint.save(folder / f"{number}", module, torch.optim.Adam(module.parameters()), counters, about, None)
        register(trial, trial.save_checkpoint(folder / f"{number}", number, {}), "four", alias=None)
    options = {"actor.port": 0, "actor.native_port": None, "actor.tcp_port": 0, "console_port": None}
    options |= {"network.channels": 8, "network.hidden": 16}
    recording = {"recording": {"kind": "recording", "folder": str(folder / "recordings")}}
    models = {"model": "models:/four/1"}
    with brayx.serve(FOLDER / "four.yaml", options | recording, models=models, tracking=uri) as service:
        words = [sys.executable, str(FOLDER / "four_game.py"), service.urls["tcp"], "--games", "1"]
        subprocess.run(words, check=True, timeout=WAIT_S)
    until(lambda: len(open_recordings(str(folder / "recordings"))) == 2, "they are written", WAIT_S)
    return Four(folder, uri, game_of(open_recordings(str(folder / "recordings"))[0].session))


def resimulated(command: Run, game: Four, session: str, *words: object, recordings: str = "recordings") -> Any:
    done = command(
        "replay", str(game.folder / recordings), "--tracking", game.uri, "--session", session, "--json",
        "--resimulate", GAME, *map(str, words),
    )  # fmt: skip
    assert done.returncode == 0
    return json.loads(done.stdout)


def rows(report: Any) -> dict[str, Any]:
    return {row["session"].rpartition("-")[2]: row for row in report["sessions"]}


def test_both_seats_are_played_again_and_then_by_another_version(four: Four, command: Run) -> None:
    same = resimulated(command, four, four.name, "--model", "models:/four/1", "--from-tick", 2)
    assert (same["model"], same["from_tick"]) == ("models:/four/1", 2)
    for row in rows(same).values():
        assert (row["first"], row["ticks"], row["end"]) == (None, row["ticks_before"], "stop")
        assert row["result"] == row["result_before"]
        assert row["player"] == "models:/four/1"
    assert {row["result"] for row in rows(same).values()} == {1.0, -1.0}
    other = resimulated(command, four, four.name, "--model", "models:/four/2", "--from-tick", 2)
    firsts = [row["first"] for row in rows(other).values() if row["first"] is not None]
    assert firsts
    assert min(firsts) >= 2


def test_one_seat_is_played_by_another_version_against_the_recorded_player(
    four: Four, command: Run, tmp_path: Path
) -> None:
    report = resimulated(
        command, four, f"{four.name}-agent-red", "--model", "models:/four/2", "--others", "models:/four/1",
        "--out", tmp_path,
    )  # fmt: skip
    red, yellow = rows(report)["red"], rows(report)["yellow"]
    assert (red["player"], red["first"] is None) == ("models:/four/2", False)
    assert yellow["player"] in ("models:/four/1", "")
    new = {episode.session.rpartition("-")[2]: episode for episode in open_recordings(str(tmp_path))}
    assert (len(new["red"]), new["red"].player, new["red"].result) == (red["ticks"], "models:/four/2", red["result"])
    if yellow["player"]:  # its board differs as soon as red's move does
        assert new["yellow"].read().number.tolist() == list(
            range(yellow["ticks"] - len(new["yellow"]), yellow["ticks"])
        )
        assert new["yellow"].player == "models:/four/1"
    text = command(
        "replay", str(four.folder / "recordings"), "--tracking", four.uri, "--session", f"{four.name}-agent-red",
        "--model", "models:/four/1", "--resimulate", GAME,
    ).stdout.splitlines()  # fmt: skip
    assert text[0] == "the game's inputs were equal up to tick 0; from there on models:/four/1 played"
    assert [line.split()[0] for line in text[2:]] == [f"{four.name}-agent-red", f"{four.name}-agent-yellow"]
    assert text[-1].endswith("its recording")


def test_a_game_with_a_seat_that_is_not_recorded_is_refused(
    four: Four, command: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BRAYX_TRACEBACK", "1")
    red = [episode for episode in open_recordings(str(four.folder / "recordings")) if episode.session.endswith("red")]
    copy(red, str(four.folder / "red"))
    words = ["--model", "models:/four/1", "--from-tick", 1]
    with pytest.raises(BadRecording, match="seat 'yellow'"):
        resimulated(command, four, four.name, *words, recordings="red")
    with pytest.raises(ConfigError, match="--others"):
        resimulated(command, four, four.name, *words, "--others", "random")
    with pytest.raises(ConfigError, match="no player is 'nobody'"):
        resimulated(command, four, f"{four.name}-agent-red", *words, "--others", "nobody")


def test_the_sessions_of_a_game_are_compared_together(four: Four, command: Run) -> None:
    report = brayx.replay_recording(
        str(four.folder / "recordings"), "models:/four/1", tracking=four.uri, session=four.name
    )
    assert [comparison.session for comparison in report.compared] == [
        f"{four.name}-agent-{seat}" for seat in ("red", "yellow")
    ]
    assert np.isfinite(report.total.kl)
