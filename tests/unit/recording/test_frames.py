"""Frames of ticks: from an agent's image through the writer's process into a video, and back by tick."""

from __future__ import annotations

import contextlib
import importlib
import io
import itertools
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image

import brayx.clock as clock
import brayx.recording
from brayx.actor.agent import State
from brayx.actor.live import NewTicks
from brayx.actor.live_ticks import LiveFrame
from brayx.commands import cli
from brayx.errors import BadRecording, ConfigError
from brayx.jobs.shipped import TEMPLATES
from brayx.metrics import Recorder
from brayx.recording import frames as h264
from brayx.recording import live_frames, writer
from brayx.recording import open as open_recordings
from brayx.recording.config import RecordingConfig
from brayx.recording.copying import copy
from brayx.recording.drawing import Drawing
from brayx.recording.frames import Encoders, sizes_of, write_video
from brayx.recording.group import PACK_TICKS
from brayx.recording.index import SessionPart
from brayx.recording.live_frames import LiveFrames
from brayx.recording.packer import ChunkPacker
from brayx.recording.process import WriterProcess
from brayx.recording.recorder import SessionRecorder
from brayx.recording.video import Video
from brayx.recording.writer import Folder
from brayx.types import Step
from tests.processes import ours
from tests.recorded import Tick, columns_of
from tests.waiting import until

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


def video_of(images: Sequence[Any]) -> tuple[io.BytesIO, list[tuple[int, int]]]:
    frames = Encoders().encode("video", "session", 0, images)
    file = io.BytesIO()
    write_video(file, frames, 30)
    return file, sizes_of(frames)


def test_each_ticks_image_comes_back_and_is_not_kept_twice(tmp_path: Path) -> None:
    recorder = SessionRecorder(config(tmp_path), Recorder())
    play(recorder, "all", [image(number) for number in range(2 * PACK_TICKS + 3)])
    play(recorder, "some", [image(number) if number % 5 else None for number in range(20)])
    play(recorder, "none", [None] * 3)
    play(recorder, "one", [image(7)])
    recorder.close(60.0)
    every, some, none, single = open_recordings(str(tmp_path))
    assert (every.columns, every.left_out) == (["score"], {"screen": "it is recorded as frames"})
    assert (every.frames, some.frames, none.frames, single.frames) == (2 * PACK_TICKS + 3, 16, 0, 1)
    assert all(is_close(frame, image(number)) for number, frame in enumerate(every.images()))
    order = list(range(len(every)))
    random.Random(0).shuffle(order)
    assert all(is_close(every.image(number), image(number)) for number in order)
    assert [frame is None for frame in some.images()] == [number % 5 == 0 for number in range(20)]
    assert is_close(some.image(19), image(19))
    assert [frame is None for frame in some.images(4, 3)] == [False, True, False]
    assert list(none.images()) == [None] * 3
    assert "no image 'screen'" in none.left_out["frames"]
    assert is_close(single.image(0), image(7))
    for tick in (-1, len(every)):
        with pytest.raises(BadRecording, match=f"has no tick {tick}"):
            every.image(tick)


def test_the_image_may_be_a_part_of_the_observation(tmp_path: Path) -> None:
    recorder = SessionRecorder(config(tmp_path, frames="obs/eye/0"), Recorder())
    log = recorder.open("s", b"")
    assert log is not None
    for number in range(5):
        state = State("s", tick=number)
        obs = {"eye": [image(number), np.zeros(2, np.float32)], "speed": np.float32(number)}
        state.step = Step(obs, np.asarray(1), -0.5, 3)  # type: ignore[arg-type]
        log.tick(state, b"x", b"y", 0.0, 0.0)
    log.end("stop", None)
    recorder.close(60.0)
    (episode,) = open_recordings(str(tmp_path))
    assert {"obs/eye/1", "obs/speed"} <= set(episode.columns)
    assert "obs/eye/0" not in episode.columns
    assert is_close(episode.image(4), image(4))
    with pytest.raises(BadRecording, match=r"'obs/eye/0' .*frames"):
        episode["obs/eye/0"]
    with pytest.raises(ConfigError, match=r"'obs/eye/0' .*frames"):
        list(brayx.recording.dataset(tmp_path))
    (fragment,) = brayx.recording.dataset(tmp_path, fields={"obs": "obs/speed", "reward": "obs/speed"})
    assert fragment.obs.tolist() == [0, 1, 2, 3, 4]


def test_what_is_no_image_stays_an_array_and_a_wrong_one_is_a_lost_frame(tmp_path: Path) -> None:
    metrics = Recorder()
    recorder = SessionRecorder(config(tmp_path), metrics)
    play(recorder, "numbers", [np.zeros(4, np.float32)] * 3)
    play(recorder, "mixed", [image(0), np.zeros(4, np.float32), image(2)])
    recorder.close(60.0)
    numbers, mixed = open_recordings(str(tmp_path))
    assert numbers["screen"].shape == (3, 4)
    assert "no image 'screen'" in numbers.left_out["frames"]
    assert [frame is None for frame in mixed.images()] == [False, True, False]
    assert metrics.summary()["recording_frames_lost.error"] == 1


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (17, 16), (84, 84, 1), (30, 31, 4), (2, 300, 3)])
def test_odd_sizes_and_other_channels_come_back_in_their_size(shape: tuple[int, ...]) -> None:
    picture = np.full(shape, 100, np.uint8)
    file, sizes = video_of([picture] * 2)
    frame = Video(file, "video", sizes, 30).image(1)
    assert frame is not None
    assert frame.shape == (*shape[:2], 3)
    assert difference(frame, np.full(frame.shape, 100)) < CLOSE


def test_sizes_may_change_and_frames_of_too_many_sizes_are_counted() -> None:
    images = [image(number, 20 + number // 3 % 2 * 11, 32) for number in range(40)]
    file, sizes = video_of(images)
    assert sizes == [(20, 32), (31, 32)]
    video = Video(file, "video", sizes, 30)
    for index in [*range(40), 39, 0, 17, 3, 4, 5, 30]:
        assert is_close(video.image(index), images[index])
    encoders = Encoders()
    encoded = encoders.encode("video", "s", 0, [image(0, 16, 16 + extra) for extra in range(h264.MAX_SIZES + 2)])
    assert encoders.lost == sum(frame is None for frame in encoded) == 2
    encoders.cut("video")
    assert encoders.encode("video", "s", 0, [image(0, 99, 99)])[0] is not None


def test_an_encoder_that_was_closed_for_others_goes_on_with_a_keyframe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(h264, "_MOST_OPEN", 2)
    encoders, frames = Encoders(), []
    for number in range(3):
        for session in "abc":
            frames += encoders.encode("video", session, number, [image(number)])
    assert all(frame is not None and frame.is_key for frame in frames)


def test_frames_of_a_video_can_be_copied_without_decoding_them() -> None:
    images = [image(number) if number % 7 else None for number in range(60)]
    file, sizes = video_of(images)
    video = Video(file, "video", sizes, 30)
    file = io.BytesIO()
    write_video(file, video.frames(0, 60), 30)
    copied = Video(file, "copy", sizes, 30)
    for index in range(60):
        frame, other = video.image(index), copied.image(index)
        assert (frame is None and other is None) or np.array_equal(frame, other)  # type: ignore[arg-type]


def test_frames_count_toward_the_memory_and_go_before_ticks_do(tmp_path: Path) -> None:
    metrics = Recorder()
    recorder = SessionRecorder(config(tmp_path, memory_mb=1.0), metrics)
    picture = np.zeros((200, 200, 3), np.uint8)  # 120 kB: five fill the part of the memory for frames
    play(recorder, "s", [picture] * 200)
    assert recorder.taken - recorder.freed <= recorder.memory_bytes
    recorder.close(60.0)
    (episode,) = open_recordings(str(tmp_path))
    assert (len(episode), episode.lost) == (200, 0)
    assert episode.frames < 200
    assert metrics.summary()["recording_frames_lost.memory"] == 200 - episode.frames
    assert recorder.taken == recorder.freed


@pytest.mark.parametrize(
    "name",
    [
        "obs/eye/0",
        "screen",
        *(pytest.param(name, marks=pytest.mark.cluster) for name in ("obs/left/0", "seen", "deep/1/x")),
    ],
)
def test_a_tick_without_room_for_its_frame_keeps_all_else(tmp_path: Path, name: str) -> None:
    columns_of_memory = {}
    for memory_mb in (64.0, 1.0):
        metrics = Recorder()
        recorder = SessionRecorder(config(tmp_path / str(memory_mb), frames=name, memory_mb=memory_mb), metrics)
        log = recorder.open("s", b"")
        assert log is not None
        for number in range(3 * PACK_TICKS):
            state, shown = State("s", tick=number), image(number, 100, 200)
            obs = {"eye": [shown, np.zeros(2, np.float32)], "left": (shown[:50],), "speed": np.float32(number)}
            state.step = Step(obs, np.asarray(number), -0.5, 3, {"seen": shown})  # type: ignore[arg-type]
            state.screen, state.deep = shown, ({"x": np.zeros(1)}, {"x": shown, "y": np.ones(3)})
            log.tick(state, b"x", b"y", 0.0, 0.0)
            assert state.screen is shown
        log.end("stop", None)
        recorder.close(60.0)
        (episode,) = open_recordings(str(tmp_path / str(memory_mb)))
        assert name not in episode.columns
        columns_of_memory[memory_mb] = {
            column: episode[column] for column in episode.columns if episode[column].nbytes < 10**5
        }
        lost = {key: value for key, value in metrics.summary().items() if key.startswith("recording_frames_lost")}
        assert len(episode) == episode.frames + sum(lost.values()) == 3 * PACK_TICKS
        assert ("recording_frames_lost.memory" in lost) == (memory_mb == 1.0)
    assert {"obs/speed", "action"} <= set(columns_of_memory[1.0])
    assert all(
        np.array_equal(columns_of_memory[1.0][column], values) for column, values in columns_of_memory[64.0].items()
    )


RENDERS = """
import time
import numpy as np

class Board:  # unpickles only once this module is loaded
    def __init__(self, shade):
        self.shade = shade

def render(episode):
    return [np.full((20, 30, 3), state.board.shade, np.uint8) for state in episode]

def single(episode):
    return np.full((20, 30, 3), episode[-1].board.shade, np.uint8)

def slow(episode):
    time.sleep(0.3)
    return render(episode)

def hang(episode):
    time.sleep(1000.0)

def wrong(episode):
    return [7]
"""


@pytest.fixture
def board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A class of a module beside the job's YAML, which other processes find only by its folder."""
    (tmp_path / "own_renders.py").write_text(RENDERS)
    monkeypatch.syspath_prepend(str(tmp_path))
    board_class = importlib.import_module("own_renders").Board
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(tmp_path)])
    yield board_class
    del sys.modules["own_renders"]


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


def test_a_render_draws_each_tick_in_the_writers_process(tmp_path: Path, board: Any) -> None:
    metrics = Recorder()
    boards = [None if number == 4 else board(number) for number in range(PACK_TICKS + 6)]
    episode = drawn(tmp_path, "render", boards, metrics)
    for number, frame in enumerate(episode.images()):
        assert (frame is None) == (number == 4)
        assert frame is None or is_close(frame, np.full((20, 30, 3), number))
    assert "recording_frames_lost.error" not in metrics.summary()


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
    episode = drawn(tmp_path, "single", [board(number) for number in range(20)], Recorder())
    assert [int(frame.mean()) for frame in episode.images()] == pytest.approx(range(20), abs=2)


def test_states_that_do_not_pickle_are_recorded_without_frames(tmp_path: Path, board: Any) -> None:
    metrics = Recorder()
    assert drawn(tmp_path, "render", [lambda: None] * 3, metrics).frames == 0
    assert metrics.summary()["recording_frames_lost.error"] == 3


def followed(frames: LiveFrames, number: int, board: Any, event: str = "") -> LiveFrame | None:
    """The newest frame of a session at a tick with this board."""
    state = State("s", tick=number)
    state.board = board
    ticks = [(state, {}, b"", b"", 0.0, 0.0, event)]
    return frames.shown("s", number, NewTicks(ticks, number + 1, "", None)).frame


def test_a_session_that_is_followed_is_drawn_at_its_newest_tick(tmp_path: Path, board: Any) -> None:
    with contextlib.closing(LiveFrames(Drawing("own_renders", "render", str(tmp_path)))) as frames:
        assert followed(frames, 0, board(0)) is None, "nobody waits for it"
        drawn: list[LiveFrame | None] = []
        for number in (3, 4):
            until(
                lambda n=number: drawn.append(followed(frames, n, board(n))) or _number(drawn[-1]) == n, "it is drawn"
            )
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


def test_videos_count_toward_the_folder_and_go_with_their_chunks(tmp_path: Path) -> None:
    write(Folder(str(tmp_path), 10**9), 6)
    size = sum(path.stat().st_size for path in tmp_path.glob("*.*[t4]"))
    ours, other = Folder(str(tmp_path), size // 2), Folder(str(tmp_path), size // 2)
    assert ours.trim() == 3
    assert other.trim() == 0
    left = {path.stem for path in tmp_path.glob("*.parquet")}
    assert {path.stem for path in tmp_path.glob("*.mp4")} == left
    write(ours, 1, "one")
    write(other, 1, "other")
    assert {episode.session for episode in open_recordings(str(tmp_path))} == {"s", "one", "other"}
    for episode in open_recordings(str(tmp_path)):
        assert episode.image(len(episode) - 1) is not None


def test_a_video_without_a_chunk_is_deleted_once_it_is_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(Folder(str(tmp_path), 10**9), 2)
    first, second = sorted(tmp_path.glob("*.parquet"))
    first.unlink()
    (tmp_path / "own.mp4").write_bytes(b"a user's")
    Folder(str(tmp_path), 10**9).trim()
    assert len(list(tmp_path.glob("*.mp4"))) == 3
    monkeypatch.setattr(writer, "_ABANDONED_S", -1.0)
    Folder(str(tmp_path), 10**9).trim()
    assert {path.stem for path in tmp_path.glob("*.mp4")} == {second.stem, "own"}


def test_a_failed_write_leaves_nothing_and_the_frames_go_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError("no space left")

    packer = ChunkPacker(lambda: Folder(str(tmp_path), 10**9), flush_s=0.0)
    packer.add([SessionPart("s", "s", 0.0, 0, 4)], ticks(4))
    with monkeypatch.context() as patched:
        patched.setattr(writer, "write_video", full)
        packer.write_due()
    assert "no space left" in packer.failure
    assert list(tmp_path.iterdir()) == []
    packer.add([SessionPart("s", "s", 0.0, 4, 4)], ticks(4, 4))
    packer.close()
    (episode,) = open_recordings(str(tmp_path))
    assert all(is_close(frame, image(number)) for number, frame in enumerate(episode.images()))
    assert len(episode) == 8


def test_a_killed_writer_leaves_videos_that_can_be_read(tmp_path: Path) -> None:
    writer = WriterProcess(str(tmp_path), 10**9, 0.1)
    recorder = SessionRecorder(config(tmp_path, flush_s=0.1), Recorder(), writer)
    log = recorder.open("s", b"")
    assert log is not None
    numbers = itertools.count()

    def played() -> bool:
        state = State("s", tick=next(numbers))
        state.screen = image(state.tick)
        log.tick(state, b"x", b"y", clock.now(), clock.now())
        time.sleep(0.02)
        return len(list(tmp_path.glob("[!.]*.parquet"))) >= 2

    until(played, "two files are written", 60.0)
    os.kill(writer.pid, signal.SIGKILL)
    log.end("stop", None)
    recorder.close(60.0)
    recordings = open_recordings(str(tmp_path))
    (episode,) = recordings
    assert episode.frames == len(episode) > 0
    assert recordings.table()["frames"].tolist() == [episode.frames]
    assert all(is_close(frame, image(number)) for number, frame in enumerate(episode.images()))


def test_broken_videos_are_typed_errors_and_ticks_stay_readable(tmp_path: Path) -> None:
    write(Folder(str(tmp_path), 10**9), 1)
    (path,) = tmp_path.glob("*.mp4")
    whole = path.read_bytes()
    rng = random.Random(1)
    broken = [b"", b"no video", whole[: len(whole) // 2], whole[:-40], bytes(len(whole))]
    for _ in range(100):
        changed = bytearray(whole)
        for _ in range(rng.randint(1, 30)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        broken.append(bytes(changed))
    for data in broken:
        path.write_bytes(data)
        (episode,) = open_recordings(str(tmp_path))
        assert episode.inputs() == [b"x"] * 4
        for tick in (3, 0, 1):
            with contextlib.suppress(BadRecording):
                frame = episode.image(tick)
                assert frame is None or frame.shape == (48, 64, 3)
    for data in broken[:3]:
        path.write_bytes(data)
        (episode,) = open_recordings(str(tmp_path))
        with pytest.raises(BadRecording, match="is not a video of a recording"):
            episode.image(0)
    path.unlink()
    (episode,) = open_recordings(str(tmp_path))
    with pytest.raises(BadRecording, match="cannot be read"):
        episode.image(0)


def test_threads_share_a_video(tmp_path: Path) -> None:
    write(Folder(str(tmp_path), 10**9), 10)
    (episode,) = open_recordings(str(tmp_path))
    order = random.Random(2).choices(range(len(episode)), k=200)
    with ThreadPoolExecutor(4) as pool:
        for number, frame in zip(order, pool.map(episode.image, order), strict=True):
            assert is_close(frame, image(number))


def test_another_chunks_video_is_refused(tmp_path: Path) -> None:
    write(Folder(str(tmp_path), 10**9), 1)
    (path,) = tmp_path.glob("*.mp4")
    for other in ([image(0, 50, 64)], [image(0), image(0, 20, 20)], [image(0)]):
        path.write_bytes(video_of(other)[0].getvalue())
        (episode,) = open_recordings(str(tmp_path))
        if len(other) == 1 and other[0].shape == (48, 64, 3):
            assert episode.image(3) is None
        else:
            with pytest.raises(BadRecording, match="is not a video of a recording"):
                episode.image(0)


def test_without_av_the_recorder_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'brayx\[video\]'"):
        SessionRecorder(config(tmp_path), Recorder())


def test_sessions_are_copied_with_their_frames(tmp_path: Path) -> None:
    recorder = SessionRecorder(config(tmp_path / "from", fps=12), Recorder())
    for session in "abc":
        play(recorder, session, [image(number) if number % 9 else None for number in range(PACK_TICKS + 9)])
    recorder.close(60.0)
    a, b, c = open_recordings(str(tmp_path / "from"))
    target = str(tmp_path / "to")
    assert copy([a, c, a], target) == (2, 2 * len(a))
    assert copy([a, b, c], target, without=[a.id, c.id]) == (1, len(b))
    copied = {episode.session: episode for episode in open_recordings(target)}
    for episode in (a, b, c):
        other = copied[episode.session]
        assert (other.fps, other.frames, other.left_out) == (12, episode.frames, episode.left_out)
        assert other.inputs() == episode.inputs()
        assert np.array_equal(other["score"], episode["score"])
        for frame, two in zip(episode.images(), other.images(), strict=True):
            assert (frame is None and two is None) or np.array_equal(frame, two)  # type: ignore[arg-type]


def test_a_session_over_several_files_becomes_one_video(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(Folder(str(tmp_path / "from"), 10**9), 5)
    words = ["recordings", "export", str(tmp_path / "from"), "--format", "mp4", "--out", str(tmp_path / "to")]
    assert cli.main(words) == 0
    assert capsys.readouterr().out == f"1 sessions of 20 frames: {tmp_path / 'to'}\n"
    video = Video((tmp_path / "to" / "s-s.mp4").open("rb"), "s", [(48, 64)], 30)
    assert all(is_close(video.image(number), image(number)) for number in range(20))
    assert video.image(20) is None
    video.close()
    recorder = SessionRecorder(config(tmp_path / "none"), Recorder())
    play(recorder, "s", [None])
    recorder.close(60.0)
    words[2] = str(tmp_path / "none")
    assert cli.main(words) == 2
    assert "no selected session has frames" in capsys.readouterr().err
    with pytest.raises(BadRecording, match="has no frames"):
        open_recordings(str(tmp_path / "none"))[0].save_video(tmp_path / "x.mp4")
    assert not (tmp_path / "x.mp4").exists()


@pytest.mark.filterwarnings("error")  # Rerun leaves out what it cannot write, and warns
def test_rerun_plays_the_frames(tmp_path: Path) -> None:
    pytest.importorskip("rerun", reason="the extra `rerun` is not installed")
    from rerun.chunk import RrdReader

    write(Folder(str(tmp_path / "from"), 10**9), 2)
    words = ["recordings", "export", str(tmp_path / "from"), "--format", "rerun", "--out", str(tmp_path / "to")]
    assert cli.main(words) == 0
    (file,) = (tmp_path / "to").iterdir()
    rows = [chunk.to_record_batch().to_pydict() for chunk in RrdReader(file).stream() if chunk.entity_path == "/frames"]
    ticks = [tick for row in rows for tick in row.get("tick", [])]
    assert ticks == list(range(8))


def test_rerun_gets_a_video_for_each_size(tmp_path: Path) -> None:
    pytest.importorskip("rerun", reason="the extra `rerun` is not installed")
    from rerun.chunk import RrdReader

    recorder = SessionRecorder(config(tmp_path / "from"), Recorder())
    sizes = [(48, 64), (48, 64), (32, 40), (48, 64)]
    play(recorder, "s", [image(number, *size) for number, size in enumerate(sizes)])
    recorder.close(60.0)
    words = ["recordings", "export", str(tmp_path / "from"), "--format", "rerun", "--out", str(tmp_path / "to")]
    assert cli.main(words) == 0
    (file,) = (tmp_path / "to").iterdir()
    ticks_of: dict[str, list[int]] = {}
    for chunk in RrdReader(file).stream():
        if chunk.entity_path.startswith("/frames"):
            ticks_of.setdefault(chunk.entity_path, []).extend(chunk.to_record_batch().to_pydict().get("tick", []))
    assert ticks_of == {"/frames": [0, 1, 3], "/frames/32x40": [2]}


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
    assert (len(episode), episode.frames) == (10, 10)
    assert "recording_frames_lost.error" not in recorder.metrics.summary()
    first, last = episode.image(0), episode.image(9)
    assert first is not None
    assert last is not None
    assert (first[90, 10] != last[90, 10]).any(), "the action"
    assert (last[20, 10] != first[20, 10]).any(), "the observation"
