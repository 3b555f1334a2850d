"""Reads recordings: `open` lists a folder's episodes; an episode reads its ticks on demand."""

from __future__ import annotations

import bisect
import itertools
import operator
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, TypeVar, overload
from weakref import WeakValueDictionary

import numpy as np

from brayx.errors import BadRecording, first_line
from brayx.recording import index
from brayx.recording.addresses import files_of
from brayx.recording.chunks import Chunk
from brayx.recording.columns import TickColumns, concatenated, texts
from brayx.recording.config import is_named
from brayx.recording.frames import Frame, write_video
from brayx.recording.index import Entry, Parts, SessionPart, part_at
from brayx.recording.video import Video
from brayx.recording.writer import SUFFIX, video_of

if TYPE_CHECKING:
    import pandas as pd

T = TypeVar("T")

_MAX_OPEN = 32
_MAX_VIDEOS = 8


def open(address: str) -> Recordings:
    """Opens recordings: a folder, or one chunk, by its path or fsspec address.

    Raises:
        BadRecording: there is no such folder or file, it cannot be reached, or the file is not a chunk.
    """
    files, path = files_of(str(address))
    try:
        if files.isfile(path):
            alone = Recordings(files, [path])
            if alone.unreadable:
                raise BadRecording(alone.unreadable[path], file=path)
            return alone
        if not files.isdir(path):
            raise BadRecording(f"there is no recording at {address}", file=str(address))
        listed = {PurePosixPath(str(entry["name"])).name: entry for entry in files.ls(path, detail=True)}
    except BadRecording:
        raise
    except Exception as error:  # such as a host that does not answer; cloud stores raise their own exceptions
        raise BadRecording(
            f"recordings at {address} cannot be listed: {first_line(error)}", file=str(address)
        ) from error
    known: dict[str, Entry] = {}
    for name in sorted(name for name in listed if name.endswith(index.SUFFIX) and not name.startswith(".")):
        try:
            entries = index.read(files.cat_file(listed[name]["name"]))
        except Exception:  # such as a file that was just deleted; the chunks hold the same
            continue
        for chunk, entry in entries.items():
            if chunk in listed and listed[chunk]["size"] == entry.size:
                known[str(listed[chunk]["name"])] = entry
    chunks = sorted(name for name in listed if name.endswith(SUFFIX) and not name.startswith("."))
    return Recordings(files, [str(listed[name]["name"]) for name in chunks], known)


class Recordings(Sequence["Recording"]):
    """Episodes, in the order in which their first ticks were written. Thread safe.

    Args:
        files: the file system.
        paths: the chunks, oldest first.
        known: entries of the folder's index, by path; other chunks are opened.

    Attributes:
        unreadable: by path, why a chunk cannot be read, or why some of its ticks are left out.
    """

    def __init__(self, files: Any, paths: Sequence[str], known: Mapping[str, Entry] | None = None) -> None:
        self._files = files
        self._lock = threading.Lock()
        self._open: dict[str, Chunk] = {}
        self._videos: dict[str, Video] = {}
        self.unreadable: dict[str, str] = {}
        self._chunks: list[tuple[str, tuple[str, ...], Parts]] = []
        ids: list[str] = []
        self._firsts: list[int] = []
        for path in paths:
            entry = known.get(path) if known else None
            try:
                if entry is None:
                    chunk = self.chunk(path)
                    columns, parts = tuple(chunk.columns), chunk.parts
                else:
                    _, columns, parts = entry
            except BadRecording as error:
                self.unreadable[path] = error.message
                continue
            self._chunks.append((path, columns, parts))
            self._firsts.append(len(ids))
            ids += parts["episode"]
        # Parts are numbered across all chunks and sorted by episode, in arrays: a folder may have a million episodes.
        self._numbers: dict[str, int] = defaultdict(itertools.count().__next__)
        numbers = np.fromiter(map(self._numbers.__getitem__, ids), np.int64, len(ids))
        self._parts = np.argsort(numbers, kind="stable")
        if len(self._numbers) < len(ids):
            self._parts = self._without_repeats(numbers)
        self._ends = np.cumsum(np.bincount(numbers[self._parts]))
        self._made: WeakValueDictionary[int, Recording] = WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._numbers)

    def __repr__(self) -> str:
        return f"<Recordings: {len(self)} episodes, {len(self.unreadable)} files that cannot be read>"

    @overload
    def __getitem__(self, number: int) -> Recording: ...
    @overload
    def __getitem__(self, number: slice) -> list[Recording]: ...
    def __getitem__(self, number: int | slice) -> Recording | list[Recording]:
        numbers = range(len(self))[number]
        return self._episode(numbers) if isinstance(numbers, int) else [self._episode(number) for number in numbers]

    def __iter__(self) -> Iterator[Recording]:
        return map(self._episode, range(len(self)))

    def _without_repeats(self, numbers: np.ndarray) -> np.ndarray:
        """The parts by episode and tick, without those whose ticks another file has, too: somebody copied a file.

        Args:
            numbers: number of each part's episode.
        """
        first, ticks = (
            np.array(list(itertools.chain.from_iterable(_of_each(parts, name) for *_, parts in self._chunks)))
            for name in ("first", "ticks")
        )
        order = np.lexsort((first, numbers))
        ends, same = (first + ticks)[order], np.diff(numbers[order]) == 0
        if not (same & (first[order][1:] < ends[:-1])).any():
            return order
        without_repeats: list[int] = []
        for part in order.tolist():
            before = without_repeats[-1] if without_repeats else part
            if part != before and numbers[part] == numbers[before] and first[part] < first[before] + ticks[before]:
                (path, *_), _ = self._located(part)
                self.unreadable[path] = f"{path} has ticks of sessions that another file has: is it a copy?"
            else:
                without_repeats.append(part)
        return np.array(without_repeats)

    def _episode(self, number: int) -> Recording:
        """An episode, created on access: a folder may have a million."""
        recording = self._made.get(number)
        if recording is None:
            pieces = []
            for part in self._parts[self._first_of(number) : self._ends[number]].tolist():
                (path, columns, parts), row = self._located(part)
                pieces.append(_Piece(path, columns, part_at(parts, row)))
            recording = self._made[number] = Recording(self, pieces)
        return recording

    def newest(self, limit: int, name: str = "") -> tuple[list[Recording], int]:
        """The newest episodes, newest first, and the number of all episodes that ``name`` selects.

        Args:
            limit: maximum number of episodes.
            name: the session's id, which may have ``*``, or the game; empty: any.
        """
        numbers: Sequence[int] = range(len(self) - 1, -1, -1)
        if name:
            numbers = [number for number in numbers if is_named(self._session(number), name)]
        return [self._episode(number) for number in numbers[:limit]], len(numbers)

    def _session(self, number: int) -> str:
        """The session of an episode, without creating the episode."""
        (*_, parts), row = self._located(int(self._parts[self._first_of(number)]))
        sessions: list[str] = parts["session"]
        return sessions[row % len(sessions)]

    def _first_of(self, number: int) -> int:
        """Place in `_parts` of an episode's first part; ``_ends`` has the place after its last."""
        return int(self._ends[number - 1]) if number else 0

    def _located(self, part: int) -> tuple[tuple[str, tuple[str, ...], Parts], int]:
        """The chunk of a part, and the part's index in it."""
        chunk = bisect.bisect_right(self._firsts, part) - 1
        return self._chunks[chunk], part - self._firsts[chunk]

    def find(self, episode: str) -> Recording | None:
        """The episode with this id; None: there is none."""
        number = self._numbers.get(episode)
        return None if number is None else self._episode(number)

    def table(self) -> pd.DataFrame:
        """A row for each episode."""
        import pandas as pd

        names = ("session", "began", "end", "result", "reported", "player", "why", "events", "lost", "frames")
        values = operator.attrgetter(*names)
        # In one pass, since an episode is created on access.
        rows = [(len(recording), *values(recording)) for recording in self]
        table = pd.DataFrame(rows, columns=["ticks", *names])
        table["began"] = pd.to_datetime(table["began"], unit="s", utc=True)
        return table[["session", "ticks", *names[1:]]]

    def chunk(self, path: str) -> Chunk:
        """A chunk, open for reading. At most 32 stay open; the least recently used is dropped."""
        return self._kept(self._open, _MAX_OPEN, path, lambda: Chunk(self._opened(path), path))

    def _kept(self, cache: dict[str, T], most: int, path: str, make: Callable[[], T]) -> T:
        """The entry for ``path``, made if it is missing. Keeps at most ``most``, those used last."""
        with self._lock:
            value = cache.pop(path, None)
        if value is None:
            value = make()
        with self._lock:
            cache[path] = value  # the most recently used comes last
            if len(cache) > most:
                del cache[next(iter(cache))]  # not closed, since another thread may be reading it
        return value

    def _opened(self, path: str) -> Any:
        try:
            return self._files.open(path, "rb")
        except Exception as error:  # cloud stores raise their own exceptions
            raise BadRecording(f"{path} cannot be read: {first_line(error)}", file=path) from None

    def video(self, path: str) -> Video:
        """The video of a chunk, open for reading. At most 8 stay open."""

        def make() -> Video:
            chunk, name = self.chunk(path), video_of(path)
            return Video(self._opened(name), name, chunk.sizes, chunk.fps)

        return self._kept(self._videos, _MAX_VIDEOS, path, make)


def _of_each(parts: Parts, name: str) -> list[Any]:
    """The values of a field of all parts."""
    values = parts[name]
    return values if len(values) > 1 else values * len(parts["episode"])


@dataclass(frozen=True)
class _Piece:
    path: str
    columns: tuple[str, ...]
    part: SessionPart


class Recording:
    """A recorded session, whose ticks are read on demand.

    ``episode["obs"]`` is an array over all ticks; ``len(episode)`` is the number of ticks.

    Attributes:
        id: unique id of the episode.
        session, began, start, start_reply, why, player, alias, version: see `brayx.recording.index.SessionPart`.
        end: see `brayx.recording.index.SessionPart`; empty: it still runs, or its process was killed.
        result: the game's return; None: no agent recorded one.
        reported: see `brayx.recording.index.SessionPart`.
        events: number of ticks with an event.
        lost: number of ticks that were lost.
        frames: number of ticks with a frame.
        left_out: attributes that agents set but that are not recorded, with the reason.
    """

    def __init__(self, recordings: Recordings, pieces: Sequence[_Piece]) -> None:
        self._recordings = recordings
        self._pieces = sorted(pieces, key=lambda piece: piece.part.first)
        self._ends = list(itertools.accumulate(piece.part.ticks for piece in self._pieces))
        first, last = self._pieces[0].part, self._pieces[-1].part
        self.id, self.session, self.began, self.start = first.episode, first.session, first.began, first.start
        self.start_reply, self.alias, self.version = first.start_reply, first.alias, first.version
        self.why, self.player, self.end, self.result = first.why, first.player, last.end, last.result
        self.reported = last.reported
        self.events = sum(piece.part.events for piece in self._pieces)
        self.lost = sum(piece.part.lost for piece in self._pieces)
        self.frames = sum(piece.part.frames for piece in self._pieces)
        self.left_out = {name: why for piece in self._pieces for name, why in piece.part.left_out.items()}

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __repr__(self) -> str:
        return f"<Episode of session {self.session!r}, {len(self)} ticks, end {self.end!r}>"

    @property
    def columns(self) -> list[str]:
        """Names of the arrays that every tick has."""
        first, *others = dict.fromkeys(piece.columns for piece in self._pieces)
        return [name for name in first if all(name in names for names in others)]

    @property
    def some_columns(self) -> list[str]:
        """Names of the arrays that some ticks have; ticks with an error or a fallback may lack them."""
        return list(dict.fromkeys(name for piece in self._pieces for name in piece.columns))

    def __getitem__(self, name: str) -> np.ndarray:
        """An array ``[N, ...]`` of all ticks.

        Raises:
            BadRecording: there is no such array; the message lists the arrays that exist.
        """
        return self.read(names=[name]).arrays[name]

    def inputs(self) -> list[bytes]:
        """The original bodies of all ticks."""
        return texts(self.read(names=[]).input)

    def outputs(self) -> list[bytes]:
        """The original replies to all ticks."""
        return texts(self.read(names=[]).output)

    @property
    def stop(self) -> bytes:
        """The original body of the session's stop; empty: it had none, or the session was not stopped."""
        return self.read(len(self) - 1, names=[]).stop[-1]

    def followed_by(self, other: Recording) -> Recording:
        """This session with further ticks, which another process recorded after it moved there.

        It has the id of this one. The times of the further ticks count from the move.
        """
        more = [
            replace(piece, part=replace(piece.part, first=piece.part.first + self._pieces[-1].part.first + 1))
            for piece in other._pieces
        ]
        return Recording(self._recordings, [*self._pieces, *more])

    def spans(self, names: Collection[str]) -> list[tuple[int, int]]:
        """Ranges ``(first, end)`` of ticks that have all arrays of these names."""
        spans: list[tuple[int, int]] = []
        for piece, end in zip(self._pieces, self._ends, strict=True):
            if set(names) <= set(piece.columns):
                start = end - piece.part.ticks
                if spans and spans[-1][1] == start:
                    start = spans.pop()[0]
                spans.append((start, end))
        return spans

    def read(self, first: int = 0, count: int | None = None, names: Sequence[str] | None = None) -> TickColumns:
        """Reads consecutive ticks.

        Args:
            first: index of the first tick, from 0 to ``len(self)``.
            count: number of ticks; None: all from ``first`` on.
            names: the arrays to read; None: all.

        Raises:
            BadRecording: a file is broken or missing, or there is no array of that name.
        """
        names = self.columns if names is None else names
        last = len(self) if count is None else min(first + count, len(self))
        blocks = []
        for place in range(bisect.bisect_right(self._ends, first), len(self._pieces)):
            piece, end = self._pieces[place], self._ends[place]
            begin = end - piece.part.ticks
            low, high = max(first, begin), min(last, end)
            if low >= high:
                break
            chunk = self._recordings.chunk(piece.path)
            for name in set(names).difference(chunk.columns):
                known = ", ".join(self.columns) or "none"
                known += f"; {name!r} is left out: {self.left_out[name]}" if name in self.left_out else ""
                raise BadRecording(f"session {self.session!r} has no array {name!r}; it has: {known}", column=name)
            blocks.append(chunk.read(piece.part.row + low - begin, high - low, names))
        if not blocks:
            nothing = np.zeros(0, np.int64)
            return TickColumns(nothing, nothing, nothing, [], [], [], {})
        return concatenated(blocks)

    def image(self, tick: int) -> np.ndarray | None:
        """The frame of a tick.

        Args:
            tick: index of the tick, from 0 to ``len(self)``, as in `read`; not the tick's number in its session.

        Returns:
            ``[height, width, 3]`` uint8, RGB, decoded from H.264: it is nearly the recorded image, with half the
            resolution in colour. A grey image gets three channels. None: the tick has no frame.

        Raises:
            BadRecording: the video is broken or missing, or there is no such tick.
            ConfigError: PyAV is missing (``pip install 'brayx[video]'``).
        """
        if not 0 <= tick < len(self):
            raise BadRecording(f"session {self.session!r} has no tick {tick}; it has {len(self)} ticks", tick=tick)
        index = bisect.bisect_right(self._ends, tick)
        piece = self._pieces[index]
        if not piece.part.frames:
            return None
        return self._recordings.video(piece.path).image(piece.part.row + tick - (self._ends[index] - piece.part.ticks))

    def images(self, first: int = 0, count: int | None = None) -> Iterator[np.ndarray | None]:
        """The frames of consecutive ticks, each as from `image`, decoded one by one.

        Args:
            first, count: as for `read`.
        """
        last = len(self) if count is None else min(first + count, len(self))
        return map(self.image, range(first, last))

    @property
    def fps(self) -> int:
        """Ticks per second of its videos, as configured."""
        return self._recordings.chunk(self._pieces[0].path).fps

    def parts(self) -> Iterator[tuple[SessionPart, TickColumns]]:
        """The ticks with their encoded frames, as stored, for copying."""
        for piece, end in zip(self._pieces, self._ends, strict=True):
            part, chunk = piece.part, self._recordings.chunk(piece.path)
            columns = chunk.read(part.row, part.ticks)
            if part.frames:
                columns.frames = self.encoded(end - part.ticks, part.ticks)
            yield part, columns

    def encoded(self, first: int = 0, count: int | None = None) -> list[Frame | None]:
        """The encoded frames of consecutive ticks, as stored, for copying; None: the tick has none.

        Args:
            first, count: as for `read`.
        """
        last = len(self) if count is None else min(first + count, len(self))
        frames: list[Frame | None] = []
        for piece, end in zip(self._pieces, self._ends, strict=True):
            low, high = max(first, end - piece.part.ticks), min(last, end)
            if low >= high:
                continue
            if piece.part.frames:
                row = piece.part.row + low - (end - piece.part.ticks)
                frames += self._recordings.video(piece.path).frames(row, high - low)
            else:
                frames += [None] * (high - low)
        return frames

    def save_video(self, path: str | Path, fps: int | None = None) -> None:
        """Writes an MP4 of all frames, one for each tick, without encoding them again.

        Each frame size has its own track; most players show only the first one.

        Args:
            path: the file; replaced if it exists.
            fps: ticks per second; None: as configured.

        Raises:
            BadRecording: the session has no frames, or a video is broken or missing.
            ConfigError: PyAV is missing.
        """
        if not self.frames:
            raise BadRecording(f"session {self.session!r} has no frames")
        frames = self.encoded()
        with Path(path).open("wb") as file:
            write_video(file, frames, fps or self.fps)

    def frame(self) -> pd.DataFrame:
        """A row for each tick: number, times, event, bodies, and a column for each array."""
        import pandas as pd

        columns = self.read()
        arrays = {name: list(array) if array.ndim > 1 else array for name, array in columns.arrays.items()}
        return pd.DataFrame(
            {
                "tick": columns.number,
                "time_s": columns.time_us / 1e6,
                "duration_s": columns.duration_us / 1e6,
                "queue_s": columns.queue_us / 1e6,
                "forward_s": columns.forward_us / 1e6,
                "event": columns.event,
                "input": texts(columns.input),
                "output": texts(columns.output),
                **arrays,
            }
        )
