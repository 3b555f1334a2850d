"""Feeds a buffer from iterators over data at rest, in threads, for a number of epochs. Knows nothing of files.

The feed waits for room in the buffer, so it causes no drops. It sets all policy versions to 0, because versions of
another trial mean nothing here. A fragment that the buffer refuses is counted and skipped. Any other error ends the
feed and is kept in ``error``, except that the buffer's stream has ended: then its reader needs no more data.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

from brayx.errors import BadFragment, BrayxError, ConfigError, ReplayError
from brayx.threads import NativeThread
from brayx.types import Columns, Fragment

Part: TypeAlias = Callable[[], Iterable[Any]]
"""Returns a new iterator over one part of the data, as fragments and columns."""

_LOOK_AGAIN_S = 0.5


class Taker(Protocol):
    """The part of `RemoteBuffer` that a feed uses."""

    def offer(self, *replays: Fragment | Columns, timeout_s: float) -> list[Fragment | Columns]:
        """Stores as much as there is room for; returns the rest."""


class Feed:
    """Feeds a buffer while its context is open.

    Args:
        buffer: the buffer to feed.
        parts: parts of the data, each read in its own thread; the order between them is undefined.
        epochs: number of times that each part is read.
        name: name of the source, for errors.

    Attributes:
        fed: fragments and `Columns` that the buffer accepted.
        refused: fragments and `Columns` that it refused.
        error: the error that ended the feed; None if there was none.
    """

    def __init__(self, buffer: Taker, parts: Sequence[Part], *, epochs: int = 1, name: str = "source") -> None:
        self._buffer, self._epochs, self._name = buffer, epochs, name
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self.fed = self.refused = 0
        self.error: BrayxError | None = None
        self._threads = [
            NativeThread(functools.partial(self._run, part), f"brayx-{name}-{number}", self._stopping.set)
            for number, part in enumerate(parts)
        ]

    def __enter__(self) -> Feed:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self, timeout_s: float = 2.0) -> None:
        """Ends the feed. A thread that does not stop in time is abandoned; it pushes nothing more."""
        self._stopping.set()
        self.join(timeout_s)

    @property
    def done(self) -> bool:
        """True once all parts are read, or the feed has failed."""
        return not any(thread.is_alive() for thread in self._threads)

    def join(self, timeout_s: float) -> bool:
        """Waits until the feed is done; False on timeout."""
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(timeout=max(0.0, deadline - time.monotonic()))
        return self.done

    def _run(self, part: Part) -> None:
        try:
            for _ in range(self._epochs):
                for replay in self._opened(part):
                    if not isinstance(replay, Fragment | Columns):
                        type_name = type(replay).__name__
                        raise ConfigError(
                            f"source {self._name!r} yielded {type_name}, expected brayx.Fragment or brayx.Columns"
                        )
                    self._push(_without_version(replay))
                    if self._stopping.is_set():
                        return
        except ReplayError as error:
            if error.details.get("ended"):
                self._stopping.set()
                return
            self._failed(ReplayError(f"source {self._name!r}: {error.message}", source=self._name))
        except BrayxError as error:
            self._failed(error)
        except Exception as error:
            self._failed(ConfigError(f"source {self._name!r} raised {type(error).__name__}: {error}"))

    def _opened(self, part: Part) -> Iterable[Any]:
        data: Any = part()
        if not isinstance(data, Iterable):
            type_name = type(data).__name__
            raise ConfigError(f"source {self._name!r}: its function returned a {type_name}, expected an iterator")
        return data

    def _push(self, replay: Fragment | Columns) -> None:
        left = [replay]
        try:
            while left:
                if self._stopping.is_set():
                    return
                left = self._buffer.offer(*left, timeout_s=_LOOK_AGAIN_S)
        except BadFragment:  # the buffer counts the transitions and keeps the message
            with self._lock:
                self.refused += 1
            return
        with self._lock:
            self.fed += 1

    def _failed(self, error: BrayxError) -> None:
        with self._lock, contextlib.suppress(RuntimeError):
            if not self._stopping.is_set() and self.error is None:
                self.error = error
        self._stopping.set()


def _without_version(replay: Fragment | Columns) -> Fragment | Columns:
    """A copy with policy version 0; unchanged if its versions are not an array, which the buffer refuses."""
    try:
        if isinstance(replay, Fragment):
            return dataclasses.replace(replay, policy_version=np.zeros_like(replay.policy_version, np.int64))
        versions = np.zeros_like(replay.arrays["policy_version"], np.int64)
        return Columns({**replay.arrays, "policy_version": versions})
    except (IndexError, KeyError, TypeError, ValueError):
        return replay
