"""Overhead of a replica on its TCP listener: the same listener, in steps from a bare process to a Serve replica.

    python -m benchmarks.hosts --markdown

*echo protocol* is the cost of uvloop and the kernel alone: it only reads and answers the frame. CPU is the server
process's time per tick, over all threads; on a busy machine it says more than the rate. All servers run at the same
time, with Ray's processes, and have the nice value of Ray's workers.
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
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.plane import listeners
from benchmarks.servers import WORKERS_NICE, Server
from benchmarks.tables import Table, machine, median, median_ratio, show
from benchmarks.ticks import compiled
from brayx.gamecore.tcp import REPLY_HEAD, REQUEST_HEAD

HOSTS = {
    "echo": "echo protocol on uvloop, nothing else",
    "main": "listener and session table, main thread",
    "thread": "the same in a second thread",
    "import": "the same, Ray imported",
    "actor": "the same in an async Ray actor",
}
SERVE, BARE, UVLOOP = "a Serve replica", "asyncio streams, a task a request", "asyncio streams on uvloop"


async def listen() -> tuple[int, Any]:
    """Opens the door of an echo, without Serve: its port, and what has to be kept."""
    from brayx.actor.config import SessionConfig
    from brayx.actor.doors.native import Limits, Listener
    from brayx.actor.doors.tcp import TcpConnection
    from brayx.actor.table import SessionTable
    from brayx.metrics import Recorder
    from deployments.echo import EchoActor

    table = SessionTable(EchoActor, SessionConfig(actors_per_worker=4096), Recorder())
    listener = Listener(table, TcpConnection, Limits())
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
    words = [sys.executable, "-m", "benchmarks.hosts", "--host", kind]
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


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", choices=list(HOSTS), help="serve one of them (what this starts itself)")
    parser.add_argument("--sessions", type=int, default=16, help="at once (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=1.2, help="of each measurement (default: %(default)s)")
    parser.add_argument("--markdown", action="store_true", help="print plain markdown")
    options = parser.parse_args(argv)
    if options.host:
        host(options.host)
        return 0
    about = f"{machine()}; {options.sessions} sessions, {options.rounds} rounds of {options.seconds:g} s, medians"
    rates: dict[str, list[float | None]] = {}
    costs: dict[str, list[float | None]] = {}
    with contextlib.ExitStack() as stack:
        command = compiled(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="brayx-load-"))))
        bare = stack.enter_context(Server("bare")).urls
        urls = {BARE: bare["echo tcp"], UVLOOP: bare["echo uvloop"]}
        urls |= {HOSTS[kind]: stack.enter_context(hosted(kind)) for kind in HOSTS}
        urls[SERVE] = stack.enter_context(Server("serve", "--ingress", "haproxy")).urls["echo tcp"]
        for _ in range(options.rounds):
            for name, url in urls.items():
                rate, cost = measure(command, url, options.sessions, options.seconds)
                rates.setdefault(name, []).append(rate)
                costs.setdefault(name, []).append(cost)
    table = Table(["where", ">ticks/s", ">to bare", ">CPU µs a tick"])
    for name in urls:
        table.add(name, median(rates[name]), median_ratio(rates[name], rates[BARE]), median(costs[name]))
    show(about, table.markdown(), markdown=options.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
