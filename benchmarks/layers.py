"""Time of a CartPole tick, layer by layer: each layer is timed together with all layers below it.

    python -m benchmarks.layers

The upper part of the table runs in this process without a network: the engine alone, then the batcher around it, then
the agent around that, and so on out to the HTTP door as an ASGI application. The lower part is one session over
loopback: that application on uvicorn in a separate process, then the same behind Serve with HAProxy, then with brayx's
client instead of the bare load. The difference between neighbours is a layer's cost.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import uvloop

from benchmarks import tables
from benchmarks.servers import (
    CARTPOLE_BODY,
    cartpole,
    load_generator,
    server,
    tell_and_wait,
)
from benchmarks.tables import Table, machine, median, show
from brayx import sample_categorical
from brayx.actor.codec import Codec
from brayx.actor.config import ActorConfig
from brayx.actor.doors.asgi import DoorApp
from brayx.actor.table import SessionTable
from brayx.gamecore.client import AsyncClient
from brayx.gamecore.protocol import StepKind, StepRequest
from brayx.metrics import Recorder

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


def build() -> tuple[SessionTable, Any]:
    """The session table of the CartPole job, serving untrained, and its model."""
    config, recorder = ActorConfig(agents=["agent"]), Recorder()
    factory = cartpole(config, recorder)
    return SessionTable(factory, config, recorder), factory.services.models["model"]


async def inside() -> dict[str, tuple[Layer, float]]:
    """Seconds of each layer that needs no network: the least of many short measurements, for others use the cores."""
    table, model = build()
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
        table, _ = build()
        listener = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(DoorApp(table), log_level="error", access_log=False, lifespan="off")
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        await asyncio.to_thread(tell_and_wait, {"cartpole": f"http://127.0.0.1:{listener.getsockname()[1]}"})
        server.should_exit = True
        await serving
        await table.close()

    uvloop.run(run())


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    parser = tables.options(__doc__, rounds=5, seconds=2.0)
    parser.add_argument("--inside", action="store_true", help="only what needs no network")
    options = parser.parse_args(argv)
    table = Table(["layer", ">µs with all inside", ">µs of its own"])
    known: dict[str, float] = {}
    for name, (layer, seconds) in uvloop.run(inside()).items():
        known[name] = seconds
        table.add(name, 1e6 * seconds, 1e6 * (seconds - known.get(layer.inner, 0.0)))
    if not options.inside:
        for name, samples, inner in outside(options.rounds, options.seconds):
            known[name] = median(samples) or float("nan")
            table.add(name, 1e6 * known[name], 1e6 * (known[name] - known[inner]))
    show(machine(), table.markdown(), markdown=options.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
