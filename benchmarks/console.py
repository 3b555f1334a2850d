"""The cost of the console: ticks/s of the local host without a console, with one that nobody visits, and with viewers.

    python -m benchmarks.console

CartPole's agent and its model answer behind the TCP door, in a process for each case. A viewer follows one session over
server-sent events, as the page does. Rounds interleave the cases. CPU is that of the serving process alone; the
console's own process has its own column.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import httpx

from benchmarks.servers import TEMPLATE
from benchmarks.tables import Table, machine, median, median_ratio, show
from benchmarks.ticks import compiled
from benchmarks.usage import tree

CASES = {"no console": 0, "console, no viewer": 0, "3 viewers": 3}
_WARM_UP_S = 0.3
_TIMEOUT_S = 60.0


class Server(NamedTuple):
    """A served CartPole.

    Attributes:
        tcp: URL of its TCP door.
        console: URL of its console; empty: it has none.
        pid: its process.
    """

    tcp: str
    console: str
    pid: int


def serve(with_console: bool) -> None:
    """Serves until standard input ends; prints the URLs."""
    from brayx.jobs.config import JobConfig
    from brayx.local.serving import Serving

    job = JobConfig.load(
        str(TEMPLATE),
        ["actor.port=0", "actor.native_port=null", "actor.tcp_port=0", "console_port=0"],
    )
    with tempfile.TemporaryDirectory(prefix="brayx-console-") as folder:
        built, said = threading.Event(), list[str]()
        with Serving(job, f"sqlite:///{folder}/mlflow.db", say=lambda line: built.set()) as serving:
            built.wait(_TIMEOUT_S)
            with serving.console(said.append) if with_console else contextlib.nullcontext():
                console = said[-1].rpartition(" ")[2] if with_console else ""
                print(json.dumps({"tcp": serving.urls["tcp"], "console": console}), flush=True)
                sys.stdin.read()


@contextlib.contextmanager
def served(with_console: bool) -> Iterator[Server]:
    """Serves in another process."""
    words = [sys.executable, "-m", "benchmarks.console", "--serve", str(int(with_console))]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        yield Server(**json.loads(process.stdout.readline()), pid=process.pid)
        process.stdin.close()


@contextlib.contextmanager
def followed(console: str, viewers: int) -> Iterator[list[int]]:
    """Follows as many sessions, once there are that many; yields the number of ticks that each viewer has got."""
    got, ended = [0] * viewers, threading.Event()

    def follow(at: int) -> None:
        with contextlib.suppress(httpx.HTTPError), httpx.Client(base_url=console, timeout=_TIMEOUT_S) as client:
            while not ended.is_set():
                sessions = client.get("/api/sessions").json()
                if len(sessions) <= at:
                    continue
                query = {"session": sessions[at]["session"]}
                with client.stream("GET", "/api/sessions/follow", params=query) as stream:
                    for line in stream.iter_lines():
                        if line.startswith("data: "):
                            got[at] += len(json.loads(line.removeprefix("data: "))["ticks"])
                        if ended.is_set():
                            break

    threads = [threading.Thread(target=follow, args=(at,), daemon=True) for at in range(viewers)]
    for thread in threads:
        thread.start()
    yield got
    ended.set()
    for thread in threads:
        thread.join(_TIMEOUT_S)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", type=int, metavar="CONSOLE", help="serve (the benchmark starts itself so)")
    parser.add_argument("--sessions", type=int, default=16, help="concurrent sessions (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="(default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement (default: %(default)s)")
    parser.add_argument("--markdown", action="store_true", help="print plain markdown")
    options = parser.parse_args(argv)
    if options.serve is not None:
        serve(bool(options.serve))
        return 0
    rates: dict[str, list[float]] = {name: [] for name in CASES}
    costs: dict[str, list[float]] = {name: [] for name in CASES}
    pages: dict[str, list[float]] = {name: [] for name in CASES}
    seen: dict[str, list[float]] = {name: [] for name in CASES}
    with contextlib.ExitStack() as stack:
        command = compiled(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="brayx-console-"))))
        servers = {name: stack.enter_context(served(name != "no console")) for name in CASES}
        for server, viewers in zip(servers.values(), CASES.values(), strict=True):
            if viewers:  # starts the console's process before the first round
                httpx.get(f"{server.console}/api/trials", timeout=_TIMEOUT_S).raise_for_status()
        for at in range(options.rounds):
            for name in [*CASES][:: 1 if at % 2 else -1]:
                server = servers[name]
                words = [*command, "--url", server.tcp, "--sessions", str(options.sessions)]
                words += ["--seconds", str(options.seconds), "--body", "cartpole"]
                with followed(server.console, CASES[name]) as got:
                    job, page = used_s(server.pid)
                    done = json.loads(subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout)
                    job_after, page_after = used_s(server.pid)
                # Also over the load's warm-up, whose ticks are not in its figure.
                ticks = done["ticks_per_s"] * (options.seconds + _WARM_UP_S)
                rates[name].append(done["ticks_per_s"])
                costs[name].append((job_after - job) / ticks)
                pages[name].append((page_after - page) / (options.seconds + _WARM_UP_S))
                seen[name].append(sum(got) / (options.seconds + _WARM_UP_S))
    table = Table(
        ["", ">ticks/s", ">of none", ">CPU µs a tick", ">to none", ">ticks/s shown", ">CPU s a second of the console"]
    )
    for name in CASES:
        table.add(
            name,
            median(rates[name]),
            median_ratio(rates[name], rates["no console"]),
            (median(costs[name]) or 0.0) * 1e6,
            median_ratio(costs[name], costs["no console"]),
            median(seen[name]),
            median(pages[name]),
        )
    about = f"{machine()}; {options.sessions} sessions, {options.rounds} rounds of {options.seconds:g} s, medians"
    show(about, table.markdown(), markdown=options.markdown)
    return 0


def used_s(pid: int) -> tuple[float, float]:
    """CPU seconds so far of a process, and of the processes that it has started."""
    own, *others = (sum(each.cpu_times()[:2]) for each in tree(pid))
    return own, sum(others)


if __name__ == "__main__":
    sys.exit(main())
