"""Until when a replica may answer for its sessions: past that, another may have taken them over.

A process that was stopped, or starved, knows nothing of the time that has passed; so whoever is about to answer looks
at the clock, and waits for the renewal if it is late. Pure asyncio; knows nothing of who renews, nor of sessions.
"""

from __future__ import annotations

import asyncio
import math
import time


class Lease:
    """A lease.

    Args:
        ends: seconds of `time.monotonic`; a table that stands alone has it for ever.

    Attributes:
        ends: as given, or as renewed.
        wanted: somebody waits for the renewal; who renews it clears that.
    """

    __slots__ = ("_renewed", "ends", "wanted")

    def __init__(self, ends: float = math.inf) -> None:
        self.ends = ends
        self.wanted = asyncio.Event()
        self._renewed = asyncio.Event()

    def renew(self, ends: float) -> None:
        """It lasts until then; who waits goes on."""
        self.ends = ends
        renewed, self._renewed = self._renewed, asyncio.Event()
        renewed.set()

    @property
    def is_over(self) -> bool:
        """Whether it has ended, by the real clock, as other processes see it."""
        return time.monotonic() > self.ends

    async def held(self) -> None:
        """Waits until it is held, for as long as that takes."""
        while self.is_over:
            self.wanted.set()
            await self._renewed.wait()
