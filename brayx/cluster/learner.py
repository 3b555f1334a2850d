"""Where the learner runs: in a thread of the job, or in the ranks of a `TorchTrainer`. Same loop, same checkpoints.

Only `LearnerSpec` travels; each process opens the buffer, the weight store, the hub and the trial by name. Knows
nothing of algorithms.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
import torch
from torch import nn

from brayx.cluster.hub import HubClient, get_hub
from brayx.cluster.named import is_done, result_or
from brayx.cluster.shards import Shards
from brayx.cluster.stream import Buffers, Stream, batches_of, read_buffer, replay_dataset, weights_of
from brayx.cluster.weights import WeightPublisher, get_weight_store
from brayx.errors import BrayxError, ConfigError, ModelError, StartupError, first_line
from brayx.metrics import BEST_METRIC
from brayx.replay.packing import Batch
from brayx.tracking import Trial
from brayx.trainer.checkpoint import Normaliser
from brayx.trainer.config import TrainerConfig
from brayx.trainer.fits import built_to_learn
from brayx.trainer.hooks import Hooks, load_hooks
from brayx.trainer.loop import Summary, learn
from brayx.trainer.prefetch import close
from brayx.trainer.ranks import Alone, Processes, Ranks
from brayx.types import Weights

log = logging.getLogger(__name__)

_DATASET = "replay"
_FINAL = (ConfigError, ModelError)
"""What would only fail again, weights that diverged to NaN included."""


@dataclass(frozen=True)
class LearnerSpec:
    """Everything a learner needs to know; picklable, names and numbers only.

    Attributes:
        config: options.
        model_name: name of the model component, passed to ``build_model``.
        model_module: import path of the module that has ``build_model(name, config)``.
        model_folder: looked in first for it, and for hooks; empty: nowhere else.
        model_config: passed to ``build_model``.
        namespace: Ray namespace of the three actors below.
        buffer: name of the buffer, or names of several with their weights.
        weight_store: name of the weight store actor.
        hub: name of the trial's hub.
        trial: the MLflow run.
        eval_buffers: names of the actors of buffers that are measured, by component.
        normaliser: opens the moments that checkpoints hold, which others gather; picklable. None: there are none.
        seed: of the learner's random generators and the initial weights.
        about: JSON values for ``meta.json`` of checkpoints: the job's configuration, say.
    """

    config: TrainerConfig
    model_name: str
    model_module: str
    namespace: str
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


class TrialNumbers(HubClient):
    """`loop.Numbers` over a trial's hub. `newest` is at most half a second old, when the hub answers."""

    def __init__(self, hub: Any, every_s: float = 0.5) -> None:
        super().__init__(hub)
        self._hub = hub
        self._every_s = every_s
        self._newest: Mapping[str, float] = {}
        self._asked: Any = None
        self._asked_at = 0.0

    def newest(self) -> Mapping[str, float]:
        """The hub's newest snapshot that has arrived."""
        if self._asked is not None and is_done(self._asked):
            self._newest = result_or(self._newest, self._asked)  # the same while the hub is being restarted
            self._asked = None
        if self._asked is None and time.monotonic() - self._asked_at >= self._every_s:
            self._asked, self._asked_at = self._hub.snapshot.remote(), time.monotonic()
        return self._newest


class TrialKeeper:
    """`loop.Keeper` over a trial: its newest checkpoints and its best."""

    def __init__(self, trial: Trial, kept: int) -> None:
        self._trial = trial
        self._kept = kept

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


def run_learner(spec: LearnerSpec, batches: Stream, ranks: Ranks) -> Summary:
    """Opens what ``spec`` names and learns from ``batches`` until the end, which the buffer is told.

    Raises:
        ConfigError: the model module is missing or is not one, or the hooks are.
        ModelError: the model does not give what is learned from, or a hook failed; `Diverged`: training did.
        ReplayError, StartupError, TrackingError: an actor or the trial is not there.
    """
    torch.manual_seed(spec.seed + ranks.rank)
    module, forward_args = learned_model(spec)
    hooks = load_hooks(spec.config.hooks, spec.model_folder) if spec.config.hooks else Hooks()
    store = get_weight_store(spec.weight_store, spec.namespace)
    numbers = TrialNumbers(get_hub(spec.hub, spec.namespace))
    # Ranks need each other's batches under way, and prefetching asks ahead.
    batches.holds = ranks.size == 1 and not spec.config.prefetch
    batches.readers = ranks.size
    evaluated = {name: _acknowledged(actor, spec.namespace) for name, actor in spec.eval_buffers.items()}
    try:
        measured = [Shards.find(actor, namespace=spec.namespace) for actor in spec.eval_buffers.values()]
        summary = learn(
            spec.config,
            module,
            forward_args,
            batches=batches,
            took=batches.took,
            publisher=lambda newest: _Publisher(WeightPublisher(store, last_version=newest), batches),
            numbers=numbers,
            keeper=TrialKeeper(spec.trial, spec.config.checkpoints_kept),
            ranks=ranks,
            about=spec.about,
            hooks=hooks,
            feedback=batches.update_priorities,
            eval_batches=evaluated,
            normaliser=None if spec.normaliser is None else spec.normaliser(),
            resumed=lambda learned: setattr(batches, "before", learned),
        )
        # So that nobody plays on while Ray Train takes its ranks down, and who waits for a batch comes back. All were
        # found at the start: a shard that hangs now would hold up the end.
        batches.end()
        for shards in measured:
            shards.end()
        return summary
    finally:
        close(batches)
        for stream in evaluated.values():
            close(stream)
        numbers.close()


class _Publisher:
    """`loop.Publisher` that has the buffers count by what was published."""

    def __init__(self, publisher: WeightPublisher, batches: Stream) -> None:
        self._publisher, self._batches = publisher, batches

    def publish(self, weights: Weights, step: int) -> int:
        """As `WeightPublisher.publish`."""
        version = self._publisher.publish(weights, step)
        self._batches.published(version)
        return version


def _acknowledged(buffer: str, namespace: str) -> Generator[Batch]:
    """Batches of a buffer that nobody learns from: whoever asks for the next has done with the last."""
    stream = read_buffer(buffer, namespace)
    try:
        for batch in stream:
            yield batch
            stream.took()
    finally:
        stream.close()


def learned_model(spec: LearnerSpec) -> tuple[nn.Module, tuple[Any, ...]]:
    """Module and example arguments, by the user's ``build_model``.

    Raises:
        ConfigError: names what is wrong with it.
        ModelError: it raised, does not give what the algorithm learns from, or fails on its own example.
    """
    module, forward_args, _ = built_to_learn(
        spec.config, spec.model_name, spec.model_module, spec.model_folder, spec.model_config
    )
    return module, forward_args


def train_worker(spec: LearnerSpec) -> Summary | BrayxError:
    """What each rank of a `TorchTrainer` runs. Gives an error that would only come again: one raised is tried again.

    Where other ranks wait for this one only raising ends them; so it is kept at the buffer, and given by all of them
    when they start again.
    """
    import ray.train

    first = Shards.find(next(iter(weights_of(spec.buffer))), namespace=spec.namespace)
    failed = first.failure()
    if failed is not None:
        return failed
    ranks = train_ranks()
    try:
        return run_learner(spec, batches_of(ray.train.get_dataset_shard(_DATASET), spec.buffer, spec.namespace), ranks)
    except _FINAL as error:
        if ranks.size == 1:
            return error
        first.fail(error)
        raise


def fit(spec: LearnerSpec, storage_path: str) -> Summary:
    """Learns in a `TorchTrainer` fed by Ray Data, until the end.

    Ray Train counts failures over the whole of a run, which would end a job of days by what happens once a day. So one
    that fails after more than ``failure_window_s`` is followed by another, which counts from 0.

    Args:
        spec: what to learn.
        storage_path: folder where Ray Train keeps its own records; checkpoints go to the trial, not here.

    Raises:
        BrayxError: the learner failed in a way that would only come again.
        ray.train.TrainingFailedError: the ranks failed, or could not start, more often than ``max_failures`` allows, in
            a run that was younger than ``failure_window_s``.
    """
    from ray.train import TrainingFailedError

    while True:
        began = time.monotonic()
        try:
            result: Summary | BrayxError = _trainer(spec, storage_path).fit().return_value  # of rank 0
        except TrainingFailedError as error:
            lasted_s = time.monotonic() - began
            # Ray may have gone with the job: whoever calls it then starts another one.
            if lasted_s < spec.config.failure_window_s or not ray.is_initialized():
                raise
            log.warning("%s; it went on for %.0f s, so ranks are started again", failure(error).message, lasted_s)
            continue
        if isinstance(result, BrayxError):
            raise result
        return result


def _trainer(spec: LearnerSpec, storage_path: str) -> Any:
    from ray.train import DataConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    config = spec.config
    dataset = replay_dataset(spec.buffer, namespace=spec.namespace)
    return TorchTrainer(
        lambda: train_worker(spec),  # type: ignore[arg-type]  # what it returns becomes `return_value`
        scaling_config=ScalingConfig(
            num_workers=config.num_workers,
            use_gpu=config.use_gpu,
            resources_per_worker={"CPU": config.cpus_per_worker or 0.01, **({"GPU": 1} if config.use_gpu else {})},
        ),
        run_config=RunConfig(
            name=spec.trial.run_id,
            storage_path=storage_path,
            # Without a limit of its own, ranks that cannot start are tried for ever, a minute each.
            failure_config=FailureConfig(  # type: ignore[call-arg]  # the checker sees the one of Train's first version
                max_failures=config.max_failures, controller_failure_limit=config.max_failures
            ),
        ),
        datasets={_DATASET: dataset},
        # Else Ray Train takes the process's options for the dataset's, which keep the order; and a splitter that minds
        # locality may hold back a batch until more come, of which there are none before this one is taken.
        dataset_config=DataConfig(execution_options=dataset.context.execution_options, enable_shard_locality=False),
    )


class Learner:
    """A learner at work in the background.

    Args:
        spec: what to learn.
        storage_path: folder for Ray Train's records.
    """

    def __init__(self, spec: LearnerSpec, storage_path: str) -> None:
        self._spec = spec
        # Now: a shard that hangs when it is to stop would hold that up.
        self._shards = [Shards.find(name, namespace=spec.namespace) for name in weights_of(spec.buffer)]
        self._summary: Summary | None = None
        self._error: BaseException | None = None
        work: Callable[[], Summary]
        if spec.config.in_process:
            work = lambda: run_learner(spec, read_buffer(spec.buffer, spec.namespace), Alone(spec.config.use_gpu))  # noqa: E731
        else:
            work = lambda: fit(spec, storage_path)  # noqa: E731
        self._thread = threading.Thread(target=self._run, args=(work,), name="brayx-learner", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether it is still learning."""
        return self._thread.is_alive()

    def state(self) -> str:
        """What it is at, in a few words for people who wait for it."""
        if not self.running:
            return "has ended"
        found = None
        with contextlib.suppress(StartupError):
            store = get_weight_store(self._spec.weight_store, self._spec.namespace)
            found = result_or(None, store.newest.remote(), 5.0)
        if found is not None:
            return f"has published weights, version {found[0]}"
        config = self._spec.config
        if config.in_process:
            return "has published no weights yet"
        asked = f"{config.cpus_per_worker:g} CPU" + (" and a GPU" if config.use_gpu else "")
        free = ray.available_resources()  # type: ignore[no-untyped-call]
        left = f"{free.get('CPU', 0):g} CPU and {free.get('GPU', 0):g} GPU"
        return f"has published no weights yet: ranks: {config.num_workers}, each needs {asked}; Ray has {left} free"

    def stop(self) -> None:
        """Ends its stream: it saves a last checkpoint and is done. Does not wait."""
        for shards in self._shards:
            shards.end()

    def result(self, timeout_s: float | None = None) -> Summary | None:
        """The summary once it is done; None if that takes longer than ``timeout_s``.

        Raises:
            BrayxError: what the learner failed with; `StartupError` for what is not ours, with its cause chained.
        """
        self._thread.join(timeout_s)
        if self._error is not None:
            raise failure(self._error) from self._error
        return self._summary

    def _run(self, work: Callable[[], Summary]) -> None:
        try:
            self._summary = work()
        except BaseException as error:
            self._error = error


def failure(error: BaseException) -> BrayxError:
    """What a learner failed with, in one line: the typed error inside Ray's wrappers, else the innermost they wrap."""
    for inner in _inside(error):
        if isinstance(inner, BrayxError):
            return type(inner)(f"the learner failed: {inner.message}", **inner.details)
    while wrapped := _wrapped(error):
        error = wrapped[0]
    return StartupError(f"the learner failed: {type(error).__name__}: {first_line(error)}")


def _inside(error: BaseException) -> Iterator[BaseException]:
    """The error, what is wrapped in it, of every rank, and what those came of."""
    waiting, seen = [error], set[int]()
    while waiting:
        error = waiting.pop(0)
        if id(error) not in seen:
            seen.add(id(error))
            yield error
            waiting += _wrapped(error) or ([error.__cause__] if error.__cause__ is not None else [])


def _wrapped(error: BaseException) -> list[BaseException]:
    """What Ray, or Ray Train, carries in an error of its own."""
    failures: Mapping[int, BaseException] = getattr(error, "worker_failures", None) or {}
    found = [*failures.values(), getattr(error, "controller_failure", None), getattr(error, "cause", None)]
    return [each for each in found if isinstance(each, BaseException)]
