"""Interfaces of an actor to whatever keeps its sessions tick by tick. Knows nothing of files or pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from brayx.actor.agent import State
from brayx.types import NestedArray

REQUESTED = "requested"
"""Why a session is kept whose start asks for that."""


class SessionLog:
    """The log of one session; the base class keeps nothing. Its methods neither wait nor raise."""

    def tick(self, state: State, body: bytes, reply: bytes, began: float) -> None:
        """Adds a tick.

        Args:
            state: the tick's state, with everything that the agents set.
            body, reply: the bytes of both.
            began: when the actor started the tick, by `time.perf_counter`.
        """

    def failed(self, state: State, body: bytes, began: float) -> None:
        """Adds a tick that raised: with the event ``error`` and an empty reply."""
        self.event("error")
        self.tick(state, body, b"", began)

    def forward(self, model: str, outputs: NestedArray) -> None:
        """Adds the outputs of a forward in the running tick; only a log that was attached later gets these."""

    def event(self, what: str, *, last: bool = False) -> None:
        """Sets the event of the next tick, or with ``last`` of the newest one.

        Events are ``error``, ``fallback`` (the client got the fallback's reply), ``skipped N`` and ``resumed``.
        """

    def stop(self, body: bytes) -> None:
        """Adds the body of the session's stop, which follows its last tick; not called for a stop without one."""

    def keep(self, why: str) -> None:
        """Keeps the session even if it was not chosen at its start; ``why`` is the reason."""

    def end(self, reason: str, result: float | None) -> None:
        """Ends the log, with the reason for the session's end, and the game's return if an agent recorded one."""


class SessionRecorder(Protocol):
    """Keeps the sessions of a process."""

    @property
    def on_request(self) -> bool:
        """Whether it keeps each session whose start asks for that."""

    def open(self, session: str, start: bytes, player: str, why: str) -> SessionLog | None:
        """Opens the log of a new session; None: this session is not kept.

        Args:
            session: the session's id.
            start: body of its start.
            player: its player in a league; else empty.
            why: why it is kept in any case, such as `REQUESTED`; empty: the recorder chooses.
        """


class SessionLogs:
    """The logs of one session.

    Args:
        recorders: may each open a log.
        session, start, player, why: as for `SessionRecorder.open`.

    Attributes:
        taking: the logs that take ticks.
    """

    def __init__(
        self,
        recorders: Sequence[SessionRecorder] = (),
        session: str = "",
        start: bytes = b"",
        player: str = "",
        why: str = "",
    ) -> None:
        opened = [each.open(session, start, player, why) for each in recorders]
        self.taking = tuple(log for log in opened if log is not None)

    def attach(self, log: SessionLog) -> None:
        """Adds a log to a running session."""
        self.taking = (*self.taking, log)

    def detach(self, log: SessionLog) -> bool:
        """Removes a log; False: it is not among them."""
        before, self.taking = self.taking, tuple(each for each in self.taking if each is not log)
        return len(before) > len(self.taking)

    def event(self, what: str, *, last: bool = False) -> None:
        """See `SessionLog.event`."""
        for log in self.taking:
            log.event(what, last=last)

    def stop(self, body: bytes) -> None:
        """See `SessionLog.stop`."""
        for log in self.taking:
            log.stop(body)

    def keep(self, why: str) -> None:
        """See `SessionLog.keep`."""
        for log in self.taking:
            log.keep(why)

    def end(self, reason: str, result: float | None) -> None:
        """Ends the logs; a second call does nothing."""
        logs, self.taking = self.taking, ()
        for log in logs:
            log.end(reason, result)
