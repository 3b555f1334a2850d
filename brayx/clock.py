"""The clock of deadlines: monotonic seconds that do not pass while a debugger's prompt holds this process.

Knows nothing of debuggers: whoever holds the process says so with `hold`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from time import monotonic

_state: tuple[float | None, float] = (None, 0.0)
"""Since when the process is held, and the seconds of all holds before; replaced as a whole, for other threads."""


def now() -> float:
    """Seconds; of use only as differences."""
    since, held_s = _state
    return (monotonic() if since is None else since) - held_s


def is_held() -> bool:
    """Whether the clock stands still."""
    return _state[0] is not None


def held_s() -> float:
    """For how long it has stood still so far, the hold under way left out."""
    return _state[1]


@contextlib.contextmanager
def hold() -> Iterator[None]:
    """A context in which the clock stands still. One thread at a time; a hold within a hold does nothing."""
    global _state
    since, held = _state
    if since is not None:
        yield
        return
    since = monotonic()
    _state = since, held
    try:
        yield
    finally:
        _state = None, held + monotonic() - since
