"""Ticks per second through every door and ingress, compared with bare echoes in the same run.

    python -m benchmarks.ticks                    # the table of docs/benchmarks.md
    python -m benchmarks.ticks --quick            # does it run at all
    python -m benchmarks.ticks --images           # a tick is an image, through a door of the local host
    python -m benchmarks.ticks --many             # 2,000 sessions, and ticks that reach the wrong replica

Every case is measured once per round, so that a disturbance of the machine affects all of them. A figure is the median
over rounds, and a ratio the median of each round's ratio to the bare echo of the same door and number of sessions. Load
and services are separate processes on the same cores.

An image is raw, 64x64x3 uint8, and the reply one byte. *small* is a policy with the network of Mnih et al. 2013, on
ONNX Runtime with one thread, batched as in a training. *stub* is a model that answers at once, so that only the door,
the session and the agent are measured.

``--many`` measures the rate with many sessions against that with 16, on the same service, and the same for a bare
streams server without sessions, since many connections also cost the kernel and the load; the memory of a session in
the replica; and the median of a forwarded tick against a direct one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.console import Console

from benchmarks import tables
from benchmarks.servers import ECHO_BODY, Load, Loaded, listeners, load_generator, serve_agents, server, service
from benchmarks.tables import Table, each, machine, median, median_ratio, show
from brayx.gamecore.client import Client

BARE = {"http": "Starlette on uvicorn", "ws": "Starlette on uvicorn", "tcp": "asyncio streams, a task a request"}
UVLOOP = "the same on uvloop"
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


Results = dict[Case, list[Loaded | None]]
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


def measure(load: Load, url: str, case: Case, seconds: float) -> Loaded | None:
    """One case under load; None, with a line on standard error, if the door failed."""
    if case.door == "ws":
        url = url.replace("http", "ws", 1)
    shared = ("--connections", "1") if case.shared else ()
    try:
        return load(url, case.sessions, seconds, case.agent, *shared)
    except subprocess.CalledProcessError:
        return None


def run(options: argparse.Namespace, say: Callable[[str], None]) -> Results:
    """Starts the services, measures, and ends them."""
    with contextlib.ExitStack() as stack:
        load = stack.enter_context(load_generator())
        started = [ingress for ingress in options.ingress if ingress != "native"] or ["haproxy"]
        say("starting: the bare echoes" + "".join(f", Ray behind {INGRESSES[i]}" for i in started))
        servers = {"bare": stack.enter_context(server("bare"))}
        for ingress in started:
            servers[ingress] = stack.enter_context(server("serve", "--ingress", ingress))
        servers["uvloop"] = servers["bare"]
        servers["native"] = servers[started[-1]]
        results: Results = {case: [] for case in cases(options.door, options.ingress, options.sessions, options.agent)}
        for number in range(options.rounds):
            for case, rounds in results.items():
                rounds.append(measure(load, case.url(servers[case.ingress].urls), case, options.seconds))
            say(f"round {number + 1} of {options.rounds} done")
    return results


MODELS = ("small", "stub")
_SHAPE = (64, 64, 3)
_ACTIONS = 6


def serve_images(model: str) -> None:
    """Serves an agent that acts on images until standard input ends."""
    from brayx.actor.agent import Agent, Services, State, forward
    from brayx.actor.agent_actor import AgentActorFactory
    from brayx.actor.codec import Codec
    from brayx.actor.config import ActorConfig
    from brayx.actor.decode import sample_categorical
    from brayx.metrics import Recorder
    from brayx.types import Forward

    class ImageAgent(Agent):
        """Acts on the bytes of an image."""

        def __init__(self, name: str, config: Any, state: State) -> None:
            super().__init__(name, config, state)
            self._rng = random.Random(0)

        async def on_tick(self, state: State) -> None:
            outputs, _ = await forward("model", np.frombuffer(state.input, np.uint8).reshape(_SHAPE))
            action, _ = sample_categorical(outputs["logits"], self._rng)
            state.output = bytes([action])

    class Stub:
        """A model that answers at once."""

        async def forward(self, *args: Any, deadline_s: float | None = None) -> Forward:
            return answer

    answer = Forward({"logits": np.zeros(_ACTIONS, np.float32)}, 1)
    recorder, models = Recorder(), {"model": Stub() if model == "stub" else _small()}
    services = Services(models, {}, recorder)
    factory = AgentActorFactory({"agent": ImageAgent}, {}, services, Codec(None), episode_length=64)
    config = ActorConfig(agents=["agent"], port=0, native_port=None, tcp_port=0, actors_per_worker=1024)
    serve_agents(factory, recorder, config)


def _small() -> Any:
    import torch

    from brayx.engines.onnx import OnnxEngine
    from brayx.model.local import LocalModel
    from brayx.nets.policy import NetworkConfig, policy_for

    torch.set_num_threads(1)
    network = NetworkConfig(convolutions="small", hidden=[256])
    module, example = policy_for(np.zeros(_SHAPE, np.uint8), num_actions=_ACTIONS, network=network)
    return LocalModel(OnnxEngine(module, example, threads=1, traced=True))


def images(sessions: int, rounds: int, seconds: float) -> Table:
    """Ticks per second of images, by model and door."""
    results: dict[tuple[str, str], list[Loaded]] = {(model, door): [] for model in MODELS for door in ("ws", "tcp")}
    with contextlib.ExitStack() as stack:
        load = stack.enter_context(load_generator())
        urls = {model: stack.enter_context(service(_MODULE, "--serve", model)).urls for model in MODELS}
        for _ in range(rounds):
            for (model, door), loads in results.items():
                loads.append(load(urls[model][door], sessions, seconds, "image"))
    out = Table(["model", "door", ">ticks/s", ">p50 ms", ">p99 ms"])
    for (model, door), loads in results.items():
        rates, p50s_ms, p99s_ms = zip(*((n.ticks_per_s, 1e3 * n.p50_s, 1e3 * n.p99_s) for n in loads), strict=True)
        out.add(model, door, median(rates), median(p50s_ms), median(p99s_ms))
    return out


_MODULE = "benchmarks.ticks"
_NATIVE = {"tcp": "echo tcp", "http": "echo native"}
_FEW = 16
_WARM_UP = 64


def bytes_a_session(url: str, sessions: int) -> float:
    """Growth of the replicas' resident memory by session, all of them open and having ticked once."""
    replicas = [psutil.Process(pid) for pid in listeners(url)]
    with contextlib.ExitStack() as stack:

        def open_and_tick(count: int) -> int:
            for _ in range(count):
                client = stack.enter_context(Client(url))
                client.start()
                client.tick(ECHO_BODY)
            return sum(process.memory_info().rss for process in replicas)

        before = open_and_tick(_WARM_UP)
        return (open_and_tick(sessions) - before) / sessions


def p50s(session_at: str, other: str, seconds: float) -> tuple[float, float]:
    """Median seconds of a tick at its session's replica, and of one that the other replica passes on."""
    with Client(session_at) as owner, Client(other) as stranger:
        owner.start()
        stranger._session = owner.session  # the same session through the other door
        samples: tuple[list[float], list[float]] = ([], [])
        until = time.perf_counter() + 2 * seconds
        while time.perf_counter() < until:
            for client, into in zip((owner, stranger), samples, strict=True):
                began = time.perf_counter()
                client.tick(ECHO_BODY)
                into.append(time.perf_counter() - began)
        stranger._session = None
    return median(samples[0]) or 0.0, median(samples[1]) or 0.0


def many(sessions: int, rounds: int, seconds: float) -> Table:
    """The cost of many sessions, and of a request that reaches the wrong replica."""
    memory: dict[str, float] = {}
    for door, name in _NATIVE.items():  # a replica each: what one has had and freed would hide the next one's
        with server("serve") as served:
            memory[door] = bytes_a_session(served.urls[name], sessions)
    rates: dict[tuple[str, int], list[float]] = {}
    with load_generator() as load, server("bare") as bare, server("serve") as served:
        urls = {door: served.urls[name] for door, name in _NATIVE.items()} | {"bare": bare.urls["echo tcp"]}
        for _ in range(rounds):
            for door, url in urls.items():
                for count in (_FEW, sessions):
                    rates.setdefault((door, count), []).append(load(url, count, seconds).ticks_per_s)
            shared = load(urls["tcp"], sessions, seconds, "echo", "--connections", str(_FEW))
            rates.setdefault(("shared", sessions), []).append(shared.ticks_per_s)
    with server("replicas") as served:
        passing = [p50s(served.urls["replica 0"], served.urls["replica 1"], seconds) for _ in range(rounds)]
    out = Table(["what", ">value"])
    for door in _NATIVE:
        to_few = median_ratio(rates[door, sessions], rates[door, _FEW])
        out.add(f"{door}, {sessions} sessions: rate to that at {_FEW}", to_few)
        out.add(f"{door}: KiB a session", memory[door] / 1024)
    shared_to_few = median_ratio(rates["shared", sessions], rates["tcp", _FEW])
    out.add(f"tcp, {sessions} sessions on {_FEW} connections: the same", shared_to_few)
    bare_to_few = median_ratio(rates["bare", sessions], rates["bare", _FEW])
    out.add("tcp, asyncio streams, without sessions: the same", bare_to_few)
    own_ms, passed_ms = (median([1e3 * took for took in column]) for column in zip(*passing, strict=True))
    out.add("HTTP between replicas: own tick, p50 ms", own_ms)
    out.add("a tick that is passed on, p50 ms", passed_ms)
    return out


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options; ``--quick`` overrides what takes time."""
    parser = tables.options(__doc__, rounds=5, seconds=2.0)
    parser.add_argument("--sessions", type=int, nargs="+", help="at once (default: 1 16; of images: 16)")
    parser.add_argument("--door", nargs="+", choices=list(BARE), default=list(BARE))
    parser.add_argument("--ingress", nargs="+", choices=list(INGRESSES), default=list(INGRESSES))
    parser.add_argument("--agent", nargs="+", choices=["echo", "cartpole"], default=["echo", "cartpole"])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round there")
    parser.add_argument("--quick", action="store_true", help="one short round, without Serve's proxy")
    parser.add_argument("--images", action="store_true", help="a tick is an image")
    parser.add_argument("--many", type=int, nargs="?", const=2000, metavar="SESSIONS", help="many sessions (%(const)s)")
    parser.add_argument("--serve", choices=MODELS, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.quick:
        options.rounds, options.seconds, options.ingress = 1, 0.5, ["haproxy", "native"]
    options.sessions = options.sessions or ([_FEW] if options.images else [1, _FEW])
    if min(options.rounds, *options.sessions) < 1 or options.seconds <= 0:
        parser.error("--rounds, --sessions and --seconds must be positive")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints; exit code 1 if a case failed."""
    options = parse(argv)
    if options.serve:
        serve_images(options.serve)
        return 0
    about = f"{machine()}; {options.rounds} rounds of {options.seconds:g} s a case, medians"
    if options.images:
        (sessions,) = options.sessions
        measured = images(sessions, options.rounds, options.seconds)
        show(f"{about}; {sessions} sessions", measured.markdown(), markdown=options.markdown)
        return 0
    if options.many:
        show(about, many(options.many, options.rounds, options.seconds).markdown(), markdown=options.markdown)
        return 0
    console = Console(stderr=True, highlight=False)
    results = run(options, lambda text: console.print(text, style="dim"))
    show(about, table(results).markdown(), markdown=options.markdown)
    if options.json is not None:
        rows = [
            {**asdict(case), "rounds": [None if loaded is None else loaded._asdict() for loaded in rounds]}
            for case, rounds in results.items()
        ]
        options.json.write_text(json.dumps({"about": about, "cases": rows}, indent=1))
    return 1 if any(None in rounds for rounds in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
