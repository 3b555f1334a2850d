"""Ticks of a followed session, in the form that the job's process sends to the console's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np


class LiveTick(NamedTuple):
    """One tick of a followed session. Pickles.

    Attributes:
        number: the tick's number in its session.
        at_s: when it was answered, in Unix seconds.
        seconds: time that the actor took; 0: it began before the session was followed.
        input, output: body and reply; the reply is empty if the tick failed.
        arrays: what the agents set on the tick's state, by path.
        event: as for `brayx.actor.logs.SessionLog.event`.
    """

    number: int
    at_s: float
    seconds: float
    input: bytes
    output: bytes
    arrays: Mapping[str, np.ndarray]
    event: str


class LiveFrame(NamedTuple):
    """A picture of a tick, drawn by the job's render. Pickles.

    Attributes:
        number: the tick's number in its session.
        png: the picture; empty: it could not be drawn.
        failure: why not.
    """

    number: int
    png: bytes
    failure: str


class LiveTicks(NamedTuple):
    """The newest ticks of a followed session. Pickles.

    Attributes:
        ticks: those that the viewer does not have yet, the oldest first.
        start: body of the session's start, which may be a contract that says how to read the bodies of its ticks.
        after: number of ticks since the session was first followed; the ``after`` of the viewer's next request.
        end: why the session ended, ``terminated`` or ``truncated`` if the game's stop says so; empty: it runs.
        result: its game's return, once it has ended and an agent recorded one.
        frame: its newest picture, which may be of an earlier tick; None: the job draws none, or none yet.
    """

    ticks: list[LiveTick]
    start: bytes
    after: int
    end: str
    result: float | None
    frame: LiveFrame | None = None
