"""The services that `benchmarks/ticks.py` loads, each a process that prints its addresses and ends with its stdin.

``serve`` starts Ray with the echo and the CartPole application on Serve, behind one kind of ingress (Ray reads the kind
at its start, hence a process for each), and with their native ports. ``bare`` is the reference without brayx: Starlette
on uvicorn with a handler that returns the body, and for Bray's TCP framing a server on asyncio's streams that starts a
task for each request, as Bray's worker does, on asyncio's loop and on uvloop.
``door`` is brayx's door on uvicorn without Serve, ``replicas`` an echo of two replicas.

To profile a replica under load (py-spy is not among the dependencies; PID is that of ``ServeReplica:cartpole``):

    python benchmarks/servers.py serve --ingress haproxy      # prints its URLs, ends with its standard input
    python benchmarks/load.py URL --door http --sessions 16 --seconds 9 --body cartpole
    py-spy record --pid PID --duration 6 --rate 200 --format raw --output profile.txt
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any, Self

TEMPLATE = Path(__file__).parents[1] / "pipelines" / "templates" / "cartpole.yaml"
_END_S = 10.0
WORKERS_NICE = 15
"""Nice value that Ray adds to its workers by default."""


class Server:
    """A context with a ready service in another process.

    Args:
        words: arguments of this module's command line.

    Attributes:
        urls: base URL by application (``echo``, ``cartpole``).
    """

    def __init__(self, *words: str) -> None:
        self._words = words
        self.urls: dict[str, str] = {}

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.servers", *self._words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                self.urls = json.loads(line)
                return self
        self._process.wait()
        raise RuntimeError(f"benchmarks.servers {' '.join(self._words)} ended with {self._process.returncode}")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _replicas() -> None:
    """Two echo replicas, each by the address where its peers reach it, and the native ports that they share."""
    from brayx.cluster.cluster import Cluster

    with Cluster(ingress="haproxy") as cluster:
        import ray
        from ray import serve

        from brayx.cluster import NAMESPACE
        from deployments import echo

        serve.run(echo.app(echo.EchoArgs(num_workers=2, native_port=0, tcp_port=0)), name="echo", route_prefix="/")
        directory: Any = ray.get_actor("echo/sessions", namespace=NAMESPACE)
        addresses: list[str] = ray.get(directory.addresses.remote())
        with urllib.request.urlopen(f"{cluster.url}/", timeout=30.0) as reply:
            doors = json.load(reply)["doors"]
        _tell_and_wait({**doors, **{f"replica {number}": url for number, url in enumerate(addresses)}})
        _delete("echo")


def _serve(ingress: str, tracking: str | None) -> None:
    from brayx.cluster.cluster import Cluster

    with (
        tempfile.TemporaryDirectory(prefix="brayx-bench-") as folder,
        Cluster(ingress="haproxy" if ingress == "haproxy" else "serve") as cluster,
    ):
        # Only now: Ray reads the environment that the cluster sets when it is imported.
        from ray import serve

        from brayx.cluster.serving import serving_application
        from brayx.jobs.config import JobConfig
        from brayx.tracking import tracking_uri
        from deployments import echo

        uri = tracking or str(Path(folder) / "mlflow.db")
        serve.run(echo.app(echo.EchoArgs(native_port=0, tcp_port=0)), name="echo", route_prefix="/echo")
        ports = ["actor.native_port=0", "actor.tcp_port=0", "actor.actors_per_worker=4096"]
        cartpole = serving_application(JobConfig.load(TEMPLATE, ports), tracking_uri(uri))
        serve.run(cartpole, name="cartpole", route_prefix="/cartpole")
        urls = {name: f"{cluster.url}/{name}" for name in ("echo", "cartpole")}
        for name, url in list(urls.items()):
            with urllib.request.urlopen(f"{url}/", timeout=30.0) as reply:
                doors = json.load(reply)["doors"]
            urls.update({f"{name} native": doors["http"], f"{name} tcp": doors["tcp"]})
        _tell_and_wait(urls)
        for name in ("echo", "cartpole"):
            _delete(name)


def _delete(application: str) -> None:
    from brayx.cluster.applications import delete_application

    if not delete_application(application, _END_S):
        print(f"the application {application!r} did not end within {_END_S:g} s", file=sys.stderr)


def _bare() -> None:
    import uvicorn
    import uvloop
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route, WebSocketRoute
    from starlette.websockets import WebSocket, WebSocketDisconnect

    async def step(request: Request) -> Response:
        return Response(await request.body())

    async def session(socket: WebSocket) -> None:
        await socket.accept()
        try:
            while True:
                await socket.send_bytes(await socket.receive_bytes())
        except WebSocketDisconnect:
            return

    os.nice(WORKERS_NICE)  # before its threads begin: as a replica is, or the load would push the one aside more often
    app = Starlette(routes=[Route("/step", step, methods=["POST"]), WebSocketRoute("/session", session)])
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", access_log=False))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    urls = {"echo": f"http://127.0.0.1:{listener.getsockname()[1]}"}
    for name, run in (("echo tcp", asyncio.run), ("echo uvloop", uvloop.run)):
        framing = socket.create_server(("127.0.0.1", 0), backlog=4096)
        threading.Thread(target=run, args=(_bray_like(framing),), daemon=True).start()
        urls[name] = f"tcp://127.0.0.1:{framing.getsockname()[1]}"
    _tell_and_wait(urls)
    server.should_exit = True
    thread.join(5.0)


async def _bray_like(listener: socket.socket) -> None:
    """Bray's framing on asyncio's streams, a task for each request; every answer is the request's body."""
    head = struct.Struct(">6q")

    async def answer(writer: asyncio.StreamWriter, session: bytes, body: bytes, sent_at: int) -> None:
        writer.write(struct.pack(">3q", len(session), len(body), sent_at) + session + body)
        await writer.drain()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        running = set()
        try:
            while True:
                *sizes, sent_at = head.unpack(await reader.readexactly(head.size))
                session, _, _, _, body = [await reader.readexactly(size) for size in sizes]
                task = asyncio.create_task(answer(writer, session, body, sent_at))
                running.add(task)
                task.add_done_callback(running.discard)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async with await asyncio.start_server(connected, sock=listener) as server:
        await server.serve_forever()


def _tell_and_wait(urls: dict[str, str]) -> None:
    print(json.dumps(urls), flush=True)
    sys.stdin.read()


def main(argv: list[str] | None = None) -> int:
    """Serves until standard input ends."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("kind", choices=["bare", "door", "replicas", "serve"])
    parser.add_argument("--ingress", choices=["haproxy", "serve"], default="haproxy")
    parser.add_argument("--tracking", help="MLflow's URI or file: serve its champion (default: untrained)")
    options = parser.parse_args(argv)
    if options.kind == "bare":
        _bare()
    elif options.kind == "door":
        from benchmarks.layers import serve_door

        serve_door()
    elif options.kind == "replicas":
        _replicas()
    else:
        _serve(options.ingress, options.tracking)
    return 0


if __name__ == "__main__":
    sys.exit(main())
