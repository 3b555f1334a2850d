"""The learner of a model in training, in the background; its weights act at once. Knows nothing of doors or MLflow."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from brayx.engines.base import check_finite
from brayx.jobs.trainee import LearnerThread
from brayx.local.stream import Batches
from brayx.trainer.loop import Publisher, TrainingSummary
from brayx.types import Weights


class Loop(Protocol):
    """A `brayx.trainer.loop.LearnerLoop`, or one in another process."""

    def run(self) -> TrainingSummary:
        """Trains until the steps, the target or the stream end it."""
        ...


class LocalLearner(LearnerThread):
    """A learner in a background thread, from `start` on.

    Args:
        loop: makes the loop, given its publisher. In the thread; the loop runs there.
        followers: get each published version with its weights, in the learner's thread.
        batches: the stream to learn from. The learner ends with it, and ends it.
        eval_batches: batches to evaluate, by buffer.

    Attributes:
        ready: set when the first weights act, or the learner has ended.
    """

    def __init__(
        self,
        loop: Callable[[Callable[[int], Publisher]], Loop],
        followers: Sequence[Callable[[int, Weights], None]],
        batches: Batches,
        eval_batches: Mapping[str, Batches],
    ) -> None:
        super().__init__(self.stop)
        self._loop, self._followers = loop, followers
        self._batches, self._eval_batches = batches, eval_batches
        self._version = 0
        self._published = False
        self.ready = threading.Event()

    def state(self) -> str:
        """See `RunningLearner.state`."""
        if not self.running:
            return "has ended"
        return f"has published weights, version {self._version}" if self._published else "has published no weights yet"

    def stop(self) -> None:
        """Ends its streams, so that it saves a last checkpoint and ends. Does not wait."""
        for batches in (self._batches, *self._eval_batches.values()):
            batches.end()

    def publish(self, weights: Weights, step: int) -> int:
        """As `brayx.trainer.loop.Publisher.publish`."""
        check_finite(weights)
        version = self._version + 1
        self._batches.published(version)  # first: acting must not use a version that the buffers do not know
        for follow in self._followers:
            follow(version, weights)
        self._version, self._published = version, True
        self.ready.set()
        return version

    def learn(self) -> TrainingSummary:
        """See `LearnerThread.learn`."""
        return self._loop(self._publisher).run()

    def ended(self) -> None:
        """See `LearnerThread.ended`."""
        self.stop()
        self.ready.set()

    def _publisher(self, newest: int) -> LocalLearner:
        """The publisher for the loop; versions continue from ``newest``."""
        self._version = newest
        return self
