"""`brayx.recording.frames`: from an agent's image through the writer's process into a video."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import brayx.clock as clock
import brayx.recording
from brayx.actor.agent import State
from brayx.errors import BadRecording, ConfigError
from brayx.metrics import Recorder
from brayx.recording import frames as h264
from brayx.recording import open as open_recordings
from brayx.recording import writer
from brayx.recording.frames import Encoders
from brayx.recording.group import PACK_TICKS
from brayx.recording.index import SessionPart
from brayx.recording.packer import ChunkPacker
from brayx.recording.process import WriterProcess
from brayx.recording.recorder import SessionRecorder
from brayx.recording.writer import Folder
from brayx.types import Step
from tests.unit.recording.pictures import config, image, is_close, play, ticks, write
from tests.waiting import until


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


def test_an_encoder_that_was_closed_for_others_goes_on_with_a_keyframe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(h264, "_MOST_OPEN", 2)
    encoders, frames = Encoders(), []
    for number in range(3):
        for session in "abc":
            frames += encoders.encode("video", session, number, [image(number)])
    assert all(frame is not None and frame.is_key for frame in frames)


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
    # Ticks may be missing: the recorder restarts a writer that it finds dead before the last ones.
    numbers_read = episode.read().number.tolist()
    assert all(is_close(frame, image(n)) for n, frame in zip(numbers_read, episode.images(), strict=True))


def test_without_av_the_recorder_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'brayx\[video\]'"):
        SessionRecorder(config(tmp_path), Recorder())
