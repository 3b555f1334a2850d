"""Gives the console the running sessions of a local host: calls `brayx.actor.live` on the host's event loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from brayx.actor.host import LocalHost
from brayx.actor.live import LiveTable
from brayx.actor.live_ticks import LiveTicks
from brayx.recording.drawing import Drawing
from brayx.recording.live_frames import LiveFrames

_ANSWER_S = 5.0

T = TypeVar("T")


class LiveSessions:
    """The running sessions of a local host. Methods may be called from any thread except the host's.

    Methods and errors are those of `LiveTable`.

    Args:
        host: the host, with open doors.
        drawing: the function that draws followed sessions; None: they are not drawn.
    """

    def __init__(self, host: LocalHost, drawing: Drawing | None = None) -> None:
        self._host = host
        self._live = LiveTable(host.table)
        self._frames = LiveFrames(drawing)

    def sessions(self) -> list[dict[str, Any]]:
        """The running sessions."""
        return self._on_loop(self._live.sessions)

    def ticks(self, session: str, after: int) -> LiveTicks:
        """The newest ticks of a session."""
        return self._frames.shown(session, after, self._on_loop(self._live.newer, session, after))

    def end(self, session: str) -> None:
        """Ends a session."""
        self._on_loop(self._live.end, session)

    def close(self) -> None:
        """Ends the process that draws."""
        self._frames.close()

    def _on_loop(self, function: Callable[..., T], *arguments: Any) -> T:
        async def call() -> T:
            return function(*arguments)

        return self._host.run(call(), _ANSWER_S)
