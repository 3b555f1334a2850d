"""Time of a CartPole tick, layer by layer: each layer is timed together with all layers below it.

    python -m benchmarks.layers
    python -m benchmarks.layers --profile           # shares of a loaded replica's event loop instead

The upper part of the table runs in this process without a network: the engine alone, then the batcher around it, then
the agent around that, and so on out to the HTTP door as an ASGI application. The lower part is one session over
loopback: that application on uvicorn in a separate process, then the same behind Serve with HAProxy, then with brayx's
client instead of the bare load. The difference between neighbours is a layer's cost.

For the profile, py-spy (in the extra ``bench``) samples the stacks of a replica with 64 sessions from outside; a sample
counts for the innermost frame that belongs to a part. Time in uvloop and the kernel counts for its caller: reading and
waiting for the loop, sending for the door's flush.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from benchmarks.load import CARTPOLE_BODY, load
from benchmarks.plane import listeners
from benchmarks.servers import TEMPLATE, Server
from benchmarks.tables import Table, machine, median, show
from benchmarks.ticks import Case, compiled
from brayx import sample_categorical
from brayx.actor.codec import Codec
from brayx.actor.doors.asgi import DoorApp
from brayx.actor.table import SessionTable
from brayx.cluster.actor_app import actor_spec, build_runtime
from brayx.gamecore.client import AsyncClient
from brayx.gamecore.protocol import StepKind, StepRequest
from brayx.jobs.config import JobConfig
from brayx.model.arms import WeightSource

SESSION = "layers"


@dataclass(frozen=True)
class Layer:
    """One line of the table.

    Attributes:
        name: what is timed.
        call: does it once.
        inner: name of the layer whose time is part of this one's; empty for none.
    """

    name: str
    call: Callable[[], Awaitable[Any]]
    inner: str = ""


async def build() -> tuple[SessionTable, Any]:
    """The session table of the CartPole job, serving untrained, and its model."""
    job = JobConfig.load(str(TEMPLATE))
    (actor,) = job.actors
    spec = actor_spec(job, actor, mode="serve", weights=dict.fromkeys(job.models, WeightSource()))
    runtime = await build_runtime(spec, {})
    table = SessionTable(runtime.make_actor, job.actors[actor], runtime.recorder)
    return table, runtime.make_actor.services.models["model"]  # type: ignore[attr-defined]


async def inside() -> dict[str, tuple[Layer, float]]:
    """Seconds of each layer that needs no network: the least of many short measurements, for others use the cores."""
    table, model = await build()
    obs = np.asarray(json.loads(CARTPOLE_BODY)["obs"], np.float32)
    rows = model.spec.flatten_inputs((obs,))
    outputs = (await model.forward(obs)).outputs
    rng, codec = random.Random(0), Codec()
    await table.step(StepRequest(StepKind.START, SESSION, b""))
    entry = table.get(SESSION)
    assert entry is not None
    app = DoorApp(table)
    headers = [(b"session", SESSION.encode()), (b"step_kind", b"tick"), (b"host", b"127.0.0.1:8000")]
    length = (b"content-length", str(len(CARTPOLE_BODY)).encode())
    scope = {"type": "http", "method": "POST", "path": "/step", "headers": [*headers, length]}

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": CARTPOLE_BODY}

    async def send(message: Any) -> None:
        pass

    async def of(work: Callable[[], Any]) -> None:
        work()

    layers = [
        Layer("engine: ONNX Runtime, batch of 1", lambda: of(lambda: model._run([rows]))),
        Layer("forward: checks, batcher, engine", lambda: model.forward(obs), "engine: ONNX Runtime, batch of 1"),
        Layer("JSON in and out", lambda: of(lambda: codec.encode({"action": codec.decode(CARTPOLE_BODY) and 1}))),
        Layer("sampling the action", lambda: of(lambda: sample_categorical(outputs["logits"], rng))),
        Layer(
            "actor: JSON, agent, forward", lambda: entry.actor.tick(CARTPOLE_BODY), "forward: checks, batcher, engine"
        ),
        Layer(
            "session table around the actor",
            lambda: table.step(StepRequest(StepKind.TICK, SESSION, CARTPOLE_BODY)),
            "actor: JSON, agent, forward",
        ),
        Layer("HTTP door around the table (ASGI)", lambda: app(scope, receive, send), "session table around the actor"),
    ]
    timed: dict[str, list[float]] = {layer.name: [] for layer in layers}
    for _ in range(100):
        for layer in layers:
            timed[layer.name].append(await _per_call(layer.call))
    await table.close()
    return {layer.name: (layer, min(timed[layer.name])) for layer in layers}


async def _per_call(call: Callable[[], Awaitable[Any]], calls: int = 40) -> float:
    began = time.perf_counter()
    for _ in range(calls):
        await call()
    return (time.perf_counter() - began) / calls


async def client_p50(url: str, seconds: float) -> float:
    """Median seconds of a tick of `AsyncClient`, one session."""
    latencies = []
    async with AsyncClient(url) as client:
        await client.start()
        until = time.perf_counter() + seconds
        while (began := time.perf_counter()) < until:
            await client.tick(CARTPOLE_BODY)
            latencies.append(time.perf_counter() - began)
    return float(np.median(latencies))


def outside(rounds: int, seconds: float) -> list[tuple[str, list[float], str]]:
    """Median seconds over loopback by layer and round, with the name of the layer inside."""
    uvicorn, proxy, client = "uvicorn around the door, over loopback", "Serve and HAProxy", "brayx's AsyncClient"
    timed: dict[str, list[float]] = {name: [] for name in (uvicorn, proxy, client)}
    with Server("door") as door, Server("serve", "--ingress", "haproxy") as served:
        for _ in range(rounds):
            for name, server in ((uvicorn, door), (proxy, served)):
                timed[name].append(_run(load(server.urls["cartpole"], "http", 1, seconds, CARTPOLE_BODY))["p50_s"])
            timed[client].append(_run(client_p50(served.urls["cartpole"], seconds)))
    inner = {uvicorn: "HTTP door around the table (ASGI)", proxy: uvicorn, client: proxy}
    return [(name, timed[name], inner[name]) for name in timed]


def _run(work: Any) -> Any:
    return uvloop.run(work)


def serve_door() -> None:
    """The CartPole job's door on uvicorn, without Serve, until standard input ends."""
    import socket

    import uvicorn

    async def run() -> None:
        table, _ = await build()
        listener = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(DoorApp(table), log_level="error", access_log=False, lifespan="off")
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        print(json.dumps({"cartpole": f"http://127.0.0.1:{listener.getsockname()[1]}"}), flush=True)
        await asyncio.to_thread(sys.stdin.read)
        server.should_exit = True
        await serving
        await table.close()

    uvloop.run(run())


PARTS = {
    "kernel and uvloop: sending": ("flush (brayx/actor/doors/native.py",),
    "door: frames, HTTP": ("brayx/actor/doors/", "brayx/gamecore/"),
    "engine": ("brayx/engines/", "onnxruntime/"),
    "batcher, model": ("brayx/model/",),
    "metrics": (
        "brayx/metrics/",
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
"""Pieces of a frame's text by part of the loop; a frame belongs to the first part that has one of them."""
_DOORS = ("kernel and uvloop: sending", "door: frames, HTTP")
LOOP = "kernel and uvloop: receiving, waiting, turns of the loop"
"""No part is on the stack."""


def shares(stacks: Iterable[str]) -> dict[str, float]:
    """Share of the samples by part, of the thread that runs the replica's event loop: the one most seen at the doors.

    Args:
        stacks: lines of py-spy's raw format: the thread, frames from the outermost to the innermost, number of samples.
    """
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for line in stacks:
        stack, _, samples = line.rpartition(" ")
        thread, *frames = stack.split(";")
        counts[thread][_part(frames)] += int(samples)
    loop = max(counts.values(), key=lambda parts: sum(parts[part] for part in _DOORS), default=Counter[str]())
    total = sum(loop.values())
    return {part: count / total for part, count in loop.most_common()}


def _part(frames: Sequence[str]) -> str:
    for frame in reversed(frames):
        for part, pieces in PARTS.items():
            if any(piece in frame for piece in pieces):
                return part
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


def profiled(agent: str, sessions: int, seconds: int) -> Table:
    """Shares of the loop's samples by part, for both doors of a replica."""
    found: dict[str, dict[str, float]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="brayx-shares-") as folder,
        Server("serve", "--ingress", "haproxy") as server,
    ):
        command = compiled(Path(folder))
        for door in ("http", "tcp"):
            case = Case(agent, door, "native", sessions)
            stacks = profile(case.url(server.urls), command, case, seconds, Path(folder))
            found[door] = shares(stacks)
    table = Table([f"part of the replica's loop ({agent})", ">native HTTP, %", ">TCP, %"])
    for part in [*PARTS, LOOP]:
        table.add(part, *(100 * found[door].get(part, 0.0) for door in ("http", "tcp")))
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="of the network part (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each of its measurements (default: %(default)s)")
    parser.add_argument("--inside", action="store_true", help="only what needs no network")
    parser.add_argument(
        "--profile", type=int, nargs="?", const=8, metavar="SECONDS", help="profile a replica (%(const)s)"
    )
    parser.add_argument("--sessions", type=int, default=64, help="of the profile (default: %(default)s)")
    parser.add_argument("--agent", choices=["echo", "cartpole"], default="cartpole", help="of the profile")
    parser.add_argument("--markdown", action="store_true", help="print plain markdown")
    options = parser.parse_args(argv)
    about = machine()
    if options.profile:
        shown = profiled(options.agent, options.sessions, options.profile)
        show(about, shown.markdown(), markdown=options.markdown)
        return 0
    table = Table(["layer", ">µs with all inside", ">µs of its own"])
    known: dict[str, float] = {}
    for name, (layer, seconds) in uvloop.run(inside()).items():
        known[name] = seconds
        table.add(name, 1e6 * seconds, 1e6 * (seconds - known.get(layer.inner, 0.0)))
    if not options.inside:
        for name, samples, inner in outside(options.rounds, options.seconds):
            known[name] = median(samples) or float("nan")
            table.add(name, 1e6 * known[name], 1e6 * (known[name] - known[inner]))
    text = table.markdown()
    show(about, text, markdown=options.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
