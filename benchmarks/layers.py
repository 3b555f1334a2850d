"""Time of a CartPole tick, layer by layer: each layer is timed together with all layers below it.

    python -m benchmarks.layers
    python -m benchmarks.layers --profile           # shares of a loaded replica's event loop instead
    python -m benchmarks.layers --hosts             # a replica's overhead on its TCP listener instead

The upper part of the table runs in this process without a network: the engine alone, then the batcher around it, then
the agent around that, and so on out to the HTTP door as an ASGI application. The lower part is one session over
loopback: that application on uvicorn in a separate process, then the same behind Serve with HAProxy, then with brayx's
client instead of the bare load. The difference between neighbours is a layer's cost.

For the profile, py-spy (in the extra ``bench``) samples the stacks of a replica with 64 sessions from outside; a sample
counts for the innermost frame that belongs to a part. Time in uvloop and the kernel counts for its caller: reading and
waiting for the loop, sending for the door's flush.

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
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from benchmarks import tables
from benchmarks.servers import (
    CARTPOLE_BODY,
    TEMPLATE,
    WORKERS_NICE,
    Cost,
    Load,
    cost,
    listeners,
    load_generator,
    server,
    service,
    tell_and_wait,
)
from benchmarks.tables import Table, machine, median, median_ratio, show
from brayx import sample_categorical
from brayx.actor.codec import Codec
from brayx.actor.doors.asgi import DoorApp
from brayx.actor.table import SessionTable
from brayx.cluster.actor_app import actor_spec, build_runtime
from brayx.gamecore.client import AsyncClient
from brayx.gamecore.protocol import StepKind, StepRequest
from brayx.gamecore.tcp import REPLY_HEAD, REQUEST_HEAD
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
    with load_generator() as load, server("door") as door, server("serve") as served:
        url = served.urls["cartpole"]
        for _ in range(rounds):
            timed[uvicorn].append(load(door.urls["cartpole"], 1, seconds, "cartpole").p50_s)
            timed[proxy].append(load(url, 1, seconds, "cartpole").p50_s)
            timed[client].append(uvloop.run(client_p50(url, seconds)))
    inner = {uvicorn: "HTTP door around the table (ASGI)", proxy: uvicorn, client: proxy}
    return [(name, timed[name], inner[name]) for name in timed]


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
        await asyncio.to_thread(tell_and_wait, {"cartpole": f"http://127.0.0.1:{listener.getsockname()[1]}"})
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


def profile(url: str, load: Load, sessions: int, seconds: int) -> list[str]:
    """Stacks of the one replica that listens at ``url``, while it is under load."""
    (replica,) = listeners(url)
    spy = Path(sys.executable).parent / "py-spy"
    with tempfile.TemporaryDirectory(prefix="brayx-shares-") as folder:
        raw = Path(folder) / "stacks"
        record = [str(spy), "record", "--pid", str(replica), "--duration", str(seconds), "--rate", "250", "--threads"]
        record += ["--format", "raw", "--output", str(raw)]
        loading = threading.Thread(target=load, args=(url, sessions, seconds + 2, "cartpole"))
        loading.start()
        subprocess.run(record, check=True, capture_output=True)
        loading.join()
        return raw.read_text().splitlines()


def profiled(sessions: int, seconds: int) -> Table:
    """Shares of the loop's samples by part, for both doors of a replica."""
    with load_generator() as load, server("serve") as served:
        urls = (served.urls["cartpole native"], served.urls["cartpole tcp"])
        by_door = [shares(profile(url, load, sessions, seconds)) for url in urls]
    table = Table(["part of the replica's loop (cartpole)", ">native HTTP, %", ">TCP, %"])
    for part in [*PARTS, LOOP]:
        table.add(part, *(100 * door.get(part, 0.0) for door in by_door))
    return table


HOSTS = {
    "echo": "echo protocol on uvloop, nothing else",
    "main": "listener and session table, main thread",
    "thread": "the same in a second thread",
    "import": "the same, Ray imported",
    "actor": "the same in an async Ray actor",
}
_BARE = "asyncio streams, a task a request"


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

    def say(port: int) -> None:
        print(json.dumps({"tcp": f"tcp://127.0.0.1:{port}"}), flush=True)

    async def run(make: Callable[[], Awaitable[tuple[int, Any]]]) -> None:
        port, kept = await make()
        say(port)
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
        say(ray.get(actor.open.remote()))
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


def hosts(sessions: int, rounds: int, seconds: float) -> Table:
    """The TCP listener, in steps from a bare process to a Serve replica."""
    costs: dict[str, list[Cost]] = {}
    with contextlib.ExitStack() as stack:
        load = stack.enter_context(load_generator())
        bare = stack.enter_context(server("bare")).urls
        urls = {_BARE: bare["echo tcp"], "asyncio streams on uvloop": bare["echo uvloop"]}
        for kind, name in HOSTS.items():
            urls[name] = stack.enter_context(service("benchmarks.layers", "--host", kind)).urls["tcp"]
        urls["a Serve replica"] = stack.enter_context(server("serve")).urls["echo tcp"]
        for _ in range(rounds):
            for name, url in urls.items():
                (pid,) = listeners(url)
                costs.setdefault(name, []).append(cost(load, pid, url, sessions, seconds))
    rates = {name: [done.ticks_per_s for done in rounds_of] for name, rounds_of in costs.items()}
    table = Table(["where", ">ticks/s", ">to bare", ">CPU µs a tick"])
    for name, rounds_of in costs.items():
        used_us = median([1e6 * done.cpu_s for done in rounds_of])
        table.add(name, median(rates[name]), median_ratio(rates[name], rates[_BARE]), used_us)
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    parser = tables.options(__doc__, rounds=5, seconds=2.0)
    parser.add_argument("--inside", action="store_true", help="only what needs no network")
    parser.add_argument(
        "--profile", type=int, nargs="?", const=8, metavar="SECONDS", help="profile a replica (%(const)s)"
    )
    parser.add_argument("--sessions", type=int, help="of the profile (default: 64), or at each host (default: 16)")
    parser.add_argument("--hosts", action="store_true", help="the TCP listener in each host")
    parser.add_argument("--host", choices=list(HOSTS), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.host:
        host(options.host)
        return 0
    about = machine()
    if options.profile:
        show(about, profiled(options.sessions or 64, options.profile).markdown(), markdown=options.markdown)
        return 0
    if options.hosts:
        about += f"; {options.rounds} rounds of {options.seconds:g} s, medians"
        measured = hosts(options.sessions or 16, options.rounds, options.seconds)
        show(about, measured.markdown(), markdown=options.markdown)
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
    show(about, table.markdown(), markdown=options.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
