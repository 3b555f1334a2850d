"""Reads the frames of ticks from an MP4, one by one. Needs PyAV, the extra ``video``.

`brayx.recording.frames` writes the MP4. Knows nothing of sessions or ticks.
"""

from __future__ import annotations

import bisect
import contextlib
import threading
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import IO, Any

import numpy as np

from brayx.errors import BadRecording, first_line
from brayx.recording.frames import Frame, check_video

_MAX_FRAMES = 2**22


class Video:
    """An MP4 from `write_video`, open for reading. Thread safe.

    Args:
        file: an open file; `close` closes it.
        name: the file's name in errors.
        sizes: height and width of each track's images.
        fps: frames per second.

    Raises:
        BadRecording: the file is not such a video, or is broken; also raised by `image` and `frames`.
        ConfigError: PyAV is missing.
    """

    def __init__(self, file: IO[bytes], name: str, sizes: Sequence[tuple[int, int]], fps: int) -> None:
        check_video()
        import av

        self._file, self._name = file, name
        # FFmpeg's contexts break if two threads use them at once.
        self._lock = threading.Lock()
        with self._translated():
            self._container = av.open(file, format="mp4")
            streams = self._container.streams.video
            if len(streams) != len(sizes):
                raise ValueError(f"it has {len(streams)} tracks, expected {len(sizes)}")
            self._tracks = [
                _Track(self._container, stream, size, fps) for stream, size in zip(streams, sizes, strict=True)
            ]

    def image(self, index: int) -> np.ndarray | None:
        """Frame ``at``, ``[height, width, 3]`` uint8; None: there is none."""
        with self._translated():
            for track in self._tracks:
                if index in track.known:
                    for other in self._tracks:
                        if other is not track:
                            other.reset()  # the tracks share the file's position
                    return track.image(index)
        return None

    def frames(self, first: int, count: int) -> list[Frame | None]:
        """Frames ``first`` to ``first + count``, still encoded, as `write_video` takes them."""
        frames: list[Frame | None] = [None] * count
        with self._translated():
            for track in self._tracks:
                track.reset()
                for index, frame in track.packets(first):
                    if index >= first + count:
                        break
                    if index >= first:
                        frames[index - first] = frame
        return frames

    def close(self) -> None:
        """Closes the file."""
        with self._lock:
            self._container.close()
            self._file.close()

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """Holds the lock, and turns exceptions into `BadRecording`."""
        with self._lock:
            try:
                yield
            except Exception as error:  # on a hostile file, FFmpeg raises almost any
                what = f"{type(error).__name__}: {first_line(error)[:200]}"
                raise BadRecording(f"{self._name} is not a video of a recording: {what}", file=self._name) from None


class _Track:
    """A track of an open MP4, with the frames of one size."""

    def __init__(self, container: Any, stream: Any, size: tuple[int, int], fps: int) -> None:
        self._container, self._stream, self._size = container, stream, size
        stream.thread_type, stream.codec_context.thread_count = "NONE", 1
        self._per_unit: Fraction = stream.time_base * fps
        if len(stream.index_entries) > _MAX_FRAMES:
            raise ValueError(f"a track has {len(stream.index_entries)} frames")
        entries = list(stream.index_entries)
        self.known = {self._frame_at(entry.timestamp): entry.timestamp for entry in entries}
        self._keys = sorted(self._frame_at(entry.timestamp) for entry in entries if entry.is_keyframe)
        self._decoding: Iterator[Any] = iter(())
        self._last = -1
        self._shape = tuple(side + side % 2 for side in size)
        context = stream.codec_context
        if context.name != "h264" or (context.height, context.width) != self._shape:
            raise ValueError(f"a track is {context.name} of {context.width}x{context.height}")

    def reset(self) -> None:
        """Ends sequential decoding: the next image is decoded from its keyframe on."""
        self._decoding, self._last = iter(()), -1

    def image(self, index: int) -> np.ndarray:
        key = self._keyframe(index)
        if not key <= self._last < index:  # else continue decoding
            self._seek(key)
            self._decoding = self._container.decode(self._stream)
        self._last = -1  # in case decoding fails
        for decoded in self._decoding:
            shown = self._frame_at(decoded.pts)
            if shown >= index:
                break
        else:
            raise ValueError(f"it ends before frame {index}")
        if shown != index or (decoded.height, decoded.width) != self._shape:
            raise ValueError(f"frame {index} is missing, or of another size")
        self._last = index
        image: np.ndarray = decoded.to_ndarray(format="rgb24")
        return np.ascontiguousarray(image[: self._size[0], : self._size[1]])

    def packets(self, first: int) -> Iterator[tuple[int, Frame]]:
        """The frames from the keyframe at or before ``first`` on, still encoded."""
        import av

        later = [index for index in self.known if index >= first]
        if not later:
            return
        self._seek(self._keyframe(min(later)))
        annex_b = av.BitStreamFilterContext("h264_mp4toannexb", self._stream)
        for packet in self._container.demux(self._stream):
            for filtered in annex_b.filter(packet) if packet.size else ():
                if filtered.pts is not None:
                    yield self._frame_at(filtered.pts), Frame(bytes(filtered), filtered.is_keyframe, self._size)

    def _frame_at(self, timestamp: int) -> int:
        """Index of the frame with this timestamp."""
        return round(timestamp * self._per_unit)

    def _keyframe(self, index: int) -> int:
        """Index of the last keyframe at or before a frame."""
        key = bisect.bisect_right(self._keys, index)
        if not key:
            raise ValueError(f"frame {index} has no keyframe before it")
        return self._keys[key - 1]

    def _seek(self, key: int) -> None:
        self._container.seek(self.known[key], stream=self._stream, backward=True)
