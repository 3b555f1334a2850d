"""The connections that hold sessions, by name, and their notification when a session ends or is taken over.

Knows nothing of doors; the connections of other processes are reached through `brayx.actor.ownership`.
"""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Callable

from brayx.actor.ownership import Ownership
from brayx.actor.service import Holder
from brayx.logs import limited

logger = limited(__name__)

HOLDER_MARK = "#"
"""Separates the process's address from the rest of a connection's name."""


class Holders:
    """The connections of this process that may hold a session.

    Args:
        ownership: reaches the connections of other processes.
    """

    def __init__(self, ownership: Ownership) -> None:
        self._ownership = ownership
        self._here: weakref.WeakValueDictionary[str, Holder] = weakref.WeakValueDictionary()

    def add(self, on_end: Callable[[str], None], at: str = "") -> Holder:
        """Registers a connection; its name starts with ``at``, the address of this process."""
        holder = Holder(f"{at}{HOLDER_MARK}{uuid.uuid4().hex}", on_end)
        self._here[holder.name] = holder
        return holder

    def end(self, holder: str, reason: str) -> bool:
        """Notifies a connection of this process that it lost its session; False: there is no such connection."""
        connection = self._here.get(holder)
        if connection is None:
            return False
        connection.end(reason)
        return True

    def notify(self, holder: str | None, reason: str) -> None:
        """Notifies a connection of any process; an empty name is no connection."""
        try:
            if holder and not self.end(holder, reason):
                self._ownership.notify(holder, reason)
        except Exception:
            logger.exception("connection %s was not notified that it lost its session: %s", holder, reason)
