"""What a learner does on a GPU, for `benchmarks.gpu --all`: its speed, whole trainings, and two ranks on one device."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, cast

import gymnasium
import numpy as np
import torch

from benchmarks.servers import ROOT
from benchmarks.tables import Table
from brayx.algorithms.optimise import Precision
from brayx.algorithms.ppo import PPOConfig
from brayx.engines.torch import module_weights
from brayx.local.train import train_local
from brayx.local.training import Training
from brayx.nets.policy import NetworkConfig, policy_for
from brayx.trainer.config import TrainerConfig
from brayx.trainer.loop import LearnerLoop
from brayx.trainer.ranks import Alone, Processes, Ranks

NO_GPU = "no GPU"


@dataclass
class Part:
    """The result of a part.

    Attributes:
        tables: tables by title.
        skipped: what was not done, and why.
        failed: what went wrong; empty: the part passed.
        seconds: how long it took.
        facts: further results.
    """

    tables: dict[str, Table] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    seconds: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        """The result in markdown."""
        lines = [f"**{title}**\n\n{table.markdown()}\n" for title, table in self.tables.items()]
        lines += [f"- {name}: {value}" for name, value in self.facts.items()]
        lines += [f"- skipped: {line}" for line in self.skipped]
        return "\n".join([*lines, *(f"- FAILED: {line}" for line in self.failed)])


def has_gpu() -> bool:
    """Whether torch finds a GPU."""
    return torch.cuda.is_available()


class Sink:
    """The loop's publisher, recorder and keeper; keeps nothing."""

    version = 0

    def publish(self, weights: Any, step: int) -> int:
        """Counts the versions."""
        self.version += 1
        return self.version

    def add(self, name: str, value: float, **_: Any) -> None:
        """Records nothing."""

    def add_shapes(self, name: str, shapes: Any) -> None:
        """Records nothing."""

    def newest(self) -> Mapping[str, float]:
        """No numbers."""
        return {}

    def save(self, folder: Path, step: int, metrics: Mapping[str, float]) -> None:
        """Saves nothing."""

    def latest(self) -> Path | None:
        """No checkpoint."""
        return None


class Recipe(NamedTuple):
    """A learner's batch and network.

    Attributes:
        obs: one observation, of zeros.
        network: options of the network.
        columns, steps: size of a batch.
        epochs, minibatch_size: of PPO.
        large: not for one thread, nor for a quick run.
    """

    obs: np.ndarray
    network: NetworkConfig
    columns: int
    steps: int
    epochs: int
    minibatch_size: int
    large: bool = False

    def batch(self) -> dict[str, np.ndarray]:
        """A random learner batch."""
        rng, shape = np.random.default_rng(0), (self.columns, self.steps + 1)
        drawn = rng.integers(0, 256, (*shape, *self.obs.shape), np.uint8)
        mask = np.ones(shape, np.float32)
        mask[:, -1] = 0
        return {
            "obs": drawn if self.obs.dtype == np.uint8 else (drawn / 128 - 1).astype(np.float32),
            "action": rng.integers(0, _ACTIONS, shape),
            "log_prob": np.full(shape, -np.log(_ACTIONS), np.float32),
            "reward": rng.normal(size=shape).astype(np.float32),
            "terminated": rng.random(shape) < 0.01,
            "truncated": np.zeros(shape, np.bool_),
            "mask": mask,
            "policy_version": np.ones(shape, np.int64),
        }


_ACTIONS = 6
_PIXELS, _NUMBERS = np.zeros((4, 84, 84), np.uint8), np.zeros(64, np.float32)
_NATURE = NetworkConfig(convolutions="nature", hidden=[])
_WIDE = NetworkConfig(hidden=[256, 256])
RECIPES = {
    "pixels, Nature CNN": Recipe(_PIXELS, _NATURE, 16, 64, 3, 256),
    "pixels, Nature CNN, large": Recipe(_PIXELS, _NATURE, 128, 64, 3, 2048, large=True),
    "MLP 256x256": Recipe(_NUMBERS, _WIDE, 32, 64, 10, 512),
    "MLP 256x256, large": Recipe(_NUMBERS, _WIDE, 256, 128, 10, 8192, large=True),
}
"""The first has the shapes of Pong in `brayx.commands.ppo.PRESETS`."""


class Way(NamedTuple):
    """How a learner computes: device, precision, whether fp32 may use TF32, batches prefetched, and all cores."""

    device: str
    precision: Precision = "fp32"
    tf32: bool = False
    prefetch: int = 0
    all_cores: bool = True


WAYS = {
    "cpu, one thread": Way("cpu", all_cores=False),
    "cpu": Way("cpu"),
    "cuda, fp32": Way("cuda"),
    "cuda, TF32": Way("cuda", tf32=True),
    "cuda, bf16": Way("cuda", "bf16"),
    "cuda, fp16": Way("cuda", "fp16"),
    "cuda, TF32, prefetch 1": Way("cuda", tf32=True, prefetch=1),
    "cuda, bf16, prefetch 1": Way("cuda", "bf16", prefetch=1),
}


class On(Alone):
    """A single learner on a device."""

    def __init__(self, device: str) -> None:
        super().__init__(device == "cuda")


def loop_of(recipe: Recipe, way: Way, ranks: Ranks | None = None, **options: Any) -> LearnerLoop:
    """A learner's loop of PPO for a recipe."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = way.tf32
    torch.manual_seed(0)
    algorithm = PPOConfig(epochs=recipe.epochs, minibatch_size=recipe.minibatch_size, precision=way.precision)
    threads = len(os.sched_getaffinity(0)) if way.all_cores else 1
    config = TrainerConfig(
        model="model",
        buffers=["buffer"],
        algorithm=algorithm,
        num_steps=10**9,
        prefetch=way.prefetch,
        threads=threads,
        checkpoint_interval_s=3600,
        histogram_interval_s=None,
    )
    module, forward_args = policy_for(recipe.obs, num_actions=_ACTIONS, network=recipe.network)
    sink = Sink()
    return LearnerLoop(
        config,
        module,
        forward_args,
        publisher=lambda _: sink,
        numbers=sink,
        keeper=sink,
        ranks=ranks or On(way.device),
        **options,
    )


def updates_per_s(recipe: Recipe, way: Way, seconds: float) -> float:
    """Updates of the learner's loop each second, weights published after each; the first does not count."""
    batch, taken = recipe.batch(), [0.0]
    until = time.perf_counter() + 600

    def stream() -> Iterator[dict[str, np.ndarray]]:
        while len(taken) < 4 or time.perf_counter() < until:
            yield batch

    def took() -> None:
        nonlocal until
        taken.append(time.perf_counter())
        if len(taken) == 3:  # the second update begins, after the first has warmed up
            until = taken[-1] + seconds

    loop_of(recipe, way, batches=stream(), took=took).run()
    return (len(taken) - 3) / (taken[-1] - taken[2])


def learner(folder: Path, quick: bool) -> Part:
    """Updates and transitions per second of the learner's loop, by device and precision."""
    part = Part(skipped=[] if has_gpu() else [f"learning on a GPU: {NO_GPU}"])
    for name, recipe in RECIPES.items():
        if quick and recipe.large:
            continue
        table = Table(["way", ">updates/s", ">transitions/s", ">to cpu"])
        base = None
        for title, way in WAYS.items():
            if (way.device == "cuda" and not has_gpu()) or (recipe.large and not way.all_cores):
                continue
            try:
                rate = updates_per_s(recipe, way, 0.1 if quick else 1.5)
            except Exception as error:
                part.failed.append(f"{name}: {title}: {type(error).__name__}: {error}")
                continue
            base = rate if title == "cpu" else base
            table.add(title, rate, rate * recipe.columns * recipe.steps, None if base is None else rate / base)
        size = f"{recipe.columns * recipe.steps:,} transitions, minibatches of {recipe.minibatch_size:,}"
        part.tables[f"{name}: {size}, {recipe.epochs} passes"] = table
    return part


class Falling(gymnasium.Env[np.ndarray, Any]):
    """A ball falls through an image of 36 x 36, a paddle at its bottom catches it: +1, or -1."""

    observation_space = gymnasium.spaces.Box(0, 255, (1, 36, 36), np.uint8)
    action_space = gymnasium.spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        """A new ball at the top."""
        super().reset(seed=seed)
        self.row, self.column, self.paddle = 0, int(self.np_random.integers(9)), 4
        return self._seen(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """The paddle moves by ``action - 1``; the ball falls."""
        self.paddle = min(max(self.paddle + int(action) - 1, 0), 8)
        self.row += 1
        over = self.row == 8
        return self._seen(), (1.0 if self.paddle == self.column else -1.0) if over else 0.0, over, False, {}

    def _seen(self) -> np.ndarray:
        image = np.zeros((1, 36, 36), np.uint8)
        image[0, 4 * self.row : 4 * self.row + 4, 4 * self.column : 4 * self.column + 4] = 255
        image[0, 32:, 4 * self.paddle : 4 * self.paddle + 4] = 128
        return image


_CARTPOLE = PPOConfig(gamma=0.98, gae_lambda=0.8, entropy_coef=0.0, epochs=8, minibatch_size=1024)
_FALLING = PPOConfig(gamma=0.99, entropy_coef=0.01, epochs=4, minibatch_size=512)
LESSONS: dict[str, tuple[Any, PPOConfig, Training]] = {
    "CartPole-v1, MLP": (
        "CartPole-v1",
        _CARTPOLE,
        Training(num_steps=200_000, num_envs=32, unroll_length=64, learning_rate=3e-3, target_return=475.0),
    ),
    "falling ball, Nature CNN": (
        Falling,
        _FALLING,
        Training(
            num_steps=150_000,
            num_envs=32,
            unroll_length=32,
            learning_rate=1e-3,
            target_return=0.9,
            network=NetworkConfig(convolutions="nature", hidden=[]),
        ),
    ),
}
"""Environment, algorithm and options of a training with a target."""


def training(folder: Path, quick: bool) -> Part:
    """Whole trainings in this process on either device: do they reach the target?"""
    table = Table(["training", "device", "end", ">return", ">env steps", ">updates", ">s", ">env steps/s"])
    part = Part({"trainings": table}, skipped=[] if has_gpu() else [f"training on a GPU: {NO_GPU}"])
    for name, (env, algorithm, options) in LESSONS.items():
        for device in ("cpu", "cuda") if has_gpu() else ("cpu",):
            chosen = {"use_gpu": device == "cuda", **({"num_steps": 10_240} if quick else {})}
            for way in ({}, {"precision": "bf16"}) if device == "cuda" else ({},):
                title = " ".join([device, *way.values()])
                try:
                    found = train_local(env, algorithm.model_copy(update=way), options.model_copy(update=chosen))
                except Exception as error:
                    part.failed.append(f"{name} on {title}: {type(error).__name__}: {error}")
                    continue
                numbers = (found.return_mean, found.env_steps, found.updates, found.seconds, found.steps_per_s)
                table.add(name, title, found.reason, *numbers)
                on = next(found.module.parameters()).device.type
                if on != device or not (quick or found.reason == "target_return"):
                    part.failed.append(f"{name} on {title}: {found.reason} with {found.return_mean:.3g}, on {on}")
    return part


def rank(number: int, folder: str, backend: str, device: str) -> None:
    """One of two ranks that learn together on one device; writes its weights."""
    recipe = RECIPES["MLP 256x256"]
    torch.distributed.init_process_group(
        backend,
        init_method=f"file://{folder}/{backend}",
        rank=number,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    try:
        batches = iter([recipe.batch()] * 5)
        loop = loop_of(recipe, Way(device, all_cores=False), Processes(torch.device(device)), batches=batches)
        loop.run()
        np.savez(f"{folder}/{backend}{number}.npz", **cast("dict[str, Any]", module_weights(loop.module)))
    finally:
        torch.distributed.destroy_process_group()


def ranks(folder: Path, quick: bool) -> Part:
    """Two ranks on one device, by NCCL if it allows that, and by gloo: is their model the same?"""
    device = "cuda" if has_gpu() else "cpu"
    part = Part(skipped=[] if has_gpu() else [f"NCCL: {NO_GPU}"])
    for backend in ("nccl", "gloo") if has_gpu() else ("gloo",):
        with tempfile.TemporaryDirectory() as temporary:
            call = f"from benchmarks.gpu_learning import rank; rank({{}}, {temporary!r}, {backend!r}, {device!r})"
            log = folder / f"gpu-ranks-{backend}.txt"
            with open(log, "w") as output:
                running = [
                    subprocess.Popen(
                        [sys.executable, "-c", call.format(number)], cwd=ROOT, stdout=output, stderr=output
                    )
                    for number in range(2)
                ]
                codes = _wait(running, 90.0)
            if any(codes):
                lines = [line for line in log.read_text().splitlines() if "Error" in line or "Duplicate" in line]
                said = f"two ranks on one {device} by {backend}: {lines[-1] if lines else f'exit codes {codes}'}"
                (part.skipped if backend == "nccl" else part.failed).append(said)
                continue
            one, other = (np.load(f"{temporary}/{backend}{number}.npz") for number in range(2))
            furthest = max(float(np.abs(one[name] - other[name]).max()) for name in one.files)
            part.facts[f"{backend} on {device}: the two models differ by at most"] = furthest
            if not furthest <= 1e-6:
                part.failed.append(f"{backend}: the ranks' models differ by {furthest}")
    return part


def _wait(running: Sequence[subprocess.Popen[Any]], seconds: float) -> list[int | None]:
    """Exit codes; whatever runs longer is killed. One that fails ends the others, which would wait for it."""
    until = time.monotonic() + seconds
    try:
        while time.monotonic() < until and any(process.poll() is None for process in running):
            if any(process.poll() for process in running):
                until = min(until, time.monotonic() + 5.0)
            time.sleep(0.1)
    finally:
        for process in running:
            process.kill()
    return [process.wait() for process in running]
