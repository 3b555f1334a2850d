"""The time until which a replica may answer for its sessions; later another replica may have taken them over.

A suspended or starved process does not notice the time that passed. So it checks the clock before every answer, and
waits for the renewal if it is late. Pure asyncio; knows nothing of sessions, nor how leases are renewed.
"""

from __future__ import annotations

import asyncio
import math
import time


class Lease:
    """The lease of one process.

    Args:
        ends: seconds of `time.monotonic`; infinite for a table without peers.

    Attributes:
        ends: the end as given or renewed.
        wanted: a request waits for the renewal; the renewal clears it.
    """

    __slots__ = ("_renewed", "ends", "wanted")

    def __init__(self, ends: float = math.inf) -> None:
        self.ends = ends
        self.wanted = asyncio.Event()
        self._renewed = asyncio.Event()

    def renew(self, ends: float) -> None:
        """Extends the lease, and wakes waiting requests."""
        self.ends = ends
        renewed, self._renewed = self._renewed, asyncio.Event()
        renewed.set()

    @property
    def is_over(self) -> bool:
        """Whether it has ended, by the real clock, as other processes see it."""
        return time.monotonic() > self.ends

    async def held(self) -> None:
        """Waits until the lease is held; the caller has the deadline."""
        while self.is_over:
            self.wanted.set()
            await self._renewed.wait()
