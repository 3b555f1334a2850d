"""The index of sessions: which parts of them a chunk has, in its footer, and for a whole folder in separate files.

A writer adds an index file for every `CHUNKS` of its chunks, so that a reader opens a chunk only to read its ticks. It
may be missing or outdated: an entry is valid only if the chunk has the size in it, and readers open chunks without a
valid entry. Knows nothing of ticks.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

SUFFIX = ".index"
CHUNKS = 64
"""Chunks in an index file."""
_FORMAT = 2
_MAX_BYTES = 2**28
"""Maximum size of a decompressed index. Without it, a small hostile file could fill the memory."""
_GZIP = 16 + zlib.MAX_WBITS


@dataclass(frozen=True, slots=True)
class SessionPart:
    """Consecutive ticks of a session in one chunk.

    Attributes:
        episode: unique id of the recorded session; the session's own id may be reused.
        session: the session's id.
        began: when the session started, in seconds since 1970.
        first: number of recorded ticks before these.
        ticks: number of ticks in this part.
        start: body of the session's start; bytes that are not UTF-8 become surrogates.
        why: why the session was recorded.
        player: the session's player in a league; empty: there is no league.
        end: why the session ended, ``terminated`` or ``truncated`` if the game's stop says so, ``refused`` if the game
            left after a refused request; empty: these are not its last ticks.
        result: the game's return, in the session's last part, if an agent recorded one.
        events: number of ticks with an event.
        lost: number of ticks lost since the previous part.
        left_out: attributes that agents set but that are not recorded, with the reason.
        row: the part's first row in the chunk.
        reported: result that the seat reported in a league: ``win``, ``draw``, ``loss`` or a score; empty: none yet.
        frames: number of ticks with a frame.
        start_reply: reply to the session's start, as text like ``start``; empty: an older file, which lacks it.
        alias: alias of the registered version that plays the session, whose number is ``version``; empty: the newest
            weights do.
        version: policy version of the part's first tick; 0: not known, or the model as built.
    """

    episode: str
    session: str
    began: float
    first: int
    ticks: int
    start: str = ""
    why: str = ""
    player: str = ""
    end: str = ""
    result: float | None = None
    events: int = 0
    lost: int = 0
    left_out: dict[str, str] = field(default_factory=dict)
    row: int = 0
    reported: str = ""
    frames: int = 0
    start_reply: str = ""
    alias: str = ""
    version: int = 0

    def after(self, before: Sequence[SessionPart]) -> SessionPart:
        """This part joined with the parts before it."""
        parts = [*before, self]
        return dataclasses.replace(
            before[0],
            why=self.why,
            end=self.end,
            result=self.result,
            reported=self.reported,
            ticks=sum(part.ticks for part in parts),
            events=sum(part.events for part in parts),
            lost=sum(part.lost for part in parts),
            frames=sum(part.frames for part in parts),
            left_out={name: why for part in parts for name, why in part.left_out.items()},
        )


_TYPES: dict[str, tuple[type, ...]] = {
    "began": (float, int),
    "result": (float, int, type(None)),
    "left_out": (dict,),
    **dict.fromkeys(("first", "ticks", "events", "lost", "row", "frames", "version"), (int,)),
}
"""Types of the fields of `SessionPart` that are not strings."""


_LARGEST = 2**62
"""Limit for numbers of ticks and rows, so that their sums are still valid lengths."""
_LATEST = 9e9
"""Maximum ``began``, in seconds since 1970: pandas cannot represent much later times."""

Parts = dict[str, list[Any]]
"""Parts as lists of values by field, since a million objects take too much memory and time. If all parts have the same
value, the list has just one entry, except that of ``episode``, which always has one for each part."""

FIELDS = [field.name for field in dataclasses.fields(SessionPart)]


def columns_of_parts(parts: Sequence[SessionPart]) -> Parts:
    """Parts as lists of values."""
    columns = {name: [getattr(part, name) for part in parts] for name in FIELDS}
    return {
        name: values if name == "episode" or any(value != values[0] for value in values) else values[:1]
        for name, values in columns.items()
    }


DEFAULTS = columns_of_parts([SessionPart("", "", 0.0, 0, ticks=0)])
"""Values of fields that an older file lacks. `ticks` is 0, which `check_parts` refuses."""


def part_at(parts: Parts, index: int) -> SessionPart:
    """The part with this index."""
    return SessionPart(*[parts[name][index % len(parts[name])] for name in FIELDS])


def check_parts(parts: Parts) -> None:
    """Raises a ``ValueError`` if there are no parts, or a field of one has the wrong type or is out of range."""
    for name in FIELDS:
        values = parts[name]
        if type(values) is not list or not values or len(values) not in (1, len(parts["episode"])):
            raise ValueError(f"{name} has no value for each part")
        types = _TYPES.get(name, (str,))
        wrong = set(map(type, values)).difference(types)
        if wrong:
            raise ValueError(f"a part's {name} is {str(next(v for v in values if type(v) in wrong))[:80]!r}")
        if types == (int,) and not (name == "ticks") <= min(values) <= max(values) < _LARGEST:
            raise ValueError(f"a part's {name} goes from {min(values)} to {max(values)}")
        if types == (str,) and name not in ("start", "start_reply"):
            check_text(values)
    began = parts["began"]
    if not (all(map(math.isfinite, began)) and 0 <= min(began) <= max(began) <= _LATEST):
        raise ValueError(f"a part began at {min(began)} to {max(began)}")
    if any(type(result) is int and not -_LARGEST < result < _LARGEST for result in parts["result"]):
        raise ValueError("a part's result is too large")
    for left_out in filter(None, parts["left_out"]):
        check_text([*left_out, *left_out.values()])


def check_text(strings: Iterable[str]) -> None:
    """Raises a ``ValueError`` if a string cannot be encoded, or a ``TypeError`` if an item is not a string."""
    "".join(strings).encode()


class Entry(NamedTuple):
    """One chunk in an index.

    Attributes:
        size: size of its file, in bytes.
        columns: names of the arrays that agents set.
        parts: its index of sessions.
    """

    size: int
    columns: tuple[str, ...]
    parts: Parts


def written(entries: dict[str, Entry]) -> bytes:
    """The content of an index file: entries by the chunk's name."""
    return gzip.compress(json.dumps({"format": _FORMAT, "chunks": entries}).encode(), 1)


def read(data: bytes) -> dict[str, Entry]:
    """The entries in an index file, by the chunk's name; empty if it is broken, since an index only saves time."""
    try:
        file = zlib.decompressobj(_GZIP)
        text = file.decompress(data, _MAX_BYTES)
        if not file.eof:  # truncated, or too long
            return {}
        about = json.loads(text)
        if about["format"] != _FORMAT:
            return {}
        return {name: _entry(*entry) for name, entry in about["chunks"].items()}
    except Exception:  # a hostile file can raise almost any
        return {}


def _entry(size: Any, columns: Any, parts: Any) -> Entry:
    if type(size) is not int or any(type(name) is not str for name in columns):
        raise ValueError("this is not an entry of an index")
    parts = DEFAULTS | parts
    check_parts(parts)
    return Entry(size, tuple(columns), parts)
