"""Shares the event loop among connections with more than one piece of work, so that a burst does not delay others.

A door handles the first piece of received data at once. The rest waits here; until it is done, the door reads nothing
more from the connection. In one turn of the loop, each waiting connection handles one piece, and all together take
about `_TURN_S`. Between two turns the loop reads from other clients. Knows nothing of protocols.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from time import perf_counter
from typing import Protocol

from brayx.logs import limited

logger = limited(__name__)

_TURN_S = 0.0005
"""Time for the waiting pieces in one turn of the loop; further ones wait for the next turn. A client that sends no
burst waits about this long for all clients that do."""


class Waiting(Protocol):
    """An open connection whose received data waits."""

    transport: asyncio.Transport

    def more(self) -> None:
        """Handles one piece if possible, and waits again if there is more."""


class Turns:
    """The connections that wait for a turn, in order. Call it only from the loop's thread."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[Waiting, None] = OrderedDict()
        self._scheduled = False

    def __len__(self) -> int:
        """Number of waiting connections."""
        return len(self._waiting)

    def wait(self, connection: Waiting) -> None:
        """Calls the connection's `more` once, in a later turn of the loop."""
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
                logger.exception("closing a connection whose data could not be handled")
                connection.transport.abort()
            if perf_counter() > end:
                break
        self._scheduled = bool(self._waiting)
        if self._scheduled:
            asyncio.get_running_loop().call_soon(self._turn)
