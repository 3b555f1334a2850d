"""The learner's loop: takes batches, updates, publishes, records, saves, stops. Reads top to bottom.

Both hosts run a `LearnerLoop`, and pass it everything it works with. It knows nothing of Ray, MLflow or games: batches
are an iterator, weights go to a `Publisher`, numbers to `LearnerNumbers`, folders to a `Keeper`.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from threadpoolctl import threadpool_limits
from torch import nn

from brayx.actor.agent import Services
from brayx.algorithms.adam import EPS, Adam
from brayx.algorithms.build import build, check_batch, failure
from brayx.engines.normalised import observed
from brayx.engines.torch import module_weights
from brayx.errors import BrayxError, Diverged, ModelError, first_line
from brayx.metrics import METRICS, WINDOW_GAMES, Bars, Kind
from brayx.metrics.totals import FAILED_IN_WINDOW, RETURN_ERROR, SECONDS
from brayx.nets.normaliser import follow, is_fresh
from brayx.nets.recurrent import state_argument
from brayx.replay.packing import Batch
from brayx.tracking.pending import Keeper
from brayx.trainer import checkpoint
from brayx.trainer.checkpoint import Counters, Normaliser
from brayx.trainer.config import TrainerConfig
from brayx.trainer.cores import Cores
from brayx.trainer.evaluation import Evaluator
from brayx.trainer.hooks import Hooks, WithLoss
from brayx.trainer.prefetch import Prefetch, Prepare, Ready
from brayx.trainer.ranks import Alone, Ranks, agree
from brayx.trainer.saving import PolicyScore, Saver, samples_of
from brayx.trainer.shapes import Shapes
from brayx.types import NestedArray, Weights

Reason = Literal["num_steps", "target_return", "stream_ended"]

RETURN_METRIC = "episode_return.last100"
"""Name of the mean return of the last games in `LearnerNumbers.newest`."""
GAMES_METRIC = "games"
WINDOW_METRIC = "games_in_window"
"""Name of the number of games in that mean, at most `WINDOW_GAMES`. A resume starts at 0."""
_LARGE_REWARD = 1e9
"""Float32 overflows when losses square the returns of larger rewards."""
_LAST_RETURNS_S = 3.0
"""Time to wait at the end for the games' last returns."""
_NUMBERS_LATE_S = 0.6
"""The same for a training that is stopped: a bit more than the age of a process's newest numbers."""


class Publisher(Protocol):
    """Publishes weights."""

    def publish(self, weights: Weights, step: int) -> int:
        """Makes ``weights`` the newest and returns their version; raises `BadWeights` if they are not finite."""
        ...


class LearnerNumbers(Protocol):
    """Records metrics, and knows the games' returns."""

    def add(self, name: str, value: float, *, label: str = "", kind: Kind | None = None, weight: float = 1.0) -> None:
        """Records one sample, as `brayx.metrics.Recorder.add`; never waits."""
        ...

    def add_shapes(self, name: str, shapes: Mapping[str, Bars]) -> None:
        """Records distributions by label, as `brayx.metrics.Recorder.add_shapes`; never waits."""
        ...

    def newest(self) -> Mapping[str, float]:
        """The trial's newest numbers, a fraction of a second old; never waits."""
        ...


@dataclass(frozen=True)
class TrainingSummary:
    """The end of a training: its reason and totals.

    Attributes:
        reason: ``num_steps``, ``target_return``, or ``stream_ended`` (it was stopped).
        env_steps: transitions learned from.
        updates: learner batches learned from; those that an algorithm only keeps for later do not count.
        policy_version: newest published version.
        seconds: time in the loop, including the time before a resume.
        return_mean: mean return of the last games; NaN if too few were finished.
        return_games: number of these games.
        resumed: training started from a checkpoint.
    """

    reason: Reason
    env_steps: int
    updates: int
    policy_version: int
    seconds: float
    return_mean: float
    return_games: int
    resumed: bool


@dataclass
class LearnerLoop:
    """Trains ``module`` from a stream of learner batches; `run` does it once.

    A caller that wants the loop in parts enters `started`, calls `learn` with one stream after another, and then `end`.

    Attributes:
        config: options.
        module: new module; restored from the newest checkpoint of ``keeper`` if there is one.
        forward_args: example arguments of the module; observations of a batch get the same layout.
        batches: the stream for `run`; its end is a request to stop.
        publisher: makes the publisher, given the newest version that the checkpoint knows.
        numbers: metrics of the trial.
        keeper: checkpoints of the trial.
        ranks: the ranks that learn together; None: one. Only rank 0 publishes, records, evaluates and saves.
        about: JSON values for a checkpoint's ``meta.json``; not copied, since it may fill during training.
        hooks: the user's hooks.
        normaliser: its moments go into checkpoints, and into published weights for acting outside of rollouts.
        took: called once for every batch taken from the stream, so that another may be sent.
        feedback: given a batch's ``index`` and the new priorities of its columns, ``[B]`` each.
        eval_batches: streams of batches to evaluate, by buffer.
        progress: called before each batch; returns the training's progress, 0 to 1, if the stream ends it and not
            ``num_steps``. None: the share of ``num_steps`` learned from.
        resumed: called when training resumes, before its first batch, with the number of learner batches that all
            ranks had learned from.
    """

    config: TrainerConfig
    module: nn.Module
    forward_args: tuple[NestedArray, ...]
    _: KW_ONLY
    batches: Iterator[Batch] = field(default_factory=lambda: iter(()))
    publisher: Callable[[int], Publisher]
    numbers: LearnerNumbers
    keeper: Keeper
    ranks: Ranks | None = None
    about: Mapping[str, Any] | None = None
    hooks: Hooks | None = None
    normaliser: Normaliser | None = None
    took: Callable[[], None] = lambda: None
    feedback: Callable[[np.ndarray, np.ndarray], None] | None = None
    eval_batches: Mapping[str, Iterator[Batch]] | None = None
    progress: Callable[[], float] | None = None
    resumed: Callable[[int], None] | None = None

    def __post_init__(self) -> None:
        self._ranks, self._hooks = self.ranks or Alone(), self.hooks or Hooks()
        self._paths = list(observed(self.module, self.forward_args))
        self._shapes = Shapes(self.numbers, self.config.histogram_interval_s)
        self._learned_from: Batch | None = None
        self._score: PolicyScore | None = None
        self._newest: Mapping[str, float] = {}

    def run(self) -> TrainingSummary:
        """Trains until the steps, the target or the stream end it.

        Raises:
            Diverged, BadWeights: a loss or a weight is NaN or infinite; the last checkpoint is from before.
            TrackingError: the last checkpoint could not be saved. An earlier failure is counted and logged, and the
                next interval tries again.
            ConfigError: batches do not have the observation that the module takes.
            ModelError: a hook failed, or a batch or the module's outputs do not fit the algorithm.
        """
        with self.started():
            reason = self.learn(self.batches)
        return self.end(reason)

    @contextlib.contextmanager
    def started(self) -> Iterator[None]:
        """The context of `learn`: what learns, from the newest checkpoint if there is one; errors as for `run`."""
        threadpool_limits(self.config.threads or 1, "blas")  # NumPy's threads take 15 times the CPU for small layers
        self._lag = 0.0
        with contextlib.closing(Cores(self.forward_args, self.config.threads)) as self._cores:
            self._resumed = self._build()
            device, state_at = self._ranks.device, state_argument(self.module)
            handle = self._hooks.handled if self._hooks.handle is not None else None
            self._prepare = Prepare(
                self.forward_args, device, handle, aside=self.config.prefetch > 0, state_at=state_at
            )
            to_evaluate = (self.eval_batches or {}) if self._ranks.rank == 0 else {}
            evaluated = Prepare(self.forward_args, device, state_at=state_at)
            self._began = time.monotonic() - self._counters.seconds
            with self._recording():  # for its threads
                self._evaluation = Evaluator(self.config, self.module, evaluated, to_evaluate, self._hooks)
            with self._evaluation:
                yield

    def learn(self, batches: Iterator[Batch]) -> Reason:
        """Learns from a stream until it ends, or the steps or the target are reached; errors as for `run`."""
        with self._recording(), Prefetch(batches, self._prepare, self.config.prefetch) as stream:
            return self._until_end(stream)

    def end(self, reason: Reason) -> TrainingSummary:
        """Publishes and saves the last weights, and waits for the games' last returns; errors as for `run`.

        Args:
            reason: from the last `learn`.
        """
        counters = self._counters
        if self._publisher is not None:
            self._save_last(self._publisher, reason)
        return TrainingSummary(
            reason=reason,
            env_steps=counters.env_steps,
            updates=counters.updates,
            policy_version=counters.policy_version,
            seconds=counters.seconds,
            return_mean=float("nan") if self._score is None else self._score.mean,
            return_games=0 if self._score is None else self._score.games,
            resumed=self._resumed,
        )

    def write(self, folder: Path) -> None:
        """Writes a checkpoint into an empty folder, between two calls of `learn`.

        Raises:
            TrackingError, BadWeights: as `brayx.trainer.checkpoint.save`.
        """
        self._write(folder, self.about or {})

    def _recording(self) -> contextlib.AbstractContextManager[object]:
        """The context in which hooks find the recorder."""
        return Services(recorder=self.numbers).use()  # type: ignore[arg-type]  # hooks only use `add`

    def _build(self) -> bool:
        """Builds what learns, from the newest checkpoint if there is one, and publishes; returns whether there was."""
        config, module, ranks = self.config, self.module, self._ranks
        module.to(ranks.device)
        self._optimizer = Adam(module.parameters(), lr=config.learning_rate, eps=EPS, fused=True)
        folder = self.keeper.latest()
        restored = None if folder is None else checkpoint.restore(folder, module, self._optimizer, self.normaliser)
        self._counters = counters = Counters() if restored is None else restored.counters
        for group in self._optimizer.param_groups:  # a resumed trial may have been given another rate
            group["initial_lr"] = group["lr"] = config.learning_rate
        wrapped = ranks.wrap(module)
        with_loss = WithLoss(wrapped, self._hooks) if self._hooks.loss is not None else wrapped
        self._algorithm = build(config.algorithm, with_loss, self._optimizer, ranks)
        if self._cores.changes:
            self._algorithm.forward.before = self._cores.choose
        if restored is not None:
            restored.go_on(self._algorithm, ranks.rank)
            if self.resumed is not None:
                self.resumed(counters.updates * ranks.size)
        self._saver = Saver(
            self.keeper,
            self._write,
            counters,
            config.checkpoint_interval_s,
            {} if self.about is None else self.about,
            failed=lambda: self.numbers.add("checkpoints_failed", 1),
            played=lambda: self._newest.get("env_steps"),
            every=config.checkpoint_interval,
        )
        self._publisher: Publisher | None = None
        if ranks.rank == 0:
            self._publisher = self.publisher(counters.policy_version)
            self._publish(self._publisher)
            self.numbers.add("policy_version", counters.policy_version)
        self._published_at, self._version_at_start = counters.updates, counters.policy_version
        self._saved = restored is not None
        return restored is not None

    def _write(self, folder: Path, said: Mapping[str, Any]) -> None:
        checkpoint.save(
            folder,
            self.module,
            self._optimizer,
            self._counters,
            said,
            samples_of(self._learned_from),
            algorithm=self._algorithm,
            normaliser=self.normaliser,
            observed=self._paths,
        )

    def _publish(self, publisher: Publisher, learned: int = 0) -> None:
        """Publishes the weights; ``learned``: steps of the newest update, which are not counted yet."""
        weights = checkpoint.acting_weights(self.module, self.normaliser, self._paths)
        self._counters.policy_version = publisher.publish(weights, self._counters.env_steps + learned)
        self._published_at = self._counters.updates

    def _until_end(self, stream: Iterator[Ready]) -> Reason:
        counters, ranks, evaluation = self._counters, self._ranks, self._evaluation
        if counters.env_steps >= self.config.num_steps:  # a trial that is resumed only to be finished
            return "num_steps"
        waiting_since = time.monotonic()
        while True:
            requested = time.time()
            ready = next(stream, None)
            if ready is not None:
                self.took()  # before the ranks wait for each other: another rank's batch may wait for this call
            # A rank whose stream has ended must announce it before the others wait for its gradients.
            _, over = agree(ranks, 0, ready is None)
            if ready is None or over:
                return "stream_ended"
            came, started = time.time() - ready.prepare_s, time.monotonic() - ready.prepare_s
            share = min(counters.env_steps / self.config.num_steps, 1.0)
            done = share if self.progress is None else self.progress()
            measured, learned = self._update(ready, done)
            reached = False
            if self._publisher is not None and self._algorithm.learned:
                if counters.updates % self.config.weights_publish_interval == 0:
                    self._publish(self._publisher, learned)
                ended = time.monotonic()
                self._record(ready, measured, learned, ended - started)
                record_waiting(self.numbers, ready, requested, came, started - waiting_since, ended - waiting_since)
                if evaluation.due(counters.updates):
                    for (name, label), value in evaluation.run(self._algorithm, done, counters.env_steps).items():
                        self.numbers.add(name, value, label=label)
                reached = self._reached()
            total, stop = agree(ranks, learned, reached)
            counters.env_steps += total
            self._clock()
            if stop:
                return "target_return"
            if counters.env_steps >= self.config.num_steps:
                return "num_steps"
            if self._algorithm.learned:
                if self._publisher is not None:
                    self._saver.save_in_turn(self._score)
                waiting_since = time.monotonic()

    def _update(self, ready: Ready, done: float) -> tuple[dict[str, float], int]:
        """Updates from a batch; returns the measured values, and the number of steps learned from."""
        algorithm = self._algorithm
        check_batch(self.config.algorithm, ready.tensors)
        self._cores.begin(ready.ready_at_s if self._lag else None)  # None: what it learned from was not ahead
        # The first moments come before the first update, when the policy depends on no observation yet. Later ones come
        # after it: a batch is learned from as it was acted.
        first = is_fresh(self.module)
        if first:
            self._follow(ready)
        try:
            measured = algorithm.update(ready.tensors, done)
        except ValueError as error:  # the next batch would fail the same way
            message = f"algorithm {self.config.algorithm.name!r} cannot learn from this: {first_line(error)}"
            raise ModelError(message) from error
        except Exception as error:
            if self.config.algorithm.module is None or isinstance(error, BrayxError):
                raise
            raise ModelError(failure(self.config.algorithm, error)) from error
        _refuse_divergence(measured, ready, self.module, self._counters.updates)
        learned = 0
        if algorithm.learned:  # otherwise the algorithm only kept the batch
            if not first:
                self._follow(ready)
            self._counters.updates += 1
            self._saved = False
            self._learned_from = ready.batch
            learned = int(ready.batch["mask"].sum()) if algorithm.counts else 0
        if self.feedback is not None and algorithm.priorities is not None:
            self.feedback(ready.batch["index"], algorithm.priorities.cpu().numpy())
        return measured, learned

    def _follow(self, ready: Ready) -> None:
        """Adds a batch to the moments that the network keeps."""
        follow(self.module, ready.tensors["obs"], ready.tensors["mask"], self._ranks.sum)

    def _record(self, ready: Ready, measured: dict[str, float], learned: int, seconds: float) -> None:
        version = self._counters.policy_version
        if learned and self.config.algorithm.imitates != "everything":  # no version of this model acted
            self._lag = measured["lag_versions"] = self._version_at_start - _version(ready.batch)
        self._version_at_start = version
        for name, value in (measured | {"updates": 1, "policy_version": version, "update_seconds": seconds}).items():
            self.numbers.add(name if name in METRICS else f"learner/{name}", value)
        self._shapes.record_in_turn(ready.batch, self._algorithm, self.module)

    def _reached(self) -> bool:
        self._look()
        target = self.config.target_return
        return self._score is not None and target is not None and self._score.mean >= target

    def _look(self) -> None:
        self._newest = self.numbers.newest()
        self._score = _score(self._newest, self.config.target_games)

    def _clock(self) -> None:
        """Counts the time of the training; rank 0 records it."""
        self._counters.seconds = time.monotonic() - self._began
        if self._publisher is not None:
            self.numbers.add(SECONDS, self._counters.seconds)

    def _save_last(self, publisher: Publisher, reason: Reason) -> None:
        counters = self._counters
        if self._saved:  # without an update since the checkpoint, whose return would be lost with it
            return
        self._clock()
        if counters.updates != self._published_at:  # new weights would make waiting workers collect once more
            self._publish(publisher)
        deadline = time.monotonic() + (_LAST_RETURNS_S if reason == "num_steps" else _NUMBERS_LATE_S)
        late = self.progress is not None  # this process plays the games, too, so the numbers are exact
        while self._score is None and not late:
            time.sleep(0.05)
            late = time.monotonic() >= deadline
            self._look()
        self._saver.save(self._score)


def record_waiting(
    numbers: LearnerNumbers, ready: Ready, requested: float, came: float, waited_s: float, total_s: float
) -> None:
    """Records the share of an update's time spent waiting, and the share spent although the buffer had a batch.

    Both are weighted by the time, so that means over many updates are shares of their whole time. ``requested`` and
    ``came`` are Unix times, as is the time at which the batch became ready.
    """
    total_s = max(total_s, 1e-9)
    numbers.add("learner_wait_fraction", min(waited_s / total_s, 1.0), weight=total_s)
    if ready.ready_at_s is not None:
        idle_s = min(max(came - max(ready.ready_at_s, requested), 0.0), waited_s)
        not_empty_s = max(total_s - (waited_s - idle_s), 1e-9)
        numbers.add("learner_idle_fraction", idle_s / not_empty_s, weight=not_empty_s)


def _refuse_divergence(measured: Mapping[str, float], ready: Ready, module: nn.Module, updates: int) -> None:
    """Raises `Diverged` if a loss is not finite; names other values that are not, as possible causes."""
    losses = {name: value for name, value in measured.items() if name == "loss" or name.endswith("_loss")}
    bad = [name for name, value in losses.items() if not math.isfinite(value)]
    if not bad:
        return
    fields = [
        key
        for key, array in ready.batch.items()
        if np.issubdtype(array.dtype, np.floating) and not np.isfinite(array).all()
    ]
    weights = [name for name, array in module_weights(module).items() if not np.isfinite(array).all()]
    also = [f"in the batch {', '.join(fields)}"] if fields else []
    also += [f"{len(weights)} weights, {weights[0]} first"] if weights else []
    rewards = ready.batch.get("reward_heads", ready.batch["reward"])
    largest = float(np.abs(rewards).max(initial=0.0, where=np.isfinite(rewards)))
    why = (
        f"; the batch's rewards reach {largest:.3g}, which losses square: expected small rewards, by normalise_reward, "
        "reward_clip or another unit in the environment"
        if largest > _LARGE_REWARD
        else "; lower learning_rate, and run the same command again: it continues from the last checkpoint"
    )
    raise Diverged(
        f"training diverged at update {updates + 1}: {bad[0]} is {losses[bad[0]]}{why}"
        + (f"; not finite either: {'; '.join(also)}" if also else ""),
        losses=bad,
        fields=fields,
        weights=weights[:8],
    )


def _version(batch: Batch) -> float:
    """Mean policy version of the steps learned from."""
    return float(batch["policy_version"][batch["mask"] > 0].mean())


def _score(newest: Mapping[str, float], games: int) -> PolicyScore | None:
    """The mean return of the window, once it has enough games; None before.

    After a resume it needs as many as the trial had before: the best of its early means would be a lucky one.
    """
    window, mean, total = int(newest.get(WINDOW_METRIC, 0)), newest.get(RETURN_METRIC), newest.get(GAMES_METRIC, 0)
    refilled = window + newest.get(FAILED_IN_WINDOW, 0) >= min(total - window, WINDOW_GAMES)
    enough = total >= games and window >= min(games, WINDOW_GAMES) and refilled
    return PolicyScore(mean, window, newest.get(RETURN_ERROR)) if enough and mean is not None else None
