"""Scaling of rollouts: throughput over workers and nodes, and the cost of a transition at each stage.

    python -m benchmarks.scaling                  # the tables of docs/scaling.md
    python -m benchmarks.scaling --quick          # a short check that it runs

The first table measures each stage alone, on one core: stepping the environments, the policy's forward and draw, the
rest of the collector, a push until the buffer has stored it, the stream until a batch is tensors, and one pass of the
update. The second table measures whole trainings, each in a separate process: env steps per second over workers and
nodes (several raylets on this machine, started by `ray.cluster_utils.Cluster`), and the CPU time per transition of each
kind of process. All share the same cores, so it shows the cost of coordination, not the gain of more machines.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks import tables
from benchmarks.tables import Table, machine, median, show

TEMPLATE = Path(__file__).parents[1] / "pipelines" / "templates" / "ppo_env.yaml"

ENV = "CartPole-v1"
WORKERS = (1, 2, 4)
NODES = (1, 2, 4)
NUM_ENVS = 32
UNROLL = 128
_TIMEOUT_S = 300.0
_COUNTED = (0.3, 0.95)
"""Part of a run's steps that counts: workers start one after the other, and end before the hub does."""
KINDS = {
    "ray::RolloutWorker": "workers",
    "ray::BufferActor": "buffer",
    "ray::Hub": "hub",
    "ray::_WeightStore": "weight store",
    "raylet": "Ray",
    "gcs_server": "Ray",
    "ray::": "Ray",
    "ray/": "Ray",
}
"""Kind of a process, by the first of these in its command line; none: the driver, with the learner."""


def best(work: Callable[[], int], seconds: float) -> float:
    """Seconds of one unit of ``work``, which says how many it did: the least of many turns, as others use the cores."""
    work()
    least, until = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < until:
        began = time.perf_counter()
        count = work()
        least = min(least, (time.perf_counter() - began) / count)
    return least


@dataclass(frozen=True)
class Stages:
    """Seconds of a transition at each stage, and bytes.

    Attributes:
        environment, forward, packing: in a rollout worker.
        push, stream: wall time with one process at either end.
        update: one pass over the data, torch on one thread.
        transition_bytes: in a learner batch.
        weight_bytes: one set of weights.
    """

    environment: float
    forward: float
    packing: float
    push: float
    stream: float
    update: float
    transition_bytes: float
    weight_bytes: float


def stages(env: str, num_envs: int, seconds: float) -> Stages:
    """Measures each stage alone; starts a Ray for two of them."""
    import ray
    import torch

    from brayx import actions
    from brayx.actions import ActionSpec
    from brayx.algorithms.build import build
    from brayx.algorithms.ppo import PPOConfig
    from brayx.cluster.remote_buffer import RemoteBuffer
    from brayx.cluster.stream import read_buffer
    from brayx.engines.torch import module_weights
    from brayx.replay.config import BufferConfig
    from brayx.rollout.collector import Collector
    from brayx.rollout.envs import make_envs
    from brayx.rollout.networks import observation_of, ready_made
    from brayx.rollout.policy import RolloutPolicy

    torch.set_num_threads(1)
    bare = make_envs(env, num_envs)
    spec = ActionSpec.of(bare.single_action_space)
    module, example = ready_made(None, bare)(observation_of(bare), spec)
    policy = RolloutPolicy(module, example)
    collector = Collector(make_envs(env, num_envs), policy, UNROLL)
    bare.reset(seed=0)
    drawn = bare.action_space.sample()
    rng = np.random.default_rng(0)
    obs = [np.zeros((num_envs, *leaf.shape), leaf.dtype) for leaf in policy.obs_leaves]

    def step() -> int:
        for _ in range(UNROLL):
            bare.step(drawn)
        return UNROLL * num_envs

    def forward() -> int:
        outputs, _ = policy.step(obs, [])
        noise = actions.noise(outputs, rng, UNROLL)
        for turn in range(UNROLL):
            outputs, _ = policy.step(obs, [])
            actions.choose(outputs, tuple(g[turn] for g in noise) if isinstance(noise, tuple) else noise[turn])
        return UNROLL * num_envs

    environment, forwarding = best(step, seconds), best(forward, seconds)
    whole = best(lambda: len(collector.collect()), seconds)
    columns = collector.collect()
    batch = dict(columns.arrays)
    algorithm = build(PPOConfig(epochs=1), module, torch.optim.Adam(module.parameters()))
    tensors: dict[str, Any] = {key: torch.from_numpy(np.array(array)) for key, array in batch.items()}

    def update() -> int:
        algorithm.update(tensors, 0.0)
        return len(columns)

    updating = best(update, seconds)
    _start_ray()
    try:
        config = BufferConfig(size=64, batch_size=num_envs, unroll_length=UNROLL, max_in_flight=2)
        remote = RemoteBuffer("scaling", config)
        actor = remote.shards[0].actor

        def push() -> int:
            remote.push(columns)
            assert remote.flush(30.0)
            return len(columns)

        pushing = best(push, seconds)
        stream = read_buffer("scaling")

        def pull() -> int:
            ray.get(actor.push.remote([columns]))
            began = time.perf_counter()
            taken = next(stream)
            for array in taken.values():
                torch.from_numpy(np.array(array))
            pulled.append((time.perf_counter() - began) / len(columns))
            stream.took()
            return len(columns)

        pulled: list[float] = []
        best(pull, seconds)
    finally:
        ray.shutdown()
        collector.close()
        bare.close()
    return Stages(
        environment=environment,
        forward=forwarding,
        packing=max(0.0, whole - environment - forwarding),
        push=pushing,
        stream=median(pulled) or float("nan"),
        update=updating,
        transition_bytes=sum(array.nbytes for array in batch.values()) / len(columns),
        weight_bytes=sum(array.nbytes for array in module_weights(module).values()),
    )


@dataclass(frozen=True)
class Whole:
    """One training.

    Attributes:
        steps_per_s: transitions learned from, after the warm-up.
        cpu_us: CPU microseconds for a transition, by kind of process.
        lag: mean policy versions between acting and learning.
        dropped: percentage of the transitions, dropped by the buffer.
    """

    steps_per_s: float
    cpu_us: dict[str, float]
    lag: float
    dropped: float


def training(env: str, workers: int, nodes: int, steps: int) -> Whole:
    """Runs one training in this process and reads its course."""
    from mlflow import MlflowClient

    from brayx.cluster.job import train
    from brayx.jobs.config import JobConfig
    from brayx.metrics.charts import CHARTS

    options = [
        f"rollout.env={env}", f"rollout.num_workers={workers}", f"rollout.num_envs={NUM_ENVS // workers}",
        "rollout.mode=non_blocking", f"buffer.batch_size={NUM_ENVS}", f"buffer.unroll_length={UNROLL}", "buffer.size=2",
        "trainer.algorithm.epochs=1", f"trainer.algorithm.minibatch_size={NUM_ENVS * UNROLL}",
        f"trainer.num_steps={steps}", "trainer.target_return=null", "trainer.checkpoint_interval_s=3600",
    ]  # fmt: skip
    job = JobConfig.load(TEMPLATE, options)
    samples: list[tuple[float, dict[str, float]]] = []
    ended = threading.Event()
    watch = threading.Thread(target=_watch, args=(samples, ended), daemon=True)
    cluster: Any = None
    address = ""
    if nodes > 1:
        from ray.cluster_utils import Cluster

        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
        for _ in range(nodes - 1):
            cluster.add_node(num_cpus=4)
        address = cluster.address
    watch.start()
    with tempfile.TemporaryDirectory(prefix="brayx-scaling-") as folder:
        try:
            done = train(job, tracking=folder, cluster=address)
        finally:
            ended.set()
            watch.join(10.0)
            if cluster is not None:
                cluster.shutdown()
        trial, numbers = done.trial, done.numbers
        points = MlflowClient(trial.uri).get_metric_history(trial.run_id, CHARTS["env_steps"])
    course = sorted((point.timestamp / 1e3, point.value) for point in points)
    late = [point for point in course if _COUNTED[0] <= point[1] / max(course[-1][1], 1.0) <= _COUNTED[1]]
    if len(late) < 2:
        raise ValueError(f"{steps} steps are over before the hub has written twice: give more")
    (begin_s, begin), (end_s, end) = late[0], late[-1]
    before = min(samples, key=lambda sample: abs(sample[0] - begin_s))[1]
    after = min(samples, key=lambda sample: abs(sample[0] - end_s))[1]
    dropped = sum(value for name, value in numbers.items() if name.startswith("replay_dropped"))
    return Whole(
        steps_per_s=(end - begin) / (end_s - begin_s),
        cpu_us={kind: 1e6 * max(0.0, after[kind] - before.get(kind, 0.0)) / (end - begin) for kind in after},
        lag=numbers.get("lag_versions", float("nan")),
        dropped=100 * dropped / max(1.0, numbers.get("env_steps", 1.0)),
    )


def _watch(samples: list[tuple[float, dict[str, float]]], ended: threading.Event) -> None:
    """CPU seconds by kind of process, twice a second."""
    me = psutil.Process()
    while not ended.wait(0.5):
        used: dict[str, float] = defaultdict(float)
        for process in [me, *me.children(recursive=True)]:
            try:
                line, times = " ".join(process.cmdline()), process.cpu_times()
            except psutil.Error:
                continue
            kind = next((kind for mark, kind in KINDS.items() if mark in line), "Ray")
            used["learner" if process == me else kind] += times.user + times.system
        samples.append((time.time(), used))


def _environment() -> None:
    """A cluster for this process alone; see tests/conftest.py."""
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(16), RAY_USAGE_STATS_ENABLED="0")


def _start_ray() -> None:
    import logging

    from brayx.cluster.start import start_ray

    options: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
    start_ray(num_cpus=4, **options)


def run(*words: str) -> dict[str, Any] | None:
    """One measurement in another process; None if it failed."""
    argv = [sys.executable, "-m", "benchmarks.scaling", "--one", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MLFLOW_DISABLE_TELEMETRY": "true"}
    try:
        done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, timeout=_TIMEOUT_S, env=environment)
    except subprocess.TimeoutExpired:
        return None
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return None
    print(f"{' '.join(words)}: {lines[-1]}", file=sys.stderr, flush=True)
    return dict(json.loads(lines[-1]))


def stage_table(runs: Sequence[dict[str, Any]]) -> Table:
    """Microseconds of a transition, medians over rounds."""
    table = Table(["stage", ">us a transition"])
    names = ("environment", "forward", "packing", "push", "stream", "update")
    for name in names:
        cost = median([each[name] for each in runs])
        table.add(name, None if cost is None else 1e6 * cost)
    return table


def whole_table(rows: Sequence[tuple[int, int, list[dict[str, Any] | None]]]) -> Table:
    """One row a number of workers and nodes, medians over rounds."""
    kinds = ("workers", "buffer", "learner", "weight store", "Ray", "hub")
    measured = (">env steps/s", *(f">{kind} us" for kind in kinds), ">lag", ">dropped %")
    table = Table([">workers", ">nodes", ">environments each", *measured])
    for workers, nodes, runs in rows:
        flat = [None if each is None else {**each, **dict.fromkeys(kinds, 0.0), **each["cpu_us"]} for each in runs]
        columns = ("steps_per_s", *kinds, "lag", "dropped")
        medians = (median([None if each is None else each[name] for each in flat]) for name in columns)
        table.add(workers, nodes, NUM_ENVS // workers, *medians)
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    parser = tables.options(__doc__, rounds=3, seconds=2.0)
    parser.add_argument("--env", default=ENV, help="Gymnasium id (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=1_000_000, help="of each training (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="one short round of the least")
    parser.add_argument("--one", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.one is not None:
        _environment()  # before Ray is imported
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends child processes
        env, *numbers = options.one
        if len(numbers) == 1:
            found: Any = stages(env, NUM_ENVS, float(numbers[0]))
        else:
            found = training(env, *map(int, numbers))
        print(json.dumps(asdict(found)))
        return 0
    rounds, steps, seconds = options.rounds, options.steps, options.seconds
    places = [(workers, 1) for workers in WORKERS] + [(max(WORKERS), nodes) for nodes in NODES if nodes > 1]
    if options.quick:
        rounds, steps, seconds, places = 1, 600_000, 0.2, [(1, 1), (2, 2)]
    about = f"{machine()}; {options.env}, {NUM_ENVS} environments; {rounds} rounds, medians"
    costs = [run(options.env, str(seconds)) for _ in range(rounds)]
    rows: list[tuple[int, int, list[dict[str, Any] | None]]] = [(workers, nodes, []) for workers, nodes in places]
    for _ in range(rounds):
        for workers, nodes, runs in rows:
            runs.append(run(options.env, str(workers), str(nodes), str(steps)))
    present = [each for each in costs if each is not None]
    text = f"{stage_table(present).markdown()}\n\n{whole_table(rows).markdown()}"
    if present:
        size, weights = (median([each[key] for each in present]) for key in ("transition_bytes", "weight_bytes"))
        text += f"\n\nA transition has {size:.0f} bytes, a set of weights {weights:,.0f}."
    show(about, text, markdown=options.markdown)
    return 0 if len(present) == rounds and all(None not in runs for *_, runs in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
