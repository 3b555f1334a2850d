"""Pictures that can be told apart after H.264, and sessions and chunks that have them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from brayx.actor.agent import State
from brayx.metrics import Recorder
from brayx.recording import open as open_recordings
from brayx.recording.config import RecordingConfig
from brayx.recording.drawing import Drawing
from brayx.recording.index import SessionPart
from brayx.recording.packer import ChunkPacker
from brayx.recording.recorder import SessionRecorder
from brayx.recording.writer import Folder
from tests.recorded import Tick, columns_of

CLOSE = 4.0
"""Mean difference of a grey image from what H.264 kept of it."""


def image(number: int, height: int = 48, width: int = 64) -> np.ndarray:
    """A grey picture of blocks that moves to the right; each number has another."""
    blocks = np.random.default_rng(0).integers(0, 255, (height // 8 + 1, width // 8 + 1), np.uint8)
    grey = np.roll(blocks.repeat(8, 0).repeat(8, 1)[:height, :width], number, 1)
    return np.ascontiguousarray(np.broadcast_to(grey[:, :, None], (height, width, 3)))


def is_close(frame: np.ndarray | None, expected: np.ndarray) -> bool:
    return frame is not None and frame.shape == expected.shape and difference(frame, expected) < CLOSE


def difference(frame: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(frame.astype(int) - expected).mean())


def config(folder: Path, **options: Any) -> RecordingConfig:
    return RecordingConfig(folder=str(folder), **{"frames": "screen", **options})


def play(recorder: SessionRecorder, session: str, images: Sequence[Any]) -> None:
    log = recorder.open(session, b"")
    assert log is not None
    for number, screen in enumerate(images):
        state = State(session, tick=number)
        state.score = float(number)
        if screen is not None:
            state.screen = screen
        log.tick(state, b"x", b"y", 0.0, 0.0)
    log.end("stop", None)


def drawn(folder: Path, function: str, states: Sequence[Any], metrics: Recorder) -> Any:
    """The episode of a session with these boards; None: a tick that failed before its agent set one."""
    drawing = Drawing("own_renders", function, str(folder))
    recorder = SessionRecorder(config(folder / function, frames="a render"), metrics, drawing=drawing)
    log = recorder.open("s", b"")
    assert log is not None
    for number, board in enumerate(states):
        state = State("s", tick=number)
        if board is None:
            log.event("error")
        else:
            state.board = board
        log.tick(state, b"x", b"y", 0.0, 0.0)
    log.end("stop", None)
    recorder.close(60.0)
    (episode,) = open_recordings(str(folder / function))
    assert len(episode) == len(states)
    return episode


def ticks(count: int, first: int = 0) -> Any:
    columns = columns_of([Tick(first + index, 0.0, 0.0, b"x", b"", {}) for index in range(count)])
    columns.frames = [image(first + index) for index in range(count)]
    return columns


def write(folder: Folder, chunks: int, session: str = "s") -> None:
    """Chunks of four ticks of a session."""
    for chunk in range(chunks):
        packer = ChunkPacker(lambda: folder, flush_s=60.0)
        packer.add([SessionPart(session, session, 0.0, 4 * chunk, 4)], ticks(4, 4 * chunk))
        packer.close()
