"""Ticks per second through every door and ingress, compared with bare echoes in the same run.

    python benchmarks/ticks.py                    # the table of docs/benchmarks.md
    python benchmarks/ticks.py --quick            # does it run at all

Every case is measured once per round, so that a disturbance of the machine affects all of them. A figure is the median
over rounds, and a ratio the median of each round's ratio to the bare echo of the same door and number of sessions. Load
and services are separate processes on the same cores. With a C++ compiler the load is `clients/cpp/load.cpp`, which
leaves more CPU to the service; otherwise it is `benchmarks/load.py`, without TCP.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from benchmarks.servers import Server
from benchmarks.tables import Table, each, machine, median, median_ratio, show

BARE = {"http": "Starlette on uvicorn", "ws": "Starlette on uvicorn", "tcp": "asyncio streams, a task a request"}
UVLOOP = "the same on uvloop"
LOAD = Path(__file__).parents[1] / "clients" / "cpp" / "load.cpp"
INGRESSES = {"serve": "Serve's proxy", "haproxy": "HAProxy", "native": "native port"}


@dataclass(frozen=True)
class Case:
    """A case: the service and its load.

    Attributes:
        agent: ``echo`` or ``cartpole``.
        door: ``http``, ``ws`` or ``tcp``.
        ingress: ``bare``, ``serve``, ``haproxy`` or ``native``; over ``tcp`` also ``uvloop``, as bare on another loop.
        sessions: concurrent sessions, each with one tick in flight.
        shared: they share one connection, over ``tcp``; else each has its own.
    """

    agent: str
    door: str
    ingress: str
    sessions: int
    shared: bool = False

    @property
    def yardstick(self) -> Case:
        """The bare echo that this case is compared with."""
        return Case("echo", self.door, "bare", self.sessions, self.shared)

    def url(self, urls: Mapping[str, str]) -> str:
        """Where the load goes, of a server's URLs."""
        if self.door == "tcp":
            return urls["echo uvloop" if self.ingress == "uvloop" else f"{self.agent} tcp"]
        return urls[f"{self.agent} native" if self.ingress == "native" else self.agent]


@dataclass(frozen=True)
class Round:
    """One measurement of one case."""

    ticks_per_s: float
    p50_s: float
    p99_s: float


Results = dict[Case, list[Round | None]]
"""Rounds by case, as many for each; None for one that failed."""


def cases(doors: Sequence[str], ingresses: Sequence[str], sessions: Sequence[int], agents: Sequence[str]) -> list[Case]:
    """All cases, the yardsticks first; over TCP there is no ingress, and several sessions also share a connection."""
    bare = [Case("echo", door, "bare", n) for door in doors for n in sessions]
    served = [Case(a, d, i, n) for a in agents for d in doors if d != "tcp" for i in ingresses for n in sessions]
    if "tcp" in doors:
        shared = [n for n in sessions if n > 1]
        bare += [Case("echo", "tcp", "uvloop", n) for n in sessions]
        bare += [Case("echo", "tcp", i, n, shared=True) for i in ("bare", "uvloop") for n in shared]
        if "native" in ingresses:
            served += [Case(a, "tcp", "native", n) for a in agents for n in sessions]
            served += [Case(a, "tcp", "native", n, shared=True) for a in agents for n in shared]
    return bare + served


def table(results: Results) -> Table:
    """Medians over rounds, one row a case."""
    out = Table(["agent", "door", "ingress", ">sessions", ">ticks/s", ">p50 ms", ">p99 ms", ">to bare"])
    for case, rounds in results.items():
        rates = each(rounds, lambda r: r.ticks_per_s)
        bases = each(results.get(case.yardstick, [None] * len(rounds)), lambda r: r.ticks_per_s)
        out.add(
            case.agent,
            case.door,
            {**INGRESSES, "uvloop": UVLOOP}.get(case.ingress, BARE[case.door]),
            f"{case.sessions} on one" if case.shared else case.sessions,
            median(rates),
            median(each(rounds, lambda r: 1e3 * r.p50_s)),
            median(each(rounds, lambda r: 1e3 * r.p99_s)),
            median_ratio(rates, bases),
        )
    return out


def compiled(folder: Path) -> list[str]:
    """The command of the load: the C++ one, built in ``folder``, or Python's where there is no compiler."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        return [sys.executable, "-m", "benchmarks.load"]
    subprocess.run([compiler, "-std=c++17", "-O2", str(LOAD), "-o", str(folder / "load")], check=True)
    return [str(folder / "load")]


def measure(command: Sequence[str], url: str, case: Case, seconds: float, processes: int) -> Round | None:
    """One case under load from ``processes`` processes; None, with a line on standard error, if the door failed."""
    where = ["--url", url if case.door == "tcp" else url.replace("http", case.door, 1)]
    if "benchmarks.load" in command:
        where = [url, "--door", case.door]
    processes = min(processes, case.sessions)
    shares = [case.sessions // processes + (index < case.sessions % processes) for index in range(processes)]
    running = [
        subprocess.Popen(
            [
                *command,
                *where,
                *("--sessions", str(share), "--seconds", str(seconds), "--body", case.agent),
                *(("--connections", "1") if case.shared else ()),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        for share in shares
    ]
    parts = []
    for process in running:
        output, _ = process.communicate()
        if process.returncode == 0:
            parts.append(json.loads(output))
    if len(parts) < processes:
        return None
    # Percentiles of several processes are averaged: the sessions are alike.
    return Round(
        ticks_per_s=sum(part["ticks_per_s"] for part in parts),
        p50_s=sum(part["p50_s"] for part in parts) / len(parts),
        p99_s=sum(part["p99_s"] for part in parts) / len(parts),
    )


def run(options: argparse.Namespace, say: Callable[[str], None]) -> Results:
    """Starts the services, measures, and ends them."""
    with contextlib.ExitStack() as stack:
        command = compiled(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="brayx-load-"))))
        started = [ingress for ingress in options.ingress if ingress != "native"] or ["haproxy"]
        say("starting: the bare echoes" + "".join(f", Ray behind {INGRESSES[i]}" for i in started))
        servers = {"bare": stack.enter_context(Server("bare"))}
        tracking = ["--tracking", options.tracking] if options.tracking else []
        for ingress in started:
            servers[ingress] = stack.enter_context(Server("serve", "--ingress", ingress, *tracking))
        servers["uvloop"] = servers["bare"]
        servers["native"] = servers[started[-1]]
        results: Results = {case: [] for case in cases(options.door, options.ingress, options.sessions, options.agent)}
        for number in range(options.rounds):
            for case, rounds in results.items():
                url = case.url(servers[case.ingress].urls)
                rounds.append(measure(command, url, case, options.seconds, options.processes))
            say(f"round {number + 1} of {options.rounds} done")
    return results


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options; ``--quick`` overrides what takes time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 16], help="at once (default: 1 16)")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="of all cases (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=1, help="that make the load (default: %(default)s)")
    parser.add_argument("--door", nargs="+", choices=list(BARE), default=list(BARE))
    parser.add_argument("--ingress", nargs="+", choices=list(INGRESSES), default=list(INGRESSES))
    parser.add_argument("--agent", nargs="+", choices=["echo", "cartpole"], default=["echo", "cartpole"])
    parser.add_argument("--tracking", help="MLflow's URI or file: serve its champion (default: an untrained model)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round there")
    parser.add_argument("--markdown", action="store_true", help="print plain markdown")
    parser.add_argument("--quick", action="store_true", help="one short round, without Serve's proxy")
    options = parser.parse_args(argv)
    if options.quick:
        options.rounds, options.seconds, options.ingress = 1, 0.5, ["haproxy", "native"]
    if min(options.rounds, options.processes, *options.sessions) < 1 or options.seconds <= 0:
        parser.error("--rounds, --processes, --sessions and --seconds must be positive")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints; exit code 1 if a case failed."""
    options = parse(argv)
    console = Console(stderr=True, highlight=False)
    about = f"{machine()}; {options.rounds} rounds of {options.seconds:g} s a case, medians"
    results = run(options, lambda text: console.print(text, style="dim"))
    text = table(results).markdown()
    show(about, text, markdown=options.markdown)
    if options.json is not None:
        rows = [
            {**asdict(case), "rounds": [None if r is None else asdict(r) for r in rounds]}
            for case, rounds in results.items()
        ]
        options.json.write_text(json.dumps({"about": about, "cases": rows}, indent=1))
    return 1 if any(r is None for rounds in results.values() for r in rounds) else 0


if __name__ == "__main__":
    sys.exit(main())
