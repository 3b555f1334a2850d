"""The learner: takes batches, updates, publishes, records, saves, until it is time to stop. Reads top to bottom.

`learn` is the same wherever it runs (`launch.py` says where); what it works with is handed to it. It knows nothing of
Ray, MLflow or games: batches are an iterator, weights go to a `Publisher`, numbers to `Numbers`, folders to `Keeper`.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import optree
import torch
from torch import Tensor, nn

from brayx.algorithms.ppo import PPO
from brayx.engines.torch import module_weights
from brayx.errors import ConfigError, TrackingError
from brayx.replay.packing import Batch
from brayx.trainer import checkpoint
from brayx.trainer.checkpoint import Counters
from brayx.trainer.config import TrainerConfig
from brayx.types import NestedArray, Weights, flatten

log = logging.getLogger(__name__)

Reason = Literal["num_steps", "target_return", "stream_ended"]

RETURN_METRIC = "episode_return.last100"
"""Mean return of the last games, in what `Numbers.newest` gives."""
GAMES_METRIC = "games"
WINDOW_METRIC = "games_in_window"
"""Games that the mean is of, about a hundred at most. After a resume they are counted anew, as one lucky game is no
mean of many."""
_WINDOW_GAMES = 100
BEST_METRIC = "episode_return"
"""Name under which a checkpoint carries the mean return it was saved at."""
_BETTER_BY = 0.05
"""A checkpoint out of turn needs a return this share better than the best saved so far,"""
_BETTER_AFTER_S = 2.0
"""and this long since the last, because saving holds up learning."""
_SAMPLES = 256
"""Observations that a checkpoint keeps."""
_LAST_RETURNS_S = 3.0
"""A training that is over before its games' returns have come in waits this long for them."""


class Publisher(Protocol):
    """Where weights go."""

    def publish(self, weights: Weights, step: int) -> int:
        """Makes ``weights`` the newest and gives their version; raises `BadWeights` when they are not finite."""
        ...


class Numbers(Protocol):
    """Where metrics go, and where the games' returns come from."""

    def add(self, name: str, value: float) -> None:
        """Records one sample; never waits."""
        ...

    def newest(self) -> Mapping[str, float]:
        """The trial's newest numbers, a moment old at most; never waits."""
        ...


class Keeper(Protocol):
    """Where checkpoint folders are kept."""

    def save(self, folder: Path, step: int, metrics: Mapping[str, float]) -> None:
        """Copies ``folder``; drops checkpoints that are neither new nor the best."""
        ...

    def latest(self) -> Path | None:
        """Folder of the newest checkpoint."""
        ...


class Ranks(Protocol):
    """The learners that share one model; `Alone` when there is one."""

    rank: int
    size: int
    device: torch.device

    def wrap(self, module: nn.Module) -> nn.Module:
        """The module whose gradients are means over the ranks, on its device."""
        ...

    def agree(self, steps: int, stop: bool) -> tuple[int, bool]:
        """Sum of ``steps``, and whether any rank wants to stop. Every rank calls it equally often."""
        ...


class Alone:
    """One learner.

    Args:
        use_gpu: on a GPU of this process instead of the CPU.

    Raises:
        ConfigError: there is no GPU.
    """

    rank = 0
    size = 1
    device = torch.device("cpu")

    def __init__(self, use_gpu: bool = False) -> None:
        if use_gpu:
            if not torch.cuda.is_available():
                raise ConfigError("trainer.use_gpu is true, and torch finds no GPU here", key="use_gpu")
            self.device = torch.device("cuda")

    def wrap(self, module: nn.Module) -> nn.Module:
        """The module itself."""
        return module

    def agree(self, steps: int, stop: bool) -> tuple[int, bool]:
        """What was given."""
        return steps, stop


@dataclass(frozen=True)
class Summary:
    """How training ended.

    Attributes:
        reason: ``num_steps``, ``target_return``, or ``stream_ended`` (somebody stopped it).
        env_steps: transitions learned from.
        updates: learner batches learned from.
        policy_version: newest published.
        seconds: in the loop, those before a resume included.
        return_mean: of the last games; NaN when too few were finished.
        resumed: training went on from a checkpoint.
    """

    reason: Reason
    env_steps: int
    updates: int
    policy_version: int
    seconds: float
    return_mean: float
    resumed: bool


def learn(
    config: TrainerConfig,
    module: nn.Module,
    forward_args: tuple[NestedArray, ...],
    *,
    batches: Iterator[Batch],
    took: Callable[[], None],
    publisher: Callable[[int], Publisher],
    numbers: Numbers,
    keeper: Keeper,
    ranks: Ranks | None = None,
    about: Mapping[str, Any] | None = None,
) -> Summary:
    """Trains ``module`` from a stream of learner batches.

    Args:
        config: options.
        module: fresh; goes on from the newest checkpoint of ``keeper`` if there is one.
        forward_args: example arguments of the module; the observation in a batch is laid out as they are.
        batches: the stream; its end is a request to stop.
        took: called once for every batch taken from the stream: as many more may be sent.
        publisher: makes the publisher, given the newest version that the checkpoint knows.
        numbers: books of the trial.
        keeper: checkpoints of the trial.
        ranks: None: alone. Only rank 0 publishes, records and saves.
        about: JSON values for a checkpoint's ``meta.json``.

    Raises:
        BadWeights: training diverged to NaN; the last checkpoint is from before.
        TrackingError: the last checkpoint could not be saved. One before that is only counted and logged: the next
            interval tries again.
        ConfigError: batches do not have the observation that the module takes.
    """
    ranks = ranks or Alone()
    torch.set_num_threads(config.threads)
    module.to(ranks.device)
    optimizer = torch.optim.Adam(module.parameters(), lr=config.learning_rate, eps=1e-5, fused=True)
    counters = Counters()
    folder = keeper.latest()
    if folder is not None:
        counters = checkpoint.restore(folder, module, optimizer)
        for group in optimizer.param_groups:  # a resumed trial may have been given another rate
            group["initial_lr"] = group["lr"] = config.learning_rate
    wrapped = ranks.wrap(module)
    algorithm = PPO(wrapped, optimizer, config.algorithm)
    obs_of = _observation(forward_args)

    publish: Publisher | None = None
    if ranks.rank == 0:
        publish = publisher(counters.policy_version)
        counters.policy_version = publish.publish(module_weights(module), counters.env_steps)
        numbers.add("policy_version", counters.policy_version)
    version_at_start = counters.policy_version
    learned_from: Batch | None = None

    def save(return_mean: float | None) -> None:
        if return_mean is not None:
            counters.best_return = max(return_mean, counters.best_return or return_mean)
        metrics = {} if return_mean is None else {BEST_METRIC: return_mean}
        with tempfile.TemporaryDirectory(prefix="brayx-checkpoint-") as temporary:
            said = {**(about or {}), "metrics": metrics}
            checkpoint.save(Path(temporary), module, optimizer, counters, said, _samples(learned_from))
            keeper.save(Path(temporary), counters.env_steps, metrics)

    failing = False

    def try_to_save(return_mean: float | None) -> None:
        nonlocal failing
        best = counters.best_return
        try:
            save(return_mean)
            failing = False
        except (TrackingError, OSError) as error:
            counters.best_return = best
            numbers.add("checkpoints_failed", 1)
            if not failing:
                log.warning("no checkpoint at %d steps, training goes on: %s", counters.env_steps, error)
            failing = True

    reason: Reason | None = None
    return_mean: float | None = None
    began = time.monotonic() - counters.seconds
    saved_at = waiting_since = time.monotonic()
    while reason is None:
        batch = next(batches, None)
        # A rank whose stream has ended must say so before the others wait for its gradients.
        _, over = ranks.agree(0, batch is None) if ranks.size > 1 else (0, False)
        if batch is None or over:
            reason = "stream_ended"
            break
        started = time.monotonic()
        took()
        measured = algorithm.update(_tensors(batch, obs_of, ranks.device), counters.env_steps / config.num_steps)
        counters.updates += 1
        learned_from = batch
        learned = int(batch["mask"].sum())
        reached = False
        if publish is not None:
            if counters.updates % config.weights_publish_interval == 0:
                counters.policy_version = publish.publish(module_weights(module), counters.env_steps + learned)
            ended = time.monotonic()
            measured["update_seconds"] = ended - started
            measured["learner_wait_fraction"] = (started - waiting_since) / max(ended - waiting_since, 1e-9)
            measured["updates"] = 1
            measured["policy_version"] = counters.policy_version
            if learned:
                measured["lag_versions"] = version_at_start - _version(batch)
            for name, value in measured.items():
                numbers.add(name, value)
            version_at_start = counters.policy_version
            return_mean = _return_mean(numbers.newest(), config.target_games)
            if return_mean is not None and config.target_return is not None:
                reached = return_mean >= config.target_return
        total, stop = ranks.agree(learned, reached)
        counters.env_steps += total
        counters.seconds = time.monotonic() - began
        if stop:
            reason = "target_return"
        elif counters.env_steps >= config.num_steps:
            reason = "num_steps"
        elif publish is not None:
            age_s = time.monotonic() - saved_at
            best = counters.best_return
            better = return_mean is not None and (best is None or return_mean > best + _BETTER_BY * abs(best))
            if age_s >= config.checkpoint_interval_s or (better and age_s >= _BETTER_AFTER_S):
                try_to_save(return_mean)
                saved_at = time.monotonic()
        waiting_since = time.monotonic()
    if publish is not None:
        counters.seconds = time.monotonic() - began
        counters.policy_version = publish.publish(module_weights(module), counters.env_steps)
        deadline = time.monotonic() + _LAST_RETURNS_S
        while reason == "num_steps" and return_mean is None and time.monotonic() < deadline:
            time.sleep(0.05)
            return_mean = _return_mean(numbers.newest(), config.target_games)
        save(return_mean)
    return Summary(
        reason=reason,
        env_steps=counters.env_steps,
        updates=counters.updates,
        policy_version=counters.policy_version,
        seconds=counters.seconds,
        return_mean=float("nan") if return_mean is None else return_mean,
        resumed=folder is not None,
    )


def _observation(forward_args: tuple[NestedArray, ...]) -> Callable[[Mapping[str, Tensor]], Any]:
    """Rebuilds the module's arguments from a batch: an observation is the one argument, or the tuple of all."""
    example: Any = forward_args[0] if len(forward_args) == 1 else forward_args
    paths = list(flatten(example, "obs"))
    structure = optree.tree_structure(example)

    def rebuild(batch: Mapping[str, Tensor]) -> Any:
        missing = [path for path in paths if path not in batch]
        if missing:
            held = sorted(key for key in batch if key.split("/")[0] == "obs")
            raise ConfigError(f"batches hold no {missing[0]!r}, which the model takes; they hold {held}")
        obs = optree.tree_unflatten(structure, [batch[path] for path in paths])
        return (obs,) if len(forward_args) == 1 else obs

    return rebuild


def _tensors(batch: Batch, obs_of: Callable[[Mapping[str, Tensor]], Any], device: torch.device) -> dict[str, Any]:
    """The batch as tensors; copied where NumPy says read-only, as blocks of the object store are."""
    tensors = {}
    for key, array in batch.items():
        tensors[key] = torch.from_numpy(array if array.flags.writeable else np.array(array)).to(device)
    return {**tensors, "obs": obs_of(tensors)}


def _samples(batch: Batch | None) -> dict[str, np.ndarray]:
    """Some observations of a batch, evenly spread over its steps."""
    if batch is None:
        return {}
    rows = np.flatnonzero(batch["mask"] > 0)
    rows = rows[np.linspace(0, len(rows) - 1, min(len(rows), _SAMPLES)).astype(int)]
    return {
        key: array.reshape(-1, *array.shape[2:])[rows]
        for key, array in batch.items()
        if key == "obs" or key.startswith("obs/")
    }


def _version(batch: Batch) -> float:
    """Mean policy version of the steps learned from."""
    return float(batch["policy_version"][batch["mask"] > 0].mean())


def _return_mean(newest: Mapping[str, float], games: int) -> float | None:
    enough = newest.get(GAMES_METRIC, 0) >= games and newest.get(WINDOW_METRIC, 0) >= min(games, _WINDOW_GAMES)
    return newest.get(RETURN_METRIC) if enough else None
