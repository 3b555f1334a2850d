"""Requests to a running job from outside: each request waits for the job's owner, and its answer for the caller.

A trial's hub holds the `Inbox`, since other processes find the trial by its hub. The owner polls it for requests
(`take`, `answer`), and the caller polls it for the answer until a deadline. Knows nothing of the requests' content.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

_ROOM = 64
"""Limit on waiting requests, and on answers that were not fetched."""


class Inbox:
    """Requests and their answers. Thread safe; beyond 64 of either, the oldest is dropped.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._now = clock
        self._requests: dict[str, tuple[Any, float]] = {}
        self._answers: dict[str, Any] = {}
        self._at_inbox = threading.Lock()

    def ask(self, request: Any, within_s: float) -> str:
        """Adds a request that expires after ``within_s``; returns the key of its answer."""
        key = secrets.token_hex(8)  # random, so that it differs from keys of an earlier process
        with self._at_inbox:
            self._requests[key] = (request, self._now() + within_s)
            _keep_newest(self._requests)
        return key

    def take(self) -> list[tuple[str, Any]]:
        """Removes and returns all waiting requests, oldest first, each with the key for its answer."""
        with self._at_inbox:
            taken, self._requests = self._requests, {}
            now = self._now()
        return [(key, request) for key, (request, until) in taken.items() if now <= until]

    def answer(self, key: str, answer: Any) -> None:
        """Stores the answer to a request."""
        with self._at_inbox:
            self._answers[key] = answer
            _keep_newest(self._answers)

    def answered(self, key: str) -> Any:
        """Removes and returns the answer to a request; None while there is none."""
        with self._at_inbox:
            return self._answers.pop(key, None)


def _keep_newest(entries: dict[str, Any]) -> None:
    while len(entries) > _ROOM:
        del entries[next(iter(entries))]
