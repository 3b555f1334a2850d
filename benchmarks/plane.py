"""Cost of sessions: with many of them, and when a request reaches the wrong replica.

    python -m benchmarks.plane

One run measures the rate with many sessions against that with 16, on the same service, and the same for a bare streams
server without sessions, since many connections also cost the kernel and the load; the memory of a session in the
replica; and the median of a forwarded tick against a direct one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from benchmarks.load import ECHO_BODY
from benchmarks.servers import Server
from benchmarks.tables import Table, machine, median, median_ratio, show
from benchmarks.ticks import compiled
from brayx.gamecore.client import Client

DOORS = {"tcp": "echo tcp", "http": "echo native"}
_WARM_UP = 64


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


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=2000, help="that are many (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement (default: %(default)s)")
    parser.add_argument("--markdown", action="store_true", help="print plain markdown")
    options = parser.parse_args(argv)
    about = f"{machine()}; {options.rounds} rounds of {options.seconds:g} s, medians"
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
