"""Environments, collecting and updates alone, in one process with one thread; and the CPU clock of a process tree."""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self

import numpy as np
import psutil

from benchmarks.servers import tree
from benchmarks.tables import Table, ratio

ENVIRONMENTS = (("CartPole-v1", 16), ("CartPole-v1", 64), ("Pendulum-v1", 16))
_UNROLL = 64
_COLUMNS = 32
RECURRENT = "PPO, ten epochs, with an LSTM"
_CLOCK_S = 0.5


def parts(seconds: float) -> list[Table]:
    """The tables; each figure takes ``seconds``."""
    return [collecting(seconds), updating(seconds)]


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

    Times are the least of many, as others use the cores.
    """
    import torch

    from brayx.algorithms.adam import Adam
    from brayx.algorithms.bc import BCConfig
    from brayx.algorithms.build import build
    from brayx.algorithms.impala import ImpalaConfig
    from brayx.algorithms.mappo import MAPPOConfig
    from brayx.algorithms.ppo import PPOConfig
    from brayx.algorithms.sac import SACConfig
    from brayx.nets.central import central_policy_for
    from brayx.nets.policy import NetworkConfig, policy_for
    from brayx.nets.soft import soft_policy_for

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
        "SAC": SACConfig(),
    }
    out = Table(["algorithm", ">update ms", ">µs a transition"])
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
        took_s = _least(functools.partial(algorithm.update, batch, 0.0), seconds)
        out.add(name, 1e3 * took_s, 1e6 * took_s / size)
    return out


def _next_step(envs: Any, actions: Iterator[Any]) -> None:
    envs.step(next(actions))


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
