"""Games on event loops that wait for the learner, which another thread says. Knows nothing of buffers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable


class Waiters:
    """Those who wait while a condition holds.

    Args:
        must_wait: the condition.
    """

    def __init__(self, must_wait: Callable[[], bool]) -> None:
        self._must_wait = must_wait
        self._waiting: set[asyncio.Future[None]] = set()

    async def wait(self, timeout_s: float) -> None:
        """Waits while the condition holds, at most ``timeout_s``. From any event loop."""
        if not self._must_wait():
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while True:
                    woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                    self._waiting.add(woken)  # before the look, so that no change is missed between the two
                    try:
                        if not self._must_wait():
                            break
                        await woken
                    finally:
                        self._waiting.discard(woken)

    def wake(self) -> None:
        """Makes all look at the condition again. From any thread."""
        for woken in list(self._waiting):
            with contextlib.suppress(RuntimeError):  # its loop is closed
                woken.get_loop().call_soon_threadsafe(_resolve, woken)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
