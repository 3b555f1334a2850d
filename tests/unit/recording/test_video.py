"""`brayx.recording.video`: each frame comes back; a broken or another chunk's video is refused."""

from __future__ import annotations

import contextlib
import io
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from brayx.errors import BadRecording
from brayx.recording import frames as h264
from brayx.recording import open as open_recordings
from brayx.recording.frames import Encoders, sizes_of, write_video
from brayx.recording.video import Video
from brayx.recording.writer import Folder
from tests.unit.recording.pictures import CLOSE, difference, image, is_close, write


def video_of(images: Sequence[Any]) -> tuple[io.BytesIO, list[tuple[int, int]]]:
    frames = Encoders().encode("video", "session", 0, images)
    file = io.BytesIO()
    write_video(file, frames, 30)
    return file, sizes_of(frames)


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
