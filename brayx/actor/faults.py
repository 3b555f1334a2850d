"""Reports of exceptions that clients may not see in full: clients get the type and an id, the log gets the rest.

An exception's text may hold paths, addresses and other clients' data. Knows nothing of sessions and doors.
"""

from __future__ import annotations

import hashlib
import traceback

from brayx.errors import AgentError, BrayxError
from brayx.logs import limited

logger = limited(__name__)

_FRAMES = 5


def report(error: BaseException, what: str, whose: str, *, show_text: bool) -> BrayxError:
    """The error that a client gets for an exception of its actor; logs the whole exception.

    Typed errors other than `AgentError` are meant for clients: they pass unchanged and are not logged.

    Args:
        error: the exception; the message of an `AgentError` with a cause ends with the cause's type and text.
        what: says what failed, for any other exception.
        whose: says whose request failed, for the log.
        show_text: the client gets the exception's text too.
    """
    if isinstance(error, BrayxError) and (not isinstance(error, AgentError) or "id" in error.details):
        return error
    if not isinstance(error, Exception):
        return AgentError(f"{what}: {type(error).__name__}")  # it was cancelled
    cause: BaseException | None = error
    details = {}
    if isinstance(error, AgentError):
        cause = error.__cause__
        details = error.details
        what = error.message
    fault = fault_id(cause or error)
    if cause is not None:
        kind = type(cause).__name__
        what = what.removesuffix(f": {cause}").removesuffix(f": {kind}")
        details = {**details, "type": kind}
    logger.error("fault %s: %s: %s", fault, whose, what, exc_info=cause, extra={"fault": fault})
    if cause is not None:
        what += f": {kind}: {cause}" if show_text else f": {kind}; the service's log has more under fault {fault}"
    return AgentError(what, **details, id=fault)


def fault_id(error: BaseException) -> str:
    """An id of an exception's type and the place that raised it.

    It is the same each time, so the log has it even where it leaves out most of a thousand repeats.
    """
    frames = list(traceback.walk_tb(error.__traceback__))[-_FRAMES:]
    places = [f"{frame.f_code.co_filename}:{line}" for frame, line in frames]
    named = "\n".join([type(error).__module__, type(error).__qualname__, *places])
    return hashlib.blake2s(named.encode(), digest_size=4).hexdigest()
