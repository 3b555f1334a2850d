"""Reads recordings: `open` lists a folder's episodes; an episode reads its ticks on demand."""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, overload

import fsspec
import numpy as np

from brayx.errors import BadRecording
from brayx.recording.chunks import Chunk
from brayx.recording.columns import Columns, concatenated, texts
from brayx.recording.part import Part
from brayx.recording.writer import SUFFIX

if TYPE_CHECKING:
    import pandas as pd

_MOST_OPEN = 32


def open(address: str) -> Recordings:
    """Opens recordings: a folder, or one chunk, by its path or fsspec address.

    Raises:
        BadRecording: there is no such folder or file, or a file is no chunk.
    """
    files, path = fsspec.core.url_to_fs(str(address))
    if files.isfile(path):
        return Recordings(files, [path])
    if not files.isdir(path):
        raise BadRecording(f"there is no recording at {address}", file=str(address))
    found = [str(each) for each in files.ls(path, detail=False)]
    names = {each: PurePosixPath(each).name for each in found}
    return Recordings(files, sorted(each for each in found if names[each].endswith(SUFFIX) and names[each][0] != "."))


class Recordings(Sequence["Episode"]):
    """Episodes, in the order in which their first ticks were written.

    Args:
        files: the file system.
        paths: the chunks, oldest first.

    Attributes:
        unreadable: the error of each chunk that cannot be read, by path.
    """

    def __init__(self, files: Any, paths: Sequence[str]) -> None:
        self._files = files
        self._open: dict[str, Chunk] = {}
        self.unreadable: dict[str, str] = {}
        found: dict[str, list[_Piece]] = {}
        for path in paths:
            try:
                for part in self.chunk(path).parts:
                    found.setdefault(part.episode, []).append(_Piece(path, part))
            except BadRecording as error:
                if len(paths) == 1:
                    raise
                self.unreadable[path] = error.message
        self._episodes = [Episode(self, pieces) for pieces in found.values()]

    def __len__(self) -> int:
        return len(self._episodes)

    def __repr__(self) -> str:
        return f"<Recordings: {len(self)} episodes, {len(self.unreadable)} files that cannot be read>"

    @overload
    def __getitem__(self, index: int) -> Episode: ...
    @overload
    def __getitem__(self, index: slice) -> list[Episode]: ...
    def __getitem__(self, index: int | slice) -> Episode | list[Episode]:
        return self._episodes[index]

    def __iter__(self) -> Iterator[Episode]:
        return iter(self._episodes)

    def table(self) -> pd.DataFrame:
        """A row for each episode."""
        import pandas as pd

        return pd.DataFrame(
            {
                "session": [each.session for each in self],
                "ticks": [len(each) for each in self],
                "began": pd.to_datetime([each.began for each in self], unit="s", utc=True),
                "end": [each.end for each in self],
                "result": [each.result for each in self],
                "reported": [each.reported for each in self],
                "player": [each.player for each in self],
                "why": [each.why for each in self],
                "events": [each.events for each in self],
                "lost": [each.lost for each in self],
            }
        )

    def chunk(self, path: str) -> Chunk:
        """An open chunk. At most 32 stay open; the least recently used is closed."""
        found = self._open.pop(path, None)
        if found is None:
            try:
                found = Chunk(self._files.open(path, "rb"), path)
            except OSError as error:
                raise BadRecording(f"{path} cannot be read: {error}", file=path) from None
        self._open[path] = found  # the most recently used comes last
        if len(self._open) > _MOST_OPEN:
            self._open.pop(next(iter(self._open))).close()
        return found


@dataclass(frozen=True)
class _Piece:
    path: str
    part: Part


class Episode:
    """A recorded session, whose ticks are read on demand.

    ``episode["obs"]`` is an array over all ticks; ``len(episode)`` is the number of ticks.

    Attributes:
        id: unique id of the episode.
        session, began, start, why, player: see `brayx.recording.part.Part`.
        end: why the session ended; empty: it still runs, or its process was killed.
        result: the game's return; None: no agent recorded one.
        reported: see `brayx.recording.part.Part`.
        events: number of ticks with an event.
        lost: number of ticks that were lost.
        left_out: attributes that agents set and that were left out, with the reason.
    """

    def __init__(self, of: Recordings, pieces: Sequence[_Piece]) -> None:
        self._of = of
        self._pieces = sorted(pieces, key=lambda piece: piece.part.first)
        self._ends = np.cumsum([piece.part.ticks for piece in self._pieces]).tolist()
        first, last = self._pieces[0].part, self._pieces[-1].part
        self.id, self.session, self.began, self.start = first.episode, first.session, first.began, first.start
        self.why, self.player, self.end, self.result = first.why, first.player, last.end, last.result
        self.reported = last.reported
        self.events = sum(piece.part.events for piece in self._pieces)
        self.lost = sum(piece.part.lost for piece in self._pieces)
        self.left_out = {name: why for piece in self._pieces for name, why in piece.part.left_out.items()}

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __repr__(self) -> str:
        return f"<Episode of session {self.session!r}, {len(self)} ticks, end {self.end!r}>"

    @property
    def columns(self) -> list[str]:
        """Names of the arrays that every tick has."""
        names = [self._of.chunk(piece.path).columns for piece in self._pieces]
        return [name for name in names[0] if all(name in each for each in names)]

    @property
    def some_columns(self) -> list[str]:
        """Names of the arrays that some ticks have; an error or a fallback may leave ticks without."""
        return list(dict.fromkeys(name for piece in self._pieces for name in self._of.chunk(piece.path).columns))

    def __getitem__(self, name: str) -> np.ndarray:
        """An array ``[N, ...]`` of all ticks.

        Raises:
            BadRecording: there is no such array; the message lists the known ones.
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
        """The original body of the session's stop; empty: it had none, or did not stop."""
        return self.read(len(self) - 1, names=[]).stop[-1]

    def spans(self, names: Collection[str]) -> list[tuple[int, int]]:
        """Ranges of ticks, as (first, end), that have all arrays of these names."""
        found: list[tuple[int, int]] = []
        for piece, end in zip(self._pieces, self._ends, strict=True):
            if set(names) <= set(self._of.chunk(piece.path).columns):
                start = end - piece.part.ticks
                if found and found[-1][1] == start:
                    start = found.pop()[0]
                found.append((start, end))
        return found

    def read(self, first: int = 0, count: int | None = None, names: Sequence[str] | None = None) -> Columns:
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
        found = []
        for index in range(bisect.bisect_right(self._ends, first), len(self._pieces)):
            piece, end = self._pieces[index], self._ends[index]
            begin = end - piece.part.ticks
            low, high = max(first, begin), min(last, end)
            if low >= high:
                break
            chunk = self._of.chunk(piece.path)
            for name in set(names).difference(chunk.columns):
                known = ", ".join(self.columns) or "none"
                raise BadRecording(f"session {self.session!r} has no array {name!r}; it has: {known}", column=name)
            found.append(chunk.read(piece.part.row + low - begin, high - low, names))
        if not found:
            nothing = np.zeros(0, np.int64)
            return Columns(nothing, nothing, nothing, [], [], [], {})
        return concatenated(found)

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
