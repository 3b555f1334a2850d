"""Encodes images as H.264 frames, and writes the frames of consecutive ticks as an MP4. Also encodes PNGs.

H.264 needs PyAV, the extra ``video``. Knows nothing of sessions or files. `brayx.recording.video` reads the MP4.
"""

from __future__ import annotations

import importlib.util
import io
import math
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from fractions import Fraction
from typing import IO, Any, NamedTuple

import numpy as np

from brayx.errors import ConfigError

MAX_SIDE = 4096
"""Maximum height and width of a frame."""
MAX_SIZES = 16
"""Maximum number of frame sizes in one MP4; frames of further sizes are lost."""
_GROUP = 16
"""Frames from one keyframe to the next: showing any frame decodes at most this many."""
_OPTIONS = {"preset": "veryfast", "tune": "zerolatency", "crf": "18"}
_MOST_PIXELS = 2**24
"""Maximum pixels of all open encoders together, one frame each: an encoder takes about ten bytes for a pixel."""
_MOST_OPEN = 64


class Frame(NamedTuple):
    """An encoded frame.

    Attributes:
        data: H.264 as Annex B; a keyframe begins with its parameter sets.
        is_key: whether it can be decoded without the frames before it.
        size: height and width of the image. The coded frame has even sides, so it may be larger by one.
    """

    data: bytes
    is_key: bool
    size: tuple[int, int]


def check_video() -> None:
    """Raises a `ConfigError` if PyAV is missing."""
    if importlib.util.find_spec("av") is None:
        raise ConfigError("frames in recordings need the package av: pip install 'brayx[video]'", key="frames")


def is_image(value: Any) -> bool:
    """Whether a value can be a frame: uint8 ``[height, width]``, or ``[height, width, C]`` with C of 1, 3 or 4."""
    return (
        isinstance(value, np.ndarray)
        and value.dtype == np.uint8
        and (value.ndim == 2 or (value.ndim == 3 and value.shape[2] in (1, 3, 4)))
        and min(value.shape[:2]) > 0
        and max(value.shape[:2]) <= MAX_SIDE
    )


def png(image: np.ndarray) -> bytes:
    """An image for which `is_image` holds, as a PNG."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image[:, :, 0] if image.shape[2:] == (1,) else image).save(file, "PNG", compress_level=1)
    return file.getvalue()


class _Encoder(NamedTuple):
    context: Any
    size: tuple[int, int]


class Encoders:
    """Encodes the frames of many sessions, each as its own stream.

    The encoders that were used last stay open; a session whose encoder was closed continues with a keyframe.

    Attributes:
        lost: number of images that could not be encoded.
    """

    def __init__(self) -> None:
        self.lost = 0
        self._open: OrderedDict[tuple[Hashable, str], _Encoder] = OrderedDict()
        self._next: dict[tuple[Hashable, str], int] = {}
        self._sizes: dict[Hashable, set[tuple[int, int]]] = {}

    def encode(self, video: Hashable, session: str, first: int, images: Sequence[Any]) -> list[Frame | None]:
        """The next frames of a session.

        Args:
            video: the MP4 that they will be in, until `cut`.
            session: id of the session.
            first: number of its earlier ticks; after a gap the next frame is a keyframe.
            images: for each tick an image for which `is_image` holds, an encoded frame, which is kept as it is, or
                None; anything else is lost.
        """
        if self._next.get((video, session)) != first:
            self._open.pop((video, session), None)
        self._next[video, session] = first + len(images)
        return [None if image is None else self._encoded(video, session, image) for image in images]

    def cut(self, video: Hashable) -> None:
        """Ends an MP4: in the next one, all sessions begin with a keyframe."""
        self._sizes.pop(video, None)
        for table in (self._open, self._next):
            for key in [key for key in table if key[0] == video]:
                del table[key]

    def _encoded(self, video: Hashable, session: str, image: Any) -> Frame | None:
        import av

        if isinstance(image, Frame):
            return image
        sizes = self._sizes.setdefault(video, set())
        if not is_image(image) or (len(sizes) == MAX_SIZES and image.shape[:2] not in sizes):
            self.lost += 1
            return None
        size = (int(image.shape[0]), int(image.shape[1]))
        try:
            picture = av.VideoFrame.from_ndarray(_even(image), format="rgb24")
            (packet,) = self._encoder((video, session), size, picture).encode(picture)
        except (av.error.FFmpegError, ValueError):
            self._open.pop((video, session), None)
            self.lost += 1
            return None
        sizes.add(size)
        return Frame(bytes(packet), packet.is_keyframe, size)

    def _encoder(self, key: tuple[Hashable, str], size: tuple[int, int], like: Any) -> Any:
        import av

        encoder = self._open.pop(key, None)
        if encoder is None or encoder.size != size:
            context = av.CodecContext.create("libx264", "w")
            context.height, context.width, context.pix_fmt = like.height, like.width, "yuv420p"
            context.time_base, context.gop_size, context.thread_count = Fraction(1, 30), _GROUP, 1
            context.options = _OPTIONS
            encoder = _Encoder(context, size)
        self._open[key] = encoder  # the most recently used comes last
        while len(self._open) > 1 and (
            len(self._open) > _MOST_OPEN
            or sum(math.prod(open_encoder.size) for open_encoder in self._open.values()) > _MOST_PIXELS
        ):
            self._open.popitem(last=False)
        return encoder.context


def _even(image: np.ndarray) -> np.ndarray:
    """RGB with even sides, since H.264 halves the resolution of colours. An odd side repeats its last line."""
    if image.ndim == 2 or image.shape[2] == 1:
        image = np.broadcast_to(image.reshape(*image.shape[:2], 1), (*image.shape[:2], 3))
    height, width = image.shape[:2]
    return np.ascontiguousarray(np.pad(image[:, :, :3], ((0, height % 2), (0, width % 2), (0, 0)), "edge"))


def sizes_of(frames: Sequence[Frame | None]) -> list[tuple[int, int]]:
    """Heights and widths of the tracks that `write_video` writes for these frames."""
    return list(dict.fromkeys(frame.size for frame in frames if frame is not None))[:MAX_SIZES]


def write_video(to: IO[bytes], frames: Sequence[Frame | None], fps: int) -> None:
    """Writes an MP4 in which frame ``frames[i]`` is shown from ``i / fps`` seconds on.

    Each frame size has its own track. If a tick has no frame, the one before is shown for longer.

    Args:
        to: a file that can seek.
        frames: at least one, each stream of which begins with a keyframe; None: no frame.
        fps: frames per second.
    """
    import av

    step = Fraction(1, fps)
    # Timestamps are shifted by the first frame's, in units of the whole movie's: by default milliseconds.
    with av.open(to, "w", format="mp4", options={"movie_timescale": str(1000 * fps)}) as out:
        tracks = {}
        for size in sizes_of(frames):
            key = next(frame for frame in frames if frame is not None and frame.size == size)
            with av.open(io.BytesIO(key.data), format="h264") as source:
                track = out.add_stream_from_template(source.streams.video[0])
            track.time_base = step
            tracks[size] = track
        for index, frame in enumerate(frames):
            if frame is None or frame.size not in tracks:
                continue
            packet = av.Packet(frame.data)
            packet.pts = packet.dts = index
            packet.time_base, packet.is_keyframe, packet.stream = step, frame.is_key, tracks[frame.size]
            out.mux(packet)
