"""Sessions of one agent, whose ticks become columns together: none may change what is recorded of another."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from brayx.actor.agent import State
from brayx.metrics import Recorder
from brayx.recording import open as open_recordings
from brayx.recording.config import RecordingConfig
from brayx.recording.group import PACK_TICKS
from brayx.recording.index import FIELDS, SessionPart
from brayx.recording.reader import Recording
from brayx.recording.recorder import SessionRecorder
from brayx.recording.session import RecordedSession
from tests.waiting import until


class Sessions:
    """A recorder with sessions that play in turn; each tick's observation says whose it is."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.metrics = Recorder()
        self.recorder = SessionRecorder(RecordingConfig(folder=str(folder), **options), self.metrics)
        self.logs: dict[str, RecordedSession] = {}
        self._folder = folder

    def open(self, *names: str) -> None:
        for name in names:
            log = self.recorder.open(name, name.encode(), "")
            assert log is not None
            self.logs[name] = log

    def tick(self, name: str, number: int, **attributes: Any) -> None:
        state = State(name, tick=number)
        state.obs = np.array([ord(name[-1]), number], np.float32)
        vars(state).update(attributes)
        self.logs[name].tick(state, b"%s asks %d" % (name.encode(), number), b"%d" % number, 0.0, 0.0)

    def recorded(self) -> dict[str, Recording]:
        self.recorder.close(60.0)
        assert self.recorder.taken == self.recorder.freed
        return {episode.session: episode for episode in open_recordings(str(self._folder))}


def check(episode: Recording, ticks: int) -> None:
    assert episode.read().number.tolist() == list(range(ticks))
    assert episode["obs"].tolist() == [[ord(episode.session[-1]), number] for number in range(ticks)]
    assert episode.inputs() == [b"%s asks %d" % (episode.session.encode(), number) for number in range(ticks)]
    assert episode.outputs() == [b"%d" % number for number in range(ticks)]
    assert episode.lost == 0


@pytest.mark.parametrize("sessions", [1, 3, 40])
def test_sessions_that_play_in_turn_come_back_each_by_itself(tmp_path: Path, sessions: int) -> None:
    playing, ticks = Sessions(tmp_path), 2 * PACK_TICKS // sessions + 30
    names = [f"game-{chr(65 + index)}" for index in range(sessions)]
    playing.open(*names)
    for number in range(ticks):
        for name in names:
            playing.tick(name, number)
    for name in reversed(names):
        playing.logs[name].stop(b"stop of " + name.encode(), "")
        playing.logs[name].end("stop", float(ord(name[-1])))
    episodes = playing.recorded()
    assert set(episodes) == set(names)
    for name, episode in episodes.items():
        check(episode, ticks)
        assert (episode.start, episode.end, episode.result) == (name, "stop", float(ord(name[-1])))
        assert [stop for stop in episode.read().stop if stop] == [b"stop of " + name.encode()]


@pytest.mark.parametrize("odd", ["shape", "name", "nesting", "forward", "object"])
def test_a_session_that_differs_costs_the_others_no_column(tmp_path: Path, odd: str) -> None:
    sessions, ticks = Sessions(tmp_path), PACK_TICKS
    sessions.open("a", "b", "c")
    for number in range(ticks):
        for name in "abc":
            more: dict[str, Any] = {"x": np.full(2, number), "y": {"z": np.float32(number)}}
            if name == "b" and odd == "shape":
                more["x"] = np.full(3, number)
            if name == "b" and odd == "name":
                more["own"] = more.pop("x")
            if name == "b" and odd == "nesting":
                more["y"] = np.float32(number)
            if name == "b" and odd == "object":
                more["x"] = object()
            if name == "b" and odd == "forward":
                sessions.logs[name].forward("model", ({"logits": np.zeros(2, np.float32)}, 3), 0.0)  # type: ignore[arg-type]
            sessions.tick(name, number, **more)
    for log in sessions.logs.values():
        log.end("stop", None)
    episodes = sessions.recorded()
    for name in "abc":
        check(episodes[name], ticks)
    for name in "ac":
        assert episodes[name]["x"].tolist() == [[number] * 2 for number in range(ticks)]
        assert episodes[name]["y/z"].tolist() == list(range(ticks))
        assert episodes[name].left_out == {}
    odd_column = {"shape": "x", "name": "own", "nesting": "y", "forward": "logits", "object": "y/z"}[odd]
    assert len(episodes["b"][odd_column]) == ticks


def test_a_session_that_cannot_be_recorded_costs_the_others_nothing(tmp_path: Path) -> None:
    class Hostile:
        def __array__(self, *_: Any, **__: Any) -> Any:
            raise RuntimeError("no array")

    sessions = Sessions(tmp_path)
    sessions.open("a", "b")
    for number in range(PACK_TICKS):
        sessions.tick("a", number)
        sessions.tick("b", number, x=Hostile())
    for log in sessions.logs.values():
        log.end("stop", None)
    episodes = sessions.recorded()
    check(episodes["a"], PACK_TICKS)
    assert sessions.metrics.summary()["recording_lost.error"] == PACK_TICKS
    assert "b" not in episodes


def test_a_session_that_stands_still_is_written_with_the_others(tmp_path: Path) -> None:
    sessions = Sessions(tmp_path)
    sessions.open("a", "b")
    for number in range(3):
        sessions.tick("a", number)
    for number in range(PACK_TICKS):
        sessions.tick("b", number)
    assert sessions.recorder.open("c", b"") is not None
    sessions.recorder.close(60.0)
    episodes = {episode.session: episode for episode in open_recordings(str(tmp_path))}
    assert episodes["a"].read().number.tolist() == [0, 1], "the newest tick waits: it may be the last"


def test_the_ticks_of_a_slow_session_are_written_while_it_plays(tmp_path: Path) -> None:
    sessions = Sessions(tmp_path, flush_s=0.05)
    sessions.open("a")
    for number in range(3):
        sessions.tick("a", number)
        time.sleep(0.1)
    until(lambda: [len(episode) for episode in open_recordings(str(tmp_path))] == [2])
    sessions.recorder.close(60.0)


def test_agents_have_groups_of_their_own_and_these_end_with_their_sessions(tmp_path: Path) -> None:
    sessions = Sessions(tmp_path)
    sessions.open("g-agent-a", "h-agent-a", "g-agent-b", "lone")
    assert set(sessions.recorder._groups) == {"a", "b", ""}
    for name in list(sessions.logs):
        sessions.tick(name, 0)
        sessions.logs.pop(name).end("stop", None)
    assert set(sessions.recorder._groups) == set()
    assert len(sessions.recorded()) == 4


def test_the_row_of_a_part_has_the_fields_of_a_part(tmp_path: Path) -> None:
    sessions = Sessions(tmp_path)
    sessions.open("a")
    sessions.tick("a", 0)
    log = sessions.logs["a"]
    log.reported("win")
    row = log.part(log.take(last=True), "stop", 2.0)
    part = SessionPart(*row)
    assert [field.name for field in dataclasses.fields(part)] == FIELDS
    assert (part.session, part.ticks, part.start, part.why, part.end) == ("a", 1, "a", "every", "stop")
    assert (part.result, part.reported, part.left_out, part.row, part.frames) == (2.0, "win", {}, 0, 0)
