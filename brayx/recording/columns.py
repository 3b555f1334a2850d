"""Ticks as columns: arrays ``[N, ...]`` by name, ready for a file. Pure; knows nothing of files or sessions.

`brayx.recording.bodies` turns bodies into columns. Each array that agents set on a tick's state becomes one column.
``step`` gives ``obs``, ``action``, ``log_prob``, ``policy_version`` and its extras; other attributes keep their names.
Nested arrays are named by their paths: ``obs/board``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from brayx.recording import bodies
from brayx.recording.bodies import Bodies
from brayx.types import NestedArray, Step, flatten

MOST_COLUMNS = 64
"""Maximum columns that agents can set; further ones are left out, with the reason."""
OWN = "tick."
"""Prefix of a recording's own columns in a file; arrays of agents with this prefix are left out."""


class Tick(NamedTuple):
    """One tick of a session.

    Attributes:
        number: the tick's number in its session, from 0.
        time_s: seconds from the session's start to the tick's arrival at the actor.
        seconds: time that the actor took.
        input, output: body and reply; the reply is empty if the tick failed.
        attributes: values that the agents set on the tick's state, by name.
        event: ``error``, ``fallback``, ``skipped N`` or ``resumed``; empty: nothing unusual.
        stop: body of the session's stop, at its last tick; empty: there was none.
    """

    number: int
    time_s: float
    seconds: float
    input: bytes
    output: bytes
    attributes: Mapping[str, Any]
    event: str = ""
    stop: bytes = b""


@dataclass
class Columns:
    """Consecutive ticks of one session, or of several with the same `layout`.

    Attributes:
        number: ``[N]`` int64.
        time_us, duration_us: ``[N]`` int64; as `Tick.time_s` and `Tick.seconds`, in microseconds.
        event: ``N`` strings.
        input, output: bodies and replies.
        arrays: arrays that the agents set, ``[N, ...]`` by name.
        left_out: attributes that could not become columns, with the reason.
        stop: ``N`` bodies of stops, as `Tick.stop`.
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

    @property
    def nbytes(self) -> int:
        """Approximate size in memory."""
        found = sum(array.nbytes for array in self.arrays.values()) + 32 * len(self.number)
        found += sum(map(len, self.stop))
        for of in (self.input, self.output):
            found += of.numbers.nbytes if isinstance(of, Bodies) else sum(map(len, of))
        return found

    @property
    def layout(self) -> tuple[Any, ...]:
        """Hashable schema; columns with equal layouts can share a file."""
        arrays = tuple((name, array.dtype.str, array.shape[1:]) for name, array in self.arrays.items())
        return _form(self.input), _form(self.output), arrays


def columns_of(ticks: Sequence[Tick], *, without: Collection[str] = ()) -> Columns:
    """The columns of one or more ticks.

    An attribute is left out unless every tick has it with the same shape.

    Args:
        ticks: consecutive ticks of a session.
        without: names of attributes that no agent has set.
    """
    arrays, left_out = _arrays([_flat(tick.attributes, without) for tick in ticks])
    return Columns(
        np.array([tick.number for tick in ticks], np.int64),
        _microseconds([tick.time_s for tick in ticks]),
        _microseconds([tick.seconds for tick in ticks]),
        [tick.event for tick in ticks],
        [tick.input for tick in ticks],
        [tick.output for tick in ticks],
        arrays,
        left_out,
        [tick.stop for tick in ticks],
    )


def _microseconds(seconds: Sequence[float]) -> np.ndarray:
    return np.round(np.array(seconds) * 1e6).astype(np.int64)


def packed(columns: Columns) -> Columns:
    """The same ticks, with their bodies split where that saves space."""
    return replace(columns, input=_split(columns.input), output=_split(columns.output))


def _split(of: Bodies | list[bytes]) -> Bodies | list[bytes]:
    return of if isinstance(of, Bodies) else bodies.split(of) or of


def texts(of: Bodies | list[bytes]) -> list[bytes]:
    """The original bodies."""
    return bodies.joined(of) if isinstance(of, Bodies) else of


def concatenated(parts: Sequence[Columns]) -> Columns:
    """Joins one or more parts of the same layout."""
    first = parts[0]
    return Columns(
        np.concatenate([part.number for part in parts]),
        np.concatenate([part.time_us for part in parts]),
        np.concatenate([part.duration_us for part in parts]),
        [event for part in parts for event in part.event],
        _merged([part.input for part in parts]),
        _merged([part.output for part in parts]),
        {name: np.concatenate([part.arrays[name] for part in parts]) for name in first.arrays},
        {name: why for part in parts for name, why in part.left_out.items()},
        [stop for part in parts for stop in part.stop],
    )


def _merged(parts: Sequence[Bodies | list[bytes]]) -> Bodies | list[bytes]:
    if not all(isinstance(each, Bodies) for each in parts):
        return [body for each in parts for body in texts(each)]
    known: dict[bytes, int] = {}
    which, numbers = [], []
    for each in parts:
        assert isinstance(each, Bodies)
        of = np.array([known.setdefault(skeleton, len(known)) for skeleton in each.skeletons], np.int32)
        which.append(of[each.which])
        numbers.append(each.numbers)
    return Bodies(list(known), np.concatenate(which), np.concatenate(numbers))


def _form(of: Bodies | list[bytes]) -> int:
    """Numbers in a body; -1: the bodies are not split."""
    return of.numbers.shape[1] if isinstance(of, Bodies) else -1


def _flat(attributes: Mapping[str, Any], without: Collection[str] = ()) -> dict[str, Any]:
    """Arrays and numbers by path; other values as they are."""
    found: dict[str, Any] = {}
    for name, value in attributes.items():
        if name in without:
            continue
        if isinstance(value, Step):
            found |= {**_paths(value.obs, "obs"), **_paths(value.action, "action")}
            found |= {"log_prob": np.float32(value.log_prob), "policy_version": np.int64(value.policy_version)}
            found.update(value.extras)
        else:
            found |= _paths(value, name)
    return found


def _paths(value: NestedArray, name: str) -> dict[str, Any]:
    if isinstance(value, np.ndarray | np.generic | bool | int | float):
        return {name: value}
    if isinstance(value, Mapping | list | tuple):
        return flatten(value, name)
    return {name: value}


def _arrays(ticks: Sequence[Mapping[str, Any]]) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    arrays: dict[str, np.ndarray] = {}
    left_out: dict[str, str] = {}
    names = dict.fromkeys(name for tick in ticks for name in tick)
    for name in names:
        reason = ""
        values = [tick[name] for tick in ticks if name in tick]
        if len(arrays) == MOST_COLUMNS:
            reason = f"there are more than {MOST_COLUMNS} columns"
        elif name.startswith(OWN):
            reason = f"its name starts with {OWN}"
        elif len(values) < len(ticks):
            reason = "not every tick has it"
        else:
            array = _stacked(values)
            if array is None:
                reason = "it is no array, or its shape varies"
            else:
                arrays[name] = array
        if reason:
            left_out[name] = reason
    return arrays, left_out


def _stacked(values: Sequence[Any]) -> np.ndarray | None:
    """``[N, ...]``; None: the values are not numbers of one shape. Python floats become float32."""
    try:
        array = np.array(values)
    except (ValueError, OverflowError):
        return None
    if isinstance(values[0], float):
        array = array.astype(np.float32)
    return array if array.dtype.kind in "biuf" and array.size else None
