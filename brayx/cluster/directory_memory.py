"""What a session directory finds after its restart: which sessions its owners had when they last renewed their lease.

Knows nothing of the directory. Serve keeps its own state in the same store, which nothing public of Ray reaches.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from typing import Protocol

logger = logging.getLogger(__name__)

_RETRY_S = 1.0


class Memory(Protocol):
    """Where a directory finds, after a restart, which sessions its owners had."""

    def write(self, owner: str, sessions: list[str]) -> None:
        """Replaces what is kept of an owner; nothing is kept of one without sessions."""

    def read(self) -> dict[str, list[str]]:
        """Sessions by owner."""


class NoMemory:
    """Keeps nothing."""

    def write(self, owner: str, sessions: list[str]) -> None:
        """See `Memory.write`."""

    def read(self) -> dict[str, list[str]]:
        """See `Memory.read`."""
        return {}


class ClusterMemory:
    """A `Memory` in the key-value store of Ray's control service, which lives as long as the cluster.

    A thread writes, so that a directory answers while that service does not.

    Args:
        name: of the directory's actor.
        namespace: of that store.
    """

    def __init__(self, name: str, namespace: str) -> None:
        self._prefix = f"{name}/".encode()
        self._namespace = namespace
        self._waiting: dict[str, list[str]] = {}  # the newest of each owner
        self._some = threading.Condition()
        self._writer: threading.Thread | None = None

    def write(self, owner: str, sessions: list[str]) -> None:
        """See `Memory.write`; returns at once."""
        with self._some:
            self._waiting[owner] = sessions
            self._some.notify()
        if self._writer is None:
            self._writer = threading.Thread(target=self._write_on, name="memory of sessions", daemon=True)
            self._writer.start()

    def _write_on(self) -> None:
        while True:
            with self._some:
                self._some.wait_for(lambda: self._waiting)
                owner, sessions = self._waiting.popitem()
            try:
                self._put(owner, sessions)
            except Exception as error:
                logger.warning("what a replica has could not be written down: %s: %s", type(error).__name__, error)
                with self._some:
                    self._waiting.setdefault(owner, sessions)
                time.sleep(_RETRY_S)

    def _put(self, owner: str, sessions: list[str]) -> None:
        from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_put

        key = self._prefix + owner.encode()
        if sessions:
            _internal_kv_put(key, json.dumps(sessions).encode(), overwrite=True, namespace=self._namespace)
        else:
            _internal_kv_del(key, namespace=self._namespace)

    def read(self) -> dict[str, list[str]]:
        """See `Memory.read`."""
        from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_list

        keys = _internal_kv_list(self._prefix, namespace=self._namespace)
        found = {key: _internal_kv_get(key, namespace=self._namespace) for key in keys}
        return {key.removeprefix(self._prefix).decode(): json.loads(kept) for key, kept in found.items() if kept}

    def clear(self) -> None:
        """Forgets what a directory of that name has left."""
        for owner in self.read():
            self._put(owner, [])
