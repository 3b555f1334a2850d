"""Iterators into a buffer: read in threads, as fast as the buffer takes it, some times over. Knows nothing of files.

What is read waits for room; nothing is dropped for it. Its policy versions are 0, older than any of the trial's that
learns from it: another's say nothing here. A fragment that the buffer refuses is counted and left out, any
other error ends the feed, and its owner finds it in ``error``. That the buffer's stream has ended is no
error: its reader has all it wants.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

from brayx.errors import BadFragment, BrayxError, ConfigError, ReplayError
from brayx.types import Columns, Fragment

Part: TypeAlias = Callable[[], Iterable[Any]]
"""Gives a new iterator over its part of the data: fragments and columns. What else it gives is an error."""

_LOOK_AGAIN_S = 0.5


class Taker(Protocol):
    """What a `RemoteBuffer` is to a feed."""

    def offer(self, *replays: Fragment | Columns, timeout_s: float) -> list[Fragment | Columns]:
        """Takes what there is room for, and gives back the rest."""


class Feed:
    """Feeds a buffer while its context lasts.

    Args:
        buffer: where to.
        parts: read side by side, a thread each; nothing is promised of the order between them.
        epochs: how many times each part is read to its end.
        name: of the source, for errors.

    Attributes:
        fed: fragments, or columns' pushes, that the buffer took.
        refused: those that it refused.
        error: what ended it; None: nothing did.
    """

    def __init__(self, buffer: Taker, parts: Sequence[Part], *, epochs: int = 1, name: str = "source") -> None:
        self._buffer, self._epochs, self._name = buffer, epochs, name
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self.fed = self.refused = 0
        self.error: BrayxError | None = None
        self._threads = [
            threading.Thread(target=self._run, args=(part,), name=f"brayx-{name}-{number}", daemon=True)
            for number, part in enumerate(parts)
        ]

    def __enter__(self) -> Feed:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self, timeout_s: float = 2.0) -> None:
        """Ends it. A thread whose iterator or buffer takes longer is left behind, and hands over nothing more."""
        self._stopping.set()
        self.join(timeout_s)

    @property
    def done(self) -> bool:
        """All parts were read to their end, or the feed has failed."""
        return not any(thread.is_alive() for thread in self._threads)

    def join(self, timeout_s: float) -> bool:
        """Waits until it is done; False if that takes longer."""
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(timeout=max(0.0, deadline - time.monotonic()))
        return self.done

    def _run(self, part: Part) -> None:
        try:
            for _ in range(self._epochs):
                for replay in self._opened(part):
                    if not isinstance(replay, Fragment | Columns):
                        given = type(replay).__name__
                        raise ConfigError(
                            f"source {self._name!r} gave a {given}, expected brayx.Fragment or brayx.Columns"
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
            given = type(data).__name__
            raise ConfigError(f"source {self._name!r}: its function gave a {given}, expected an iterator")
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
    """The same, of policy version 0; as it is where its versions are no array, which the buffer refuses."""
    try:
        if isinstance(replay, Fragment):
            return dataclasses.replace(replay, policy_version=np.zeros_like(replay.policy_version, np.int64))
        versions = np.zeros_like(replay.arrays["policy_version"], np.int64)
        return Columns({**replay.arrays, "policy_version": versions})
    except (IndexError, KeyError, TypeError, ValueError):
        return replay
