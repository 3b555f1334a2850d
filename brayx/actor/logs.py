"""The interfaces through which sessions are logged tick by tick. Knows nothing of files or pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from brayx.actor.agent import State
from brayx.types import Forward

REQUESTED = "requested"
"""Reason for keeping a session whose start asks for it."""


class SessionLog:
    """The log of one session; the base class keeps nothing. Its methods neither wait nor raise.

    Attributes:
        is_taking: whether it takes ticks now. While no log of a session does, its ticks cost nothing extra.
        why: why the session is kept; empty: that is undecided.
    """

    is_taking = True
    why = ""

    def trace(self, traceparent: str) -> None:
        """Sets the client's span, the parent of the ticks from now on; it is not checked."""

    def phase(self, name: str) -> None:
        """Marks the end of a phase of the running tick: ``decode``, then ``agents``; after that it is encoded."""

    def tick(self, state: State, body: bytes, reply: bytes, began: float, arrived: float) -> None:
        """Adds a tick.

        Args:
            state: the tick's state, with everything that the agents set.
            body, reply: the bytes of both.
            began: when the actor started the tick, by `brayx.clock`; 0: no log took ticks then.
            arrived: when the tick arrived, by the same clock.
        """

    def failed(self, state: State, body: bytes, began: float, arrived: float, why: str) -> None:
        """Adds a tick that raised or was refused, with an event ``error`` and an empty reply, even if no tick is taken.

        ``why`` is one line: the error's type, message and place, or what is wrong in the body.
        """
        self.event(f"error: {why}")
        self.tick(state, body, b"", began, arrived)

    def forward(self, model: str, forward: Forward, seconds: float) -> None:
        """Adds a forward of the running tick: the model's name, its result, and how long the agent waited."""

    def event(self, what: str, *, last: bool = False) -> None:
        """Sets the event of the next tick, or with ``last`` of the newest one.

        Events are ``error: WHY``, ``stop refused: WHY``, ``fallback`` (the client got the fallback's reply),
        ``forwarded`` (the tick came through another replica), ``skipped N`` and ``resumed``. A tick may have several.
        """

    def stop(self, body: bytes, outcome: str) -> None:
        """Adds the body of the session's stop, which follows its last tick; not called for a stop without one.

        ``outcome`` is ``terminated`` or ``truncated`` if the body says so; else empty.
        """

    def keep(self, why: str) -> None:
        """Keeps the session even if it was not chosen at its start; ``why`` is the reason."""

    def reported(self, result: str | float) -> None:
        """Takes the result of the session's seat in a league: ``win``, ``draw``, ``loss`` or a score."""

    def end(self, reason: str, result: float | None) -> None:
        """Ends the log, with the reason for the session's end, and the game's return if an agent recorded one."""


class SessionLogOpener(Protocol):
    """Keeps the sessions of a process."""

    @property
    def on_request(self) -> bool:
        """Whether it keeps every session whose start asks for it."""

    def open(self, session: str, start: bytes, player: str, why: str, reply: bytes, alias: str) -> SessionLog | None:
        """Opens the log of a new session; None: this session is not kept.

        Args:
            session: the session's id.
            start: body of its start.
            player: its player in a league; else empty.
            why: reason to keep it in any case, such as `REQUESTED`; empty: the recorder chooses.
            reply: reply to its start.
            alias: alias of the registered version that plays it; empty: it is played by the newest weights.
        """


class SessionLogs:
    """The logs of one session.

    Args:
        recorders: may each open a log.
        session, start, player, why, reply, alias: as for `SessionLogOpener.open`.

    Attributes:
        taking: the logs that take ticks.
    """

    def __init__(
        self,
        recorders: Sequence[SessionLogOpener] = (),
        session: str = "",
        start: bytes = b"",
        player: str = "",
        why: str = "",
        reply: bytes = b"",
        alias: str = "",
    ) -> None:
        opened = [recorder.open(session, start, player, why, reply, alias) for recorder in recorders]
        self._all = tuple(log for log in opened if log is not None)
        self.taking: tuple[SessionLog, ...] = ()
        self._choose()

    @property
    def why(self) -> str:
        """Why the session is kept; empty: that is undecided."""
        return next((log.why for log in self._all if log.why), "")

    def failed(self, state: State, body: bytes, began: float, arrived: float, why: str) -> None:
        """See `SessionLog.failed`."""
        for log in self._all:
            log.failed(state, body, began, arrived, why)

    def trace(self, traceparent: str) -> None:
        """See `SessionLog.trace`."""
        for log in self._all:
            log.trace(traceparent)
        self._choose()

    def phase(self, name: str) -> None:
        """See `SessionLog.phase`."""
        for log in self.taking:
            log.phase(name)

    def forward(self, model: str, forward: Forward, seconds: float) -> None:
        """See `SessionLog.forward`."""
        for log in self.taking:
            log.forward(model, forward, seconds)

    def attach(self, log: SessionLog) -> None:
        """Adds a log to a running session."""
        self._all = (*self._all, log)
        self._choose()

    def detach(self, log: SessionLog) -> None:
        """Removes a log, if it is among them."""
        self._all = tuple(other for other in self._all if other is not log)
        self._choose()

    def event(self, what: str, *, last: bool = False) -> None:
        """See `SessionLog.event`."""
        for log in self._all:
            log.event(what, last=last)

    def stop(self, body: bytes, outcome: str) -> None:
        """See `SessionLog.stop`."""
        for log in self._all:
            log.stop(body, outcome)

    def keep(self, why: str) -> None:
        """See `SessionLog.keep`."""
        for log in self._all:
            log.keep(why)
        self._choose()

    def reported(self, result: str | float) -> None:
        """See `SessionLog.reported`."""
        for log in self._all:
            log.reported(result)

    def end(self, reason: str, result: float | None) -> None:
        """Ends the logs; a second call does nothing."""
        logs, self._all, self.taking = self._all, (), ()
        for log in logs:
            log.end(reason, result)

    def _choose(self) -> None:
        self.taking = tuple(log for log in self._all if log.is_taking)
