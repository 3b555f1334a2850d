"""The cost of recording: ticks/s of the local host with and without it, side by side in one run; and of reading.

    python -m benchmarks.recording

Three agents run behind the TCP door: one echoes a body of 1 kB, another is CartPole's with its model, and the third
echoes, too, and sets an image of 84x84 on each tick. Each is served by three processes: without a recorder; with one
that keeps the newest ticks of each session in memory, in case of an error; and with
one that records every session, the images as frames. CPU is that of the serving process and of the process that it
starts to write.

The second table opens a session of a million ticks over thousands of files, reads single ticks of it, and lists a
folder of many sessions. The third one encodes frames of three sizes, and shows them in any order.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import tables
from benchmarks.servers import Cost, cartpole, cost, cost_cells, load_generator, serve_agents, service
from benchmarks.tables import Table, machine, median, show

if TYPE_CHECKING:
    from brayx.recording.columns import TickColumns

AGENTS = ("echo", "cartpole", "screen")
_PER_FILE = 300
_SESSIONS_PER_FILE = 2000
_FRAMES = 300
RECORDINGS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "sessions with an error": {"every": 0},
    "every session": {"every": 1},
}
ECHO_BYTES = 1024


def serve(agent: str, recording: str, folder: str) -> None:
    """Serves until standard input ends; says what the recorder has lost."""
    from brayx.actor.agent import Agent, Services, State
    from brayx.actor.agent_actor import AgentActorFactory
    from brayx.actor.codec import Codec
    from brayx.actor.config import ActorConfig
    from brayx.metrics import Recorder
    from brayx.recording.config import RecordingConfig
    from brayx.recording.recorder import closing, recorders_of

    class Echo(Agent):
        async def on_tick(self, state: State) -> None:
            state.output = state.input

    images = pictures(84, 84, 256)

    class Screen(Agent):
        async def on_tick(self, state: State) -> None:
            state.output = state.input
            state.screen = images[state.tick % len(images)]

    recorder, options = Recorder(), RECORDINGS[recording]
    frames = {"frames": "screen"} if agent == "screen" else {}
    config = None if options is None else RecordingConfig(folder=folder, **options, **frames)
    recorders = recorders_of(config, recorder)
    actor = ActorConfig(agents=["agent"], port=0, native_port=None, tcp_port=0, actors_per_worker=1024)
    if agent != "cartpole":
        factory = AgentActorFactory(
            {"agent": Echo if agent == "echo" else Screen}, {}, Services(), Codec(None), recorders=recorders
        )
    else:
        factory = cartpole(actor, recorder, recorders=recorders)
    serve_agents(factory, recorder, actor, *closing(recorders))
    lost = {name: value for name, value in recorder.summary().items() if "_lost" in name}
    if lost:
        print(f"{agent}, {recording}: {lost}", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    parser = tables.options(__doc__, rounds=5, seconds=3.0)
    parser.add_argument("--sessions", type=int, default=16, help="concurrent sessions (default: %(default)s)")
    parser.add_argument("--many", type=int, default=1_000_000, help="sessions to list (default: %(default)s)")
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.serve:
        serve(*options.serve)
        return 0
    about = f"{machine()}; {options.sessions} sessions, {options.rounds} rounds of {options.seconds:g} s, medians"
    measured = (ticking(options.sessions, options.rounds, options.seconds), reading(options.many), showing())
    show(about, "\n\n".join(table.markdown() for table in measured), markdown=options.markdown)
    return 0


def ticking(sessions: int, rounds: int, seconds: float) -> Table:
    """The rate and the CPU of each agent by what is recorded; the CPU is also that of the writer's process."""
    table = Table(["agent", "recorded", ">ticks/s", ">of none", ">CPU µs a tick", ">to none", ">kB a tick"])
    for agent in AGENTS:
        body = ("cartpole",) if agent == "cartpole" else ("echo", "--bytes", str(ECHO_BYTES))
        costs: dict[str, list[Cost]] = {name: [] for name in RECORDINGS}
        with tempfile.TemporaryDirectory(prefix="brayx-recording-") as temporary:
            folders = {name: Path(temporary, name) for name in RECORDINGS}
            with contextlib.ExitStack() as stack:
                load = stack.enter_context(load_generator())
                servers = {
                    name: stack.enter_context(service("benchmarks.recording", "--serve", agent, name, str(folder)))
                    for name, folder in folders.items()
                }
                for _ in range(rounds):
                    for name, (urls, pid) in servers.items():
                        spent = cost(load, pid, urls["tcp"], sessions, seconds, *body)
                        costs[name].append(spent._replace(cpu_s=spent.cpu_s + spent.others_cpu_s))
            for name, rounds_of in costs.items():
                table.add(agent, name, *cost_cells(rounds_of, costs["none"]), _kb_a_tick(folders[name]))
    return table


def _columns(bodies: Sequence[bytes], reply: bytes, attributes: Sequence[Mapping[str, Any]]) -> TickColumns:
    """The columns of ticks at 60 ticks/s."""
    from brayx.recording.columns import columns_by_field

    count = len(bodies)
    times = (range(count), np.arange(count) / 60, [1e-4] * count)
    nothing: tuple[Any, ...] = ([""] * count, [b""] * count, [0.0] * count, [()] * count)
    return columns_by_field(*times, bodies, [reply] * count, attributes, *nothing)


def reading(many: int) -> Table:
    """A session of a million ticks, in files of 300 as a game of 60 ticks/s writes them; and ``many`` sessions."""
    from brayx.recording import open as open_recordings
    from brayx.recording.columns import packed
    from brayx.recording.index import SessionPart
    from brayx.recording.writer import Folder

    table = Table(["reading", ">what", ">took"])
    body = '{"obs":[%d.5,0.25,0.125,1.0]}'
    bodies = [(body % at).encode() for at in range(_PER_FILE)]
    columns = packed(_columns(bodies, b'{"action":1}', [{"x": float(at)} for at in range(_PER_FILE)]))
    with tempfile.TemporaryDirectory(prefix="brayx-recording-") as temporary:
        folder = Folder(temporary, 10**12)
        for at in range(1_000_000 // _PER_FILE):
            folder.write([SessionPart("long", "long", 0.0, at * _PER_FILE, _PER_FILE)], columns)
        began = time.perf_counter()
        (episode,) = open_recordings(temporary)
        table.add("open a session", f"{len(episode):,} ticks", f"{time.perf_counter() - began:.2f} s")
        took = []
        for at in range(300):
            began = time.perf_counter()
            episode.read((500_000 + at * 79_193) % len(episode), 1)
            took.append(time.perf_counter() - began)
        table.add("ticks anywhere", "median of 300", f"{(median(took) or 0.0) * 1e3:.1f} ms")
    with tempfile.TemporaryDirectory(prefix="brayx-recording-") as temporary:
        folder = Folder(temporary, 10**12)
        for at in range(0, many, _SESSIONS_PER_FILE):
            names = [f"game-{number}" for number in range(at, min(at + _SESSIONS_PER_FILE, many))]
            columns = packed(_columns(bodies[:1] * len(names), b'{"action":1}', [{"x": 0.0}] * len(names)))
            folder.write([SessionPart(name, name, 0.0, 0, 1, end="stop") for name in names], columns)
        began = time.perf_counter()
        episodes = open_recordings(temporary)
        last = episodes[-1].session
        took_s = time.perf_counter() - began
        assert last == f"game-{many - 1}"
        table.add("list sessions", f"{len(episodes):,}", f"{took_s:.2f} s")
    return table


def pictures(height: int, width: int, count: int) -> list[np.ndarray]:
    """Frames of a game that scrolls over a landscape with things that move: ``[height, width, 3]`` uint8 each."""
    rng = np.random.default_rng(0)
    coarse = rng.integers(40, 200, (height // 12 + 2, (width + 2 * count) // 12 + 2, 3)).astype(np.float32)
    rows, columns = np.arange(height) / 12, np.arange(width + 2 * count) / 12
    for axis, at in ((0, rows), (1, columns)):  # linear interpolation
        low, part = at.astype(int), (at % 1).astype(np.float32)
        part = part[:, None, None] if axis == 0 else part[None, :, None]
        coarse = coarse.take(low, axis) * (1 - part) + coarse.take(low + 1, axis) * part
    land, made = coarse.astype(np.uint8), []
    for number in range(count):
        frame = land[:, 2 * number : 2 * number + width].copy()
        for thing in range(5):
            y = (thing * height // 5 + number * (thing % 3)) % height
            x = (thing * width // 7 + number * (1 + thing % 2)) % width
            frame[y : y + height // 10, x : x + width // 14] = (230, 40 * thing, 30)
        made.append(frame)
    return made


def showing() -> Table:
    """Frames of a session of 300 ticks: the cost of encoding, their size, and the time until one is shown."""
    from brayx.recording import open as open_recordings
    from brayx.recording.index import SessionPart
    from brayx.recording.packer import ChunkPacker
    from brayx.recording.writer import Folder

    table = Table(["frames", ">kB each", ">encoded in", ">any in", ">any, p95"])
    for height, width in ((84, 84), (480, 640), (720, 1280)):
        images = pictures(height, width, _FRAMES)
        columns = _columns([b""] * _FRAMES, b"", [{"screen": image} for image in images])
        columns.frames = images
        with tempfile.TemporaryDirectory(prefix="brayx-recording-") as temporary:
            packer = ChunkPacker(lambda folder=temporary: Folder(folder, 10**12), flush_s=math.inf)  # type: ignore[misc]
            began = time.perf_counter()
            packer.add([SessionPart("s", "s", 0.0, 0, _FRAMES)], columns)
            encoded_s = (time.perf_counter() - began) / _FRAMES
            packer.close()
            (video,) = Path(temporary).glob("*.mp4")
            (episode,) = open_recordings(temporary)
            took = []
            for tick in np.random.default_rng(1).integers(0, _FRAMES, _FRAMES).tolist():
                began = time.perf_counter()
                episode.image(tick)
                took.append(time.perf_counter() - began)
            table.add(
                f"{width}x{height}",
                video.stat().st_size / _FRAMES / 1e3,
                f"{encoded_s * 1e3:.2f} ms",
                f"{(median(took) or 0.0) * 1e3:.1f} ms",
                f"{float(np.quantile(took, 0.95)) * 1e3:.1f} ms",
            )
    return table


def _kb_a_tick(folder: Path) -> float | None:
    """Size of the files for each recorded tick, in kB; None: no files."""
    from brayx.recording import open as open_recordings

    files = [*folder.glob("*.parquet")]
    ticks = sum(len(each) for each in open_recordings(str(folder))) if files else 0
    return sum(file.stat().st_size for file in [*files, *folder.glob("*.mp4")]) / ticks / 1e3 if ticks else None


if __name__ == "__main__":
    sys.exit(main())
