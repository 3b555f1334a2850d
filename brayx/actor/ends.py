"""Why sessions ended, and the error for a request that comes after the end."""

from __future__ import annotations

from collections import OrderedDict

from brayx.errors import BrayxError, Overloaded, ServiceFull, SessionLost, SessionUnknown
from brayx.gamecore.protocol import StepKind, StepRequest

_MAX_KEPT = 4096

BETWEEN = "between"
"""Layer of the error for a request that came while its session was moved: the request was not applied."""


class Ends:
    """The reasons of the newest ends, by session."""

    def __init__(self) -> None:
        self._reasons: OrderedDict[str, str] = OrderedDict()

    def __contains__(self, session: str) -> bool:
        return session in self._reasons

    def add(self, session: str, reason: str) -> None:
        """Keeps why a session ended."""
        self._reasons[session] = reason
        while len(self._reasons) > _MAX_KEPT:
            self._reasons.popitem(last=False)

    def forget(self, session: str) -> None:
        """Drops the reason: the session runs again, or another process keeps the reason."""
        self._reasons.pop(session, None)

    def is_ending(self, session: str) -> bool:
        """Whether a session of that id is ending here and its id is not free yet."""
        return self._reasons.get(session, "moved") != "moved"

    def error(self, request: StepRequest) -> BrayxError:
        """The error for a tick or stop. One request gets the reason, and every request that may be a repeat."""
        reason = self._reasons.get(request.session, "")
        self.given(request, reason)
        return over(request.session, request.kind.value, reason)

    def given(self, request: StepRequest, reason: str) -> None:
        """Drops the reason after a request got it, unless the request may be repeated."""
        if reason != "moved" and not may_be_repeat(request):
            self.forget(request.session)


def may_be_repeat(request: StepRequest) -> bool:
    """Whether the request may be a repeat after a lost reply: clients repeat numbered ticks and stops."""
    return request.seq is not None or request.kind is StepKind.STOP


def over(session: str, kind: str, reason: str) -> BrayxError:
    """The error for a request whose session ended for ``reason``; an empty reason is unknown."""
    if reason == "moved":
        return Overloaded(f"session {session!r} is moving to another replica; try again", layer=BETWEEN)
    if reason not in ("", "stop"):
        return SessionLost(f"session {session!r} was ended here: {reason}", reason=reason)
    return SessionUnknown(f"{kind} for session {session!r}, which is not running: send step_kind start first")


def start_refused() -> ServiceFull:
    """The error for a start at a replica that is ending."""
    return ServiceFull("this replica is ending and takes no new sessions; try again")
