"""Forwards of the torch engine on the CPU and on a GPU, in one process: from which batch size on is the GPU faster?

    python -m benchmarks.gpu --markdown
    python -m benchmarks.gpu --all --json FILE      # everything that needs a GPU: `benchmarks.gpu_parts`

A forward is timed as an actor sees it: NumPy in, NumPy out, both copies included. Without a GPU it shows the CPU's
half. Needs neither Ray nor MLflow.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.tables import Table, machine, percentile, show
from brayx.engines.torch import TorchEngine, example_leaves
from brayx.nets.mlp import ActorCritic

BATCH_SIZES = (1, 64, 1024)

Model = tuple[nn.Module, tuple[Any, ...]]
Variants = Mapping[str, Callable[[nn.Module, tuple[Any, ...]], Any]]
"""What makes an engine of a module and its example arguments, by the engine's name in the table."""


class NatureCNN(nn.Module):
    """The network of Mnih et al. 2015, "Human-level control through deep reinforcement learning", with a value beside
    the logits: ``[B, 4, 84, 84]`` float32 in [0, 1] -> ``{"logits": [B, A], "value": [B]}``.

    Args:
        num_actions: number of discrete actions, ``A``.
    """

    def __init__(self, num_actions: int = 6) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(4, 32, 8, 4), nn.ReLU(),
            nn.Conv2d(32, 64, 4, 2), nn.ReLU(),
            nn.Conv2d(64, 64, 3, 1), nn.ReLU(),
            nn.Flatten(), nn.Linear(64 * 7 * 7, 512), nn.ReLU(),
        )  # fmt: skip
        self.logits, self.value = nn.Linear(512, num_actions), nn.Linear(512, 1)

    def forward(self, obs: torch.Tensor) -> dict[str, torch.Tensor]:
        """The logits and the value of each observation."""
        hidden = self.body(obs)
        return {"logits": self.logits(hidden), "value": self.value(hidden).squeeze(-1)}


def nature_cnn() -> Model:
    """The network and its example arguments."""
    torch.manual_seed(0)
    return NatureCNN(), (np.zeros((1, 4, 84, 84), np.float32),)


def mlp() -> Model:
    """CartPole's network and its example arguments."""
    torch.manual_seed(0)
    return ActorCritic(4, 2, (64, 64)), (np.zeros((1, 4), np.float32),)


MODELS = {"MLP 64x64": mlp, "Nature CNN": nature_cnn}


def seconds_per_run(engine: Any, inputs: Sequence[np.ndarray], runs: int, seconds: float) -> list[float]:
    """Durations of forwards: ``runs`` of them, or as many as fit into ``seconds``, after a few that do not count."""
    bound = engine.bind(engine.initial)
    for _ in range(5):
        engine.run(bound, inputs)
    taken: list[float] = []
    ends = time.perf_counter() + seconds
    while len(taken) < runs and (time.perf_counter() < ends or len(taken) < 5):
        began = time.perf_counter()
        engine.run(bound, inputs)
        taken.append(time.perf_counter() - began)
    return taken


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


def torch_engines(compiled: bool = False) -> Variants:
    """The torch engine on the CPU, and on the GPU if there is one; ``compiled``: the last one compiled, too."""
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    kinds = [(device, False) for device in devices] + ([(devices[-1], True)] if compiled else [])

    def of(device: str, compiled: bool) -> Callable[[nn.Module, tuple[Any, ...]], TorchEngine]:
        return lambda module, example: TorchEngine(module, example, device=device, compiled=compiled)

    return {device + (" compiled" if is_compiled else ""): of(device, is_compiled) for device, is_compiled in kinds}


def measure(variants: Variants, runs: int, seconds: float) -> Table:
    """A row for each model and batch size; ratios are to the first variant."""
    heads = list(variants)
    ratios_to = [f">{heads[0]} to {head}" for head in heads[1:]]
    table = Table(["model", ">batch", *(f">{head}, µs" for head in heads), *ratios_to])
    for name, build in MODELS.items():
        module, example = build()
        engines = [make(module, example) for make in variants.values()]
        for batch_size in BATCH_SIZES:
            inputs = example_leaves(example, batch_size)
            medians = [percentile(seconds_per_run(engine, inputs, runs, seconds), 0.5) for engine in engines]
            ratios = [medians[0] / median for median in medians[1:]]
            table.add(name, batch_size, *(1e6 * median for median in medians), *ratios)
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=1000, help="forwards of a case at most (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=3.0, help="a case takes at most (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=None, help="torch's, on the CPU (default: torch's own)")
    parser.add_argument("--compile", action="store_true", help="the last device through torch.compile, too")
    parser.add_argument("--markdown", action="store_true", help="print plain markdown")
    parser.add_argument("--all", action="store_true", help="every check that needs a GPU, in minutes; the rest is said")
    parser.add_argument("--json", type=Path, default=Path("gpu.json"), help="results of --all; logs go beside it")
    parser.add_argument("--quick", action="store_true", help="with --all: does it run at all")
    parser.add_argument("--only", nargs="+", metavar="PART", help="with --all: these parts alone")
    arguments = parser.parse_args(argv)
    about = machine()
    if arguments.all:
        from benchmarks.gpu_parts import run_all  # it imports this module

        return run_all(arguments.json, quick=arguments.quick, only=arguments.only)
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    text = measure(torch_engines(arguments.compile), arguments.runs, arguments.seconds).markdown()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    about = f"{gpu}; {about}; {torch.get_num_threads()} threads, torch {torch.__version__}; medians"
    show(about, text, markdown=arguments.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
