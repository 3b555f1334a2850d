"""Bytes and CPU of a tick through the WebSocket door, plain and compressed, side by side in one run.

    python -m benchmarks.wire

A game sends bodies that change a little each tick, and gets a short reply. The CPU is that of both processes, the game
with brayx's Python client and the local host, and the bytes are those of both directions without TCP's headers. The
second table has the compression alone, without a door, also with the window that uvicorn chooses; and a delta encoding
written in Python: changed fields of JSON, changed ranges of other bodies. Needs the package ``isal``.

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
import zlib
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
WAYS = {"plain": ("", 0), "zlib 1": ("zlib", 1), "zlib 6": ("zlib", 6), "ISA-L 1": ("isal.isal_zlib", 1)}
"""Codec and level of the compression, empty for none."""
CODECS = {
    "zlib 1": ("zlib", 1, 15, 8),
    "zlib 6": ("zlib", 6, 15, 8),
    "zlib 6, 4 kB": ("zlib", 6, 12, 5),
    "ISA-L 1": ("isal.isal_zlib", 1, 15, 8),
}
"""Codec, level, window and memory of the compression alone."""
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


def alone(bodies: Sequence[bytes], codec: Any, level: int, window_bits: int = 15, memory: int = 8) -> Cost:
    """Compresses and decompresses all bodies, each against those before it."""
    packer = codec.compressobj(level, codec.DEFLATED, -window_bits, memory)
    reader = codec.decompressobj(-window_bits)
    size, began = 0, time.process_time()
    for body in bodies:
        packed = packer.compress(body) + packer.flush(zlib.Z_SYNC_FLUSH)
        size += len(packed) - 4  # a WebSocket message leaves out the end of the flush
        reader.decompress(packed)
    return Cost(size / len(bodies), (time.process_time() - began) / len(bodies) * 1e6)


def delta(bodies: Sequence[bytes]) -> Cost:
    """Sends each body as its difference from the one before it, and puts it together again."""
    differs, merged = (_fields, _merged) if bodies[0].startswith(b"{") else (_ranges, _patched)
    size, before, there, began = len(bodies[0]), bodies[0], bodies[0], time.process_time()
    for body in bodies[1:]:
        sent = differs(before, body)
        size += len(sent)
        before, there = body, merged(there, sent)
        assert there == body
    return Cost(size / len(bodies), (time.process_time() - began) / len(bodies) * 1e6)


def _fields(before: bytes, body: bytes) -> bytes:
    """The fields of two levels that differ, as JSON. A real encoding would also need removed and reordered ones."""
    old, new = json.loads(before), json.loads(body)
    found = {}
    for name, fields in new.items():
        if old[name] != fields:
            found[name] = {key: value for key, value in fields.items() if old[name][key] != value}
    return json.dumps(found).encode()


def _merged(before: bytes, sent: bytes) -> bytes:
    there = json.loads(before)
    for name, fields in json.loads(sent).items():
        there[name].update(fields)
    return json.dumps(there).encode()


def _ranges(before: bytes, body: bytes) -> bytes:
    """Changed ranges of two bodies of the same length: starts and ends as uint16, then their bytes."""
    old, new = np.frombuffer(before, np.uint8), np.frombuffer(body, np.uint8)
    changed = np.flatnonzero(old != new)
    if not len(changed):
        return b""
    gaps = np.flatnonzero(np.diff(changed) > 4)  # a range costs four bytes
    starts, ends = changed[np.append(0, gaps + 1)], changed[np.append(gaps, -1)] + 1
    edges = np.stack([starts, ends], 1).astype(np.uint16)
    return struct.pack("<H", len(edges)) + edges.tobytes() + b"".join(body[a:b] for a, b in edges.tolist())


def _patched(before: bytes, sent: bytes) -> bytes:
    if not sent:
        return before
    there, at = bytearray(before), 2 + 4 * struct.unpack_from("<H", sent)[0]
    for start, end in np.frombuffer(sent[2:at], np.uint16).reshape(-1, 2).tolist():
        there[start:end] = sent[at : at + end - start]
        at += end - start
    return bytes(there)


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
    ticks = Table(["body", ">bytes", *(f">{of}, {way}" for way in [*WAYS][1:] for of in ("bytes", "CPU")), ">plain us"])
    bare = Table(["body", *(f">{of}, {name}" for name in [*CODECS, "delta"] for of in ("bytes", "us"))])
    for name, make in BODIES.items():
        bodies = make()
        costs: dict[str, list[Cost]] = {way: [] for way in WAYS}
        apart: dict[str, list[Cost]] = {codec: [] for codec in [*CODECS, "delta"]}
        with service("benchmarks.wire", "--serve", "json" if name.startswith("JSON") else "bytes") as served:
            for _ in range(options.rounds):
                for way, how in WAYS.items():
                    costs[way].append(play(served.urls["ws"], served.pid, bodies, how, options.seconds))
                for codec, (module, *options_of) in CODECS.items():
                    apart[codec].append(alone(bodies, importlib.import_module(module), *options_of))
                apart["delta"].append(delta(bodies))
        plain = costs.pop("plain")
        ratios = [
            median_ratio([getattr(each, of) for each in found], [getattr(each, of) for each in plain])
            for found in costs.values()
            for of in ("bytes", "cpu_us")
        ]
        size = sum(map(len, bodies)) / len(bodies)
        ticks.add(name, median([each.bytes for each in plain]), *ratios, median([each.cpu_us for each in plain]))
        cells = [(median([e.bytes for e in of]), median([e.cpu_us for e in of])) for of in apart.values()]
        bare.add(name, *(cell for found, us in cells for cell in ((found or 0.0) / size, us)))
    door = f"A tick through the door, relative to plain:\n\n{ticks.markdown()}\n\n"
    compression = f"Compression alone, bytes relative to plain:\n\n{bare.markdown()}"
    show(about, door + compression, markdown=options.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
