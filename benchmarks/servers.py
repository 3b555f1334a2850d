"""The services that benchmarks load, each a process that ends with its standard input; and the load itself.

``serve`` starts Ray with the echo and the CartPole application on Serve, behind one kind of ingress (Ray reads the kind
at its start, hence a process for each), and with their native ports. ``bare`` is the reference without brayx: Starlette
on uvicorn with a handler that returns the body, and for Bray's TCP framing a server on asyncio's streams that starts a
task for each request, as Bray's worker does, on asyncio's loop and on uvloop.
``door`` is brayx's door on uvicorn without Serve, ``replicas`` an echo of two replicas. Other benchmarks serve from
their own modules.

The load is `clients/cpp/load.cpp`, which leaves more CPU to the service than a real client.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

import psutil

from benchmarks.tables import median, median_ratio

if TYPE_CHECKING:
    from brayx.actor.agent_actor import AgentActorFactory
    from brayx.actor.config import ActorConfig
    from brayx.metrics import Recorder

ROOT = Path(__file__).parents[1]
TEMPLATE = ROOT / "pipelines" / "templates" / "cartpole.yaml"
ECHO_BODY = b"x" * 256
CARTPOLE_BODY = b'{"obs":[0.0273956,-0.00611216,0.03585979,0.0197368],"reward":1.0}'
WORKERS_NICE = 15
"""Nice value that Ray adds to its workers by default."""
_WARM_UP_S = 0.3
"""Of the load, before it counts."""
_END_S = 10.0


class Service(NamedTuple):
    """A service in another process.

    Attributes:
        urls: its addresses by name.
        pid: its process.
    """

    urls: dict[str, str]
    pid: int


@contextlib.contextmanager
def service(module: str, *words: str, python: str = sys.executable) -> Iterator[Service]:
    """Runs ``python -m module`` with these words until the context ends; a line of JSON says where it serves.

    Raises:
        RuntimeError: it ended.
    """
    command = [python, "-m", module, *words]
    process: Any = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        urls = next((line for line in process.stdout if line.startswith("{")), None)
        if urls is None:
            raise RuntimeError(f"{module} {' '.join(words)} ended with {process.wait()}")
        yield Service(json.loads(urls), process.pid)
    finally:
        process.stdin.close()
        try:
            process.wait(60.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def server(*words: str) -> contextlib.AbstractContextManager[Service]:
    """One of this module's services."""
    return service("benchmarks.servers", *words)


class Loaded(NamedTuple):
    """The result of a load; percentiles are of a tick."""

    ticks: float
    ticks_per_s: float
    p50_s: float
    p99_s: float


Load = Callable[..., Loaded]


@contextlib.contextmanager
def load_generator() -> Iterator[Load]:
    """Compiles the load; gives a function of a URL, the number of sessions and of seconds, and further options.

    Raises:
        RuntimeError: there is no C++ compiler.
    """
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise RuntimeError("the load is a C++ program, and there is no compiler g++")
    with tempfile.TemporaryDirectory(prefix="brayx-load-") as folder:
        program, source = f"{folder}/load", str(ROOT / "clients" / "cpp" / "load.cpp")
        subprocess.run([compiler, "-std=c++17", "-O2", source, "-o", program], check=True)

        def load(url: str, sessions: int, seconds: float, body: str = "echo", *more: str) -> Loaded:
            words = ["--url", url, "--sessions", str(sessions), "--seconds", str(seconds), "--body", body, *more]
            done = json.loads(subprocess.run([program, *words], stdout=subprocess.PIPE, check=True).stdout)
            return Loaded(*(float(done[name]) for name in Loaded._fields))

        yield load


def tree(pid: int) -> list[psutil.Process]:
    """A process and its descendants; empty once it has ended."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def cpu_s(pid: int) -> tuple[float, float]:
    """CPU seconds so far of a process, and of the processes that it has started."""
    own, *others = (sum(process.cpu_times()[:2]) for process in tree(pid))
    return own, sum(others)


class Cost(NamedTuple):
    """The cost of serving a load.

    Attributes:
        ticks_per_s: rate.
        cpu_s: CPU seconds of the serving process for each tick.
        others_cpu_s: those of the processes that it has started.
        seconds: how long the load took, with its warm-up.
    """

    ticks_per_s: float
    cpu_s: float
    others_cpu_s: float
    seconds: float


def cost(load: Load, pid: int, url: str, sessions: int, seconds: float, *more: str) -> Cost:
    """Loads a service; the CPU is also that of the load's warm-up, and so are the ticks that it is divided by."""
    own, others = cpu_s(pid)
    rate = load(url, sessions, seconds, *more).ticks_per_s
    own_after, others_after = cpu_s(pid)
    spent_s = seconds + _WARM_UP_S
    ticks = rate * spent_s
    return Cost(rate, (own_after - own) / ticks, (others_after - others) / ticks, spent_s)


def cost_cells(rounds: Sequence[Cost], none: Sequence[Cost]) -> list[float | None]:
    """The rate, its ratio to ``none``, the CPU of a tick in µs, and its ratio; medians over rounds."""
    (rates, used), (bare_rates, bare_used) = (
        ([done.ticks_per_s for done in costs], [1e6 * done.cpu_s for done in costs]) for costs in (rounds, none)
    )
    return [median(rates), median_ratio(rates, bare_rates), median(used), median_ratio(used, bare_used)]


def listeners(url: str) -> list[int]:
    """Ids of the processes that listen at a URL's port."""
    port = urlsplit(url).port
    listening = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    return sorted({c.pid for c in listening if c.pid and c.laddr and c.laddr.port == port})


def cartpole(actor: ActorConfig, recorder: Recorder, **options: Any) -> AgentActorFactory:
    """Makes CartPole's actors on the local host, untrained; ``options`` are the factory's."""
    from brayx.actor.agent import Services
    from brayx.actor.agent_actor import AgentActorFactory
    from brayx.jobs.config import JobConfig
    from brayx.jobs.weights import acting_from
    from brayx.model.arms import WeightSource

    job = JobConfig.load(str(TEMPLATE))
    as_dict = job.in_mode("serve").as_dict()
    acting = acting_from(WeightSource(), job, "model", as_dict, recorder)
    acting.build(lambda line: None)
    services = Services({"model": acting.model}, {}, recorder)
    return AgentActorFactory.of(actor, job.agents, job.folder, as_dict, services, **options)


def serve_agents(factory: AgentActorFactory, recorder: Recorder, config: ActorConfig, *close: Any) -> None:
    """Serves on the local host until standard input ends; prints the URLs."""
    from brayx.actor.host import LocalHost
    from brayx.actor.serving import Runtime

    host = LocalHost(config, Runtime(factory, recorder, close=list(close)))
    host.open()
    tell_and_wait(host.urls)
    host.close()


def tell_and_wait(urls: dict[str, str]) -> None:
    """Says where this process serves, and waits until standard input ends."""
    print(json.dumps(urls), flush=True)
    sys.stdin.read()


def _doors(url: str) -> dict[str, str]:
    with urllib.request.urlopen(f"{url}/", timeout=30.0) as reply:
        doors: dict[str, str] = json.load(reply)["doors"]
    return doors


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
        replicas = {f"replica {number}": url for number, url in enumerate(addresses)}
        tell_and_wait({**_doors(cluster.url), **replicas})
        _delete("echo")


def _serve(ingress: str) -> None:
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

        serve.run(echo.app(echo.EchoArgs(native_port=0, tcp_port=0)), name="echo", route_prefix="/echo")
        ports = ["actor.native_port=0", "actor.tcp_port=0", "actor.actors_per_worker=4096"]
        cartpole = serving_application(JobConfig.load(TEMPLATE, ports), tracking_uri(str(Path(folder) / "mlflow.db")))
        serve.run(cartpole, name="cartpole", route_prefix="/cartpole")
        urls = {name: f"{cluster.url}/{name}" for name in ("echo", "cartpole")}
        for name, url in list(urls.items()):
            doors = _doors(url)
            urls |= {f"{name} native": doors["http"], f"{name} tcp": doors["tcp"]}
        tell_and_wait(urls)
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
    tell_and_wait(urls)
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


def main(argv: list[str] | None = None) -> int:
    """Serves until standard input ends."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("kind", choices=["bare", "door", "replicas", "serve"])
    parser.add_argument("--ingress", choices=["haproxy", "serve"], default="haproxy")
    options = parser.parse_args(argv)
    if options.kind == "bare":
        _bare()
    elif options.kind == "door":
        from benchmarks.layers import serve_door

        serve_door()
    elif options.kind == "replicas":
        _replicas()
    else:
        _serve(options.ingress)
    return 0


if __name__ == "__main__":
    sys.exit(main())
