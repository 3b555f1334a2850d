"""The cost of recording: ticks/s of the local host with and without it, side by side in one run; and of reading.

    python -m benchmarks.recording

Two agents run behind the TCP door: one echoes a body of 1 kB, the other is CartPole's with its model. Each is served by
four processes: without a recorder; with one that records no session; with one that keeps the newest ticks of each
session in memory, in case of an error; and with one that records every session. CPU is that of the serving process and
of the process that it starts to write.

The second table opens a session of a million ticks over thousands of files, reads single ticks of it, and lists a
folder of many sessions.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.servers import TEMPLATE
from benchmarks.tables import Table, machine, median, median_ratio, show
from benchmarks.ticks import compiled

AGENTS = ("echo", "cartpole")
_WARM_UP_S = 0.3
_PER_FILE = 300
_SESSIONS_PER_FILE = 2000
RECORDINGS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "no session": {"every": 0, "errors": False, "before": 0},
    "sessions with an error": {"every": 0},
    "every session": {"every": 1},
}
ECHO_BYTES = 1024


def serve(agent: str, recording: str, folder: str) -> None:
    """Serves until standard input ends; prints the URLs."""
    from brayx.actor.agent import Agent, Services, State
    from brayx.actor.agent_actor import AgentActorFactory
    from brayx.actor.codec import Codec
    from brayx.actor.config import ActorConfig
    from brayx.actor.parts import agents_of
    from brayx.actor.serving import Runtime
    from brayx.local.host import LocalHost
    from brayx.metrics import Recorder
    from brayx.recording.config import RecordingConfig
    from brayx.recording.recorder import closing, recorders_of
    from deployments.job import JobConfig
    from deployments.weights import WeightSource
    from pipelines.acting import acting_from

    class Echo(Agent):
        async def on_tick(self, state: State) -> None:
            state.output = state.input

    recorder, options = Recorder(), RECORDINGS[recording]
    config = None if options is None else RecordingConfig(folder=folder, **options)
    recorders = recorders_of(config, recorder)
    actor = ActorConfig(agents=["agent"], port=0, native_port=None, tcp_port=0, actors_per_worker=1024)
    if agent == "echo":
        factory = AgentActorFactory({"agent": Echo}, {}, Services(), Codec(None), recorders=recorders)
    else:
        job = JobConfig.load(str(TEMPLATE))
        as_dict = job.in_mode("serve").as_dict()
        acting = acting_from(WeightSource(), job, "model", as_dict, recorder)
        acting.build(lambda line: None)
        services = Services({"model": acting.model}, {}, recorder)
        factory = AgentActorFactory(agents_of(job.agents, job.folder), as_dict, services, recorders=recorders)
    host = LocalHost(actor, Runtime(factory, recorder, close=closing(recorders)))
    host.open()
    print(json.dumps(host.urls), flush=True)
    sys.stdin.read()
    host.close()
    print(json.dumps(recorder.summary()), flush=True)


@contextlib.contextmanager
def served(agent: str, recording: str, folder: Path) -> Iterator[tuple[str, int]]:
    """Serves in another process; yields the URL of its TCP door, and its process id."""
    words = [sys.executable, "-m", "benchmarks.recording", "--serve", agent, recording, str(folder)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        yield json.loads(process.stdout.readline())["tcp"], process.pid
        process.stdin.close()
        lost = {
            name: value for name, value in json.loads(process.stdout.readline()).items() if "recording_lost" in name
        }
        if lost:
            print(f"{agent}, {recording}: {lost}", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", nargs=3, metavar="WORD", help="serve one agent (the benchmark starts itself so)")
    parser.add_argument("--sessions", type=int, default=16, help="concurrent sessions (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement (default: %(default)s)")
    parser.add_argument("--many", type=int, default=1_000_000, help="sessions to list (default: %(default)s)")
    parser.add_argument("--markdown", action="store_true", help="print plain markdown")
    options = parser.parse_args(argv)
    if options.serve:
        serve(*options.serve)
        return 0
    about = f"{machine()}; {options.sessions} sessions, {options.rounds} rounds of {options.seconds:g} s, medians"
    table = Table(["agent", "recorded", ">ticks/s", ">of none", ">CPU µs a tick", ">to none", ">kB a tick"])
    for agent in AGENTS:
        rates: dict[str, list[float]] = {name: [] for name in RECORDINGS}
        costs: dict[str, list[float]] = {name: [] for name in RECORDINGS}
        with tempfile.TemporaryDirectory(prefix="brayx-recording-") as temporary:
            folders = {name: Path(temporary, name) for name in RECORDINGS}
            with contextlib.ExitStack() as stack:
                command = compiled(Path(temporary))
                servers = {name: stack.enter_context(served(agent, name, folders[name])) for name in RECORDINGS}
                for _ in range(options.rounds):
                    for name, (url, pid) in servers.items():
                        words = [*command, "--url", url, "--sessions", str(options.sessions)]
                        words += ["--seconds", str(options.seconds), "--body", agent]
                        words += ["--bytes", str(ECHO_BYTES)] if agent == "echo" else []
                        before = cpu_s(pid)
                        done = json.loads(subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout)
                        rates[name].append(done["ticks_per_s"])
                        # Also over the load's warm-up, whose ticks are not in its figure.
                        costs[name].append(
                            (cpu_s(pid) - before) / (done["ticks_per_s"] * (options.seconds + _WARM_UP_S))
                        )
            for name in RECORDINGS:
                cost_us = None if any(math.isnan(each) for each in costs[name]) else median(costs[name])
                table.add(
                    agent,
                    name,
                    median(rates[name]),
                    median_ratio(rates[name], rates["none"]),
                    None if cost_us is None else cost_us * 1e6,
                    median_ratio(costs[name], costs["none"]),
                    _kb_a_tick(folders[name]),
                )
    show(about, table.markdown() + "\n\n" + reading(options.many).markdown(), markdown=options.markdown)
    return 0


def cpu_s(pid: int) -> float:
    """CPU time of a process and its children so far, in seconds; NaN where /proc does not tell."""
    total, ticks_per_s = 0, os.sysconf("SC_CLK_TCK")
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if stat.parent.name == str(pid) or fields[1] == str(pid):
                total += int(fields[11]) + int(fields[12])
    return total / ticks_per_s if total else math.nan


def reading(many: int) -> Table:
    """A session of a million ticks, in files of 300 as a game of 60 ticks/s writes them; and ``many`` sessions."""
    from brayx.recording import open as open_recordings
    from brayx.recording.columns import Tick, columns_of, packed
    from brayx.recording.part import Part
    from brayx.recording.writer import Folder

    table = Table(["reading", ">what", ">took"])
    body = '{"obs":[%d.5,0.25,0.125,1.0]}'
    ticks = [
        Tick(at, at / 60, 1e-4, (body % at).encode(), b'{"action":1}', {"x": float(at)}) for at in range(_PER_FILE)
    ]
    columns = packed(columns_of(ticks))
    short = packed(columns_of(ticks[:1]))
    with tempfile.TemporaryDirectory(prefix="brayx-recording-") as temporary:
        folder = Folder(temporary, 10**12)
        for at in range(1_000_000 // _PER_FILE):
            folder.write([(Part("long", "long", 0.0, at * _PER_FILE, _PER_FILE), columns)])
        began = time.perf_counter()
        (episode,) = open_recordings(temporary)
        table.add("open a session", f"{len(episode):,} ticks", f"{time.perf_counter() - began:.2f} s")
        for name, step in (("tick after tick", 1), ("ticks anywhere", 79_193)):
            took = []
            for at in range(300):
                began = time.perf_counter()
                episode.read((500_000 + at * step) % len(episode), 1)
                took.append(time.perf_counter() - began)
            table.add(name, "median of 300", f"{(median(took) or 0.0) * 1e3:.1f} ms")
    with tempfile.TemporaryDirectory(prefix="brayx-recording-") as temporary:
        folder = Folder(temporary, 10**12)
        for at in range(0, many, _SESSIONS_PER_FILE):
            names = [f"game-{number}" for number in range(at, min(at + _SESSIONS_PER_FILE, many))]
            folder.write([(Part(name, name, 0.0, 0, 1, end="stop"), short) for name in names])
        began = time.perf_counter()
        episodes = open_recordings(temporary)
        last = episodes[-1].session
        took_s = time.perf_counter() - began
        assert last == f"game-{many - 1}"
        table.add("list sessions", f"{len(episodes):,}", f"{took_s:.2f} s")
    return table


def _kb_a_tick(folder: Path) -> float | None:
    """Size of the files for each recorded tick, in kB; None: no files."""
    from brayx.recording import open as open_recordings

    files = [*folder.glob("*.parquet")]
    ticks = sum(len(each) for each in open_recordings(str(folder))) if files else 0
    return sum(file.stat().st_size for file in files) / ticks / 1e3 if ticks else None


if __name__ == "__main__":
    sys.exit(main())
