"""The control API: a FastAPI application over a `Desk`, with OpenAPI at ``/docs``.

Knows nothing of jobs, stores or pages.
"""

from __future__ import annotations

import asyncio
import importlib.resources
from collections.abc import AsyncIterator, Callable
from pathlib import PurePath
from typing import IO, Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Depends, FastAPI, Path, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, Response, StreamingResponse
from fastapi.security import HTTPBasic
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from brayx.console import documents as doc
from brayx.console.desk import Desk, FileFormat
from brayx.console.guard import ConsoleKeys, Guard, refusal
from brayx.errors import BodyTooLarge, BrayxError, ProtocolError, first_line

_PIECE_BYTES = 1 << 18
EVERY_S = 0.2
"""Time between two messages of a followed session."""

SessionId = Annotated[str, Query(description="id of the session")]
Registered = Annotated[str, Query(pattern=r"^models:/[^/@]+/\d+$", description="models:/NAME/VERSION")]
Named = Annotated[str, Query(description="only of the session with this id, which may have *, or of this game")]
First = Annotated[int, Query(ge=0, description="index of the first tick")]
Count = Annotated[int, Query(ge=1, le=1000, description="number of ticks")]
_Replies = dict[int | str, dict[str, Any]]
_PNG: _Replies = {200: {"content": {"image/png": {}}}, 204: {"description": "no frame"}}
_EVENTS: _Replies = {200: {"content": {"text/event-stream": {}}}}
_ERRORS: _Replies = {"default": {"model": doc.Refusal, "description": "a typed error"}}
_TYPES = {
    ".parquet": "application/vnd.apache.parquet",
    ".mp4": "video/mp4",
    ".rrd": "application/vnd.rerun.rrd",
    ".zip": "application/zip",
}
"""Content type of a downloaded file by its suffix."""
_FILE: _Replies = {200: {"content": {kind: {} for kind in _TYPES.values()}}}
_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"]


def create_app(desk: Desk, keys: ConsoleKeys | None = None) -> FastAPI:
    """The control API.

    Args:
        desk: answers the calls.
        keys: keys of the callers; None: everybody on this machine may call.
    """
    app = FastAPI(
        title="brayx console",
        version="1",
        description="Sessions, models, leagues, recordings and trials of a job. GET reads; other methods control.",
        responses=_ERRORS,
        docs_url=None,
        redoc_url=None,
        # Only documents the scheme in OpenAPI: `Guard` checks the credentials.
        dependencies=[] if keys is None else [Depends(HTTPBasic(auto_error=False))],
    )
    app.add_middleware(Guard, keys=keys)

    @app.exception_handler(BrayxError)
    async def refused(_: Request, error: BrayxError) -> Response:
        return refusal(error)

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        return refusal(ProtocolError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}"))

    @app.exception_handler(HTTPException)
    async def refused_by_framework(_: Request, error: HTTPException) -> Response:
        """Such as a body that cannot be parsed, or that `Guard` finds too large."""
        kind = BodyTooLarge if error.status_code == BodyTooLarge.http_status else ProtocolError
        return Response(kind(str(error.detail)).to_wire(), error.status_code, media_type="application/json")

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> Response:  # the server also logs its traceback
        return refusal(BrayxError(f"the console failed: {type(error).__name__}: {first_line(error)}"))

    for routes in (_job, _sessions, _models, _trials, _league, _games, _recordings, _comparisons):
        app.include_router(routes(desk))
    app.include_router(_rest())
    return app


def _job(desk: Desk) -> APIRouter:
    routes = APIRouter(prefix="/api/job", tags=["job"])

    @routes.get("")
    def job() -> doc.Job:
        """The job, its health and its refusals."""
        return desk.job()

    return routes


def _sessions(desk: Desk) -> APIRouter:
    routes = APIRouter(prefix="/api/sessions", tags=["sessions"])

    @routes.get("")
    def sessions() -> list[doc.Session]:
        """The running sessions."""
        return desk.sessions()

    @routes.get("/ticks")
    def ticks(session: SessionId, after: Annotated[int, Query(ge=0)] = 0) -> doc.Ticks:
        """The newest ticks of a session. It is followed from the first call until 3 s after the last one."""
        return desk.ticks(session, after)

    @routes.get("/follow", response_class=StreamingResponse, responses=_EVENTS)
    async def follow(session: SessionId) -> Response:
        """Follows a session by server-sent events, which have its newest ticks, until it ends."""
        first = await asyncio.to_thread(desk.ticks, session, 0)
        return StreamingResponse(_events(desk.ticks, first), media_type="text/event-stream")

    @routes.delete("")
    def end_session(session: SessionId) -> doc.Done:
        """Ends a session; its client gets `session_lost` with reason `ended`."""
        return desk.end_session(session)

    return routes


def _models(desk: Desk) -> APIRouter:
    routes = APIRouter(prefix="/api", tags=["models"])

    @routes.get("/models")
    def models() -> list[doc.Model]:
        """The registered models and their versions."""
        return desk.models()

    @routes.post("/models/{name}/promote")
    def promote(name: str, reference: doc.Reference) -> doc.Move:
        """Points an alias at a version, whose weights are checked first."""
        return desk.promote(name, reference.version, reference.alias)

    @routes.post("/models/{name}/roll-back")
    def roll_back(name: str) -> doc.Move:
        """Restores the previous champion."""
        return desk.roll_back(name)

    @routes.post("/canaries/{component}")
    def set_share(component: str, share: doc.Share) -> doc.Done:
        """Sets the share of new sessions that get the canary, until the service ends."""
        return desk.set_share(component, share.share)

    return routes


def _trials(desk: Desk) -> APIRouter:
    routes = APIRouter(prefix="/api/trials", tags=["trials"])

    @routes.get("")
    def trials(project: str = "") -> list[doc.Trial]:
        """The newest trials."""
        return desk.trials(project)

    @routes.get("/{run_id}")
    def curves(run_id: str, metric: Annotated[list[str], Query(description="only these")] = []) -> doc.Curves:  # noqa: B006
        """The newest numbers and the curves of a trial."""
        return desk.curves(run_id, metric)

    @routes.post("/{run_id}/stop")
    def stop(run_id: str) -> doc.Done:
        """Interrupts the job's training as Ctrl-C does: it saves a last checkpoint; the same command resumes it."""
        return desk.stop_trial(run_id)

    return routes


def _league(desk: Desk) -> APIRouter:
    routes = APIRouter(prefix="/api/league", tags=["league"])

    @routes.get("")
    def league() -> doc.League | None:
        """Standings, payoff and rating curves of the newest league; null: there is none."""
        return desk.league()

    return routes


def _games(desk: Desk) -> APIRouter:
    routes = APIRouter(prefix="/api", tags=["games"])

    @routes.get("/opponents")
    def opponents() -> doc.Opponents:
        """The opponents for a human, or why nobody can play here."""
        return desk.opponents()

    @routes.post("/games")
    def new_game(new: doc.NewGame) -> doc.Game:
        """Begins a game at the job's door, like any game, and plays until it is the human's turn."""
        return desk.new_game(new.opponent)

    @routes.post("/games/{game}/moves")
    def move(game: str, chosen: doc.HumanMove) -> doc.Game:
        """Plays the human's move, and then on until it is the human's turn again, or the game ends."""
        return desk.move(game, chosen.move)

    @routes.delete("/games/{game}")
    def give_up(game: str) -> doc.Done:
        """Gives up a game."""
        return desk.give_up(game)

    return routes


def _recordings(desk: Desk) -> APIRouter:
    routes = APIRouter(prefix="/api/recordings", tags=["recordings"])

    @routes.get("")
    def recordings(limit: Annotated[int, Query(ge=1, le=10_000)] = 200, session: Named = "") -> doc.Recordings:
        """The newest recordings."""
        return desk.recordings(limit, session)

    @routes.get("/{recording}")
    def ticks(recording: str, first: First = 0, count: Count = 100) -> doc.RecordedTicks:
        """Consecutive ticks of a recording."""
        return desk.recorded_ticks(recording, first, count)

    @routes.get("/{recording}/curves")
    def curves(recording: str) -> doc.RecordedCurves:
        """Curves over all ticks of a recording."""
        return desk.recorded_curves(recording)

    @routes.get("/{recording}/frames/{tick}", response_class=Response, responses=_PNG)
    def frame(recording: str, tick: Annotated[int, Path(ge=0, description="index of the tick")]) -> Response:
        """The frame of a tick; 204: it has none."""
        png = desk.frame(recording, tick)
        return Response(status_code=204) if png is None else Response(png, media_type="image/png")

    @routes.get("/{recording}/file", response_class=StreamingResponse, responses=_FILE)
    def file(recording: str, format: FileFormat = "parquet") -> Response:
        """The session as a file, by the exporter of `brayx recordings export`. If the format has several files, such as
        a Minari dataset, or a long or filmed session in Parquet, it is a zip archive.
        """
        name, size, made = desk.recording_file(recording, format)
        plain = name.encode("ascii", "replace").decode().replace("?", "_")  # for programs that do not know `filename*`
        named = f"attachment; filename=\"{plain}\"; filename*=UTF-8''{quote(name)}"
        headers = {"Content-Disposition": named, "Content-Length": str(size)}
        return _FileResponse(made, headers, _TYPES[PurePath(name).suffix])

    return routes


def _comparisons(desk: Desk) -> APIRouter:
    routes = APIRouter(prefix="/api/recordings/{recording}/comparison", tags=["recordings"])

    @routes.get("")
    def comparison(recording: str, version: Registered, reference: Registered | None = None) -> doc.Comparison:
        """What a version would have done, or the progress of computing it. The first request starts the comparison, and
        it stops 5 s after the last one. Only one runs at a time: while another runs, a request gets `service_full`. If
        the comparison failed, the request gets its error.
        """
        return desk.comparison(recording, version, reference or "")

    @routes.get("/ticks")
    def ticks(
        recording: str, version: Registered, reference: Registered | None = None, first: First = 0, count: Count = 100
    ) -> list[doc.ComparedTick]:
        """Consecutive ticks of a finished comparison."""
        return desk.compared_ticks(recording, version, reference or "", first, count)

    return routes


def _rest() -> APIRouter:
    """The documentation, and the refusal of unknown calls, which would else get the page's HTML. Must come last."""
    routes = APIRouter(include_in_schema=False)

    @routes.get("/docs")
    def docs() -> HTMLResponse:
        """The API's documentation page. It works offline, since it loads nothing from other sites."""
        return HTMLResponse(importlib.resources.files("brayx.console").joinpath("docs.html").read_text())

    @routes.api_route("/api", methods=_METHODS)
    @routes.api_route("/api/{path:path}", methods=_METHODS)
    def unknown(request: Request) -> Response:
        error = ProtocolError(f"there is no {request.method} {request.url.path[:200]}: /docs lists the calls")
        return Response(error.to_wire(), 404, media_type="application/json")

    return routes


class _FileResponse(StreamingResponse):
    """Sends an open file, and closes it also if the viewer goes before the end."""

    def __init__(self, file: IO[bytes], headers: dict[str, str], media_type: str) -> None:
        super().__init__(iter(lambda: file.read(_PIECE_BYTES), b""), headers=headers, media_type=media_type)
        self._file = file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._file:
            await super().__call__(scope, receive, send)


async def _events(newer: Callable[[str, int], doc.Ticks], first: doc.Ticks) -> AsyncIterator[str]:
    """The messages of a followed session. The last one has the session's end, or is an event ``error``."""
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
