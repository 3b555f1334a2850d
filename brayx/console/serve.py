"""Serves the control API and the page: for a job, for a tracking store, or for the console of a job elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import socket
import threading
import time
from collections.abc import AsyncIterator

import httpx
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse

from brayx import systems
from brayx.children import Channel
from brayx.command_line import say
from brayx.console.api import create_app
from brayx.console.guard import AccessGuard, ConsoleKeys, basic, refusal
from brayx.console.page import add_page
from brayx.console.page.caller import Connect
from brayx.console.port import PORT
from brayx.console.source import Source
from brayx.errors import ConnectFailed, StartupError, TransportError, from_wire
from brayx.gamecore.auth import Keys, credentials
from brayx.ports import listen
from brayx.tracking.store import import_mlflow

_HOST = "127.0.0.1"
_LOOK_S = 0.5
_PASSED_ON = ("content-type", "content-length", "content-disposition")


def main(job: Channel, source: str, keys_file: str, descriptor: str) -> None:
    """The console's process of a job: serves until the job ends.

    Args:
        job: answers the console's requests.
        source: JSON of the fields of `Source`: what the console shows.
        keys_file: path of the console's keys; empty: it has none.
        descriptor: file descriptor of the listening socket, which the job has opened.
    """
    keys = ConsoleKeys(Keys.load(keys_file)) if keys_file else None
    app = create_app(Source(**json.loads(source), channel=job), keys)
    _import_early()
    threading.Thread(target=_show_end, args=(job,), name="brayx-console-end", daemon=True).start()
    systems.lower_priority(5)  # the job has priority, except while this starts: that would take a minute
    serve_app(socket.socket(fileno=int(descriptor)), app)


def serve_app(listening: socket.socket, app: FastAPI, connect: Connect | None = None) -> None:
    """Serves the page, and the control API if ``app`` has one, until the process gets a signal.

    Args:
        listening: a listening socket.
        app: the application.
        connect: makes clients of the control API; None: of the one in ``app``.
    """

    def in_process(authorization: str) -> httpx.AsyncClient:
        headers = {"Authorization": authorization} if authorization else {}
        url = f"http://localhost:{listening.getsockname()[1]}"
        return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=url, headers=headers)

    add_page(app, connect or in_process)
    config = uvicorn.Config(
        app, log_config=None, access_log=False, server_header=False, timeout_graceful_shutdown=1, ws_ping_interval=None
    )
    uvicorn.Server(config).run([listening])


def console(
    url: str,
    *,
    uri: str,
    recordings: str = "",
    port: int | None = None,
    keys_file: str | None = None,
    key: str | None = None,
    trust: bool = False,
) -> None:
    """Serves the console on this machine until Ctrl-C, and prints its URL.

    Args:
        url: URL of a job's console; empty: show a tracking store.
        uri: tracking URI; used without ``url``.
        recordings: folder of recordings; used without ``url``.
        port: number of the port; 0: a free one; None: `PORT`, or if that is taken a free one.
        trust: run the code of compared versions, see `brayx.jobs.stored_models.stored_model`.
        keys_file, key: credentials for ``url``, as for `brayx.gamecore.auth.credentials`.

    Raises:
        StartupError: the port cannot be opened, or no console answers at ``url``.
        ConfigError: the keys file or key cannot be used.
    """
    connect: Connect | None = None
    if url:
        connect = _remote(url, keys_file, key)
        app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
        app.add_middleware(AccessGuard, keys=None)
        app.add_api_route("/api/recordings/{recording}/file", functools.partial(_passed_on, connect))
    else:
        app = create_app(Source(uri, recordings=recordings, trust=trust))
        _import_early()
    listening, taken = _listen(port)
    shown = url or uri
    say(f"{taken}the console of {shown} is http://{_HOST}:{listening.getsockname()[1]}")
    serve_app(listening, app, connect)


def _show_end(job: Channel) -> None:
    """Waits until a training has ended, shows that on all open pages, and tells the job so."""
    from nicegui import core

    from brayx.console.page.frame import show_end

    try:
        while (end := job.ask("ending")) is None:
            time.sleep(_LOOK_S)
        if core.loop is not None:
            asyncio.run_coroutine_threadsafe(show_end(end["text"]), core.loop).result()
        job.ask("shown")
    except EOFError:  # the job is gone
        return


def _import_early() -> None:
    """Imports MLflow in a thread, before a page needs it: that takes seconds."""
    threading.Thread(target=import_mlflow, name="brayx-console-imports", daemon=True).start()


def _listen(port: int | None) -> tuple[socket.socket, str]:
    """The listening socket, and words for the user if the usual port is taken; errors as `console`."""
    if port is not None:
        return listen(_HOST, port, "--port"), ""
    try:
        return listen(_HOST, PORT, "--port"), ""
    except StartupError:
        return listen(_HOST, 0, "--port"), f"port {PORT} is taken; "


async def _passed_on(connect: Connect, request: Request) -> Response:
    """Passes a download on, to which the page links: a viewer's browser does not have this command's credentials."""
    client = connect("")
    path = request.scope["raw_path"].decode()
    try:
        reply = await client.send(
            client.build_request("GET", path, params=request.query_params, timeout=None), stream=True
        )
    except httpx.HTTPError as error:
        await client.aclose()
        return refusal(ConnectFailed(f"the job's console does not answer: {error}"))

    async def pieces() -> AsyncIterator[bytes]:
        async with contextlib.aclosing(client):
            async for piece in reply.aiter_raw():
                yield piece

    headers = {name: reply.headers[name] for name in _PASSED_ON if name in reply.headers}
    return StreamingResponse(pieces(), reply.status_code, headers)


def _remote(url: str, keys_file: str | None, key: str | None) -> Connect:
    """Connects to a job's console with this command's credentials. Viewers on this machine need none."""
    key_pair = credentials(keys_file, key)
    headers = {"Authorization": basic(key_pair["key"], key_pair["secret"])} if key_pair else {}
    try:
        reply = httpx.get(f"{url.rstrip('/')}/api/job", headers=headers, timeout=20.0)
    except httpx.HTTPError as error:
        raise StartupError(f"no console answers at {url}: {error}", url=url) from None
    if reply.status_code != 200 or reply.headers.get("content-type") != "application/json":
        refused = from_wire(reply.content, http_status=reply.status_code)
        if isinstance(refused, TransportError):  # it is some other page, such as that of another `brayx console URL`
            raise StartupError(f"{url} is no job's console: use the URL that the job prints", url=url)
        raise StartupError(f"the console at {url} refuses: {refused.message}", url=url)
    return lambda _: httpx.AsyncClient(base_url=url.rstrip("/"), headers=headers)
