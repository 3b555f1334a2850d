"""What fails in one session: errors of its agents' hooks, hooks that are cut off, and load; the game counts once.

The counts and their notes are for the display. Knows nothing of ticks and episodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator

from brayx.actor.actor import is_cancelled
from brayx.errors import BadLimits, BrayxError, DeadlineExceeded, Overloaded, raised_at
from brayx.faults import note_of
from brayx.logs import one_line
from brayx.metrics import MAX_NOTE, OVERLOADED, Recorder
from brayx.strict_json import parse_json

_SHOWN_BYTES = 120
LOAD = Overloaded | DeadlineExceeded
"""Errors of a model that is full or late. They show load, not a bug of the hook that they end."""


class SessionFailures:
    """Counts the failures of one session.

    Args:
        recorder: counts ``agent_errors``, ``games_failed`` and ``games_without_return``.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._newest = ""
        self._failure: tuple[str, str] | None = None
        self._cut_off: tuple[str, str] | None = None

    def __bool__(self) -> bool:
        return self._failure is not None

    @contextlib.contextmanager
    def counted(self, agent: str, hook: str) -> Iterator[None]:
        """A context that counts exceptions of ``hook``, and re-raises them."""
        try:
            yield
        except Exception as error:
            self.add(agent, hook, error)
            raise

    def add(self, agent: str, hook: str, error: BaseException) -> None:
        """Counts an exception of an agent's hook, with a note of its message and place.

        Load is not an error of the hook, but it ends the game too. Limits of the client's that cannot be kept are
        neither.
        """
        self._newest = note(agent, hook, error)
        if isinstance(error, BadLimits):
            return
        if isinstance(error, LOAD):
            self.fail(OVERLOADED, self._newest)
        else:
            self._add(hook, self._newest)

    def cut_off(self, hook: str, why: str) -> None:
        """Remembers a hook that was cancelled: the reason if the session ends by an error and has no other."""
        self._cut_off = hook, why

    def why(self, error: BaseException) -> str:
        """Why ``error`` ended the current tick: a line for the tick's event."""
        if self._cut_off is not None and isinstance(error, asyncio.CancelledError):
            return self._cut_off[1]
        return self._newest if isinstance(error, Exception) else type(error).__name__

    def ended_by_error(self) -> None:
        """The session ended by an error: if that is a hook that was cut off, it counts as the hook's error."""
        if self._cut_off is not None and self._failure is None:
            self._add(*self._cut_off)

    def fail(self, label: str, why: str = "") -> None:
        """Records why the game failed, unless it has failed before."""
        if self._failure is None:
            self._failure = label, why

    def count_game(self) -> None:
        """Counts this game as failed. The errors of a hook have a note, so only load needs one here."""
        label, why = self._failure or ("session", "")
        self._recorder.add("games_failed", 1.0, label=label, note=why)

    def count_without_return(self, stop: bytes) -> None:
        """Counts a game that stopped without a return; the note names what the stop's body has, and lacks."""
        self._recorder.add("games_without_return", 1.0, note=one_line(f"its stop had {_contents(stop)}"))

    def _add(self, hook: str, why: str) -> None:
        self.fail(hook)
        self._recorder.add("agent_errors", 1.0, label=hook, note=why)


def _contents(stop: bytes) -> str:
    """What a stop's body says of the game's end, and its other fields; the first bytes of one that is no object."""
    try:
        document = parse_json(stop)
    except BrayxError:
        document = None
    if not isinstance(document, dict):
        return stop[:_SHOWN_BYTES].decode(errors="replace") or "no body"
    ends = [f"{name}: {json.dumps(document.pop(name))}" for name in ("terminated", "truncated") if name in document]
    others = f" besides {', '.join(document)}" if document else ""
    return f"{', '.join(ends) or 'neither terminated nor truncated'}{others}"


def note(agent: str, hook: str, error: BaseException) -> str:
    """A line for the display: which agent's hook failed, why and where."""
    if isinstance(error, asyncio.CancelledError) and is_cancelled():
        return f"agent {agent!r}: {was_cut_off(hook)} ({raised_at(error)})"
    return f"agent {agent!r}: {note_of(error, raised_at(error))}"[:MAX_NOTE]


def was_cut_off(hook: str) -> str:
    """Says that a hook did not end in time."""
    return f"{hook} was cut off by actor.tick_timeout_s, or by the end of the service"
