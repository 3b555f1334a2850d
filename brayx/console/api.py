"""The control API: a FastAPI application over a `Desk`, with OpenAPI at ``/docs``.

Knows nothing of jobs, stores or pages.
"""

from __future__ import annotations

import asyncio
import importlib.resources
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any

from fastapi import FastAPI, Path, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, Response, StreamingResponse

from brayx.console import documents as doc
from brayx.console.desk import Desk
from brayx.console.guard import ConsoleKeys, Guard, refusal
from brayx.errors import BrayxError, ProtocolError

EVERY_S = 0.2
"""Time between two messages of a followed session."""

SessionId = Annotated[str, Query(description="id of the session")]
Registered = Annotated[str, Query(pattern=r"^models:/[^/@]+/\d+$", description="models:/NAME/VERSION")]
_PNG: dict[int | str, dict[str, Any]] = {200: {"content": {"image/png": {}}}, 204: {"description": "no frame"}}
_ERRORS: dict[int | str, dict[str, Any]] = {
    "default": {"description": "a typed error: `error`, `message`, `details`", "content": {"application/json": {}}}
}


def create_app(desk: Desk, keys: ConsoleKeys | None = None) -> FastAPI:
    """The control API.

    Args:
        desk: answers the calls.
        keys: keys of the callers; None: everybody on this machine.
    """
    app = FastAPI(
        title="brayx console",
        version="1",
        description="Sessions, models, leagues, recordings and trials of a job. GET reads; other methods control.",
        responses=_ERRORS,
        docs_url=None,
        redoc_url=None,
    )
    app.add_middleware(Guard, keys=keys)

    @app.exception_handler(BrayxError)
    async def refused(_: Request, error: BrayxError) -> Response:
        return refusal(error)

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        return refusal(ProtocolError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}"))

    _reading(app, desk)
    _controlling(app, desk)
    return app


def _reading(app: FastAPI, desk: Desk) -> None:
    @app.get("/api/job", tags=["job"])
    def job() -> doc.Job:
        """The job, its health and its refusals."""
        return desk.job()

    @app.get("/api/sessions", tags=["sessions"])
    def sessions() -> list[doc.Session]:
        """The running sessions."""
        return desk.sessions()

    @app.get("/api/sessions/ticks", tags=["sessions"])
    def ticks(session: SessionId, after: Annotated[int, Query(ge=0)] = 0) -> doc.Ticks:
        """The newest ticks of a session, which is followed from the first call on and for 3 s after the last."""
        return desk.ticks(session, after)

    @app.get("/api/sessions/follow", tags=["sessions"], response_class=StreamingResponse)
    async def follow(session: SessionId) -> Response:
        """Server-sent events: the newest ticks of a session as they come, until it ends."""
        first = await asyncio.to_thread(desk.ticks, session, 0)
        return StreamingResponse(_events(desk.ticks, first), media_type="text/event-stream")

    @app.get("/api/models", tags=["models"])
    def models() -> list[doc.Model]:
        """The registered models and their versions."""
        return desk.models()

    @app.get("/api/trials", tags=["trials"])
    def trials(project: str = "") -> list[doc.Trial]:
        """The newest trials."""
        return desk.trials(project)

    @app.get("/api/trials/{run_id}", tags=["trials"])
    def curves(run_id: str, metric: Annotated[list[str], Query(description="only these")] = []) -> doc.Curves:  # noqa: B006
        """Numbers and curves of a trial."""
        return desk.curves(run_id, metric)

    @app.get("/api/league", tags=["league"])
    def league() -> doc.League | None:
        """Standings, payoff and rating curves of the newest league; null: there is none."""
        return desk.league()

    @app.get("/api/opponents", tags=["games"])
    def opponents() -> doc.Opponents:
        """Whom a human can play with here, or why nobody can."""
        return desk.opponents()

    @app.get("/api/recordings", tags=["recordings"])
    def recordings(limit: Annotated[int, Query(ge=1, le=10_000)] = 200) -> doc.Recordings:
        """The newest recordings."""
        return desk.recordings(limit)

    @app.get("/api/recordings/{recording}", tags=["recordings"])
    def recorded(
        recording: str, first: Annotated[int, Query(ge=0)] = 0, count: Annotated[int, Query(ge=1, le=1000)] = 100
    ) -> doc.RecordedTicks:
        """Consecutive ticks of a recording."""
        return desk.recorded_ticks(recording, first, count)

    @app.get("/api/recordings/{recording}/curves", tags=["recordings"])
    def recorded_curves(recording: str) -> doc.RecordedCurves:
        """Curves over all of a recording's ticks."""
        return desk.recorded_curves(recording)

    @app.get("/api/recordings/{recording}/frames/{tick}", tags=["recordings"], response_class=Response, responses=_PNG)
    def frame(recording: str, tick: Annotated[int, Path(ge=0, description="index of the tick")]) -> Response:
        """The frame of a tick; 204: it has none."""
        png = desk.frame(recording, tick)
        return Response(status_code=204) if png is None else Response(png, media_type="image/png")

    @app.get("/api/recordings/{recording}/comparison", tags=["recordings"])
    def comparison(recording: str, version: Registered, reference: Registered | None = None) -> doc.Comparison:
        """What a version would have done, or how far that is computed: the first request starts it, and it stops 5 s
        after the last one. One runs at a time; while another does, this is `service_full`. A failed one is its error.
        """
        return desk.comparison(recording, version, reference or "")

    @app.get("/api/recordings/{recording}/comparison/ticks", tags=["recordings"])
    def compared_ticks(
        recording: str,
        version: Registered,
        reference: Registered | None = None,
        first: Annotated[int, Query(ge=0)] = 0,
        count: Annotated[int, Query(ge=1, le=1000)] = 100,
    ) -> list[doc.ComparedTick]:
        """Consecutive ticks of a comparison that has been made."""
        return desk.compared_ticks(recording, version, reference or "", first, count)

    @app.get("/docs", include_in_schema=False)
    def docs() -> HTMLResponse:
        """The API's documentation page; it loads nothing from other sites, so that it works offline."""
        return HTMLResponse(importlib.resources.files("brayx.console").joinpath("docs.html").read_text())


def _controlling(app: FastAPI, desk: Desk) -> None:
    @app.delete("/api/sessions", tags=["sessions"])
    def end_session(session: SessionId) -> doc.Done:
        """Ends a session; its client gets `session_lost` with reason `ended`."""
        return desk.end_session(session)

    @app.post("/api/games", tags=["games"])
    def new_game(new: doc.NewGame) -> doc.Game:
        """Begins a game of a human, at the job's door like any game; it plays on until the human is to move."""
        return desk.new_game(new.opponent)

    @app.post("/api/games/{game}/moves", tags=["games"])
    def move(game: str, chosen: doc.HumanMove) -> doc.Game:
        """Plays a move of the human, and what follows until the next one, or the end."""
        return desk.move(game, chosen.move)

    @app.delete("/api/games/{game}", tags=["games"])
    def give_up(game: str) -> doc.Done:
        """Ends a game before its end."""
        return desk.give_up(game)

    @app.post("/api/models/{name}/promote", tags=["models"])
    def promote(name: str, reference: doc.Reference) -> doc.Move:
        """Points an alias at a version, whose weights are checked first."""
        return desk.promote(name, reference.version, reference.alias)

    @app.post("/api/models/{name}/roll-back", tags=["models"])
    def roll_back(name: str) -> doc.Move:
        """Makes the version before the champion champion again."""
        return desk.roll_back(name)

    @app.post("/api/canaries/{component}", tags=["models"])
    def set_share(component: str, share: doc.Share) -> doc.Done:
        """Sets the share of new sessions that get the canary, until the service ends."""
        return desk.set_share(component, share.share)

    @app.post("/api/trials/{run_id}/stop", tags=["trials"])
    def stop(run_id: str) -> doc.Done:
        """Interrupts the job's trial as Ctrl-C does: a last checkpoint is saved, and the same command resumes it."""
        return desk.stop_trial(run_id)


async def _events(newer: Callable[[str, int], doc.Ticks], first: doc.Ticks) -> AsyncIterator[str]:
    """Messages of a followed session; the last one has its end, or is an event ``error``."""
    found = first
    while True:
        if found.ticks or found.end:
            yield f"data: {found.model_dump_json()}\n\n"
        if found.end:
            return
        await asyncio.sleep(EVERY_S)
        try:
            found = await asyncio.to_thread(newer, found.session, found.after)
        except BrayxError as error:
            yield f"event: error\ndata: {error.to_wire().decode()}\n\n"
            return
