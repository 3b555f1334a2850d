"""Reports exceptions without leaking them to clients: a client gets the type and an id, the log gets the rest.

An exception's text may hold paths, addresses and other clients' data. Knows nothing of sessions and doors.
"""

from __future__ import annotations

import hashlib
import traceback

from brayx.errors import AgentError, BrayxError, first_line
from brayx.logs import limited, one_line

logger = limited(__name__)
AGENTS_LOGGER = f"{__name__}.agents"
"""Logs exceptions of agents' hooks. A training's display shows these records itself, and keeps them out of the log."""
_agents_logger = limited(AGENTS_LOGGER)

_FRAMES = 5


def report(
    error: BaseException, what: str, whose: str, *, show_text: bool, kind: type[BrayxError] = AgentError
) -> BrayxError:
    """Logs an exception of an actor or a model, and returns the error for the client.

    Typed errors pass unchanged and are not logged, except those of status 500, since their messages quote the failure.

    Args:
        error: the exception. For an `AgentError`, its message says what failed and its cause why.
        what: what failed, for any other exception.
        whose: whose request failed, for the log.
        show_text: the client gets the exception's text too.
        kind: class of the error for an exception that is not typed.
    """
    typed = error if isinstance(error, BrayxError) else None
    if typed is not None and (typed.http_status != AgentError.http_status or "id" in typed.details):
        return typed
    if not isinstance(error, Exception):
        return kind(f"{what}: {type(error).__name__}")  # it was cancelled
    cause: BaseException | None = error
    kind = type(typed) if typed is not None else kind
    details = {}
    if isinstance(error, AgentError):
        what, details, cause = error.message, error.details, error.__cause__
    fault = fault_id(cause or error)
    log = _agents_logger if isinstance(error, AgentError) else logger
    log.error("fault %s: %s: %s", fault, whose, what, exc_info=cause, extra={"fault": fault})
    if cause is not None:
        name = type(cause).__name__
        details = {**details, "type": name}
        what += f": {name}: {cause}" if show_text else f": {name}; the service's log has more under fault {fault}"
    return kind(what, **details, id=fault)


def note_of(error: BaseException, place: str) -> str:
    """One line for the display of a training: an error's type and message, and its ``FILE:LINE``, if known."""
    # It may quote what a client sent, and no client controls this terminal.
    return one_line(f"{type(error).__name__}: {first_line(error)}" + (f" ({place})" if place else ""))


def fault_id(error: BaseException) -> str:
    """An id of an exception's type and the place that raised it.

    Repeats have the same id, so the log contains it even if it drops most of the repeats.
    """
    frames = list(traceback.walk_tb(error.__traceback__))[-_FRAMES:]
    places = [f"{frame.f_code.co_filename}:{line}" for frame, line in frames]
    named = "\n".join([type(error).__module__, type(error).__qualname__, *places])
    return hashlib.blake2s(named.encode(), digest_size=4).hexdigest()
