"""Writes recordings as files for Rerun's viewer, one for each session. Needs rerun-sdk, the extra ``rerun``.

Each array that the agents set is an entity: numbers and short vectors are curves, images are images, other arrays are
tensors. ``input`` and ``output`` are texts, events are a log, and frames are a video, or one for each size. The
timelines are ``tick`` and ``time``, which counts from the session's start.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from brayx.errors import ConfigError
from brayx.recording.columns import TickColumns, texts
from brayx.recording.copying import file_name
from brayx.recording.frames import Frame

if TYPE_CHECKING:
    from brayx.recording.reader import Recording

_BLOCK = 4096
"""Ticks that are read and written at once."""
_FACTS = ("player", "end", "why", "start", "start_reply", "result")
_CURVES = 64
"""Maximum length of a vector that is shown as curves."""


def write_rerun(episodes: Iterable[Recording], out: Path) -> tuple[int, int]:
    """Writes ``SESSION-ID.rrd`` for each episode; ``rerun OUT/*.rrd`` opens them.

    Args:
        episodes: recorded sessions.
        out: the folder; created if it is missing.

    Returns:
        The numbers of sessions and ticks.

    Raises:
        ConfigError: rerun-sdk is missing, or there is no episode.
        BadRecording: a file is broken.
    """
    try:
        import rerun as rr
    except ImportError as error:
        raise ConfigError("Rerun's files need rerun-sdk: pip install 'brayx[rerun]'") from error
    out.mkdir(parents=True, exist_ok=True)
    sessions = ticks = 0
    for episode in episodes:
        stream = rr.RecordingStream("brayx", recording_id=episode.id, send_properties=False)
        stream.save(out / f"{file_name(episode)}.rrd")
        stream.set_log_time_enabled(False)  # a timeline of the export's own times
        stream.send_recording_name(episode.session)
        stream.send_recording_start_time_nanos(round(episode.began * 1e9))
        facts = {name: getattr(episode, name) for name in _FACTS if getattr(episode, name) not in ("", None)}
        if facts:  # Rerun has no empty values
            stream.send_property("session", rr.AnyValues(**facts))
        videos: dict[tuple[int, int], str] = {}
        for first in range(0, len(episode), _BLOCK):
            columns = episode.read(first, _BLOCK)
            _write(rr, stream, columns)
            if episode.frames:
                _write_frames(rr, stream, columns, episode.encoded(first, _BLOCK), videos)
        stream.disconnect()  # once everything is written
        sessions, ticks = sessions + 1, ticks + len(episode)
    if not sessions:
        raise ConfigError("no recorded session is selected", path=str(out))
    return sessions, ticks


def _index(rr: Any, ticks: TickColumns, rows: slice | list[int]) -> list[Any]:
    return [
        rr.TimeColumn("tick", sequence=ticks.number[rows]),
        rr.TimeColumn("time", duration=ticks.time_us[rows] / 1e6),
    ]


def _write(rr: Any, stream: Any, ticks: TickColumns) -> None:
    every = _index(rr, ticks, slice(None))
    for name in ("input", "output"):
        bodies = [body.decode(errors="replace") for body in texts(getattr(ticks, name))]
        stream.send_columns(name, indexes=every, columns=rr.TextDocument.columns(text=bodies))
    events = [row for row, event in enumerate(ticks.event) if event]
    if events:
        columns = rr.TextLog.columns(text=[ticks.event[row] for row in events])
        stream.send_columns("event", indexes=_index(rr, ticks, events), columns=columns)
    images = {}
    for name, array in ticks.arrays.items():
        if array.ndim == 1 or (array.ndim == 2 and array.shape[1] <= _CURVES):
            stream.send_columns(name, indexes=every, columns=rr.Scalars.columns(scalars=array.astype(np.float64)))
        else:
            images[name] = array
    if not images:
        return
    for row, (number, time_us) in enumerate(zip(ticks.number.tolist(), ticks.time_us.tolist(), strict=True)):
        stream.set_time("tick", sequence=number)
        stream.set_time("time", duration=time_us / 1e6)
        for name, array in images.items():
            shown = array[row].view(np.uint8) if array.dtype == np.bool_ else array[row]  # there are no bool tensors
            stream.log(name, rr.Image(shown) if _is_image(array) else rr.Tensor(shown))
    stream.reset_time()


def _write_frames(
    rr: Any, stream: Any, ticks: TickColumns, frames: Sequence[Frame | None], videos: dict[tuple[int, int], str]
) -> None:
    """Writes the frames as they are stored, since Rerun plays H.264.

    Args:
        videos: entities of the session's videos so far, by height and width: one video has one size. Gets new ones.
    """
    rows: dict[tuple[int, int], list[int]] = {}
    for row, frame in enumerate(frames):
        if frame is not None:
            rows.setdefault(frame.size, []).append(row)
    for size, shown in rows.items():
        name = videos.setdefault(size, "frames/{}x{}".format(*size) if videos else "frames")
        stream.log(name, rr.VideoStream(codec=rr.VideoCodec.H264), static=True)
        columns = rr.VideoStream.columns(sample=[frame.data for row in shown if (frame := frames[row]) is not None])
        stream.send_columns(name, indexes=_index(rr, ticks, shown), columns=columns)


def _is_image(array: np.ndarray) -> bool:
    """Whether an array ``[N, ...]`` holds grey or coloured images."""
    return array.dtype == np.uint8 and (array.ndim == 3 or (array.ndim == 4 and array.shape[3] in (1, 3, 4)))
