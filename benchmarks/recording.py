"""The cost of recording: ticks/s of the local host with and without it, side by side in one run.

    python -m benchmarks.recording

Two agents run behind the TCP door: one echoes a body of 1 kB, the other is CartPole's with its model. Each is served by
three processes: without a recorder, with a recorder that records no session, and with one that records every session.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.servers import TEMPLATE
from benchmarks.tables import Table, machine, median, show
from benchmarks.ticks import compiled

AGENTS = ("echo", "cartpole")
RECORDINGS = {"none": None, "no session": 0, "every session": 1}


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

    recorder, every = Recorder(), RECORDINGS[recording]
    config = None if every is None else RecordingConfig(folder=folder, every=every, errors=False, before=0)
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
def served(agent: str, recording: str, folder: Path) -> Iterator[str]:
    """Serves in another process; yields the URL of its TCP door."""
    words = [sys.executable, "-m", "benchmarks.recording", "--serve", agent, recording, str(folder)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        yield json.loads(process.stdout.readline())["tcp"]
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
    parser.add_argument("--markdown", action="store_true", help="print plain markdown")
    options = parser.parse_args(argv)
    if options.serve:
        serve(*options.serve)
        return 0
    about = f"{machine()}; {options.sessions} sessions, {options.rounds} rounds of {options.seconds:g} s, medians"
    table = Table(["agent", "recorded", ">ticks/s", ">of none", ">kB a tick"])
    for agent in AGENTS:
        rates: dict[str, list[float]] = {name: [] for name in RECORDINGS}
        with tempfile.TemporaryDirectory(prefix="brayx-recording-") as temporary:
            folders = {name: Path(temporary, name) for name in RECORDINGS}
            with contextlib.ExitStack() as stack:
                command = compiled(Path(temporary))
                urls = {name: stack.enter_context(served(agent, name, folders[name])) for name in RECORDINGS}
                for _ in range(options.rounds):
                    for name, url in urls.items():
                        words = [*command, "--url", url, "--sessions", str(options.sessions)]
                        words += ["--seconds", str(options.seconds), "--body", agent]
                        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout
                        rates[name].append(json.loads(done)["ticks_per_s"])
            for name, of in rates.items():
                ratios = [rate / none for rate, none in zip(of, rates["none"], strict=True)]
                table.add(agent, name, median(of), median(ratios), _kb_a_tick(folders[name]))
    show(about, table.markdown(), markdown=options.markdown)
    return 0


def _kb_a_tick(folder: Path) -> float | None:
    """Size of the files for each recorded tick, in kB; None: no files."""
    from brayx.recording import open as open_recordings

    files = [*folder.glob("*.parquet")]
    ticks = sum(len(each) for each in open_recordings(str(folder))) if files else 0
    return sum(file.stat().st_size for file in files) / ticks / 1e3 if ticks else None


if __name__ == "__main__":
    sys.exit(main())
