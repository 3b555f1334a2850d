"""The recordings of a job's folder: listed, shown tick by tick, and downloaded."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import IO, Annotated, Any
from urllib.parse import quote

import numpy as np
from fastapi import APIRouter, Path, Query
from fastapi.responses import Response, StreamingResponse
from pydantic import Field
from starlette.types import Receive, Scope, Send

import brayx.recording
from brayx.actor.live_ticks import LiveTick
from brayx.console.documents import MAX_POINTS, Document
from brayx.console.downloads import Downloads, FileFormat, formats_of
from brayx.console.drawn import RecordedDrawing
from brayx.console.games import BoardDocument
from brayx.console.ticks import RecordedCurvesDocument, SessionBodies, TickDocument, body_of, tick_of
from brayx.errors import BadRecording, RecordingUnknown
from brayx.recording import reader
from brayx.recording.columns import ERROR, REFUSED, TickColumns, texts
from brayx.recording.frames import png

_LEFT = ("idle", "disconnect", "lost")
"""Ends of sessions whose game has left without a stop."""
_LISTING_S = 2.0
"""How long a listing of recordings is cached."""
_LOOKED_THROUGH = 20_000
"""Newest recordings among which a query selects."""
_MAX_WHOLE_STEP = 40
"""Maximum distance between drawn ticks at which the whole recording is read."""
_PIECE_BYTES = 1 << 18
_TYPES = {
    ".parquet": "application/vnd.apache.parquet",
    ".mp4": "video/mp4",
    ".rrd": "application/vnd.rerun.rrd",
    ".zip": "application/zip",
}
"""Content type of a downloaded file by its suffix."""

FirstTick = Annotated[int, Query(ge=0, description="index of the first tick")]
TickCount = Annotated[int, Query(ge=1, le=1000, description="number of ticks")]
_Tick = Annotated[int, Path(ge=0, description="index of the tick")]
_Named = Annotated[str, Query(description="only sessions with this id (* stands for any text), or of this game")]
_Limit = Annotated[int, Query(ge=1, le=10_000, description="maximum number of recordings")]
_First = Annotated[int, Query(ge=0, description="number of newer recordings that are left out")]
_PNG: dict[int | str, dict[str, Any]] = {200: {"content": {"image/png": {}}}, 204: {"description": "no frame"}}
_FILE: dict[int | str, dict[str, Any]] = {200: {"content": {kind: {} for kind in _TYPES.values()}}}


class RecordingDocument(Document):
    """A recorded session."""

    id: str
    session: str
    ticks: int
    began_s: float
    end: str
    """Why it ended: ``terminated``, ``truncated``, or the reason for the session's end; empty: it runs."""
    result: float | None
    player: str
    alias: str = ""
    """Alias of the registered version that played it; empty: the weights of a training did."""
    version: int
    """With ``alias`` the registered version, else the number of the weights at its first tick; 0: not known, or the
    model as built."""
    why: str
    """Why it was recorded."""
    events: int
    lost: int
    """Number of ticks that could not be recorded."""
    frames: int
    """Number of ticks with a frame."""
    formats: list[str] = []
    """Formats in which it can be downloaded here."""


class RecordingsQuery(Document):
    """Which recordings are selected; by default all."""

    end: str = Field("", description="only sessions with this end, such as terminated")
    played_by: str = Field(
        "", description="only sessions that began with this player or version: main, main:7, champion 3 or weights 57"
    )
    errors: bool = Field(False, description="only sessions with errors or other unusual events, or without a stop")
    min_return: float | None = Field(None, description="only sessions with at least this return")
    max_return: float | None = Field(None, description="only sessions with at most this return")

    def selects(self, episode: reader.Recording) -> bool:
        """Whether it selects a recording."""
        result = math.nan if episode.result is None else episode.result
        return (
            self.end in ("", episode.end)
            and {part.strip() for part in self.played_by.split(",")} <= {"", *players_of(episode)}
            and not (self.errors and not (episode.events + episode.lost or episode.end in _LEFT))
            and not (self.min_return is not None and not result >= self.min_return)
            and not (self.max_return is not None and not result <= self.max_return)
        )


def players_of(episode: reader.Recording) -> list[str]:
    """Names of who played a recording: its player, and its registered version or the number of its weights."""
    version = f"{episode.alias or 'weights'} {episode.version}"
    return [episode.player, episode.player.partition(":")[0], episode.alias, version]


class RecordingsDocument(Document):
    """Recordings of the job's folder."""

    folder: str
    total: int
    """Number of all recordings."""
    selected: int
    """Number of recordings that match the query."""
    recordings: list[RecordingDocument]
    """A page of the selected recordings, newest first."""
    unreadable: dict[str, str]
    """Files that cannot be read, with the reason."""


class RecordedTicksDocument(Document):
    """Consecutive ticks of a recording."""

    recording: RecordingDocument
    start: Any
    """Body of the session's start: JSON, or else text."""
    start_reply: Any
    """Reply to it; null: an older recording, which lacks it."""
    labels: dict[str, list[str]] = {}
    action_labels: list[str] = []
    """``labels`` and ``action_labels``: as of `SessionBodies`."""
    stop: Any = None
    """Body of the session's stop, with its first or its last ticks; null: it had none, or was not stopped."""
    cause: str = ""
    """The error or refusal in the session's last tick, with its first or its last ticks; empty: there was none."""
    first: int
    ticks: list[TickDocument]
    draws_frames: bool = False
    """Whether the job draws a frame of each tick, also of those recorded without one."""
    draws_boards: bool = False
    """Whether the job draws a board of each tick."""


class RecordingFolder:
    """A folder of recordings, whose listing is cached for a moment. Thread safe.

    Args:
        path: the folder; empty: there is none.

    Attributes:
        path: as the argument.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._opened: tuple[float, reader.Recordings] | None = None

    def listing(self, age_s: float = _LISTING_S) -> reader.Recordings | None:
        """Its recordings, as they were at most ``age_s`` ago; None: nothing has been recorded yet."""
        if not self.path:
            return None
        with self._lock:
            if self._opened is None or time.monotonic() - self._opened[0] > age_s:
                try:
                    self._opened = (time.monotonic(), brayx.recording.open(self.path))
                except BadRecording:
                    return None
            return self._opened[1]

    def episode(self, recording: str) -> reader.Recording:
        """A recording by its id.

        Raises:
            RecordingUnknown: there is none.
        """
        for age_s in (_LISTING_S, 0.0):  # a recording that is new since the listing was cached
            listing = self.listing(age_s)
            if listing is not None and (episode := listing.find(recording)) is not None:
                return episode
        raise RecordingUnknown(f"there is no recording {recording!r} in {self.path or 'this job'}")


def routes(folder: RecordingFolder, drawing: RecordedDrawing) -> APIRouter:
    """The API's calls about recordings."""
    router = APIRouter(prefix="/api/recordings", tags=["recordings"])
    downloads = Downloads()

    @router.get("")
    def recordings(
        query: Annotated[RecordingsQuery, Query()], session: _Named = "", limit: _Limit = 200, first: _First = 0
    ) -> RecordingsDocument:
        """The newest recordings, a page of them at a time."""
        listing = folder.listing()
        if listing is None:
            return RecordingsDocument(folder=folder.path, total=0, selected=0, recordings=[], unreadable={})
        if query == RecordingsQuery():
            newest, selected = listing.newest(first + limit, session)
        else:
            named, _ = listing.newest(_LOOKED_THROUGH, session)
            newest = [episode for episode in named if query.selects(episode)]
            selected = len(newest)
        page = newest[first : first + limit]
        return RecordingsDocument(
            folder=folder.path,
            total=len(listing),
            selected=selected,
            recordings=[_recording(episode) for episode in page],
            unreadable=listing.unreadable,
        )

    @router.get("/{recording}")
    def ticks(recording: str, first: FirstTick = 0, count: TickCount = 100) -> RecordedTicksDocument:
        """Consecutive ticks of a recording."""
        drawn = {"draws_frames": drawing.has_frames, "draws_boards": drawing.has_boards}
        return _ticks(folder.episode(recording), first, count).model_copy(update=drawn)

    @router.get("/{recording}/curves")
    def curves(recording: str) -> RecordedCurvesDocument:
        """Curves over all ticks of a recording."""
        return _curves(folder.episode(recording))

    @router.get("/{recording}/frames/{tick}", response_class=Response, responses=_PNG)
    def frame(recording: str, tick: _Tick) -> Response:
        """The frame of a tick, recorded or else drawn now by the job's `render`; 204: there is none."""
        episode = folder.episode(recording)
        image = episode.image(tick)
        content = drawing.frame(episode, tick) if image is None else png(image)
        return Response(status_code=204) if content is None else Response(content, media_type="image/png")

    @router.get("/{recording}/boards/{tick}")
    def board(recording: str, tick: _Tick) -> BoardDocument | None:
        """The board of a tick, drawn by the job's `kind: board`; null: the job draws none."""
        return drawing.board(folder.episode(recording), tick)

    @router.get("/{recording}/file", response_class=StreamingResponse, responses=_FILE)
    def file(recording: str, format: FileFormat = "parquet") -> Response:
        """The session as a file, by the exporter of `brayx recordings export`. If the format has several files, such as
        a Minari dataset, or a long or filmed session in Parquet, it is a zip archive.
        """
        name, size, content = downloads.make(folder.episode(recording), format)
        plain = name.encode("ascii", "replace").decode().replace("?", "_")  # for programs that do not know `filename*`
        named = f"attachment; filename=\"{plain}\"; filename*=UTF-8''{quote(name)}"
        headers = {"Content-Disposition": named, "Content-Length": str(size)}
        return _FileResponse(content, headers, _TYPES[PurePath(name).suffix])

    return router


def _recording(episode: reader.Recording) -> RecordingDocument:
    return RecordingDocument(
        id=episode.id,
        session=episode.session,
        ticks=len(episode),
        began_s=episode.began,
        end=episode.end,
        result=episode.result,
        player=episode.player,
        alias=episode.alias,
        version=episode.version,
        why=episode.why,
        events=episode.events,
        lost=episode.lost,
        frames=episode.frames,
        formats=formats_of(episode),
    )


def _ticks(episode: reader.Recording, first: int, count: int) -> RecordedTicksDocument:
    columns = episode.read(first, count)
    inputs, outputs = texts(columns.input), texts(columns.output)
    ticks = [
        LiveTick(
            int(columns.number[row]),
            columns.time_us[row] / 1e6,
            columns.duration_us[row] / 1e6,
            inputs[row],
            outputs[row],
            {name: array[row] for name, array in columns.arrays.items()},
            columns.event[row],
        )
        for row in range(len(columns.number))
    ]
    start = _body(episode.start)
    bodies = SessionBodies(start)
    return RecordedTicksDocument(
        recording=_recording(episode),
        start=start,
        start_reply=_body(episode.start_reply),
        first=first,
        ticks=[tick_of(tick, bodies) for tick in ticks],
        labels=bodies.labels,
        action_labels=bodies.action_labels,
        **_end(episode, bodies, first, columns),
    )


def _body(text: str) -> Any:
    return body_of(text.encode(errors="surrogateescape"))


def _end(episode: reader.Recording, bodies: SessionBodies, first: int, columns: TickColumns) -> dict[str, Any]:
    """``stop`` and ``cause``, from a window's ticks if it has the last one; empty: that cannot be read."""
    is_last = first + len(columns.number) == len(episode)
    if not episode.end or (first and not is_last):
        return {}
    try:
        last = columns if is_last else episode.read(len(episode) - 1, names=[])
    except BadRecording:
        return {}
    event = last.event[-1]
    return {"stop": bodies.stop(last.stop[-1]), "cause": event if ERROR in event or REFUSED in event else ""}


def _curves(episode: reader.Recording) -> RecordedCurvesDocument:
    step = -(-len(episode) // MAX_POINTS)
    if step <= _MAX_WHOLE_STEP:
        columns = episode.read()
        numbers = columns.number[::step].tolist()
        arrays = {name: array[::step] for name, array in columns.arrays.items()}
        inputs = texts(columns.input)[::step]
    else:  # of a long recording, read only the ticks that are drawn
        parts = [episode.read(first, 1) for first in range(0, len(episode), step)]
        numbers = np.concatenate([part.number for part in parts]).tolist()
        inputs = [text for part in parts for text in texts(part.input)]
        arrays = {name: np.concatenate([part.arrays[name] for part in parts]) for name in parts[0].arrays}
    bodies = SessionBodies(_body(episode.start))
    curves = {
        name: array.astype(float).tolist()
        for name, array in (arrays | labelled(arrays, bodies.labels)).items()
        if array.ndim == 1 and array.dtype.kind in "biuf" and np.isfinite(array).all()
    }
    if "reward" not in curves:
        last = episode.read(len(episode) - 1, names=[])
        stops = [stop for stop in map(bodies.stop, last.stop) if _rewards([stop])]
        if rewards := _rewards([*map(bodies.tick, inputs), *stops]):
            curves["reward"] = rewards
            numbers += [int(last.number[-1]) + 1 for _ in stops]
    return RecordedCurvesDocument(ticks=numbers, curves=curves)


def labelled(arrays: Mapping[str, np.ndarray], labels: Mapping[str, Sequence[str]]) -> dict[str, np.ndarray]:
    """The columns of labelled observations ``[N, values]`` by their labels, after the observation's name where another
    array has the same."""
    columns = {
        (path, label): array[:, i]
        for path, array in arrays.items()
        if array.ndim == 2 and array.shape[1] == len(named := labels.get(path.rpartition("/")[2], ()))
        for i, label in enumerate(named)
    }
    taken = Counter([*arrays, *(label for _, label in columns)])
    return {f"{path} {label}" if taken[label] > 1 else label: array for (path, label), array in columns.items()}


def _rewards(bodies: Sequence[Any]) -> list[float]:
    """The field ``reward`` of the games' bodies, 0 where a body has none; empty: no body has one."""
    rewards = [body.get("reward") if isinstance(body, dict) else None for body in bodies]
    numbers = [
        float(reward) if isinstance(reward, int | float) and abs(reward) <= sys.float_info.max else None
        for reward in rewards
    ]  # no float holds a larger int, and no NaN is below it
    return [number or 0.0 for number in numbers] if any(number is not None for number in numbers) else []


class _FileResponse(StreamingResponse):
    """Sends an open file, and closes it also if the viewer goes before the end."""

    def __init__(self, file: IO[bytes], headers: dict[str, str], media_type: str) -> None:
        super().__init__(iter(lambda: file.read(_PIECE_BYTES), b""), headers=headers, media_type=media_type)
        self._file = file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._file:
            await super().__call__(scope, receive, send)
