"""`brayx.recording.live_frames`: the newest tick of a followed session is drawn, or why it is not is told."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image

from brayx.actor.agent import State
from brayx.actor.live import NewTicks
from brayx.actor.live_ticks import LiveFrame
from brayx.recording import live_frames
from brayx.recording.drawing import Drawing
from brayx.recording.live_frames import LiveFrames
from tests.processes import ours
from tests.waiting import until


def followed(frames: LiveFrames, number: int, board: Any, event: str = "") -> LiveFrame | None:
    """The newest frame of a session at a tick with this board."""
    state = State("s", tick=number)
    state.board = board
    ticks = [(state, {}, b"", b"", 0.0, 0.0, event)]
    return frames.shown("s", number, NewTicks(ticks, b"", number + 1, "", None)).frame


def test_a_session_that_is_followed_is_drawn_at_its_newest_tick(tmp_path: Path, board: Any) -> None:
    with contextlib.closing(LiveFrames(Drawing("own_renders", "render", str(tmp_path)))) as frames:
        assert followed(frames, 0, board(0)) is None, "nobody waits for it"
        drawn: list[LiveFrame | None] = []
        for number in (3, 4):

            def is_drawn(number: int = number) -> bool:
                # A process that was paused beyond its limit has failed, and draws the same tick once it is restarted.
                drawn.append(followed(frames, number, board(number)))
                return _number(drawn[-1]) == number and not _failure(drawn[-1])

            until(is_drawn, "it is drawn")
            assert drawn[-1] is not None
            np.testing.assert_array_equal(Image.open(io.BytesIO(drawn[-1].png)), np.full((20, 30, 3), number))
        assert _number(followed(frames, 5, lambda: None, "error")) == 4, "a failed tick may lack what is drawn"
        until(lambda: "does not pickle" in _failure(followed(frames, 6, lambda: None)), "it is told")
        assert _number(followed(frames, 0, board(0))) is None, "another session of this id"
    assert not _drawers()


@pytest.mark.parametrize(
    ("function", "why"),
    [
        ("missing", "has no 'missing'"),
        ("wrong", "wrong returned no image"),
        ("hang", "took more than 0.5 s"),
        ("killed", "the process that draws it was killed by SIGKILL"),
    ],
)
def test_a_frame_that_cannot_be_drawn_is_told(
    tmp_path: Path, board: Any, function: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if function == "hang":
        monkeypatch.setattr(live_frames, "_START_S", 0.5)
    name = "hang" if function == "killed" else function
    with contextlib.closing(LiveFrames(Drawing("own_renders", name, str(tmp_path)))) as frames:
        if function == "killed":
            followed(frames, 1, board(1))
            until(_drawers, "it starts")
            _drawers()[0].kill()
        until(lambda: why in _failure(followed(frames, 1, board(1))), "it is told")
    assert not _drawers()


def test_closing_ends_a_frame_that_is_being_drawn(tmp_path: Path, board: Any) -> None:
    frames = LiveFrames(Drawing("own_renders", "hang", str(tmp_path)))
    followed(frames, 1, board(1))
    until(_drawers, "it draws")
    frames.close()
    assert not _drawers()


def _number(frame: LiveFrame | None) -> int | None:
    return None if frame is None else frame.number


def _failure(frame: LiveFrame | None) -> str:
    return "" if frame is None else frame.failure


def _drawers() -> list[psutil.Process]:
    return ours("brayx.recording.live_frames")
