"""The running sessions of one process, as a console lists, follows and ends them.

A session has a log only while somebody asks for its ticks: without viewers a tick does no extra work. Belongs to the
sessions' event loop. Knows nothing of viewers.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

import brayx.clock as clock
from brayx.actor.agent import STATE_OWN, State
from brayx.actor.live_ticks import LiveTick, LiveTicks
from brayx.actor.logs import SessionLog
from brayx.actor.table import SessionTable
from brayx.errors import ServiceFull, SessionUnknown
from brayx.types import Forward, NestedArray, Step, flatten

MAX_TICKS = 16
"""Newest ticks of a followed session that wait for its viewers."""
ENDED = "ended"
"""Reason for a session's end if the console ended it."""
SILENT_S = 10.0
"""A session without a request for this long has no player now: its game may have left without a stop."""
_FOLLOWED_S = 10.0
"""A session is no longer followed this long after the last request for its ticks. A busy machine, or a browser that
shows another tab, asks late."""
_MAX_FOLLOWED = 64
_MAX_VALUES = 65_536
"""Elements of an array that the console shows; larger ones are left out."""
_MAX_PIXELS = 4 * 2**20
"""As `_MAX_VALUES` of the newest tick's uint8 arrays: images, of which a viewer sees one at a time."""


_Kept = tuple[State, Mapping[str, NestedArray], bytes, bytes, float, float, str]


class NewTicks(NamedTuple):
    """The newest ticks of a followed session, as the session kept them.

    Attributes:
        kept: those that the viewer does not have yet, the oldest first.
        start, after, end, result: as for `LiveTicks`.
    """

    kept: list[_Kept]
    start: bytes
    after: int
    end: str
    result: float | None

    def shown(self) -> LiveTicks:
        """The ticks for another process. It may take milliseconds, and may run in any thread."""
        ticks = [_shown(*tick, newest=tick is self.kept[-1]) for tick in self.kept]
        return LiveTicks(ticks, self.start, self.after, self.end, self.result)


class FollowedSession(SessionLog):
    """Keeps the newest ticks of one session for its viewers. Belongs to the sessions' event loop."""

    def __init__(self) -> None:
        self.asked_at = clock.now()
        self.start = b""
        self.end_reason = ""
        self._outcome = ""
        self.result: float | None = None
        self._count = 0
        self._ticks: deque[_Kept] = deque(maxlen=MAX_TICKS)
        self._event = ""
        self._outputs: dict[str, NestedArray] = {}

    def forward(self, model: str, forward: Forward, seconds: float) -> None:
        """See `brayx.actor.logs.SessionLog.forward`."""
        self._outputs[model] = forward.outputs

    def tick(self, state: State, body: bytes, reply: bytes, began: float, arrived: float) -> None:
        """See `brayx.actor.logs.SessionLog.tick`; ``began`` is 0 if the tick began before the log was attached."""
        seconds = clock.now() - began if began else 0.0
        self._ticks.append((state, self._outputs, body, reply, time.time(), seconds, self._event))
        self._count += 1
        self._event, self._outputs = "", {}

    def event(self, what: str, *, last: bool = False) -> None:
        """See `brayx.actor.logs.SessionLog.event`."""
        if last and self._ticks:
            *tick, _ = self._ticks[-1]
            self._ticks[-1] = (*tick, what)  # type: ignore[assignment]
        else:
            self._event = what

    def stop(self, body: bytes, outcome: str) -> None:
        """See `brayx.actor.logs.SessionLog.stop`."""
        self._outcome = outcome

    def end(self, reason: str, result: float | None) -> None:
        """See `brayx.actor.logs.SessionLog.end`."""
        self.end_reason = self._outcome if reason == "stop" and self._outcome else reason
        self.result = result

    def newer(self, after: int) -> tuple[list[_Kept], int]:
        """The kept ticks after the first ``after``; and the number of all ticks. All, if ``after`` is another log's."""
        fresh = min(self._count - after if after <= self._count else self._count, len(self._ticks))
        return list(self._ticks)[len(self._ticks) - fresh :], self._count


def silent(rows: Sequence[Mapping[str, Any]]) -> int:
    """How many of the rows of `LiveTable.sessions` have had no request for `SILENT_S`."""
    return sum(row["idle_s"] > SILENT_S for row in rows)


class LiveTable:
    """Lists, follows and ends the sessions of a table.

    Args:
        table: the sessions.
    """

    def __init__(self, table: SessionTable) -> None:
        self._table = table
        self._followed: dict[str, FollowedSession] = {}

    def sessions(self) -> list[dict[str, Any]]:
        """A row for each session: ``session``, ``ticks``, ``idle_s``, ``followed`` and `Actor.facts`."""
        now = clock.now()
        rows = []
        for name in self._table.sessions:
            session = self._table.get(name)
            if session is not None:  # otherwise it is about to start
                rows.append(
                    {
                        "session": name,
                        "ticks": session.ticks,
                        "idle_s": now - session.last_seen,
                        "followed": name in self._followed,
                        **session.actor.facts(),
                    }
                )
        return rows

    def newer(self, name: str, after: int) -> NewTicks:
        """The newest ticks of a session, which is followed from the first request on.

        Args:
            name: id of the session.
            after: `LiveTicks.after` of the previous answer; 0: there was none.

        Raises:
            SessionUnknown: it does not run, or not any more.
            ConfigError: sessions of its kind cannot be followed.
            ServiceFull: too many are followed.
        """
        session = self._table.get(name)
        followed = self._followed.get(name)
        # Not followed so far, or a new session of the same id.
        if session is not None and (followed is None or (followed.end_reason and not after)):
            if len(self._followed) >= _MAX_FOLLOWED:
                raise ServiceFull(f"{len(self._followed)} sessions are followed, which is the limit: close a view")
            followed = FollowedSession()
            followed.start = session.actor.attach(followed)
            if not self._followed:
                asyncio.get_running_loop().call_later(_FOLLOWED_S, self._unfollow)
            self._followed[name] = followed
        if followed is None:
            raise unknown_session(name)
        followed.asked_at = clock.now()
        kept, count = followed.newer(after)
        return NewTicks(kept, followed.start, count, followed.end_reason, followed.result)

    def end(self, name: str) -> None:
        """Ends a session; its client gets `SessionLost` with reason ``ended``.

        Raises:
            SessionUnknown: it does not run.
        """
        if not self._table.end(name, ENDED):
            raise unknown_session(name)

    def _unfollow(self) -> None:
        """Detaches from sessions without recent requests; runs while any is followed."""
        now = clock.now()
        for name, followed in list(self._followed.items()):
            if now - followed.asked_at > _FOLLOWED_S:
                del self._followed[name]
                session = self._table.get(name)
                if session is not None:
                    session.actor.detach(followed)
        if self._followed:
            asyncio.get_running_loop().call_later(_FOLLOWED_S / 2, self._unfollow)


def unknown_session(session: str) -> SessionUnknown:
    """The error for a session that does not run."""
    return SessionUnknown(f"session {session!r} is not running")


def _shown(
    state: State,
    outputs: Mapping[str, NestedArray],
    body: bytes,
    reply: bytes,
    at_s: float,
    seconds: float,
    event: str,
    newest: bool,
) -> LiveTick:
    """A tick for the console's process: of the state only arrays and numbers, not the user's objects."""
    arrays: dict[str, np.ndarray] = {}
    for name, value in list(vars(state).items()):
        if name in STATE_OWN:
            continue
        if isinstance(value, Step):
            arrays |= flatten(value.obs, "obs") | flatten(value.action, "action") | dict(value.extras)
            arrays |= {"log_prob": np.asarray(value.log_prob), "policy_version": np.asarray(value.policy_version)}
        elif isinstance(value, np.ndarray | np.generic | bool | int | float | dict | list | tuple):
            arrays |= flatten(value, name)
    for model, output in outputs.items():
        arrays |= flatten(output, model)
    sizes = {np.dtype(np.uint8): _MAX_PIXELS} if newest else {}
    arrays = {
        name: array
        for name, array in arrays.items()
        if array.dtype.kind in "biuf" and array.size <= sizes.get(array.dtype, _MAX_VALUES)
    }
    return LiveTick(state.tick, at_s, seconds, body, reply, arrays, event)
