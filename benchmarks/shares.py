"""Profile of a replica's event loop under load: shares of CartPole ticks by layer.

    python -m benchmarks.shares                     # native HTTP and TCP, 64 sessions each

py-spy (in the extra ``bench``) samples the replica's stacks from outside; a sample counts for the innermost frame that
belongs to a layer. Time in uvloop and the kernel counts for its caller: reading and waiting for the loop, sending for
the door's flush.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.plane import listeners
from benchmarks.servers import Server
from benchmarks.tables import Table, machine, show
from benchmarks.ticks import Case, compiled

LAYERS = {
    "kernel and uvloop: sending": ("flush (brayx/actor/doors/native.py",),
    "door: frames, HTTP": ("brayx/actor/doors/", "brayx/gamecore/"),
    "engine": ("brayx/engines/", "onnxruntime/"),
    "batcher, model": ("brayx/model/",),
    "metrics": (
        "brayx/metrics/__init__.py",
        "brayx/cluster/prometheus.py",
        "brayx/cluster/hub.py",
        "brayx/tracking/hub.py",
    ),
    "JSON": ("(json/",),
    "actor, agent, sampling": (
        "brayx/actor/agent_actor.py",
        "brayx/actor/codec.py",
        "brayx/actor/episodes.py",
        "brayx/actor/agent.py",
        "gym_agent.py",
        "brayx/actor/decode.py",
    ),
    "session table": (
        "brayx/actor/session.py",
        "brayx/actor/table.py",
        "brayx/actor/tick_times.py",
        "brayx/actor/serving.py",
        "brayx/cluster/replica.py",
    ),
}
"""Parts of a frame's text by layer; the first layer that fits a frame has it."""
_DOORS = ("kernel and uvloop: sending", "door: frames, HTTP")
LOOP = "kernel and uvloop: receiving, waiting, turns of the loop"
"""Where no layer is on the stack."""


def shares(stacks: Iterable[str]) -> dict[str, float]:
    """Share of the samples by layer, of the thread that runs the replica's event loop: the one most seen at the doors.

    Args:
        stacks: lines of py-spy's raw format: the thread, frames from the outermost to the innermost, number of samples.
    """
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for line in stacks:
        stack, _, samples = line.rpartition(" ")
        thread, *frames = stack.split(";")
        counts[thread][_layer(frames)] += int(samples)
    loop = max(counts.values(), key=lambda layers: sum(layers[layer] for layer in _DOORS), default=Counter[str]())
    total = sum(loop.values())
    return {layer: count / total for layer, count in loop.most_common()}


def _layer(frames: Sequence[str]) -> str:
    for frame in reversed(frames):
        for layer, parts in LAYERS.items():
            if any(part in frame for part in parts):
                return layer
    return LOOP


def profile(url: str, command: Sequence[str], case: Case, seconds: float, folder: Path) -> list[str]:
    """Stacks of the one replica that listens at ``url``, while it is under load."""
    (replica,) = listeners(url)
    load = subprocess.Popen(
        [*command, "--url", url, "--sessions", str(case.sessions), "--seconds", str(seconds + 2), "--body", case.agent],
        stdout=subprocess.DEVNULL,
    )
    raw = folder / "stacks"
    record = ["py-spy", "record", "--pid", str(replica.pid), "--duration", str(seconds), "--rate", "250", "--threads"]
    spy = Path(sys.executable).parent / record[0]
    subprocess.run([str(spy), *record[1:], "--format", "raw", "--output", str(raw)], check=True, capture_output=True)
    load.wait(60.0)
    return raw.read_text().splitlines()


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=64, help="at once (default: %(default)s)")
    parser.add_argument("--seconds", type=int, default=8, help="of each profile (default: %(default)s)")
    parser.add_argument("--agent", choices=["echo", "cartpole"], default="cartpole")
    parser.add_argument("--markdown", action="store_true", help="print plain markdown")
    options = parser.parse_args(argv)
    about = machine()
    found: dict[str, dict[str, float]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="brayx-shares-") as folder,
        Server("serve", "--ingress", "haproxy") as server,
    ):
        command = compiled(Path(folder))
        for door in ("http", "tcp"):
            case = Case(options.agent, door, "native", options.sessions)
            stacks = profile(case.url(server.urls), command, case, options.seconds, Path(folder))
            found[door] = shares(stacks)
    table = Table([f"part of the replica's loop ({options.agent})", ">native HTTP, %", ">TCP, %"])
    for layer in [*LAYERS, LOOP]:
        table.add(layer, *(100 * found[door].get(layer, 0.0) for door in ("http", "tcp")))
    show(about, table.markdown(), markdown=options.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
