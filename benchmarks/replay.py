"""Throughput and latency of the replay stream, from a push in one process to torch tensors in another.

    python -m benchmarks.replay

Transitions have 64 floats of observation. A push waits for room; it is columns of exactly one learner batch.
The consumer copies every array into a
tensor. *Ray Data* is `TorchTrainer`'s stream, *direct* that of a learner in the job's process, *queue* the reference:
the same batches through ``ray.util.queue.Queue``. Rates are with 4 batches in flight. Push-to-batch latency is with
one, pushed after the previous one has arrived. The learner's idle share is its waiting time with a full buffer and
updates of 50 ms on one CPU, with the trainer's option ``prefetch`` 0 and 1.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import ray
import torch
from ray.util.queue import Queue

from benchmarks import tables
from benchmarks.tables import Table, machine, median, median_ratio, percentile, show
from brayx.cluster.remote_buffer import RemoteBuffer
from brayx.cluster.start import start_ray
from brayx.cluster.stream import batches_of, read_buffer, replay_dataset
from brayx.errors import ReplayError
from brayx.replay.config import STREAM_ENVIRONMENT, BufferConfig
from brayx.trainer.prefetch import Prefetch, Prepare
from brayx.types import Columns

FLOATS = 64
COLUMNS, STEPS = 256, 32
WAYS = ("Ray Data", "direct", "queue")
_UPDATE_S = 0.05
_GIVE_UP_S = 120.0


def batch(rows: int = COLUMNS) -> dict[str, np.ndarray]:
    """A learner batch of noise."""
    shape = (rows, STEPS + 1)
    mask = np.ones(shape, np.float32)
    mask[:, -1] = 0
    return {
        "obs": np.random.default_rng(0).standard_normal((*shape, FLOATS), np.float32),
        "action": np.zeros(shape, np.int64),
        "log_prob": np.zeros(shape, np.float32),
        "reward": np.zeros(shape, np.float32),
        "terminated": np.zeros(shape, np.bool_),
        "truncated": np.zeros(shape, np.bool_),
        "mask": mask,
        "policy_version": np.zeros(shape, np.int64),
    }


@ray.remote(num_cpus=0)
class Pusher:
    """Pushes from another process."""

    def into_buffer(self, name: str, seconds: float) -> None:
        """As fast as there is room."""
        buffer = RemoteBuffer.attach(name)
        made, until = batch(), time.monotonic() + seconds
        with contextlib.suppress(ReplayError):  # the stream was ended
            while time.monotonic() < until:
                buffer.push(Columns(made), drop=False, timeout_s=_GIVE_UP_S)

    def into_queue(self, queue: Queue, seconds: float) -> None:
        """As fast as there is room."""
        made, until = batch(), time.monotonic() + seconds
        with contextlib.suppress(Exception):  # the queue was shut down
            while time.monotonic() < until:
                queue.put(made, timeout=_GIVE_UP_S)


def tensors(arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Copies, since the store's arrays are read only."""
    return {key: torch.from_numpy(np.array(array)) for key, array in arrays.items()}


@contextlib.contextmanager
def plane(way: str, in_flight: int) -> Iterator[tuple[Iterator[dict[str, np.ndarray]], Callable[[], None], Any, Any]]:
    """The stream, how to tell that a batch of it was taken, where to push, and the pusher in another process."""
    pusher = Pusher.remote()  # type: ignore[attr-defined]
    if way == "queue":
        queue = Queue(maxsize=in_flight, actor_options={"num_cpus": 0})
        yield _queued(queue), lambda: None, queue, pusher
        queue.shutdown(force=True)
    else:
        name = f"bench-{uuid.uuid4().hex[:8]}"
        config = BufferConfig(size=8, batch_size=COLUMNS, unroll_length=STEPS, max_in_flight=in_flight)
        buffer = RemoteBuffer(name, config)
        stream = read_buffer(name, timeout_s=_GIVE_UP_S) if way == "direct" else batches_of(replay_dataset(name), name)
        yield stream, stream.took, buffer, pusher
        buffer.end()
        with contextlib.suppress(StopIteration, ReplayError):
            while True:
                next(stream)
        buffer.close(0.0)
        buffer.shards.kill()
    ray.kill(pusher)


def _queued(queue: Queue) -> Iterator[dict[str, np.ndarray]]:
    with contextlib.suppress(ray.exceptions.RayError):  # the queue was shut down
        while True:
            yield queue.get(timeout=_GIVE_UP_S)


def start_pushing(way: str, target: Any, pusher: Any) -> None:
    """Runs the pusher until the stream has ended."""
    if way == "queue":
        pusher.into_queue.remote(target, 600.0)
    else:
        pusher.into_buffer.remote(target.name, 600.0)


def rate(way: str, seconds: float) -> float:
    """Transitions a second."""
    with plane(way, 4) as (stream, took, target, pusher):

        def get() -> int:
            taken = next(stream)
            took()
            return int(tensors(taken)["mask"].sum())

        start_pushing(way, target, pusher)
        for _ in range(5):
            get()
        began, count = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            count += get()
        return count / (time.perf_counter() - began)


def push_to_batch(way: str, count: int) -> float:
    """Median seconds from a push to its tensors."""
    samples = []
    with plane(way, 1) as (stream, took, target, _):
        made = batch()
        for number in range(count + 3):
            time.sleep(0.02)  # the loop before has come to rest
            began = time.perf_counter()
            if way == "queue":
                target.put(made)
            else:
                target.push(Columns(made))
            taken = next(stream)
            took()
            tensors(taken)
            if number >= 3:
                samples.append(time.perf_counter() - began)
    return percentile(samples, 0.5)


def idle_share(way: str, seconds: float, prefetch: int) -> float:
    """Share of the learner's time that it waits although there is data."""
    left, right = torch.randn(256, 256), torch.randn(256, 256)
    prepare = Prepare((np.zeros((1, FLOATS), np.float32),), torch.device("cpu"))
    with (
        plane(way, 2) as (stream, took, target, pusher),
        Prefetch(stream, prepare, prefetch) as ready,
    ):
        start_pushing(way, target, pusher)
        for _ in range(5):
            next(ready)
            took()
            time.sleep(0.1)
        began, waited = time.perf_counter(), 0.0
        while time.perf_counter() - began < seconds:
            asked = time.perf_counter()
            next(ready)
            took()
            waited += time.perf_counter() - asked
            until = time.thread_time() + _UPDATE_S
            while time.thread_time() < until:
                torch.mm(left, right)
        share = waited / (time.perf_counter() - began)
        if way != "queue":
            target.end()  # the prefetching thread reads the stream until its end, and nobody else may meanwhile
            for _ in ready:
                took()
        return share


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    parser = tables.options(__doc__, rounds=3, seconds=5.0)
    parser.add_argument("--pushes", type=int, default=50, help="of push to batch (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="one short round, to see that it runs")
    options = parser.parse_args(argv)
    rounds, seconds, pushes = (1, 0.5, 3) if options.quick else (options.rounds, options.seconds, options.pushes)
    about = f"{machine()}; batches of {COLUMNS} x {STEPS} transitions; {rounds} rounds of {seconds:g} s, medians"
    os.environ.update(STREAM_ENVIRONMENT, RAY_USAGE_STATS_ENABLED="0")
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    torch.set_num_threads(1)
    start_ray(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    measures: dict[str, Callable[[str], float]] = {
        "transitions/s": lambda way: rate(way, seconds),
        "push to batch, p50 ms": lambda way: 1e3 * push_to_batch(way, pushes),
        "learner idle, %": lambda way: 1e2 * idle_share(way, seconds, 0),
        "learner idle, prefetch 1, %": lambda way: 1e2 * idle_share(way, seconds, 1),
    }
    found: dict[tuple[str, str], list[float | None]] = {(what, way): [] for what in measures for way in WAYS}
    try:
        for _ in range(rounds):
            for what, measure in measures.items():
                for way in WAYS:
                    found[what, way].append(measure(way))
    finally:
        ray.shutdown()
    table = Table(["what", "way", ">value", ">to queue"])
    for (what, way), values in found.items():
        table.add(what, way, median(values), median_ratio(values, found[what, "queue"]))
    show(about, table.markdown(), markdown=options.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
