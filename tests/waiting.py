"""How tests wait: for a condition, with a deadline that only a failing test reaches."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

WAIT_S = 120.0
_EVERY_S = 0.01
_PATIENCE = 4
"""Factor on shorter deadlines: they are written for a machine of one's own, and others share theirs."""


def until(
    condition: Callable[[], object], what: str = "what is waited for", timeout_s: float = WAIT_S / _PATIENCE
) -> None:
    """Waits until ``condition`` is true.

    Raises:
        AssertionError: it was not within four times ``timeout_s``; names ``what``.
    """
    deadline = time.monotonic() + _PATIENCE * timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come true within {_PATIENCE * timeout_s:g} s"
        time.sleep(_EVERY_S)


async def until_awaited(
    condition: Callable[[], object], what: str = "what is waited for", timeout_s: float = WAIT_S / _PATIENCE
) -> None:
    """As `until`, with the event loop running meanwhile."""
    deadline = time.monotonic() + _PATIENCE * timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come true within {_PATIENCE * timeout_s:g} s"
        await asyncio.sleep(_EVERY_S)
