"""Limits for log lines that clients can cause: each is one line long, and only some of many repeats are logged.

A client that sends malformed data, or makes an agent raise, thousands of times a second would otherwise fill the disk
and hide all other log lines. Knows nothing of what is logged.
"""

from __future__ import annotations

import logging
import re
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable

LINES = 10
"""Lines logged in `PERIOD_S` from one place in the code, or for one fault there."""
PERIOD_S = 60.0
_MAX_PLACES = 4096
_MAX_CHARS = 4000
_MAX_FRAMES = 8
_MAX_CAUSES = 4
_OTHERS = ("asyncio", "grpc._cython.cygrpc", "ray.serve", "uvicorn.error")
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")


class Limit(logging.Filter):
    """Makes one line of each record, lets `LINES` of each place through in `PERIOD_S`, and counts the rest.

    A place is a line of code that logs. Each value of a record's ``fault`` (given with ``extra``) is its own place.

    Args:
        clock: seconds, for tests.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._lock = threading.Lock()
        self._places: OrderedDict[tuple[str, int, object], list[float]] = OrderedDict()

    def forget(self) -> None:
        """Resets the counts of all places."""
        with self._lock:
            self._places.clear()

    def filter(self, record: logging.LogRecord) -> bool:
        left_out = self._left_out(record)
        if left_out is None:
            return False
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            text += f": {in_one_line(record.exc_info[1])}"
        if left_out:
            text += f" ({left_out} more of these were not logged)"
        record.msg, record.args = one_line(text), ()
        record.exc_info = record.exc_text = record.stack_info = None
        return True

    def _left_out(self, record: logging.LogRecord) -> int | None:
        """Number of lines left out before this one; None: leave this one out too."""
        place = (record.pathname, record.lineno, getattr(record, "fault", None))
        now = self._clock()
        with self._lock:
            count = self._places.setdefault(place, [now, 0])
            self._places.move_to_end(place)
            if len(self._places) > _MAX_PLACES:
                self._places.popitem(last=False)
            left_out = 0
            if now - count[0] >= PERIOD_S:
                left_out = max(0, int(count[1]) - LINES)
                count[:] = [now, 0]
            count[1] += 1
            return None if count[1] > LINES else left_out


limit = Limit()
"""The limit of this process."""


def limited(name: str) -> logging.Logger:
    """The logger of that name, with `limit` applied to its lines."""
    logger = logging.getLogger(name)
    logger.addFilter(limit)
    return logger


def limit_others() -> None:
    """Limits the log lines of the libraries below the doors: clients can cause those too."""
    for name in _OTHERS:
        limited(name)


def one_line(text: str) -> str:
    """A text without line breaks and control characters, cut if it is very long."""
    cut = text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]}…"
    return _CONTROL.sub(lambda match: repr(match[0])[1:-1], cut.strip())


def in_one_line(error: BaseException) -> str:
    """An exception on one line: its text, its calls, the innermost first, and its causes."""
    parts: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(parts) < _MAX_CAUSES:
        frames = traceback.extract_tb(cause.__traceback__)[-_MAX_FRAMES:]
        calls = " < ".join(f"{frame.filename}:{frame.lineno} {frame.name}" for frame in reversed(frames))
        text = "".join(traceback.format_exception_only(cause)).strip()
        parts.append(f"{text} [{calls}]" if calls else text)
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return one_line(", caused by ".join(parts))
