"""Where the learner runs: in a thread of the job, or in the ranks of a `TorchTrainer`. Same loop, same checkpoints.

`LearnerSpec` is all that travels; each process opens the buffer, the weight store, the hub and the trial by name.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
import torch
from torch import nn

from brayx.components import load
from brayx.errors import BrayxError, ConfigError, StartupError
from brayx.hub import HubClient, get_hub
from brayx.model.weights import WeightPublisher, get_weight_store
from brayx.replay.buffer import get_buffer
from brayx.replay.packing import Batch
from brayx.replay.source import batches_of, read_buffer, replay_dataset
from brayx.tracking import Trial
from brayx.trainer.config import TrainerConfig
from brayx.trainer.loop import BEST_METRIC, Alone, Ranks, Summary, learn

_POLL_S = 0.25
_DATASET = "replay"


@dataclass(frozen=True)
class LearnerSpec:
    """Everything a learner needs to know; picklable, names and numbers only.

    Attributes:
        config: options.
        model_name: name of the model component, passed to ``build_model``.
        model_module: import path of the module that has ``build_model(name, config)``.
        model_folder: looked in first for it; empty: nowhere else.
        model_config: passed to ``build_model``.
        namespace: Ray namespace of the three actors below.
        buffer: name of the buffer actor.
        weight_store: name of the weight store actor.
        hub: name of the trial's hub.
        trial: the MLflow run.
        seed: of the learner's random generators and the initial weights.
        about: JSON values for ``meta.json`` of checkpoints: the job's configuration, say.
    """

    config: TrainerConfig
    model_name: str
    model_module: str
    namespace: str
    buffer: str
    weight_store: str
    hub: str
    trial: Trial
    model_folder: str = ""
    model_config: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    about: Mapping[str, Any] = field(default_factory=dict)


class TrialNumbers:
    """`loop.Numbers` over a trial's hub. `newest` is at most half a second old, when the hub answers."""

    def __init__(self, hub: Any, every_s: float = 0.5) -> None:
        self._hub = hub
        self._client = HubClient(hub)
        self._every_s = every_s
        self._newest: Mapping[str, float] = {}
        self._asked: Any = None
        self._asked_at = 0.0

    def add(self, name: str, value: float) -> None:
        """Records one sample."""
        self._client.add(name, value)

    def newest(self) -> Mapping[str, float]:
        """The hub's newest snapshot that has arrived."""
        if self._asked is not None and ray.wait([self._asked], timeout=0)[0]:
            with contextlib.suppress(ray.exceptions.RayError):  # the hub is being restarted: ask again
                self._newest = ray.get(self._asked)
            self._asked = None
        if self._asked is None and time.monotonic() - self._asked_at >= self._every_s:
            self._asked, self._asked_at = self._hub.snapshot.remote(), time.monotonic()
        return self._newest

    def close(self) -> None:
        """Hands over what is left."""
        self._client.close()


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


class TrainRanks:
    """`loop.Ranks` inside a Ray Train worker."""

    def __init__(self) -> None:
        import ray.train
        import ray.train.torch

        context = ray.train.get_context()
        self.rank = context.get_world_rank()
        self.size = context.get_world_size()
        self.device = ray.train.torch.get_device()

    def wrap(self, module: nn.Module) -> nn.Module:
        """The module on its device; under DDP when there are several ranks."""
        import ray.train.torch

        wrapped: nn.Module = ray.train.torch.prepare_model(module)
        return wrapped

    def agree(self, steps: int, stop: bool) -> tuple[int, bool]:
        """One all-reduce, when there are several ranks."""
        if self.size == 1:
            return steps, stop
        both = torch.tensor([steps, int(stop)], dtype=torch.int64, device=self.device)
        torch.distributed.all_reduce(both)
        return int(both[0]), bool(both[1])


def run_learner(spec: LearnerSpec, batches: Generator[Batch], ranks: Ranks) -> Summary:
    """Opens what ``spec`` names and learns from ``batches`` until the end.

    Raises:
        ConfigError: the model module is missing or is not one.
        ReplayError, StartupError, TrackingError: an actor or the trial is not there.
    """
    torch.manual_seed(spec.seed + ranks.rank)
    module, forward_args = build_model(spec)
    buffer = get_buffer(spec.buffer, namespace=spec.namespace)
    store = get_weight_store(spec.weight_store, spec.namespace)
    numbers = TrialNumbers(get_hub(spec.hub, spec.namespace))
    try:
        with contextlib.closing(batches) as stream:
            return learn(
                spec.config,
                module,
                forward_args,
                batches=stream,
                took=lambda: buffer.ack.remote(1),
                publisher=lambda newest: WeightPublisher(store, last_version=newest),
                numbers=numbers,
                keeper=TrialKeeper(spec.trial, spec.config.checkpoints_kept),
                ranks=ranks,
                about=spec.about,
            )
    finally:
        numbers.close()


def build_model(spec: LearnerSpec) -> tuple[nn.Module, tuple[Any, ...]]:
    """Module and example arguments, by the user's ``build_model``.

    Raises:
        ConfigError: names what is wrong with it.
    """
    built = load(spec.model_module, "build_model", spec.model_folder)(spec.model_name, dict(spec.model_config))
    if not (isinstance(built, tuple) and len(built) == 2 and isinstance(built[0], nn.Module)):
        raise ConfigError(
            f"{spec.model_module}.build_model must return (module, tuple of example arguments), got {built!r:.200}"
        )
    module, forward_args = built
    return module, tuple(forward_args)


def train_worker(spec: LearnerSpec) -> Summary:
    """What each rank of a `TorchTrainer` runs."""
    import ray.train

    return run_learner(spec, batches_of(ray.train.get_dataset_shard(_DATASET)), TrainRanks())


def fit(spec: LearnerSpec, storage_path: str) -> Summary:
    """Learns in a `TorchTrainer` fed by Ray Data, until the end.

    Args:
        spec: what to learn.
        storage_path: folder where Ray Train keeps its own records; checkpoints go to the trial, not here.

    Raises:
        StartupError: the ranks failed more often than ``max_failures`` allows; the cause is chained.
    """
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    config = spec.config
    trainer = TorchTrainer(
        lambda: train_worker(spec),  # type: ignore[arg-type]  # what it returns becomes `return_value`
        scaling_config=ScalingConfig(
            num_workers=config.num_workers,
            use_gpu=config.use_gpu,
            resources_per_worker={"CPU": config.cpus_per_worker or 0.01, **({"GPU": 1} if config.use_gpu else {})},
        ),
        run_config=RunConfig(
            name=spec.trial.run_id,
            storage_path=storage_path,
            failure_config=FailureConfig(max_failures=config.max_failures),
        ),
        datasets={_DATASET: replay_dataset(spec.buffer, namespace=spec.namespace)},
    )
    summary: Summary = trainer.fit().return_value  # type: ignore[attr-defined]  # of rank 0
    return summary


class Learner:
    """A learner at work in the background.

    Args:
        spec: what to learn.
        storage_path: folder for Ray Train's records.
    """

    def __init__(self, spec: LearnerSpec, storage_path: str) -> None:
        self._spec = spec
        self._summary: Summary | None = None
        self._error: BaseException | None = None
        work: Callable[[], Summary]
        if spec.config.where == "process":
            work = lambda: run_learner(spec, read_buffer(spec.buffer, spec.namespace), Alone())  # noqa: E731
        else:
            work = lambda: fit(spec, storage_path)  # noqa: E731
        self._thread = threading.Thread(target=self._run, args=(work,), name="brayx-learner", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether it is still learning."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Ends its stream: it saves a last checkpoint and is done. Does not wait."""
        get_buffer(self._spec.buffer, namespace=self._spec.namespace).end.remote()

    def result(self, timeout_s: float | None = None) -> Summary | None:
        """The summary once it is done; None if that takes longer than ``timeout_s``.

        Raises:
            BrayxError: what the learner failed with; `StartupError` for what is not ours, with its cause chained.
        """
        self._thread.join(timeout_s)
        if self._error is not None:
            ours = _ours(self._error)
            if ours is not None:
                raise ours from self._error
            raise StartupError(f"the learner failed: {self._error}") from self._error
        return self._summary

    def _run(self, work: Callable[[], Summary]) -> None:
        try:
            self._summary = work()
        except BaseException as error:
            self._error = error


def _ours(error: BaseException | None) -> BrayxError | None:
    """The typed error inside Ray's wrappers."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, BrayxError):
            return error
        seen.add(id(error))
        failures = getattr(error, "worker_failures", None) or {}
        inner = getattr(error, "cause", None) or next(iter(failures.values()), None)
        error = inner or error.__cause__
    return None
