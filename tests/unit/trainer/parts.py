"""Small real parts around the loop: a bandit to learn, and lists and folders in place of a job's actors and MLflow."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import torch

from brayx.algorithms.impala import ImpalaConfig
from brayx.algorithms.mixed import MixedConfig
from brayx.algorithms.ppo import PPOConfig
from brayx.engines.base import check_finite
from brayx.nets.mlp import ActorCritic
from brayx.replay.buffer import ReplayBuffer
from brayx.replay.config import BufferConfig
from brayx.trainer.config import TrainerConfig
from brayx.trainer.loop import LearnerLoop
from brayx.types import Fragment

BATCH_STEPS = 32


class Weights:
    """A weight store that keeps everything published."""

    def __init__(self, newest: int = 0) -> None:
        self.version = newest
        self.published = []

    def publish(self, weights, step):
        check_finite(weights)
        self.version += 1
        self.published.append((self.version, step, weights))
        return self.version


class Numbers:
    """A recorder that keeps all metrics; the test sets the games' return."""

    def __init__(self, newest=None):
        self.samples, self.weights, self.kinds = {}, {}, {}
        self.trial = newest or {}
        self.shapes = []

    def add(self, name, value, *, label="", kind=None, weight=1.0):
        name = f"{name}.{label}" if label else name
        self.weights.setdefault(name, []).append(weight)
        self.kinds[name] = kind
        self.samples.setdefault(name, []).append(value)

    def add_shapes(self, name, shapes):
        self.shapes += [(name, label, shape) for label, shape in shapes.items()]

    def newest(self):
        return self.trial() if callable(self.trial) else self.trial


class Folders:
    """A keeper that keeps every checkpoint."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.saved = []

    def save(self, folder, step, metrics):
        target = self.root / f"{len(self.saved):04d}"
        shutil.copytree(folder, target)
        self.saved.append((step, dict(metrics), target))

    def latest(self):
        return self.saved[-1][2] if self.saved else None


def batches(count, act=None, seed=0, extras=None):
    """Batches of a bandit: one observation, reward for action 1."""
    rng = np.random.default_rng(seed)
    buffer = ReplayBuffer(BufferConfig(size=1000, batch_size=2, unroll_length=16))
    for _ in range(count * 2):
        action = rng.integers(0, 2, 16)
        buffer.push(
            Fragment(
                obs=np.ones((17, 3), np.float32),
                action=action,
                log_prob=np.full(16, -np.log(2), np.float32),
                reward=action.astype(np.float32),
                terminated=True,
                truncated=False,
                policy_version=np.full(16, 1, np.int64),
                extras=extras or {},
            )
        )
    while (batch := buffer.pop()) is not None:
        yield batch


def run(
    folder, count=6, newest=None, seed=0, stream=None, ranks=None, algorithm=None, parts=None, took=None, **options
):
    torch.manual_seed(seed)
    parts = {"hooks": options.pop("hooks", None), "eval_batches": options.pop("evaluate", None), **(parts or {})}
    if not isinstance(algorithm, MixedConfig | ImpalaConfig):
        plain = {
            "gamma": 0.0,
            "epochs": 4,
            "minibatch_size": 16,
            "entropy_coef": 0.0,
            "learning_rate_schedule": "linear",
        }
        algorithm = PPOConfig(**{**plain, **(algorithm or {})})
    options = {"learning_rate": 1e-3, **options}
    config = TrainerConfig(model="model", buffers=["buffer"], algorithm=algorithm, **options)
    weights, numbers, batches_taken = Weights(), Numbers(newest), []
    keeper = folder if isinstance(folder, Folders) else Folders(folder)

    def publisher(newest_version):
        weights.version = newest_version
        return weights

    summary = LearnerLoop(
        config,
        ActorCritic(3, 2, hidden=(16,)),
        (np.zeros((1, 3), np.float32),),
        batches=stream if stream is not None else batches(count),
        took=took or (lambda: batches_taken.append(1)),
        publisher=publisher,
        numbers=numbers,
        keeper=keeper,
        ranks=ranks,
        about={"project": "test"},
        **parts,
    ).run()
    return summary, weights, numbers, keeper, batches_taken
