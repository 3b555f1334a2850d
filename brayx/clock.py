"""The clock of deadlines: monotonic seconds that do not pass while a debugger's prompt holds this process.

Knows nothing of debuggers; they call `hold`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from time import monotonic

_state: tuple[float | None, float] = (None, 0.0)
"""Start of the current hold, and the seconds of all earlier ones. Replaced as a whole: other threads read it."""


def now() -> float:
    """Seconds; only differences have a meaning."""
    since, held_s = _state
    return (monotonic() if since is None else since) - held_s


def is_held() -> bool:
    """Whether the clock stands still."""
    return _state[0] is not None


def held_s() -> float:
    """Seconds of all holds so far, without the current one."""
    return _state[1]


@contextlib.contextmanager
def hold() -> Iterator[None]:
    """A context in which the clock stands still. One thread at a time; a hold within a hold does nothing."""
    global _state
    since, total = _state
    if since is not None:
        yield
        return
    since = monotonic()
    _state = since, total
    try:
        yield
    finally:
        _state = None, total + monotonic() - since
