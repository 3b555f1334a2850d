"""Ticks as columns: arrays ``[N, ...]`` by name, ready for a file. Pure; knows nothing of files or sessions.

`brayx.recording.bodies` converts bodies to columns, `brayx.recording.gather` what the agents set.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from brayx.recording import bodies
from brayx.recording.bodies import Bodies
from brayx.recording.frames import is_image
from brayx.recording.gather import DROPPED, arrays_of, value_at
from brayx.types import NestedArray

ERROR = "error"
"""Start of the event of a failed tick; the error follows."""
REFUSED = "refused"
"""Part of the event of a tick whose stop was refused; the reason follows."""
NOT_APPLIED = ("fallback", ERROR)
"""Events of ticks whose action did not reach the game."""


Forwarded = tuple[str, NestedArray, int, float]
"""A forward of an agent in a tick: the model's name, its outputs without a batch axis, the version of the
weights that computed them, and how long the agent waited. A plain tuple, which is created quickly."""


def _no_times() -> np.ndarray:
    return np.zeros(0, np.int64)


@dataclass
class TickColumns:
    """Consecutive ticks of one session, or of several with the same `layout`.

    Attributes:
        number: ``[N]`` int64; the tick's number in its session, from 0.
        time_us: ``[N]`` int64; time from the session's start until the actor began the tick, in microseconds.
        duration_us: ``[N]`` int64; how long the actor took.
        queue_us: ``[N]`` int64; how long the tick waited for the actor.
        forward_us: ``[N]`` int64; the part of ``duration_us`` in which agents waited for models.
        event: ``N`` strings, as for `brayx.actor.logs.SessionLog.event`, or several, separated by commas; empty:
            nothing unusual happened.
        input, output: bodies and replies.
        arrays: arrays that the agents set, and outputs of their forwards, ``[N, ...]`` by name.
        left_out: attributes that could not become columns, with the reason.
        stop: ``N`` bodies of the session's stop, in its last tick; empty: there was none.
        frames: ``N`` images, or encoded frames, with None for a tick that has none; empty: no tick has one. A chunk
            stores them in its video, and `Chunk.read` leaves them out.
    """

    number: np.ndarray
    time_us: np.ndarray
    duration_us: np.ndarray
    event: list[str]
    input: Bodies | list[bytes] = field(repr=False)
    output: Bodies | list[bytes] = field(repr=False)
    arrays: dict[str, np.ndarray]
    left_out: dict[str, str] = field(default_factory=dict)
    stop: list[bytes] = field(default_factory=list, repr=False)
    queue_us: np.ndarray = field(default_factory=_no_times)
    forward_us: np.ndarray = field(default_factory=_no_times)
    frames: Sequence[Any] = field(default=(), repr=False)

    @property
    def nbytes(self) -> int:
        """Approximate size in memory, with encoded frames."""
        size = sum(array.nbytes for array in self.arrays.values()) + 48 * len(self.number)
        size += sum(map(len, self.stop)) + sum(len(frame.data) for frame in self.frames if frame is not None)
        for column in (self.input, self.output):
            size += column.numbers.nbytes if isinstance(column, Bodies) else sum(map(len, column))
        return size

    @property
    def layout(self) -> tuple[Any, ...]:
        """Hashable schema; columns with equal layouts can share a file."""
        arrays = tuple((name, array.dtype.str, array.shape[1:]) for name, array in self.arrays.items())
        return _number_count(self.input), _number_count(self.output), arrays


def columns_by_field(
    number: Sequence[int],
    time_s: Sequence[float] | np.ndarray,
    seconds: Sequence[float] | np.ndarray,
    inputs: Sequence[bytes],
    outputs: Sequence[bytes],
    attributes: Sequence[Mapping[str, Any]],
    events: Sequence[str],
    stops: Sequence[bytes],
    queue_s: Sequence[float] | np.ndarray,
    forwards: Sequence[Sequence[Forwarded]],
    *,
    without: Collection[str] = (),
    frames: str = "",
    strict: bool = False,
) -> TickColumns:
    """The columns of one or more ticks, consecutive in a session or of several; arguments have one entry for each tick.

    An attribute is left out unless every tick has it with the same shape; failed ticks get zeros instead. Outputs of
    forwards become columns, too, unless an attribute has the name: ``NAME`` if each tick has one forward, else
    ``MODEL/NAME``.

    Args:
        number: the ticks' numbers in their sessions, from 0.
        time_s, seconds, queue_s: as ``time_us``, ``duration_us`` and ``queue_us`` of `TickColumns`, in seconds.
        inputs, outputs: bodies and replies; a reply is empty if the tick failed.
        attributes: values that the agents set on the tick's state, by name.
        events, stops: as `TickColumns.event` and `TickColumns.stop`.
        forwards: the forwards of the ticks' agents.
        without: names of attributes to ignore, which no agent set.
        frames: name of the image that becomes `TickColumns.frames` instead of an array; empty: none.
        strict: raise `Irregular` instead of leaving an attribute out: one session must not cost others their columns.

    Raises:
        Irregular: with ``strict``, if the ticks differ in their attributes or in the shapes of these.
    """
    # Column by column, since a loop over every value of every tick is slow.
    failed = [ERROR in event for event in events]
    images = [value_at(tick, frames) for tick in attributes] if frames else []
    has_frames = any(image is DROPPED or is_image(image) for image in images)
    arrays, left_out = arrays_of(attributes, forwards, failed, without, frames if has_frames else "", strict)
    waited = [
        sum([forward[3] for forward in waits]) if waits[1:] else waits[0][3] if waits else 0.0 for waits in forwards
    ]
    time_us, duration_us, queue_us, forward_us = _microseconds(time_s, seconds, queue_s, waited)
    return TickColumns(
        np.array(number, np.int64),
        time_us,
        duration_us,
        list(events),
        list(inputs),
        list(outputs),
        arrays,
        left_out,
        list(stops),
        queue_us,
        np.minimum(forward_us, duration_us),  # concurrent waits may add up to more
        [None if image is DROPPED else image for image in images] if has_frames else (),
    )


def _microseconds(*seconds: Sequence[float] | np.ndarray) -> np.ndarray:
    """Each row in whole microseconds. All rows together, since most of such a call's time is independent of length."""
    return np.round(np.array([np.asarray(row, np.float64) for row in seconds]) * 1e6).astype(np.int64)


def packed(columns: TickColumns) -> TickColumns:
    """The same ticks, with their bodies split if that saves space."""
    return replace(columns, input=_split(columns.input), output=_split(columns.output))


def _split(column: Bodies | list[bytes]) -> Bodies | list[bytes]:
    return column if isinstance(column, Bodies) else bodies.split(column) or column


def texts(column: Bodies | list[bytes]) -> list[bytes]:
    """The original bodies."""
    return bodies.joined(column) if isinstance(column, Bodies) else column


def concatenated(parts: Sequence[TickColumns]) -> TickColumns:
    """Joins one or more parts of the same layout."""
    first = parts[0]
    return TickColumns(
        np.concatenate([part.number for part in parts]),
        np.concatenate([part.time_us for part in parts]),
        np.concatenate([part.duration_us for part in parts]),
        [event for part in parts for event in part.event],
        _merged([part.input for part in parts]),
        _merged([part.output for part in parts]),
        {name: np.concatenate([part.arrays[name] for part in parts]) for name in first.arrays},
        {name: why for part in parts for name, why in part.left_out.items()},
        [stop for part in parts for stop in part.stop],
        np.concatenate([part.queue_us for part in parts]),
        np.concatenate([part.forward_us for part in parts]),
        frames_of(parts),
    )


def rows_at(columns: TickColumns, rows: np.ndarray) -> TickColumns:
    """The ticks in ``rows``, ``[M]`` int64, in that order."""
    listed = rows.tolist()

    def bodies_at(column: Bodies | list[bytes]) -> Bodies | list[bytes]:
        if isinstance(column, Bodies):
            return Bodies(column.skeletons, column.indices[rows], column.numbers[rows])
        return [column[row] for row in listed]

    return replace(
        columns,
        number=columns.number[rows],
        time_us=columns.time_us[rows],
        duration_us=columns.duration_us[rows],
        event=[columns.event[row] for row in listed],
        input=bodies_at(columns.input),
        output=bodies_at(columns.output),
        arrays={name: array[rows] for name, array in columns.arrays.items()},
        stop=[columns.stop[row] for row in listed],
        queue_us=columns.queue_us[rows],
        forward_us=columns.forward_us[rows],
        frames=[columns.frames[row] for row in listed] if columns.frames else (),
    )


def frames_of(parts: Sequence[TickColumns]) -> Sequence[Any]:
    """The frames of all parts, an entry for each tick; empty: there are none."""
    if not any(part.frames for part in parts):
        return ()
    return [frame for part in parts for frame in part.frames or [None] * len(part.number)]


def _merged(parts: Sequence[Bodies | list[bytes]]) -> Bodies | list[bytes]:
    if not all(isinstance(column, Bodies) for column in parts):
        return [body for column in parts for body in texts(column)]
    known: dict[bytes, int] = {}
    indices, numbers = [], []
    for part in parts:
        assert isinstance(part, Bodies)
        index = np.array([known.setdefault(skeleton, len(known)) for skeleton in part.skeletons], np.int32)
        indices.append(index[part.indices])
        numbers.append(part.numbers)
    return Bodies(list(known), np.concatenate(indices), np.concatenate(numbers))


def _number_count(column: Bodies | list[bytes]) -> int:
    """How many numbers a body has; -1: the bodies are not split."""
    return column.numbers.shape[1] if isinstance(column, Bodies) else -1
