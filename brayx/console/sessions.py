"""The running sessions of a job: listed, followed and ended."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.responses import Response, StreamingResponse

from brayx.actor.live_ticks import LiveFrame, LiveTicks
from brayx.console.documents import Document, DoneDocument
from brayx.console.source import Source
from brayx.console.ticks import SessionBodies, TickDocument, body_of, data_url, tick_of
from brayx.errors import BrayxError

EVERY_S = 0.2
"""Time between two messages of a followed session."""

_Id = Annotated[str, Query(description="id of the session")]


class SessionDocument(Document):
    """A running session."""

    session: str
    ticks: int
    idle_s: float
    """Seconds since its last request was answered."""
    followed: bool
    """Whether a viewer follows it."""
    player: str = ""
    """Its player in a league."""
    arms: list[str] = []
    """``MODEL/ALIAS/VERSION`` for each model that is served by an alias."""
    result: float | None = None
    """The newest return that its agents recorded."""


class FrameDocument(Document):
    """A picture of a tick, drawn by the job's render."""

    number: int
    """The tick's number."""
    image: str | None
    """A PNG in a data URL; null: it could not be drawn."""
    failure: str = ""
    """Why it could not be drawn."""


class TicksDocument(Document):
    """The newest ticks of a followed session."""

    session: str
    ticks: list[TickDocument]
    labels: dict[str, list[str]] = {}
    action_labels: list[str] = []
    """``labels`` and ``action_labels``: as of `SessionBodies`."""
    after: int
    """Value of ``after`` for the next request."""
    end: str = ""
    """Why the session ended; empty: it runs."""
    result: float | None = None
    frame: FrameDocument | None = None
    """The newest picture, which may be of an earlier tick; null: the job draws none, or has drawn none yet."""


def routes(source: Source) -> APIRouter:
    """The API's calls about running sessions."""
    router = APIRouter(prefix="/api/sessions", tags=["sessions"])

    @router.get("")
    def sessions() -> list[SessionDocument]:
        """The running sessions."""
        return [] if source.channel is None else [SessionDocument(**row) for row in source.ask("sessions")]

    @router.get("/ticks")
    def ticks(session: _Id, after: Annotated[int, Query(ge=0)] = 0) -> TicksDocument:
        """The newest ticks of a session. It is followed from the first call until 10 s after the last one."""
        return _newer(source, session, after)

    @router.get("/follow", response_class=StreamingResponse, responses={200: {"content": {"text/event-stream": {}}}})
    async def follow(session: _Id) -> Response:
        """Follows a session by server-sent events, which have its newest ticks, until it ends."""
        first = await asyncio.to_thread(_newer, source, session, 0)
        return StreamingResponse(_events(source, first), media_type="text/event-stream")

    @router.delete("")
    def end_session(session: _Id) -> DoneDocument:
        """Ends a session; its client gets `session_lost` with reason `ended`."""
        source.ask("end", session)
        return DoneDocument(done=f"session {session} is ended")

    return router


def _newer(source: Source, session: str, after: int) -> TicksDocument:
    """The newest ticks of a session; see `brayx.actor.live.LiveTable.newer`."""
    newest: LiveTicks = source.ask("ticks", session, after)
    bodies = _bodies(newest.start)
    return TicksDocument(
        session=session,
        ticks=[tick_of(tick, bodies) for tick in newest.ticks],
        labels=bodies.labels,
        action_labels=bodies.action_labels,
        after=newest.after,
        end=newest.end,
        result=newest.result,
        frame=None if newest.frame is None else _frame(newest.frame),
    )


@functools.lru_cache(64)
def _bodies(start: bytes) -> SessionBodies:
    return SessionBodies(body_of(start))


def _frame(frame: LiveFrame) -> FrameDocument:
    return FrameDocument(number=frame.number, image=data_url(frame.png) if frame.png else None, failure=frame.failure)


async def _events(source: Source, newest: TicksDocument) -> AsyncIterator[str]:
    """The messages of a followed session. The last one has the session's end, or is an event ``error``."""
    while True:
        if newest.ticks or newest.end:
            yield f"data: {newest.model_dump_json()}\n\n"
        if newest.end:
            return
        await asyncio.sleep(EVERY_S)
        try:
            newest = await asyncio.to_thread(_newer, source, newest.session, newest.after)
        except BrayxError as error:
            yield f"event: error\ndata: {error.to_wire().decode()}\n\n"
            return
