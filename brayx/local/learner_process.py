"""The learner in a child process, so that doors do not share Python's lock with it: both of its ends.

`ChildLoop` is this process's end, with the buffers, the metrics and the trial. `main` runs in the child: it builds the
model from the job, and runs the same `LearnerLoop` as a thread of this process would. The child asks for whatever the
loop needs, and waits for the answer, so that nothing queues between the two. Knows nothing of what fills the buffers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

import brayx.jobs.contract_model  # noqa: F401  # the child imports it while the job waits for a game
from brayx import systems
from brayx.algorithms.ppo import PPOConfig
from brayx.children import Channel, Child
from brayx.errors import BrayxError, ConfigError, StartupError, TrackingError, first_line
from brayx.jobs.config import JobConfig, only
from brayx.jobs.environments import normalises
from brayx.metrics import Drained, Recorder
from brayx.metrics.numbers import NEWEST_S, LocalNumbers
from brayx.replay.packing import Batch
from brayx.tracking.pending import Keeper
from brayx.trainer.checkpoint import start_from
from brayx.trainer.fits import built_to_learn
from brayx.trainer.hooks import Hooks, load_hooks
from brayx.trainer.loop import LearnerLoop, Publisher, TrainingSummary
from brayx.trainer.ranks import Alone
from brayx.types import Weights

log = logging.getLogger(__name__)

_END_S = 2.0
"""Time for the child to end by itself after its loop."""


def learner_child(job: JobConfig) -> Child | None:
    """A child for a `ChildLoop`, to start early, because importing torch takes seconds; None: the learner is a thread.

    By default there is one for PPO of a game that says its contract, with a core to spare: there the actor's work in
    Python is a large share, and doors wait for the learner.
    """
    config = job.trainers[only("trainer", job.trainers)]
    where = config.where
    if where is None and job.has_contract and not job.leagues and systems.cores() > 1:
        plain = not (config.hooks or config.use_gpu or config.eval_buffers or config.prefetch or job.rollouts)
        where = "child" if plain and type(config.algorithm) is PPOConfig else None
    if where != "child":
        return None
    if any(map(normalises, job.rollouts.values())):
        raise ConfigError("trainer.where is child, expected process: rollouts that normalise share its moments")
    return Child(__name__, forks=not config.use_gpu)  # CUDA does not work in a fork


@dataclass
class ChildLoop:
    """A `LearnerLoop` in a child process; `run` does it once.

    Attributes:
        child: from `learner_child`.
        about: the job and its folder, from which the child builds the model; they are also in checkpoints.
        weights: initial weights; None: those of the job's seed.
        batches, publisher, numbers, keeper, feedback, resumed: as for `LearnerLoop`.
    """

    child: Child
    about: Mapping[str, Any]
    weights: Weights | None
    batches: Iterator[Batch]
    publisher: Callable[[int], Publisher]
    numbers: LocalNumbers
    keeper: Keeper
    feedback: Callable[[np.ndarray, np.ndarray], None]
    resumed: Callable[[int], None]
    _outcome: TrainingSummary | BrayxError | None = field(init=False, default=None)

    def run(self) -> TrainingSummary:
        """As `LearnerLoop.run`.

        Raises:
            BrayxError: as `LearnerLoop.run`; `StartupError` if the child raised another exception, or died.
        """
        try:
            self.child.start()
            self.child.serve(self._answer)
        finally:
            self.child.end(_END_S)
            self.child.close()
        if isinstance(self._outcome, TrainingSummary):
            return self._outcome
        raise self._outcome or StartupError(f"its process {self.child.death}")

    def _answer(self, kind: str, *parts: Any) -> Any:
        """Answers a request of the child: each method with a request's name."""
        return getattr(self, f"_{kind}")(*parts)

    def _begin(self) -> tuple[Mapping[str, Any], Weights | None]:
        return self.about, self.weights

    def _batch(self, numbers: Drained) -> Batch | None:
        self.numbers.merge(numbers)
        return next(self.batches, None)

    def _newest(self, numbers: Drained) -> Mapping[str, float]:
        self.numbers.merge(numbers)
        return self.numbers.newest()

    def _publish_after(self, version: int) -> None:
        self._publisher = self.publisher(version)

    def _publish(self, weights: Weights, step: int) -> int:
        return self._publisher.publish(weights, step)

    def _latest(self) -> Path | None:
        return self.keeper.latest()

    def _save(self, folder: Path, step: int, metrics: Mapping[str, float]) -> None:
        try:
            self.keeper.save(folder, step, metrics)
        except OSError as error:  # which the loop would have seen as such
            raise TrackingError(f"a checkpoint cannot be kept: {first_line(error)}") from error

    def _new_priorities(self, index: np.ndarray, priorities: np.ndarray) -> None:
        self.feedback(index, priorities)

    def _skip(self, batches: int) -> None:
        self.resumed(batches)

    def _end(self, outcome: TrainingSummary | BrayxError, numbers: Drained) -> None:
        self.numbers.merge(numbers)
        self._outcome = outcome


class _Parent(Recorder):
    """What the loop works with, in the child: publisher, numbers and keeper, each of which asks the other end."""

    def __init__(self, parent: Channel) -> None:
        super().__init__()
        self._ask = parent.ask
        self._known: Mapping[str, float] = {}
        self._known_at = 0.0

    def batches(self) -> Iterator[Batch]:
        """Batches until the stream ends."""
        while (batch := self._ask("batch", self.drain())) is not None:
            yield batch

    def publisher(self, newest: int) -> _Parent:
        self._ask("publish_after", newest)
        return self

    def publish(self, weights: Weights, step: int) -> int:
        """As `Publisher.publish`."""
        return int(self._ask("publish", weights, step))

    def newest(self) -> Mapping[str, float]:
        """As `brayx.trainer.loop.LearnerNumbers.newest`."""
        if time.monotonic() - self._known_at >= NEWEST_S:
            self._known, self._known_at = self._ask("newest", self.drain()), time.monotonic()
        return self._known

    def save(self, folder: Path, step: int, metrics: Mapping[str, float]) -> None:
        """As `Keeper.save`."""
        self._ask("save", folder, step, metrics)

    def latest(self) -> Path | None:
        """As `Keeper.latest`."""
        folder: Path | None = self._ask("latest")
        return folder

    def loop(self) -> LearnerLoop:
        """The loop, of the job that the other end has."""
        about, weights = self._ask("begin")
        job = JobConfig.of(about["job"], about["folder"])
        config = job.trainers[only("trainer", job.trainers)]
        torch.set_num_threads(config.threads or 1)
        torch.manual_seed(job.seed)
        model = job.models[config.model]
        module, forward_args, _ = built_to_learn(config, config.model, model.module, job.folder, about["job"])
        if weights is not None:
            start_from(module, weights)
        return LearnerLoop(
            config,
            module,
            forward_args,
            batches=self.batches(),
            publisher=self.publisher,
            numbers=self,
            keeper=self,
            ranks=Alone(config.use_gpu),
            about=about,
            hooks=load_hooks(config.hooks, job.folder) if config.hooks else Hooks(),
            feedback=lambda index, priorities: self._ask("new_priorities", index, priorities),
            resumed=lambda batches: self._ask("skip", batches),
        )

    def learn(self) -> None:
        """Runs the loop, and gives its outcome to the other end."""
        outcome: TrainingSummary | BrayxError
        try:
            outcome = self.loop().run()
        except BrayxError as error:
            outcome = error
        except Exception as error:
            log.exception("the learner failed")
            outcome = StartupError(f"{type(error).__name__}: {first_line(error)}")
        self._ask("end", outcome, self.drain())


def main(parent: Channel) -> None:
    """Learns until the loop ends."""
    _Parent(parent).learn()
