"""Cost of a forward compared with the engine alone, torch and Serve's batching; and cost of new weights.

    python -m benchmarks.forward

Each figure is a ratio to something measured in the same round, or a time; figures are medians over rounds. In this
process: 64 closed loops that act with a 64x64 MLP and with Nature's CNN, against torch eager a request at a time and
against the engine alone at the batch sizes that occurred; one forward at a time against one engine call; 64 versions
on one session. Over Ray: 16 closed loops through `ModelClient`, against a plain deployment with `serve.batch`; and the
time from a publish until four processes act with it.

The CNN spends its time in the engine, so only its share of the engine's rate has a bound. The bounds of five times
torch eager and of 60 µs over the engine's call apply to the MLP.
"""

from __future__ import annotations

import asyncio
import functools
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
import uvloop
from torch import nn

from benchmarks import tables
from benchmarks.tables import Table, machine, median, median_ratio, percentile, show
from brayx.engines import build_engine
from brayx.engines.base import Engine
from brayx.model.config import ModelConfig
from brayx.model.local import LocalModel
from brayx.types import Weights

SESSIONS = 64
CALLERS = 16
SUBSCRIBERS = 4
VERSIONS = 64
MEGABYTES = (1, 100)


def mlp() -> tuple[nn.Module, tuple[np.ndarray, ...]]:
    """CartPole's policy: 4, 64, 64, 2."""
    layers = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
    return layers, (np.zeros((1, 4), np.float32),)


def cnn() -> tuple[nn.Module, tuple[np.ndarray, ...]]:
    """The network of "Human-level control through deep reinforcement learning" (Mnih et al., 2015)."""
    layers = nn.Sequential(
        nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3, 1), nn.ReLU(),
        nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, 18),
    )  # fmt: skip
    return layers, (np.zeros((1, 4, 84, 84), np.float32),)


class Large(nn.Module):
    """A model with this many megabytes of weights, of which a forward reads a few."""

    def __init__(self, megabytes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(megabytes * 250_000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight[:4]


def large(megabytes: int) -> tuple[nn.Module, tuple[np.ndarray, ...]]:
    """A model whose weights are what takes the time."""
    return Large(megabytes), (np.zeros((1, 4), np.float32),)


async def loops(forward: Callable[[], Awaitable[Any]], count: int, seconds: float) -> tuple[float, list[float]]:
    """Forwards per second of this many closed loops, and the seconds of each forward."""
    latencies: list[float] = []
    until = time.perf_counter() + seconds

    async def loop() -> None:
        while (began := time.perf_counter()) < until:
            await forward()
            latencies.append(time.perf_counter() - began)

    began = time.perf_counter()
    await asyncio.gather(*[loop() for _ in range(count)])
    return len(latencies) / (time.perf_counter() - began), latencies


def calls(work: Callable[[], Any], seconds: float) -> list[float]:
    """Seconds of each of the calls that fit."""
    latencies = []
    until = time.perf_counter() + seconds
    while (began := time.perf_counter()) < until:
        work()
        latencies.append(time.perf_counter() - began)
    return latencies


def raw_rate(engine: Engine, bound: Any, example: np.ndarray, sizes: Counter[int], seconds: float) -> float:
    """Rows a second of the engine alone, at batch sizes in the proportions of ``sizes``."""
    inputs = {size: [np.repeat(example, size, 0)] for size in sizes}
    took = {
        size: median(calls(functools.partial(engine.run, bound, inputs[size]), seconds / len(sizes))) for size in sizes
    }
    rows = sum(size * count for size, count in sizes.items())
    return rows / sum(count * (took[size] or 0.0) for size, count in sizes.items())


def bare(engine: Engine, bound: Any, obs: np.ndarray) -> Callable[[], Awaitable[Any]]:
    """The least that batches on an event loop: a list of futures, without checks, bounds, deadlines or versions."""
    loop = asyncio.get_running_loop()
    waiting: list[asyncio.Future[np.ndarray]] = []

    def flush() -> None:
        batch = waiting.copy()
        waiting.clear()
        [outputs] = engine.run(bound, [np.array([obs] * len(batch))])
        for index, future in enumerate(batch):
            future.set_result(outputs[index])

    async def forward() -> np.ndarray:
        if not waiting:
            loop.call_soon(flush)
        future: asyncio.Future[np.ndarray] = loop.create_future()
        waiting.append(future)
        return await future

    return forward


async def in_process(
    build: Callable[[], tuple[nn.Module, tuple[np.ndarray, ...]]], rounds: int, seconds: float
) -> dict[str, list[float]]:
    """Samples by name, one per round."""
    torch.set_num_threads(1)
    module, (example,) = build()
    engine = build_engine("onnx", module, (example,))
    bound = engine.bind(engine.initial)
    module = module.eval()
    sizes: Counter[int] = Counter()
    model = LocalModel(engine, on_batch=lambda rows, *_: sizes.update([rows]))
    obs = np.ascontiguousarray(example[0])
    found: dict[str, list[float]] = {name: [] for name in ("rate", "bare", "torch", "raw", "one", "raw one")}

    def eager() -> Any:
        with torch.inference_mode():
            return module(torch.from_numpy(obs[None])).numpy()

    for _ in range(rounds):
        sizes.clear()
        found["rate"].append((await loops(lambda: model.forward(obs), SESSIONS, seconds))[0])
        found["bare"].append((await loops(bare(engine, bound, obs), SESSIONS, seconds))[0])
        found["raw"].append(raw_rate(engine, bound, example, Counter(sizes), seconds))
        found["torch"].append(1 / (median(calls(eager, seconds)) or 1.0))
        found["one"].append(median((await loops(lambda: model.forward(obs), 1, seconds))[1]) or 0.0)
        found["raw one"].append(median(calls(lambda: engine.run(bound, [obs[None]]), seconds)) or 0.0)
    await model.close()
    return found


async def as_columns(size: int, rounds: int, seconds: float) -> list[float]:
    """An engine's call of so many observations of the MLP, to a forward of them as arrays; one a round."""
    module, (example,) = mlp()
    engine = build_engine("onnx", module, (example,))
    bound = engine.bind(engine.initial)
    model = LocalModel(engine, max_batch_size=size)
    columns = [np.repeat(example, size, 0)]
    found = []
    for _ in range(rounds):
        one = median((await loops(lambda: model.forward_columns(columns), 1, seconds))[1]) or 1.0
        found.append((median(calls(lambda: engine.run(bound, columns), seconds)) or 0.0) / one)
    await model.close()
    return found


async def many_versions(rounds: int, seconds: float) -> list[list[float]]:
    """Rates of one loop on one of 64 pinned versions, and on all 64 in turn; of the engine's calls on
    all in turn; and of 64 loops each on a different version, so that no two fit into one batch."""
    module, (example,) = mlp()
    engine = build_engine("onnx", module, (example,))
    model = LocalModel(engine, max_versions=VERSIONS)
    pins = []
    for version in range(VERSIONS):
        model.load(version, engine.initial)
        pins.append(model.pinned())
    obs = example[0]
    turns = iter(range(sys.maxsize))
    same: list[float] = []
    other: list[float] = []
    raw_other: list[float] = []
    at_once: list[float] = []
    bound = [engine.bind(engine.initial) for _ in range(VERSIONS)]
    for _ in range(rounds):
        same.append((await loops(lambda: pins[0].forward(obs), 1, seconds))[0])
        other.append((await loops(lambda: pins[next(turns) % VERSIONS].forward(obs), 1, seconds))[0])
        raw_other.append(
            1 / (median(calls(lambda: engine.run(bound[next(turns) % VERSIONS], [example]), seconds)) or 1.0)
        )
        each = await asyncio.gather(*[loops(functools.partial(pin.forward, obs), 1, seconds) for pin in pins])
        at_once.append(sum(rate for rate, _ in each))
    await model.close()
    return [same, other, raw_other, at_once]


GROWTH = """
import gc, sys
import numpy as np, psutil
from torch import nn
from brayx.engines import build_engine
from brayx.model.versions import Versions
module = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512))
engine = build_engine("onnx", module, (np.zeros((1, 512), np.float32),))
versions = Versions(engine, keep=int(sys.argv[1]))
def load(first, last):
    for version in range(first, last):
        versions.load(version, {name: array + 0 for name, array in engine.initial.items()})
        engine.run(versions.newest.bound, [np.zeros((16, 512), np.float32)])
    return psutil.Process().memory_info().rss
before = load(1, 5)
size = sum(array.nbytes for array in engine.initial.values())
print((load(5, int(sys.argv[1]) + 1) - before) / (int(sys.argv[1]) - 4) / size)
"""


def growth() -> float:
    """Growth of resident memory for each further version, in sizes of the weights."""
    done = subprocess.run([sys.executable, "-c", GROWTH, str(VERSIONS)], stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout)


class Peer:
    """A plain deployment that batches with Serve's own decorator; the engine is the same."""

    def __init__(self) -> None:
        from ray import serve

        module, example = mlp()
        self._engine = build_engine("onnx", module, example)
        self._bound = self._engine.bind(self._engine.initial)

        @serve.batch(max_batch_size=CALLERS, batch_wait_timeout_s=0.0)
        async def batched(rows: list[np.ndarray]) -> list[np.ndarray]:
            [outputs] = self._engine.run(self._bound, [np.stack(rows)])
            return list(outputs)

        self._batched = batched

    async def forward(self, row: np.ndarray) -> np.ndarray:
        """The outputs of one observation."""
        return await self._batched(row)


async def remote(rounds: int, seconds: float) -> dict[str, list[float]]:
    """Forwards a second of 16 closed loops: through a `ModelClient`, and through a plain deployment."""
    from ray import serve

    from brayx.cluster.model import model_application
    from brayx.cluster.model_client import ModelClient

    config = ModelConfig(module="unused", placement="remote", max_batch_size=CALLERS)
    handles: dict[str, Any] = {
        "brayx": await asyncio.to_thread(
            serve.run, model_application(mlp, config), name="bench-model", route_prefix=None
        )
    }
    plain: Any = serve.deployment(Peer, max_ongoing_requests=4 * CALLERS, ray_actor_options={"num_cpus": 0})
    handles["serve.batch"] = await asyncio.to_thread(serve.run, plain.bind(), name="bench-peer", route_prefix=None)
    obs = np.zeros(4, np.float32)
    model = await ModelClient.connect(handles["brayx"], max_batch_size=CALLERS)
    forwards: dict[str, Callable[[], Awaitable[Any]]] = {
        name: functools.partial(handle.forward.remote, obs) for name, handle in handles.items()
    }
    forwards["brayx"] = lambda: model.forward(obs)
    found: dict[str, list[float]] = {name: [] for name in forwards}
    for forward in forwards.values():
        await loops(forward, CALLERS, 0.5)
    for _ in range(rounds):
        for name, forward in forwards.items():
            found[name].append((await loops(forward, CALLERS, seconds))[0])
    await model.close()
    for name in ("bench-model", "bench-peer"):
        await asyncio.to_thread(serve.delete, name)
    return found


class Follower:
    """A process that acts with published weights, and notes when it first could."""

    async def start(self, store: Any, megabytes: int) -> None:
        """Builds the model, and follows the store."""
        from brayx.cluster.weights import WeightSubscriber

        module, example = large(megabytes)
        self._model = LocalModel(build_engine("onnx", module, example))
        self._visible: dict[int, tuple[float, float]] = {}
        self._latencies: list[tuple[float, float]] = []

        def load(version: int, weights: Weights) -> None:
            began = time.perf_counter()
            self._model.load(version, weights)
            self._visible[version] = (began, time.perf_counter())

        self._subscriber = WeightSubscriber(store, load)
        await self._subscriber.start()

    async def act(self, seconds: float) -> None:
        """16 closed loops that act meanwhile."""
        obs = np.zeros(4, np.float32)

        async def forward() -> None:
            began = time.perf_counter()
            await self._model.forward(obs)
            self._latencies.append((began, time.perf_counter()))

        await loops(forward, CALLERS, seconds)

    async def found(self) -> tuple[dict[int, tuple[float, float]], list[tuple[float, float]]]:
        """When loading each version began and ended, and the same of each forward; on the machine's one clock."""
        await self._subscriber.stop()
        return self._visible, self._latencies


def publishing(
    megabytes: int,
    publishes: int,
    every_s: float,
    *,
    subscribers: int = SUBSCRIBERS,
    acting: bool = False,
) -> tuple[list[float], list[float], list[float]]:
    """Seconds from each publish until the last of so many processes has the weights; and, if the first of them acts
    meanwhile, the seconds of its forwards beside and during swaps."""
    import ray

    from brayx.cluster.weight_store import create_weight_store
    from brayx.cluster.weights import WeightPublisher

    store = create_weight_store(f"bench-{megabytes}-{subscribers}")
    followers: list[Any] = [ray.remote(Follower).options(num_cpus=0).remote() for _ in range(subscribers)]
    ray.get([follower.start.remote(store, megabytes) for follower in followers])
    publisher = WeightPublisher(store)
    weights = {"weight": np.ones(megabytes * 250_000, np.float32)}
    began: dict[int, float] = {}
    with ThreadPoolExecutor(1) as pool:
        busy = pool.submit(ray.get, [f.act.remote((publishes + 2) * every_s) for f in followers[: int(acting)]])
        for step in range(publishes):
            time.sleep(every_s)
            now = time.perf_counter()
            began[publisher.publish(weights, step)] = now
        busy.result()
        time.sleep(every_s)
    found = ray.get([follower.found.remote() for follower in followers])
    forwards = found[0][1]
    for actor in (*followers, store):
        ray.kill(actor)
    everywhere = set.intersection(*[set(visible) for visible, _ in found])
    delays = [max(visible[version][1] for visible, _ in found) - began[version] for version in sorted(everywhere)][1:]
    visible = found[0][0]
    swaps = [(began[version], visible[version][1]) for version in sorted(visible)]
    beside: list[float] = []
    during: list[float] = []
    for start, end in forwards:
        hit = any(start < swapped and end > published for published, swapped in swaps)
        (during if hit else beside).append(end - start)
    return delays, beside, during


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    parser = tables.options(__doc__, rounds=5, seconds=1.0)
    parser.add_argument("--local", action="store_true", help="only what needs no Ray")
    options = parser.parse_args(argv)
    about = f"{machine()}; {options.rounds} rounds of {options.seconds:g} s, medians"
    table = Table(["what", ">value", "wanted"])
    for name, build, wanted in (("64x64 MLP", mlp, "0.5"), ("Nature CNN", cnn, "0.85")):
        found = uvloop.run(in_process(build, options.rounds, options.seconds))
        table.add(f"{name}, {SESSIONS} sessions: forwards a second", median(found["rate"]), "")
        against = median_ratio(found["rate"], found["torch"])
        table.add("... to torch eager, a call a request", against, "at least 5" if build is mlp else "")
        table.add(
            "... to the engine alone at its batch sizes",
            median_ratio(found["rate"], found["raw"]),
            f"at least {wanted}",
        )
        table.add("... to a bare list of futures around it", median_ratio(found["rate"], found["bare"]), "")
        over = median([one - raw for one, raw in zip(found["one"], found["raw one"], strict=True)])
        table.add(
            "... one at a time: µs over the engine's call", 1e6 * (over or 0.0), "at most 60" if build is mlp else ""
        )
    found_ratios = uvloop.run(as_columns(512, options.rounds, options.seconds))
    table.add("64x64 MLP, 512 at once as arrays: to the engine alone", median(found_ratios), "0.5")
    same, other, raw_other, at_once = uvloop.run(many_versions(options.rounds, options.seconds))
    table.add(f"{VERSIONS} versions in turn: rate to that of one", median_ratio(other, same), "as the next")
    table.add("... a session on each at once: to the engine alone, a call each", median_ratio(at_once, raw_other), "")
    table.add("... memory of a version, in sizes of its weights", growth(), "1")
    if not options.local:
        _over_ray(table, options.rounds, options.seconds)
    text = table.markdown()
    show(about, text, markdown=options.markdown)
    return 0


def _over_ray(table: Table, rounds: int, seconds: float) -> None:
    from brayx.cluster.cluster import Cluster

    with Cluster(ingress="serve"):
        rates = asyncio.run(remote(rounds, seconds))
        table.add(f"remote, {CALLERS} callers: forwards a second", median(rates["brayx"]), "")
        table.add("... to serve.batch", median_ratio(rates["brayx"], rates["serve.batch"]), "at least 5")
        for megabytes, most in zip(MEGABYTES, (30, 300), strict=True):
            delays, _, _ = publishing(megabytes, 4 * rounds, 4e-3 * megabytes + 0.1)
            table.add(
                f"{megabytes} MB published: ms until {SUBSCRIBERS} act with it, p50",
                1e3 * percentile(delays, 0.5),
                f"at most {most}",
            )
        _, beside, during = publishing(1, 20 * rounds, 0.1, subscribers=1, acting=True)
        table.add("forwards beside swaps: p99 ms", 1e3 * percentile(beside, 0.99), "")
        table.add("... during a swap, to that", percentile(during, 0.99) / percentile(beside, 0.99), "at most 2")


if __name__ == "__main__":
    sys.exit(main())
