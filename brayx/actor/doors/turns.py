"""Shares the event loop among connections that have sent more than one piece of work, so that a burst delays no others.

A door handles the first piece of what it reads at once, and reads no more before the rest is done. The rest waits here:
in one turn of the loop each waiting connection handles one piece, and all of them together take about `_TURN_S`. What
other clients send is read between two turns. Knows nothing of protocols.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from time import perf_counter
from typing import Protocol

from brayx.logs import limited

logger = limited(__name__)

_TURN_S = 0.0005
"""Time of a loop's turn after which further pieces wait for the next one: a client that sends no burst waits about this
long for all those that do."""


class Waiting(Protocol):
    """An open connection with input that waits."""

    transport: asyncio.Transport

    def more(self) -> None:
        """Handles one piece, if nothing prevents that, and waits again if there is more."""


class Turns:
    """The connections that wait for a turn, in order. All calls come from one loop's thread."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[Waiting, None] = OrderedDict()
        self._scheduled = False

    def __len__(self) -> int:
        """Number of waiting connections."""
        return len(self._waiting)

    def wait(self, connection: Waiting) -> None:
        """Calls the connection's `more` once, in one of the loop's next turns."""
        self._waiting[connection] = None
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        end = perf_counter() + _TURN_S
        for _ in range(len(self._waiting)):
            connection, _ = self._waiting.popitem(last=False)
            try:
                if not connection.transport.is_closing():
                    connection.more()
            except Exception:
                logger.exception("a connection's input could not be handled: it is closed")
                connection.transport.abort()
            if perf_counter() > end:
                break
        self._scheduled = bool(self._waiting)
        if self._scheduled:
            asyncio.get_running_loop().call_soon(self._turn)
