"""The control API: a FastAPI application with the calls of each subject, and OpenAPI at ``/docs``."""

from __future__ import annotations

import importlib.resources

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, Response
from fastapi.security import HTTPBasic
from starlette.exceptions import HTTPException

from brayx.console import comparisons, league, models, overview, play, recordings, sessions, trials
from brayx.console.documents import RefusalDocument
from brayx.console.drawn import RecordedDrawing
from brayx.console.guard import AccessGuard, ConsoleKeys, refusal
from brayx.console.source import Source
from brayx.errors import BodyTooLarge, BrayxError, ProtocolError, first_line

_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"]


def create_app(source: Source, keys: ConsoleKeys | None = None) -> FastAPI:
    """The control API.

    Args:
        source: what it shows.
        keys: keys of the callers; None: everybody on this machine may call.
    """
    app = FastAPI(
        title="brayx console",
        version="1",
        description="Sessions, models, leagues, recordings and trials of a job. GET reads; other methods control.",
        responses={"default": {"model": RefusalDocument, "description": "a typed error"}},
        docs_url=None,
        redoc_url=None,
        # Only documents the scheme in OpenAPI: `AccessGuard` checks the credentials.
        dependencies=[] if keys is None else [Depends(HTTPBasic(auto_error=False))],
    )
    app.add_middleware(AccessGuard, keys=keys)

    @app.exception_handler(BrayxError)
    async def refused(_: Request, error: BrayxError) -> Response:
        return refusal(error)

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        return refusal(ProtocolError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}"))

    @app.exception_handler(HTTPException)
    async def refused_by_framework(_: Request, error: HTTPException) -> Response:
        """Such as a body that cannot be parsed, or that `AccessGuard` finds too large."""
        kind = BodyTooLarge if error.status_code == BodyTooLarge.http_status else ProtocolError
        return Response(kind(str(error.detail)).to_wire(), error.status_code, media_type="application/json")

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> Response:  # the server also logs its traceback
        return refusal(BrayxError(f"the console failed: {type(error).__name__}: {first_line(error)}"))

    for subject in (overview, sessions, models, trials, league, play):
        app.include_router(subject.routes(source))
    folder = recordings.RecordingFolder(source.recordings)
    app.include_router(recordings.routes(folder, RecordedDrawing(source)))
    app.include_router(comparisons.routes(source, folder))
    app.include_router(_rest())
    return app


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
