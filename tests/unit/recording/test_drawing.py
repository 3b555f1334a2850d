"""`brayx.recording.drawing`: a function draws each tick, and ticks that it cannot draw are recorded as well."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from brayx.actor.agent import State
from brayx.jobs.shipped import TEMPLATES
from brayx.metrics import Recorder
from brayx.recording import open as open_recordings
from brayx.recording.config import RecordingConfig
from brayx.recording.drawing import Drawing
from brayx.recording.group import PACK_TICKS
from brayx.recording.recorder import SessionRecorder
from brayx.types import Step
from tests.unit.recording.pictures import drawn, is_close


def lost_to_slowness(metrics: Recorder) -> float:
    """Frames that were not drawn in time, as when the process is paused; no other may be lost."""
    summary = metrics.summary()
    assert "recording_frames_lost.error" not in summary
    return summary.get("recording_frames_lost.slow", 0)


def test_a_render_draws_each_tick_in_the_writers_process(tmp_path: Path, board: Any) -> None:
    metrics = Recorder()
    boards = [None if number == 4 else board(number) for number in range(PACK_TICKS + 6)]
    episode = drawn(tmp_path, "render", boards, metrics)
    frames = list(episode.images())
    assert frames[4] is None
    assert all(is_close(frame, np.full((20, 30, 3), n)) for n, frame in enumerate(frames) if frame is not None)
    assert sum(frame is None for frame in frames) == 1 + lost_to_slowness(metrics)


@pytest.mark.parametrize(("function", "why"), [("wrong", "error"), ("missing", "error"), ("slow", "slow")])
def test_ticks_are_recorded_also_if_they_cannot_be_drawn(
    tmp_path: Path, board: Any, function: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = Recorder()
    episode = drawn(tmp_path, function, [board(number) for number in range(PACK_TICKS)], metrics)
    assert episode.frames < PACK_TICKS
    assert metrics.summary()[f"recording_frames_lost.{why}"] == PACK_TICKS - episode.frames
    if why == "error":
        assert "cannot draw frames of recordings" in caplog.text
        assert episode.frames == 0


def test_a_render_that_draws_one_picture_of_all_ticks_gets_one_at_a_time(tmp_path: Path, board: Any) -> None:
    metrics = Recorder()
    episode = drawn(tmp_path, "single", [board(number) for number in range(20)], metrics)
    shades = {number: int(frame.mean()) for number, frame in enumerate(episode.images()) if frame is not None}
    assert shades == pytest.approx({number: number for number in shades}, abs=2)
    assert len(shades) == 20 - lost_to_slowness(metrics)


def test_states_that_do_not_pickle_are_recorded_without_frames(tmp_path: Path, board: Any) -> None:
    metrics = Recorder()
    assert drawn(tmp_path, "render", [lambda: None] * 3, metrics).frames == 0
    assert metrics.summary()["recording_frames_lost.error"] == 3


def test_the_shipped_render_draws_frames(tmp_path: Path) -> None:
    drawing = Drawing("gym_render", "each_tick", str(TEMPLATES))
    recorder = SessionRecorder(RecordingConfig(folder=str(tmp_path), frames="render"), Recorder(), drawing=drawing)
    log = recorder.open("drawn", b"")
    assert log is not None
    for number in range(10):
        state = State("drawn", tick=number)
        state.step, state.value = Step(np.full(4, number / 5, np.float32), np.asarray(number % 2), 0.0, 1), 1.0
        log.tick(state, b"", b"", 0.0, 0.0)
    log.end("stop", None)
    recorder.close(60.0)
    (episode,) = open_recordings(str(tmp_path))
    assert (len(episode), episode.frames) == (10, 10 - lost_to_slowness(recorder.metrics))
    first, last = episode.image(0), episode.image(7)  # eight are drawn in one call, which is always made
    assert first is not None
    assert last is not None
    assert (first[90, 10] != last[90, 10]).any(), "the action"
    assert (last[20, 10] != first[20, 10]).any(), "the observation"
