"""The learner in a thread of this process, with the shared training loop; its weights act at once.

Knows nothing of doors, gamecores or MLflow.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from brayx.engines.base import check_finite
from brayx.jobs.trainee import LearnerThread
from brayx.local.stream import Batches
from brayx.tracking.pending import Keeper
from brayx.trainer.checkpoint import Normaliser
from brayx.trainer.config import TrainerConfig
from brayx.trainer.hooks import Hooks
from brayx.trainer.loop import LearnerLoop, LearnerNumbers, TrainingSummary
from brayx.trainer.ranks import Alone
from brayx.types import Weights


class LocalLearner(LearnerThread):
    """A learner in a background thread, from `start` on.

    Args:
        config: options.
        module, forward_args: a new model; only the learner's thread may use it.
        followers: get each published version with its weights, in the learner's thread.
        batches: the stream to learn from. The learner ends with it, and ends it.
        numbers, keeper, about, hooks, normaliser: as for `brayx.trainer.loop.LearnerLoop`.
        eval_batches: batches to evaluate, by buffer.

    Attributes:
        ready: set when the first weights act, or the learner has ended.

    Raises:
        ConfigError: there is no GPU for it.
    """

    def __init__(
        self,
        config: TrainerConfig,
        module: nn.Module,
        forward_args: tuple[Any, ...],
        *,
        followers: Sequence[Callable[[int, Weights], None]],
        batches: Batches,
        numbers: LearnerNumbers,
        keeper: Keeper,
        about: Mapping[str, Any],
        hooks: Hooks,
        normaliser: Normaliser | None,
        eval_batches: Mapping[str, Batches],
    ) -> None:
        super().__init__(self.stop)
        self._config, self._module, self._forward_args = config, module, forward_args
        self._followers, self._batches, self._eval_batches = followers, batches, eval_batches
        self._numbers, self._keeper, self._about, self._hooks = numbers, keeper, about, hooks
        self._normaliser = normaliser
        self._ranks = Alone(config.use_gpu)
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
        return LearnerLoop(
            self._config,
            self._module,
            self._forward_args,
            batches=self._batches,
            publisher=self._publisher,
            numbers=self._numbers,
            keeper=self._keeper,
            ranks=self._ranks,
            about=self._about,
            hooks=self._hooks,
            normaliser=self._normaliser,
            feedback=self._batches.update_priorities,
            eval_batches=self._eval_batches,
            resumed=self._batches.skip,
        ).run()

    def ended(self) -> None:
        """See `LearnerThread.ended`."""
        self.stop()
        self.ready.set()

    def _publisher(self, newest: int) -> LocalLearner:
        """The publisher for the `LearnerLoop`; versions continue from ``newest``."""
        self._version = newest
        return self
