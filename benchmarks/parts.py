"""A training by part: its CPU in a separate run, and in one process environments, collecting and updates alone.

CPU seconds per thread come from the system; samples of py-spy (in the extra ``bench``) only divide those of the event
loop's thread among its parts. A sample counts for the innermost frame that belongs to a part; time in uvloop and the
kernel without one counts for the door. The figures in one process are measured one after the other, with one thread.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import psutil

from benchmarks.servers import tree
from benchmarks.tables import Table, median, ratio

ENVIRONMENTS = (("CartPole-v1", 16), ("CartPole-v1", 64), ("Pendulum-v1", 16))
_UNROLL = 64
_COLUMNS = 32
RECURRENT = "PPO, ten epochs, with an LSTM"
_CLOCK_S = 0.5
GAMECORE, DOOR, AGENT, FORWARD, FRAGMENT, LEARNER, REST = PARTS = (
    "gamecores",
    "door and session",
    "agent",
    "forward",
    "fragments",
    "learner",
    "MLflow and the rest",
)
_ON_THE_LOOP = {
    FRAGMENT: ("on_episode", "brayx/replay/", "brayx/local/buffer.py"),
    FORWARD: ("brayx/model/", "brayx/engines/", "onnxruntime/"),
    AGENT: (
        "gym_agent.py",
        "brayx/actor/agent_actor.py",
        "brayx/actor/codec.py",
        "brayx/actor/agent.py",
        "brayx/actor/decode.py",
        "json/",
    ),
    DOOR: ("",),
}
"""Pieces of a frame's text by part: a part's piece anywhere on the stack gives the sample to the first such part."""
_THREADS = {
    DOOR: "_run (brayx/actor/host.py",
    LEARNER: "_run (brayx/local/learner.py",
    FORWARD: '"brayx-batcher',
}
"""Text in py-spy's dump of a thread that is only one part: the frame at which it begins, or the name if it waits."""
SPY = Path(shutil.which("py-spy") or Path(sys.executable).parent / "py-spy")
_FIRST_TICK_S = 60.0
_EVERY_S = 0.2
_LOOKS = 5


def parts(seconds: float) -> list[Table]:
    """The tables; each figure takes ``seconds``."""
    return [collecting(seconds), updating(seconds), distributions()]


def collecting(seconds: float) -> Table:
    """Env steps each second: nothing but the environments, and a 64x64 policy acting in them."""
    import torch

    from brayx.actions import ActionSpec
    from brayx.rollout.collector import Collector
    from brayx.rollout.envs import make_envs
    from brayx.rollout.networks import observation_of, ready_made
    from brayx.rollout.policy import RolloutPolicy

    torch.set_num_threads(1)
    out = Table(["environment", ">environments", ">bare steps/s", ">collecting steps/s", ">share"])
    for env, num in ENVIRONMENTS:
        envs = make_envs(env, num)
        envs.reset(seed=0)
        drawn = [envs.action_space.sample() for _ in range(64)]
        bare = num * _rate(functools.partial(_next_step, envs, itertools.cycle(drawn)), seconds)
        module, example = ready_made(None, envs)(observation_of(envs), ActionSpec.of(envs.single_action_space))
        collector = Collector(envs, RolloutPolicy(module, example), _UNROLL)
        collector.collect()
        rate = num * _UNROLL * _rate(collector.collect, seconds)
        out.add(env, num, bare, rate, ratio(rate, bare))
        collector.close()
    return out


def updating(seconds: float) -> Table:
    """Time of one update, and of each transition in it, for every algorithm, with networks of two layers of 64.

    The arithmetic is that of the products of matrices, forward and backward. Times are the least of many, as others use
    the cores.
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from brayx.algorithms.adam import Adam
    from brayx.algorithms.bc import BCConfig
    from brayx.algorithms.build import build
    from brayx.algorithms.impala import ImpalaConfig
    from brayx.algorithms.mappo import MAPPOConfig
    from brayx.algorithms.mixed import MixedConfig
    from brayx.algorithms.ppo import PPOConfig
    from brayx.algorithms.sac import SACConfig
    from brayx.nets.central import central_policy_for
    from brayx.nets.policy import NetworkConfig, policy_for
    from brayx.nets.soft import soft_policy_for
    from brayx.types import DEMONSTRATION

    torch.set_num_threads(1)
    torch.manual_seed(0)
    size = _COLUMNS * _UNROLL
    once, often = {"epochs": 1, "minibatch_size": size}, {"epochs": 10, "minibatch_size": size // 4}
    configs: dict[str, Any] = {
        "PPO, one epoch": PPOConfig(**once),
        "PPO, ten epochs": PPOConfig(**often),
        "PPO, ten epochs, by autograd": PPOConfig(**often, clip_value=10.0),  # which its closed form does not know
        RECURRENT: PPOConfig(**often),
        "MAPPO, ten epochs": MAPPOConfig(**often),
        "IMPALA": ImpalaConfig(),
        "cloning": BCConfig(),
        "PPO with imitation, ten epochs": MixedConfig(reinforcement=PPOConfig(**often), imitation_columns=_COLUMNS),
        "IMPALA with imitation": MixedConfig(reinforcement=ImpalaConfig(), imitation_columns=_COLUMNS),
        "SAC": SACConfig(),
    }
    out = Table(["algorithm", ">transitions", ">update ms", ">µs a transition", ">kFLOP a transition", ">GFLOP/s"])
    seen, network = np.zeros(4, np.float32), NetworkConfig(hidden=[64, 64])
    module: torch.nn.Module
    for name, config in configs.items():
        batch = _batch(_COLUMNS, _UNROLL)
        if isinstance(config, SACConfig):
            module, _ = soft_policy_for(seen, action_size=1, network=network)
            batch["action"] = torch.rand(*batch["mask"].shape, 1) * 2 - 1
        elif isinstance(config, MAPPOConfig):
            module, _ = central_policy_for({"obs": seen, "state": seen}, num_actions=2, network=network)
            batch |= {"obs": {"obs": batch["obs"]}, "obs/state": batch["obs"]}
        else:
            of = network.model_copy(update={"lstm": 64} if name == RECURRENT else {})
            module, _ = policy_for(seen, num_actions=2, network=of)
        if name == RECURRENT:
            batch |= {f"state/{part}": torch.zeros(*batch["mask"].shape, 64) for part in "hc"}
        algorithm = build(config, module, Adam(module.parameters(), lr=1e-4, fused=True))
        if isinstance(config, MixedConfig):
            algorithm.update({**batch, DEMONSTRATION: batch["mask"]}, 0.0)
        with FlopCounterMode(display=False) as counter:
            algorithm.update(batch, 0.0)
        flop = counter.get_total_flops()
        took_s = _least(functools.partial(algorithm.update, batch, 0.0), seconds)
        out.add(name, size, 1e3 * took_s, 1e6 * took_s / size, flop / size / 1e3, flop / took_s / 1e9)
    return out


def _next_step(envs: Any, actions: Iterator[Any]) -> None:
    envs.step(next(actions))


def distributions() -> Table:
    """The cost of a trial's distributions: for the learner, which counts them, and for MLflow's process, which draws
    them. For scale, the table begins with a PPO update on a batch of the CartPole recipe."""
    import torch

    from brayx.algorithms.build import build
    from brayx.algorithms.ppo import PPOConfig
    from brayx.metrics import Recorder
    from brayx.metrics.totals import Totals
    from brayx.nets.cnn import NatureCNN
    from brayx.nets.mlp import ActorCritic
    from brayx.tracking import Trial, initialise, tracking_uri
    from brayx.tracking.pictures import log_shapes
    from brayx.trainer.config import TrainerConfig
    from brayx.trainer.shapes import Shapes

    class Numbers(Recorder):
        """A recorder, which needs not know the games' returns."""

        def newest(self) -> dict[str, float]:
            return {}

    torch.set_num_threads(1)
    torch.manual_seed(0)
    numbers, module = Numbers(), ActorCritic(4, 2, hidden=(64, 64))
    algorithm = build(PPOConfig(epochs=20, minibatch_size=256), module, torch.optim.Adam(module.parameters()))
    batch, large = _batch(8, 32), {name: tensor.numpy() for name, tensor in _batch(128, 128).items()}
    small = {name: tensor.numpy() for name, tensor in batch.items()}

    def counted(sample: dict[str, np.ndarray], net: torch.nn.Module) -> None:
        Shapes(numbers, 30.0).record_in_turn(sample, algorithm, net)

    interval_s = TrainerConfig.model_fields["histogram_interval_s"].default
    out = Table(["what", ">ms", f">% of {interval_s:g} s"])

    def add(what: str, call: Callable[[], object]) -> None:
        took_s = _median_s(call)
        out.add(what, 1e3 * took_s, 100 * took_s / interval_s)

    add("a PPO update on 256 transitions, 20 epochs", lambda: algorithm.update(batch, 0.0))
    add("learner: distributions of a 64x64 MLP", lambda: counted(small, module))
    counted(small, module)
    totals = Totals()
    totals.merge(numbers.drain())
    shapes = totals.take_shapes()
    images = NatureCNN((4, 84, 84))
    algorithm.advantages = (torch.randn(128 * 128), torch.ones(128 * 128))
    add("learner: of the Nature CNN, 16,384 transitions", lambda: counted(large, images))
    with tempfile.TemporaryDirectory() as folder:
        trial = Trial.open("benchmark", "pictures", initialise(tracking_uri(folder)))
        add("MLflow's process: the three pictures of the MLP", lambda: log_shapes(trial, shapes, 1))
    return out


def _batch(columns: int, steps: int) -> dict[str, Any]:
    import torch

    shape = (columns, steps + 1)
    mask = torch.ones(shape)
    mask[:, -1] = 0
    return {
        "obs": torch.randn(*shape, 4),
        "action": torch.randint(0, 2, shape),
        "log_prob": torch.full(shape, float(np.log(0.5))),
        "reward": torch.randn(shape),
        "terminated": torch.rand(shape) < 0.02,
        "truncated": torch.zeros(shape, dtype=torch.bool),
        "mask": mask,
        "policy_version": torch.zeros(shape, dtype=torch.int64),
    }


def _median_s(call: Callable[[], object]) -> float:
    """Median seconds of twenty calls, after one that does not count."""
    call()
    took = []
    for _ in range(20):
        began = time.perf_counter()
        call()
        took.append(time.perf_counter() - began)
    return median(took) or 0.0


def _least(call: Callable[[], object], seconds: float) -> float:
    """Seconds of the quickest call."""
    call()
    least, until = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < until:
        began = time.perf_counter()
        call()
        least = min(least, time.perf_counter() - began)
    return least


def _rate(call: Callable[[], object], seconds: float) -> float:
    """Calls each second, after a few that do not count."""
    for _ in range(3):
        call()
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        call()
        count += 1
    return count / (time.perf_counter() - began)


def by_thread(pid: int) -> dict[int, float]:
    """CPU seconds of each thread of a process, by the system's thread id; empty once it has ended."""
    try:
        return {thread.id: thread.user_time + thread.system_time for thread in psutil.Process(pid).threads()}
    except psutil.NoSuchProcess:
        return {}


class CpuClock:
    """A context in which the CPU time of a process tree is sampled, by a thread.

    Processes that have ended count with what they had at the last sample.

    Args:
        pid: root of the tree.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._used: dict[tuple[int, float], float] = {}
        self._samples: list[tuple[float, float]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()

    def at(self, time_s: float) -> float:
        """CPU seconds used up to a moment on the epoch's clock, linear between samples."""
        after = bisect.bisect_left(self._samples, (time_s, 0.0))
        (t0, c0), (t1, c1) = self._samples[max(after - 1, 0)], self._samples[min(after, len(self._samples) - 1)]
        return c0 if t1 <= t0 else c0 + (c1 - c0) * min((time_s - t0) / (t1 - t0), 1.0)

    def _run(self) -> None:
        while not self._ended.wait(_CLOCK_S):
            for process in tree(self._pid):
                with contextlib.suppress(psutil.NoSuchProcess):
                    times = process.cpu_times()
                    self._used[process.pid, process.create_time()] = times.user + times.system
            self._samples.append((time.time(), sum(self._used.values())))


def shares(stacks: Iterable[str]) -> dict[str, float]:
    """Share of the samples by part.

    Args:
        stacks: lines of py-spy's raw format, of one thread: frames from the outermost to the innermost, then the number
            of samples.
    """
    counts: Counter[str] = Counter()
    for line in stacks:
        stack, _, samples = line.rpartition(" ")
        part = next(part for part, pieces in _ON_THE_LOOP.items() if any(piece in stack for piece in pieces))
        counts[part] += int(samples)
    total = sum(counts.values())
    return {part: count / total for part, count in counts.items()}


def cpu_by_part(words: Sequence[str], environment: Mapping[str, str], stamp: Path) -> dict[str, float]:
    """CPU seconds by part of a training, from its first tick until its gamecores end.

    Args:
        words: arguments of Python that train on the local host.
        environment: of the process.
        stamp: file that exists once the first tick is answered.

    Raises:
        RuntimeError: no tick arrived, or py-spy has no permission.
    """
    with tempfile.TemporaryDirectory(prefix="brayx-spy-") as folder:
        quiet = subprocess.DEVNULL
        process = subprocess.Popen([sys.executable, *words], env=environment, stdout=quiet, stderr=quiet)
        try:
            until = time.monotonic() + _FIRST_TICK_S
            while not stamp.exists():
                if process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError("the training has had no tick")
                time.sleep(_EVERY_S)
            stacks = Path(folder) / "stacks"
            threads = _thread_parts(process.pid)
            record = [str(SPY), "record", "--pid", str(process.pid), "--threads", "--rate", "40"]
            with subprocess.Popen(
                [*record, "--format", "raw", "--output", str(stacks)], stdout=quiet, stderr=quiet
            ) as spy:
                before = last = now = _used(process.pid)
                while any(gamecore for _, gamecore, _ in now):
                    time.sleep(_EVERY_S)
                    last, now = last | now, _used(process.pid)  # the learner's thread ends before the gamecores
                spy.send_signal(signal.SIGINT)
            if not stacks.exists():
                raise RuntimeError("py-spy gave no samples")
            used = {key: seconds - before.get(key, 0.0) for key, seconds in last.items()}
            return _by_part(process.pid, used, threads, stacks.read_text().splitlines())
        finally:
            process.send_signal(signal.SIGINT)
            process.wait()


Thread = tuple[int, bool, int]
"""Process, whether that is a gamecore, and thread."""


def _used(root: int) -> dict[Thread, float]:
    """CPU seconds so far of every thread of a process tree."""
    found: dict[Thread, float] = {}
    for each in tree(root):
        gamecore = each.pid != root and "gamecore" in " ".join(_command(each))
        found.update({(each.pid, gamecore, thread): used for thread, used in by_thread(each.pid).items()})
    return found


def _thread_parts(pid: int) -> dict[int, str]:
    """Which part each thread of a process is, by what it runs: py-spy mistakes a thread's name now and then.

    Raises:
        RuntimeError: py-spy failed.
    """
    found: dict[int, str] = {}
    for _ in range(_LOOKS):
        dump = subprocess.run([str(SPY), "dump", "--pid", str(pid)], capture_output=True, text=True, check=False)
        for thread, stack in re.findall(r"^Thread (\d+)(.*?)(?=^Thread|\Z)", dump.stdout, re.MULTILINE | re.DOTALL):
            found |= {int(thread): part for part, frame in _THREADS.items() if frame in stack}
    if not found:
        raise RuntimeError(f"py-spy gave no stacks of threads: {dump.stderr.strip()[-500:]}")
    return found


def _by_part(
    root: int, used: Mapping[Thread, float], threads: Mapping[int, str], stacks: Sequence[str]
) -> dict[str, float]:
    of_loop = [line for line in stacks if _THREADS[DOOR] in line]
    parts = dict.fromkeys(PARTS, 0.0)
    for (process, gamecore, thread), seconds in used.items():
        if process != root:
            parts[GAMECORE if gamecore else REST] += seconds
        elif threads.get(thread) == DOOR:
            for part, share in shares(of_loop).items():
                parts[part] += share * seconds
        else:
            parts[threads.get(thread, REST)] += seconds
    return parts


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def parts_table(name: str, parts: Mapping[str, float], steps: int) -> Table:
    """CPU for each of ``steps``, by part, of a training of that name."""
    out = Table([name, ">CPU µs a step", ">%"])
    total, count = sum(parts.values()), steps
    for part, seconds in parts.items():
        out.add(part, 1e6 * seconds / count, 100 * seconds / total)
    out.add("all", 1e6 * total / count, 100.0)
    return out
