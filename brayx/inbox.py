"""What a running job is asked from outside: a request waits for the job's owner, its answer for whoever asked.

`Inbox` is what a trial's hub keeps of them, since the hub is where everybody finds the trial. The owner looks into it
in turns of its own (`take`, `answer`); who asks looks for the answer until it has waited for long enough. Knows nothing
of what is asked.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

_ROOM = 64
"""Requests that wait, and answers that nobody has fetched."""


class Inbox:
    """Requests and their answers. Thread safe; past 64 of either the oldest is forgotten.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._now = clock
        self._requests: dict[str, tuple[Any, float]] = {}
        self._answers: dict[str, Any] = {}
        self._at_inbox = threading.Lock()

    def ask(self, request: Any, within_s: float) -> str:
        """Leaves a request, which is not to be taken any more after ``within_s``; gives the key of its answer."""
        key = secrets.token_hex(8)  # an inbox that was lost with its process has given none of these
        with self._at_inbox:
            self._requests[key] = (request, self._now() + within_s)
            _keep_newest(self._requests)
        return key

    def take(self) -> list[tuple[str, Any]]:
        """Every request that waits, the oldest first, with the key to answer it by; none waits afterwards."""
        with self._at_inbox:
            taken, self._requests = self._requests, {}
            now = self._now()
        return [(key, request) for key, (request, until) in taken.items() if now <= until]

    def answer(self, key: str, answer: Any) -> None:
        """Leaves the answer to a request."""
        with self._at_inbox:
            self._answers[key] = answer
            _keep_newest(self._answers)

    def answered(self, key: str) -> Any:
        """The answer to a request, once; None while there is none."""
        with self._at_inbox:
            return self._answers.pop(key, None)


def _keep_newest(entries: dict[str, Any]) -> None:
    while len(entries) > _ROOM:
        del entries[next(iter(entries))]
