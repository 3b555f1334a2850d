"""The cost of a trial's distributions: for the learner, which counts them, and for MLflow's process, which draws them.

    python -m benchmarks.pictures

For scale, the table begins with a PPO update on a batch of the CartPole recipe.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn

from benchmarks.tables import Table, machine, median, show
from brayx.algorithms.base import Algorithm
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

ROUNDS = 20


class Numbers(Recorder):
    """A recorder, which needs not know the games' returns."""

    def newest(self) -> dict[str, float]:
        return {}


def batch(columns: int, steps: int) -> dict[str, np.ndarray]:
    """A learner batch of CartPole's shapes."""
    rng, shape = np.random.default_rng(0), (columns, steps + 1)
    zeros = np.zeros(shape, np.float32)
    return {
        "obs": rng.normal(size=(*shape, 4)).astype(np.float32),
        "action": rng.integers(0, 2, shape),
        "log_prob": np.full(shape, -0.7, np.float32),
        "reward": np.ones(shape, np.float32),
        "terminated": zeros.astype(bool),
        "truncated": zeros.astype(bool),
        "mask": np.concatenate([np.ones((columns, steps), np.float32), zeros[:, :1]], 1),
        "policy_version": np.ones(shape, np.int64),
    }


def milliseconds(call: Callable[[], object]) -> float | None:
    """Median time of a call, after one that does not count."""
    call()
    took = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        call()
        took.append(1e3 * (time.perf_counter() - began))
    return median(took)


def taken(shapes_of: Numbers, sample: dict[str, np.ndarray], algorithm: Algorithm, module: nn.Module) -> float | None:
    """Time of the learner's part."""
    return milliseconds(lambda: Shapes(shapes_of, 30.0).record_in_turn(sample, algorithm, module))


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--markdown", action="store_true", help="print plain markdown")
    options = parser.parse_args(argv)
    about = f"{machine()}; medians of {ROUNDS}"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    numbers, module, sample = Numbers(), ActorCritic(4, 2, hidden=(64, 64)), batch(8, 32)
    config = PPOConfig(epochs=20, minibatch_size=256)
    algorithm = build(config, module, torch.optim.Adam(module.parameters()))
    tensors = {name: torch.from_numpy(array) for name, array in sample.items()}
    interval_s = TrainerConfig.model_fields["histogram_interval_s"].default
    rows = [("a PPO update on 256 transitions, 20 epochs", milliseconds(lambda: algorithm.update(tensors, 0.0)))]
    small = taken(numbers, sample, algorithm, module)
    rows.append(("learner: distributions of a 64x64 MLP", small))
    images, large = NatureCNN((4, 84, 84)), batch(128, 128)
    algorithm.advantages = (torch.randn(128 * 128), torch.ones(128 * 128))
    rows.append(("learner: of the Nature CNN, 16,384 transitions", taken(numbers, large, algorithm, images)))
    totals = Totals()
    Shapes(numbers, 30.0).record_in_turn(sample, algorithm, module)
    totals.merge(numbers.drain())
    found = totals.take_shapes()
    with tempfile.TemporaryDirectory() as folder:
        trial = Trial.open("benchmark", "pictures", initialise(tracking_uri(folder)))
        written = milliseconds(lambda: log_shapes(trial, found, 1))
    rows.append(("MLflow's process: the three pictures of the MLP", written))
    table = Table(["what", ">ms", f">% of {interval_s:g} s"])
    for what, took in rows:
        table.add(what, took, None if took is None else took / 10 / interval_s)
    show(about, table.markdown(), markdown=options.markdown)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
