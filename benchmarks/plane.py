"""Cost of sessions: with many of them, and when a request reaches the wrong replica; and of a replica around them.

    python -m benchmarks.plane
    python -m benchmarks.plane --hosts              # a replica's overhead on its TCP listener instead

One run measures the rate with many sessions against that with 16, on the same service, and the same for a bare streams
server without sessions, since many connections also cost the kernel and the load; the memory of a session in the
replica; and the median of a forwarded tick against a direct one.

With ``--hosts``, the same TCP listener runs in steps from a bare process to a Serve replica. *echo protocol* is what
uvloop and the kernel cost: it only reads and answers the frame. CPU is the server process's time per tick, over all
threads; on a busy machine it says more than the rate. All servers run at the same time, with Ray's processes, and have
the nice value of Ray's workers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from benchmarks.load import ECHO_BODY
from benchmarks.servers import WORKERS_NICE, Server
from benchmarks.tables import Table, machine, median, median_ratio, show
from benchmarks.ticks import compiled
from brayx.gamecore.client import Client
from brayx.gamecore.tcp import REPLY_HEAD, REQUEST_HEAD

DOORS = {"tcp": "echo tcp", "http": "echo native"}
_WARM_UP = 64
HOSTS = {
    "echo": "echo protocol on uvloop, nothing else",
    "main": "listener and session table, main thread",
    "thread": "the same in a second thread",
    "import": "the same, Ray imported",
    "actor": "the same in an async Ray actor",
}
REPLICA, BARE, UVLOOP = "a Serve replica", "asyncio streams, a task a request", "asyncio streams on uvloop"


def rate(command: Sequence[str], url: str, sessions: int, seconds: float, connections: int = 0) -> float:
    """Ticks a second of the C++ load; 0 connections: one for each session."""
    words = ["--url", url, "--sessions", str(sessions), "--seconds", str(seconds), "--body", "echo"]
    words += ["--connections", str(connections)] if connections else []
    done = subprocess.run([*command, *words], stdout=subprocess.PIPE, text=True, check=True)
    return float(json.loads(done.stdout)["ticks_per_s"])


def listeners(url: str) -> list[psutil.Process]:
    """The processes that listen at a URL's port."""
    port = urlsplit(url).port
    listening = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.laddr]
    pids = {c.pid for c in listening if c.laddr and c.laddr.port == port}
    return [psutil.Process(pid) for pid in pids if pid]


def bytes_a_session(url: str, sessions: int) -> float:
    """Growth of the replicas' resident memory by session, all of them open and having ticked once."""
    replicas = listeners(url)
    with contextlib.ExitStack() as stack:

        def open_and_tick(count: int) -> int:
            for _ in range(count):
                client = stack.enter_context(Client(url))
                client.start()
                client.tick(ECHO_BODY)
            return sum(process.memory_info().rss for process in replicas)

        before = open_and_tick(_WARM_UP)
        return (open_and_tick(sessions) - before) / sessions


def p50s(session_at: str, other: str, seconds: float) -> tuple[float, float]:
    """Median seconds of a tick at its session's replica, and of one that the other replica passes on."""
    with Client(session_at) as owner, Client(other) as stranger:
        owner.start()
        stranger._session = owner.session  # the same session through the other door
        samples: tuple[list[float], list[float]] = ([], [])
        until = time.perf_counter() + 2 * seconds
        while time.perf_counter() < until:
            for client, into in zip((owner, stranger), samples, strict=True):
                began = time.perf_counter()
                client.tick(ECHO_BODY)
                into.append(time.perf_counter() - began)
        stranger._session = None
    return median(samples[0]) or 0.0, median(samples[1]) or 0.0


async def listen() -> tuple[int, Any]:
    """Opens the door of an echo, without Serve: its port, and what has to be kept."""
    from brayx.actor.config import SessionConfig
    from brayx.actor.doors.native import DoorLimits, Listener
    from brayx.actor.doors.tcp import TcpConnection
    from brayx.actor.table import SessionTable
    from brayx.metrics import Recorder
    from deployments.echo import EchoActor

    table = SessionTable(EchoActor, SessionConfig(actors_per_worker=4096), Recorder())
    listener = Listener(table, TcpConnection, DoorLimits())
    await listener.open("127.0.0.1", 0)
    return listener.address[1], (table, listener)


class _Echo(asyncio.Protocol):
    """Answers each chunk as one request; the load sends one at a time."""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        session, kind, key, token, body, time = REQUEST_HEAD.unpack_from(data)
        at = REQUEST_HEAD.size
        self._transport.write(
            REPLY_HEAD.pack(session, body, time) + data[at : at + session] + data[at + session + kind + key + token :]
        )


async def _echo() -> tuple[int, Any]:
    server = await asyncio.get_running_loop().create_server(_Echo, "127.0.0.1", 0)
    return server.sockets[0].getsockname()[1], server


def host(kind: str) -> None:
    """Serves until standard input ends."""
    import uvloop

    async def run(make: Callable[[], Awaitable[tuple[int, Any]]]) -> None:
        port, kept = await make()
        print(port, flush=True)
        await asyncio.Event().wait()
        del kept

    os.nice(WORKERS_NICE)
    if kind == "actor":
        import ray

        from brayx.cluster.start import start_ray

        start_ray(include_dashboard=False, log_to_driver=False)

        class Actor:
            async def open(self) -> int:
                port, self._kept = await listen()
                os.setpriority(os.PRIO_PROCESS, 0, WORKERS_NICE)
                return port

        made: Any = ray.remote(num_cpus=0)(Actor)
        actor = made.remote()
        print(ray.get(actor.open.remote()), flush=True)
        sys.stdin.read()
        ray.shutdown()
        return
    if kind == "import":
        import ray
    serve = _echo if kind == "echo" else listen
    if kind == "thread":
        threading.Thread(target=lambda: uvloop.run(run(serve)), daemon=True).start()
        sys.stdin.read()
    else:
        threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
        uvloop.run(run(serve))
    os._exit(0)


@contextlib.contextmanager
def hosted(kind: str) -> Any:
    """One of `HOSTS`, by its URL."""
    words = [sys.executable, "-m", "benchmarks.plane", "--host", kind]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        yield f"tcp://127.0.0.1:{next(line for line in process.stdout if line.strip().isdigit()).strip()}"
        process.stdin.close()


def measure(command: Sequence[str], url: str, sessions: int, seconds: float) -> tuple[float, float]:
    """Ticks a second, and microseconds of the server's CPU for each."""
    (server,) = listeners(url)

    def used() -> float:
        times = psutil.Process(server.pid).cpu_times()
        return float(times.user + times.system)

    before = used()
    words = [*command, "--url", url, "--sessions", str(sessions), "--seconds", str(seconds), "--body", "echo"]
    done = json.loads(subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout)
    return float(done["ticks_per_s"]), 1e6 * (used() - before) / float(done["ticks"])


def hosts(sessions: int, rounds: int, seconds: float) -> Table:
    """The TCP listener, in steps from a bare process to a Serve replica."""
    rates: dict[str, list[float | None]] = {}
    costs: dict[str, list[float | None]] = {}
    with contextlib.ExitStack() as stack:
        command = compiled(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="brayx-load-"))))
        bare = stack.enter_context(Server("bare")).urls
        urls = {BARE: bare["echo tcp"], UVLOOP: bare["echo uvloop"]}
        urls |= {HOSTS[kind]: stack.enter_context(hosted(kind)) for kind in HOSTS}
        urls[REPLICA] = stack.enter_context(Server("serve", "--ingress", "haproxy")).urls["echo tcp"]
        for _ in range(rounds):
            for name, url in urls.items():
                rate, cost = measure(command, url, sessions, seconds)
                rates.setdefault(name, []).append(rate)
                costs.setdefault(name, []).append(cost)
    table = Table(["where", ">ticks/s", ">to bare", ">CPU µs a tick"])
    for name in urls:
        table.add(name, median(rates[name]), median_ratio(rates[name], rates[BARE]), median(costs[name]))
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", action="store_true", help="the listener in each host, under 16 sessions")
    parser.add_argument("--host", choices=list(HOSTS), help="serve in one of them (what this starts itself)")
    parser.add_argument("--sessions", type=int, default=2000, help="that are many (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement (default: %(default)s)")
    parser.add_argument("--markdown", action="store_true", help="print plain markdown")
    options = parser.parse_args(argv)
    if options.host:
        host(options.host)
        return 0
    about = f"{machine()}; {options.rounds} rounds of {options.seconds:g} s, medians"
    if options.hosts:
        show(about, hosts(16, options.rounds, options.seconds).markdown(), markdown=options.markdown)
        return 0
    few: dict[str, list[float | None]] = {door: [] for door in DOORS}
    many: dict[str, list[float | None]] = {door: [] for door in DOORS}
    shared: list[float | None] = []
    bare_few: list[float | None] = []
    bare_many: list[float | None] = []
    own, passed = [], []
    with tempfile.TemporaryDirectory(prefix="brayx-load-") as folder:
        command = compiled(Path(folder))
        memory: dict[str, float] = {}
        for door, name in DOORS.items():  # a replica each: what one has had and freed would hide the next one's
            with Server("serve", "--ingress", "haproxy") as server:
                memory[door] = bytes_a_session(server.urls[name], options.sessions)
        with Server("bare") as bare, Server("serve", "--ingress", "haproxy") as server:
            for _ in range(options.rounds):
                for door, name in DOORS.items():
                    few[door].append(rate(command, server.urls[name], 16, options.seconds))
                    many[door].append(rate(command, server.urls[name], options.sessions, options.seconds))
                bare_few.append(rate(command, bare.urls["echo tcp"], 16, options.seconds))
                bare_many.append(rate(command, bare.urls["echo tcp"], options.sessions, options.seconds))
                shared.append(rate(command, server.urls[DOORS["tcp"]], options.sessions, options.seconds, 16))
    with Server("replicas") as server:
        for _ in range(options.rounds):
            at, passing = p50s(server.urls["replica 0"], server.urls["replica 1"], options.seconds)
            own.append(at)
            passed.append(passing)
    table = Table(["what", ">value"])
    for door in few:
        table.add(f"{door}, {options.sessions} sessions: rate to that at 16", median_ratio(many[door], few[door]))
        table.add(f"{door}: KiB a session", memory[door] / 1024)
    table.add(f"tcp, {options.sessions} sessions on 16 connections: the same", median_ratio(shared, few["tcp"]))
    table.add("tcp, asyncio streams, without sessions: the same", median_ratio(bare_many, bare_few))
    table.add("HTTP between replicas: own tick, p50 ms", 1e3 * (median(own) or 0.0))
    table.add("a tick that is passed on, p50 ms", 1e3 * (median(passed) or 0.0))
    show(about, table.markdown(), markdown=options.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
