"""Gives the console the running sessions of a local host: calls `brayx.actor.live` on the host's event loop."""

from __future__ import annotations

from typing import Any

from brayx.actor.host import LocalHost
from brayx.actor.live import LiveTable, NewTicks
from brayx.actor.live_ticks import LiveTicks
from brayx.recording.drawing import Drawing
from brayx.recording.live_frames import LiveFrames

_ANSWER_S = 5.0


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
        return self._host.run(self._sessions(), _ANSWER_S)

    def ticks(self, session: str, after: int) -> LiveTicks:
        """The newest ticks of a session."""
        return self._frames.shown(session, after, self._host.run(self._newer(session, after), _ANSWER_S))

    def end(self, session: str) -> None:
        """Ends a session."""
        self._host.run(self._end(session), _ANSWER_S)

    def close(self) -> None:
        """Ends the process that draws."""
        self._frames.close()

    async def _sessions(self) -> list[dict[str, Any]]:
        return self._live.sessions()

    async def _newer(self, session: str, after: int) -> NewTicks:
        return self._live.newer(session, after)

    async def _end(self, session: str) -> None:
        self._live.end(session)
