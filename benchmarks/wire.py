"""Bytes and CPU of a tick through the WebSocket door, plain and compressed, side by side in one run.

    python -m benchmarks.wire

A game sends bodies that change a little each tick, and gets a short reply. The CPU is that of both processes, the game
with brayx's Python client and the local host, and the bytes are those of both directions without TCP's headers.
Needs the package ``isal``.

With ``--encodings`` it measures those of contracts instead: decoding a tick and encoding its reply, without a door.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import struct
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np

from benchmarks import tables
from benchmarks.servers import cpu_s, serve_agents, service
from benchmarks.tables import Table, machine, median, median_ratio, show
from brayx.gamecore.contract import ENCODINGS, Contract
from brayx.gamecore.contract_bodies import ContractBodies

CHANGE = 0.02
"""Share of a body's values that change each tick."""
TICKS = 400
"""Different bodies of one kind, sent one after the other."""
WAYS = {"plain": ("", 0), "zlib 1": ("zlib", 1), "ISA-L 1": ("isal.isal_zlib", 1)}
"""Codec and level of the compression, empty for none."""
_REPLY = b'{"action": 3}'


def serve(codec: str) -> None:
    """Serves until standard input ends."""
    from brayx.actor.agent import Agent, Services, State
    from brayx.actor.agent_actor import AgentActorFactory
    from brayx.actor.codec import Codec
    from brayx.actor.config import ActorConfig
    from brayx.metrics import Recorder

    class Acts(Agent):
        async def on_tick(self, state: State) -> None:
            state.output = json.loads(_REPLY) if codec == "json" else _REPLY

    recorder = Recorder()
    actor = ActorConfig(
        agents=["agent"], port=0, native_port=0, tcp_port=None, websocket_window_bits=15, episode_length=64
    )
    factory = AgentActorFactory({"agent": Acts}, {}, Services(), Codec("json" if codec == "json" else None))
    serve_agents(factory, recorder, actor)


def json_bodies(size: int) -> list[bytes]:
    """JSON of ``size`` bytes: units with coordinates, health and a name."""
    rng = random.Random(0)
    units: dict[str, dict[str, Any]] = {}
    while len(json.dumps(units)) < size:
        units[f"unit_{len(units)}"] = {"x": _place(rng), "y": _place(rng), "hp": rng.randrange(100), "kind": "archer"}
    bodies = []
    for _ in range(TICKS):
        for _ in range(max(1, round(len(units) * 4 * CHANGE))):
            unit = rng.choice(list(units.values()))
            key = rng.choice(("x", "y", "hp"))
            unit[key] = rng.randrange(100) if key == "hp" else _place(rng)
        bodies.append(json.dumps(units).encode())
    return bodies


def _place(rng: random.Random) -> float:
    return round(rng.uniform(0, 1000), 2)


def images() -> list[bytes]:
    """Grey images of 84 x 84: a ball and a bar that move before a background with a gradient."""
    rows = np.arange(84)
    background = (np.add.outer(rows, rows) // 2).astype(np.uint8)
    bodies = []
    for tick in range(TICKS):
        image = background.copy()
        x, y, bar = 2 * tick % 80, tick % 80, 2 * tick % 70
        image[y : y + 4, x : x + 4] = 255
        image[78:80, bar : bar + 10] = 200
        bodies.append(image.tobytes())
    return bodies


def entities(count: int = 200) -> list[bytes]:
    """A packed list of entities, 20 bytes each: id, kind, place, velocity, health. One in ten moves each tick."""
    rng = np.random.default_rng(0)
    place, speed = rng.uniform(0, 1000, (count, 2)).astype(np.float32), rng.normal(size=(count, 2)).astype(np.float16)
    bodies = []
    for _ in range(TICKS):
        moving = rng.random(count) < 0.1
        place[moving] += speed[moving]
        bodies.append(
            b"".join(
                struct.pack("<HBxffeeHxx", number, number % 7, *place[number], *speed[number], 100)
                for number in range(count)
            )
        )
    return bodies


def noise() -> list[bytes]:
    """Images of random pixels, which nothing compresses."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, 84 * 84, np.uint8).tobytes() for _ in range(TICKS)]


BODIES: dict[str, Callable[[], list[bytes]]] = {
    "JSON, 2 kB": lambda: json_bodies(2_000),
    "JSON, 8 kB": lambda: json_bodies(8_000),
    "image, 84 x 84": images,
    "entity list, 4 kB": entities,
    "noise, 84 x 84": noise,
}


class Cost(NamedTuple):
    """Cost of a tick."""

    bytes: float
    cpu_us: float


def play(url: str, server: int, bodies: Sequence[bytes], way: tuple[str, int], seconds: float) -> Cost:
    """Ticks for some seconds, compressed by a codec and level of `WAYS`."""
    from brayx.gamecore import deflate
    from brayx.gamecore.client import Client
    from brayx.gamecore.transports import websocket
    from brayx.gamecore.transports.connection import ClientConnection

    moved = 0

    class Counted(ClientConnection):
        def send(self, data: bytes, timeout_s: float) -> None:
            nonlocal moved
            moved += len(data)
            super().send(data, timeout_s)

        def recv(self, deadline: float) -> bytes:
            nonlocal moved
            data = super().recv(deadline)
            moved += len(data)
            return data

    codec, deflate.LEVEL = way
    if codec:
        deflate.CODEC = importlib.import_module(codec)
    with patch.object(websocket, "ClientConnection", Counted), Client(url, compress=bool(codec)) as client:
        client.start()
        for body in bodies:  # once before it counts
            client.tick(body)
        moved, ticks, own, other = 0, 0, time.process_time(), cpu_s(server)[0]
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for body in bodies:
                client.tick(body)
            ticks += len(bodies)
        spent_s = time.process_time() - own + cpu_s(server)[0] - other
        return Cost(moved / ticks, spent_s / ticks * 1e6)


CONTRACTS: dict[str, dict[str, Any]] = {
    "4 numbers": {"vector": {"shape": [4]}},
    "64 numbers": {"vector": {"shape": [64]}},
    "8 numbers, 20 entities of 8": {"vector": {"shape": [8]}, "units": {"kind": "entities", "shape": [20, 8]}},
    "image, 84 x 84": {"camera": {"kind": "image", "shape": [84, 84, 1]}},
}
"""Observations of games with a contract."""


def contract_bodies(observations: dict[str, Any], encoding: str) -> tuple[ContractBodies, bytes]:
    """A game's bodies, and that of a tick with random observations."""
    document = {"contract": 1, "observations": observations, "encoding": encoding}
    actions = {"steer": {"kind": "continuous", "size": 2}, "dash": {"kind": "discrete", "size": 2}}
    contract = Contract.parse({**document, "actions": actions})
    rng = np.random.default_rng(0)
    values = {
        spec.name: rng.normal(size=spec.shape) if spec.kind != "image" else rng.integers(0, 256, spec.shape, np.uint8)
        for spec in contract.observations
    }
    bodies = ContractBodies(contract)
    return bodies, bodies.encode_tick(values, 1.0)


def turn_us(bodies: ContractBodies, body: bytes, seconds: float) -> float:
    """Microseconds of CPU to decode a tick and encode its reply."""
    action = {"steer": np.array([0.2, -0.5]), "dash": 1}
    turns, passed_s, began = 0, 0.0, time.process_time()
    while passed_s < seconds:
        for _ in range(20):
            bodies.decode(body)
            bodies.encode(action)
        turns += 20
        passed_s = time.process_time() - began
    return passed_s / turns * 1e6


def encodings(rounds: int, seconds: float) -> Table:
    """The encodings of contracts side by side."""
    table = Table(["observation", *(f">{what}, {name}" for name in ENCODINGS for what in ("bytes", "us"))])
    for name, observations in CONTRACTS.items():
        games = {encoding: contract_bodies(observations, encoding) for encoding in ENCODINGS}
        costs: dict[str, list[float | None]] = {encoding: [] for encoding in games}
        for _ in range(rounds):
            for encoding, (bodies, body) in games.items():
                costs[encoding].append(turn_us(bodies, body, seconds))
        table.add(name, *(cell for key, (_, body) in games.items() for cell in (len(body), median(costs[key]))))
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    parser = tables.options(__doc__, rounds=5, seconds=2.0)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--encodings", action="store_true", help="measure the encodings of contracts instead")
    options = parser.parse_args(argv)
    if options.serve:
        serve(options.serve)
        return 0
    about = f"{machine()}; one session, {options.rounds} rounds of {options.seconds:g} s, medians"
    if options.encodings:
        show(about, encodings(options.rounds, options.seconds).markdown(), markdown=options.markdown)
        return 0
    ticks = Table(["body", ">bytes", *(f">{of}, {way}" for way in [*WAYS][1:] for of in ("bytes", "CPU"))])
    for name, make in BODIES.items():
        bodies = make()
        costs: dict[str, list[Cost]] = {way: [] for way in WAYS}
        with service("benchmarks.wire", "--serve", "json" if name.startswith("JSON") else "bytes") as served:
            for _ in range(options.rounds):
                for way, how in WAYS.items():
                    costs[way].append(play(served.urls["ws"], served.pid, bodies, how, options.seconds))
        plain = costs.pop("plain")
        ratios = [
            median_ratio([getattr(each, of) for each in found], [getattr(each, of) for each in plain])
            for found in costs.values()
            for of in ("bytes", "cpu_us")
        ]
        ticks.add(name, median([each.bytes for each in plain]), *ratios)
    show(about, ticks.markdown(), markdown=options.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
