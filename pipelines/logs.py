"""What is logged in a process that shows its progress: each thing once, by the place that it comes from.

An agent that raises does so in every game. The first time its whole traceback is shown; how often it comes is among
the numbers.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator

from brayx.errors import raised_at

_PLACES = 256


class _Once(logging.Filter):
    """Lets the first record of each place pass: where it was logged, and where its exception was raised."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[tuple[object, ...]] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        place = (record.pathname, record.lineno, type(error), raised_at(error) if isinstance(error, Exception) else "")
        if place in self._seen or len(self._seen) >= _PLACES:
            return False
        self._seen.add(place)
        return True


class _ToStandardError(logging.Handler):
    """Writes to whatever is standard error now: a progress display puts itself there for a while."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except OSError:
            self.handleError(record)


@contextlib.contextmanager
def once_per_place() -> Iterator[None]:
    """A context in which warnings and errors of all loggers are on standard error, each place's first."""
    handler = _ToStandardError(logging.WARNING)
    handler.addFilter(_Once())
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
