"""Runs the learner in a thread of the job, or in the ranks of a `TorchTrainer`, with the same loop and checkpoints.

Only `LearnerSpec` travels; each process opens the buffer, the weight store, the hub and the trial by name. Knows
nothing of algorithms.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
import torch
from torch import nn

from brayx.cluster.hub import HubClient
from brayx.cluster.named import WEIGHT_STORE, get_actor, is_done, result_or
from brayx.cluster.shards import Shards
from brayx.cluster.stream import Buffers, Stream, batches_of, read_buffer, replay_dataset, weights_of
from brayx.cluster.weights import WeightPublisher
from brayx.engines.layers import layer_table
from brayx.errors import BrayxError, ConfigError, ModelError, StartupError, TrackingError
from brayx.jobs.trainee import LearnerThread, learner_failed
from brayx.metrics import BEST_METRIC
from brayx.replay.packing import Batch
from brayx.rollout.worker import FAILURE_WINDOW_S
from brayx.tracking import Trial
from brayx.tracking.pending import BackgroundKeeper
from brayx.tracking.tensorboard import LAYERS_FILE
from brayx.trainer.checkpoint import Normaliser, start_from
from brayx.trainer.config import TrainerConfig
from brayx.trainer.fits import built_to_learn
from brayx.trainer.hooks import Hooks, load_hooks
from brayx.trainer.loop import LearnerLoop, TrainingSummary
from brayx.trainer.prefetch import close
from brayx.trainer.ranks import Alone, Processes, Ranks
from brayx.types import Weights

log = logging.getLogger(__name__)

_DATASET = "replay"
_FINAL = (ConfigError, ModelError)
"""Errors that a retry would only repeat, including weights that diverged to NaN."""


@dataclass(frozen=True)
class LearnerSpec:
    """The settings of a learner; picklable, names and numbers only.

    Attributes:
        config: options.
        model_name: name of the model component, passed to ``build_model``.
        model_module: import path of the module with ``build_model(name, config)``.
        model_folder: folder searched first for that module and for hooks; empty: none.
        model_config: passed to ``build_model``.
        buffer: name of the buffer, or names of several with their weights.
        weight_store: name of the weight store actor.
        hub: name of the trial's hub.
        trial: the MLflow run.
        eval_buffers: actor names of the buffers used for evaluation, by component.
        normaliser: opens the moments that rollout workers gather and checkpoints save; picklable. None: none.
        seed: seed of the learner's random generators and the initial weights.
        about: JSON values for ``meta.json`` of checkpoints, such as the job's configuration.
        initial_weights: weights to start from; None: the seed's.
    """

    config: TrainerConfig
    model_name: str
    model_module: str
    buffer: Buffers
    weight_store: str
    hub: str
    trial: Trial
    model_folder: str = ""
    model_config: Mapping[str, Any] = field(default_factory=dict)
    eval_buffers: Mapping[str, str] = field(default_factory=dict)
    normaliser: Callable[[], Normaliser] | None = None
    seed: int = 0
    about: Mapping[str, Any] = field(default_factory=dict)
    initial_weights: Weights | None = None


class TrialNumbers(HubClient):
    """`loop.Numbers` over a trial's hub. Thread safe. `newest` is at most half a second old, when the hub answers."""

    def __init__(self, hub: Any, every_s: float = 0.5) -> None:
        super().__init__(hub)
        self._hub = hub
        self._every_s = every_s
        self._newest: Mapping[str, float] = {}
        self._request: Any = None
        self._requested_at = 0.0

    def newest(self) -> Mapping[str, float]:
        """The hub's newest snapshot that has arrived."""
        request = self._request  # the learner and the progress may call this at the same time
        if request is not None and is_done(request):
            self._newest = result_or(self._newest, request)  # unchanged while the hub restarts
            self._request = request = None
        if request is None and time.monotonic() - self._requested_at >= self._every_s:
            self._request, self._requested_at = self._hub.snapshot.remote(), time.monotonic()
        return self._newest


class CheckpointKeeper:
    """`loop.Keeper` over a trial: its newest checkpoints and its best."""

    def __init__(self, trial: Trial, checkpoints_kept: int) -> None:
        self._trial = trial
        self._kept = checkpoints_kept

    def save(self, folder: Path, step: int, metrics: Mapping[str, float]) -> None:
        """Copies ``folder`` into the trial, then prunes."""
        self._trial.save_checkpoint(folder, step, metrics)
        self._trial.prune_checkpoints(self._kept, best_by=BEST_METRIC)

    def latest(self) -> Path | None:
        """The trial's newest whole checkpoint."""
        return self._trial.latest_checkpoint()


def train_ranks() -> Ranks:
    """The ranks of the Ray Train worker group that this process is one of."""
    import ray.train
    import ray.train.torch

    device = ray.train.torch.get_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if ray.train.get_context().get_world_size() > 1:
        return Processes(device)
    alone = Alone()
    alone.device = device
    return alone


def run_learner(spec: LearnerSpec, batches: Stream, ranks: Ranks, numbers: TrialNumbers) -> TrainingSummary:
    """Opens the actors that ``spec`` names, learns from ``batches`` until training ends, and then ends the buffers.

    Args:
        spec: the learner's settings.
        batches: the batches to learn from.
        ranks: the learner's ranks, of which this process is one.
        numbers: recorder of this process.

    Raises:
        ConfigError: the model module or the hooks are missing or invalid.
        ModelError: the model lacks outputs that the algorithm needs, or a hook failed; `Diverged`: training diverged.
        ReplayError, StartupError, TrackingError: an actor or the trial does not exist.
    """
    torch.manual_seed(spec.seed + ranks.rank)
    module, forward_args = learned_model(spec)
    if spec.initial_weights is not None:
        start_from(module, spec.initial_weights)
    if ranks.rank == 0:
        with contextlib.suppress(TrackingError):  # a store that is down for a while does not end a training
            spec.trial.log_text(layer_table(module, forward_args), LAYERS_FILE)
    hooks = load_hooks(spec.config.hooks, spec.model_folder) if spec.config.hooks else Hooks()
    store = get_actor(spec.weight_store, WEIGHT_STORE)
    # Several ranks each need a batch at the same time, and prefetching requests batches early.
    batches.holds = ranks.size == 1 and not spec.config.prefetch
    batches.readers = ranks.size
    evaluated = {name: _acknowledged(actor) for name, actor in spec.eval_buffers.items()}
    checkpoints_kept = spec.config.checkpoints_kept
    failed = functools.partial(numbers.add, "checkpoints_failed", 1)
    try:
        measured = [Shards.find(actor) for actor in spec.eval_buffers.values()]
        with BackgroundKeeper(CheckpointKeeper(spec.trial, checkpoints_kept), checkpoints_kept, failed) as keeper:
            summary = LearnerLoop(
                spec.config,
                module,
                forward_args,
                batches=batches,
                took=batches.took,
                publisher=lambda newest: WeightPublisher(store, last_version=newest, published=batches.published),
                numbers=numbers,
                keeper=keeper,
                ranks=ranks,
                about=spec.about,
                hooks=hooks,
                feedback=batches.update_priorities,
                eval_batches=evaluated,
                normaliser=None if spec.normaliser is None else spec.normaliser(),
                resumed=lambda learned: setattr(batches, "before", learned),
            ).run()
            # End all buffers: this stops rollouts while Ray Train shuts its ranks down, and wakes ranks that wait for a
            # batch. The shards were found at the start, because finding one that hangs now would delay the end.
            batches.end()
            for shards in measured:
                shards.end()
        return summary
    finally:
        close(batches)
        for stream in evaluated.values():
            close(stream)


def _acknowledged(buffer: str) -> Generator[Batch]:
    """Batches of an evaluation buffer; each is acknowledged when the next one is requested."""
    stream = read_buffer(buffer)
    try:
        for batch in stream:
            yield batch
            stream.took()
    finally:
        stream.close()


def learned_model(spec: LearnerSpec) -> tuple[nn.Module, tuple[Any, ...]]:
    """Calls the user's ``build_model``; returns the module and its example arguments.

    Raises:
        ConfigError: ``build_model`` is missing or returned something else; names the fault.
        ModelError: it raised, its model lacks outputs that the algorithm needs, or fails on its example.
    """
    module, forward_args, _ = built_to_learn(
        spec.config, spec.model_name, spec.model_module, spec.model_folder, spec.model_config
    )
    return module, forward_args


def train_worker(spec: LearnerSpec) -> TrainingSummary | BrayxError:
    """The function that each rank of a `TorchTrainer` runs. Returns a permanent error, because Ray retries raised ones.

    With several ranks, only a raised error ends the ranks that wait for this one. So it is also stored in the buffer,
    and after the restart all ranks return it.
    """
    import ray.train

    first = Shards.find(next(iter(weights_of(spec.buffer))))
    failed = first.failure()
    if failed is not None:
        return failed
    ranks = train_ranks()
    batches = batches_of(ray.train.get_dataset_shard(_DATASET), spec.buffer)
    try:
        with contextlib.closing(TrialNumbers.of(spec.hub)) as numbers:
            return run_learner(spec, batches, ranks, numbers)
    except _FINAL as error:
        if ranks.size == 1:
            return error
        first.fail(error)
        raise


def fit(spec: LearnerSpec, storage_path: str) -> TrainingSummary:
    """Learns in a `TorchTrainer` fed by Ray Data, until training ends.

    Ray Train counts failures over the whole run, so one failure a day would end a job of many days. So if a run fails
    after more than `FAILURE_WINDOW_S`, this starts another run, which counts from 0.

    Args:
        spec: the learner's settings.
        storage_path: folder for Ray Train's own records; checkpoints go to the trial instead.

    Raises:
        BrayxError: the learner failed with an error that a retry would only repeat.
        ray.train.TrainingFailedError: within `FAILURE_WINDOW_S`, the ranks failed or could not start more often than
            ``max_failures`` allows.
    """
    from ray.train import TrainingFailedError

    while True:
        began = time.monotonic()
        try:
            result: TrainingSummary | BrayxError = _trainer(spec, storage_path).fit().return_value  # of rank 0
        except TrainingFailedError as error:
            lasted_s = time.monotonic() - began
            # Ray may have ended with the job; a call would then start another cluster.
            if lasted_s < FAILURE_WINDOW_S or not ray.is_initialized():
                raise
            log.warning("%s; it went on for %.0f s, so ranks are started again", failure(error).message, lasted_s)
            continue
        if isinstance(result, BrayxError):
            raise result
        return result


def _trainer(spec: LearnerSpec, storage_path: str) -> Any:
    from ray.train import DataConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from brayx.cluster.ray_train import NodeNetwork, RankFailures  # loads Ray Train, which takes seconds

    config = spec.config
    dataset = replay_dataset(spec.buffer)
    return TorchTrainer(
        lambda: train_worker(spec),  # type: ignore[arg-type]  # its result becomes `return_value`
        torch_config=NodeNetwork(),
        scaling_config=ScalingConfig(
            num_workers=config.num_workers,
            use_gpu=config.use_gpu,
            resources_per_worker={"CPU": config.cpus_per_worker or 0.01, **({"GPU": 1} if config.use_gpu else {})},
        ),
        run_config=RunConfig(
            name=spec.trial.run_id,
            storage_path=storage_path,
            callbacks=[RankFailures(spec.hub)],  # type: ignore[list-item]  # mypy sees the first version's class
            # Without this limit, ranks that cannot start are retried forever, a minute each.
            failure_config=FailureConfig(  # type: ignore[call-arg]  # mypy sees the class of Ray Train's first version
                max_failures=config.max_failures, controller_failure_limit=config.max_failures
            ),
        ),
        datasets={_DATASET: dataset},
        # By default Ray Train uses the process's options, which preserve order. And with locality a splitter may hold
        # a batch back until more arrive, but none arrives before this one is taken.
        dataset_config=DataConfig(execution_options=dataset.context.execution_options, enable_shard_locality=False),
    )


class Learner(LearnerThread):
    """A learner that runs in the background, from `start` on.

    Args:
        spec: the learner's settings.
        storage_path: folder for Ray Train's records.
        numbers: recorder of this process, used if the learner is in it.
    """

    def __init__(self, spec: LearnerSpec, storage_path: str, numbers: TrialNumbers) -> None:
        super().__init__()
        self._spec, self._storage_path, self._numbers = spec, storage_path, numbers
        # Find the shards now: finding one that hangs would delay `stop`.
        self._shards = [Shards.find(name) for name in weights_of(spec.buffer)]

    def learn(self) -> TrainingSummary:
        """See `LearnerThread.learn`."""
        spec = self._spec
        if not spec.config.in_process:
            return fit(spec, self._storage_path)
        return run_learner(spec, read_buffer(spec.buffer), Alone(spec.config.use_gpu), self._numbers)

    def failure(self, error: BaseException) -> BrayxError:
        """See `LearnerThread.failure`."""
        return failure(error)

    def state(self) -> str:
        """A few words about its state, for display."""
        if not self.running:
            return "has ended"
        newest = None
        with contextlib.suppress(StartupError):
            store = get_actor(self._spec.weight_store, WEIGHT_STORE)
            newest = result_or(None, store.newest.remote(), 5.0)
        if newest is not None:
            return f"has published weights, version {newest[0]}"
        config = self._spec.config
        if config.in_process:
            return "has published no weights yet"
        needed = f"{config.cpus_per_worker:g} CPU" + (" and a GPU" if config.use_gpu else "")
        free = ray.available_resources()  # type: ignore[no-untyped-call]
        left = f"{free.get('CPU', 0):g} CPU and {free.get('GPU', 0):g} GPU"
        return f"has published no weights yet: ranks: {config.num_workers}, each needs {needed}; Ray has {left} free"

    def stop(self) -> None:
        """Ends its stream; the learner then saves a last checkpoint and ends. Does not wait."""
        for shards in self._shards:
            shards.end()


def failure(error: BaseException) -> BrayxError:
    """A learner's error in one line: brayx's error inside Ray's wrappers, or otherwise the innermost error."""
    for inner in _inside(error):
        if isinstance(inner, BrayxError):
            return learner_failed(inner)
    while wrapped := _wrapped(error):
        error = wrapped[0]
    return learner_failed(error)


def _inside(error: BaseException) -> Iterator[BaseException]:
    """Iterates over the error, the errors wrapped in it (of every rank), and their causes."""
    waiting, seen = [error], set[int]()
    while waiting:
        error = waiting.pop(0)
        if id(error) not in seen:
            seen.add(id(error))
            yield error
            waiting += _wrapped(error) or ([error.__cause__] if error.__cause__ is not None else [])


def _wrapped(error: BaseException) -> list[BaseException]:
    """The errors inside an error of Ray or Ray Train."""
    failures: Mapping[int, BaseException] = getattr(error, "worker_failures", None) or {}
    errors = [*failures.values(), getattr(error, "controller_failure", None), getattr(error, "cause", None)]
    return [wrapped for wrapped in errors if isinstance(wrapped, BaseException)]
