"""`RemoteModel`: a model by its name, from a notebook, an agent or a script; the same handle as in Bray.

The first construction starts a weight store and a Serve application of that name; every later one, in any process,
finds them. It is a facade: batching, swapping and restarting are elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from brayx.cluster.model_client import ModelClient
from brayx.cluster.named import ANSWER_S, call_with_retry, named_lock
from brayx.cluster.named_model import (
    config_of,
    deploy,
    find,
    initial_recipe,
    not_found,
    prepare,
    recipe_of,
    remove,
    withdraw,
)
from brayx.cluster.process_model import background_loop, process_model
from brayx.cluster.weight_store import create_weight_store
from brayx.cluster.weights import WeightPublisher, fetch_weights
from brayx.engines.base import ModelSpec, check_weights
from brayx.engines.scaling import completed
from brayx.errors import ConfigError, DeadlineExceeded, ModelError, StartupError, VersionUnknown
from brayx.model.checkpoints import CheckpointInterval, Checkpoints, InitialWeights, abandon_trial, checked_interval
from brayx.model.config import ModelConfig
from brayx.model.handles import Model, sooner
from brayx.model.inputs import to_columns
from brayx.model.local import LocalModel
from brayx.tracking import Trial, initialise, tracking_uri
from brayx.tracking.lineage import Origin
from brayx.types import NestedArray, Weights

if TYPE_CHECKING:
    import torch

PROJECT = "brayx-models"
"""MLflow experiment of the checkpoints."""

_CALLS_AT_ONCE = 8
"""Most concurrent calls to the replicas for one large batch."""
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,99}")


class RemoteModel:
    """A model with a name. The constructor blocks; on an event loop, await `connect` instead.

    Args:
        name: letters, digits, ``_``, ``.``, ``-``. If a model of that name runs, this is a handle of it, and all other
            arguments but ``override_model`` have no effect.
        model: takes and returns nested tensors ``[B, ...]``. Its class must be importable where replicas run, unless it
            is defined in the notebook or script itself.
        forward_args: example arguments, nested arrays with a batch axis of at least 1.
        forward_kwargs: further example arguments, by the names of its positional parameters.
        checkpoint_interval: steps (int) or time (`datetime.timedelta`) after which a publish is also written to MLflow;
            a model that starts again under its name resumes from the newest, with its version, step and lineage. A
            clone, and a model that overrides another, start a new trial.
        checkpoint: initial weights if it has no checkpoint under its name: a folder with ``weights.npz``, or
            ``models:/name@alias``. A model that was trained on normalised observations then normalises them itself.
        override_model: ends a running model of that name and starts this one with ``model``'s weights. If several
            processes override at once, they do so one after the other, and the last one has the name.
        start_timeout_s: deadline for all replicas to run; if it is missed, everything that was started is ended. If
            several processes start a model at once, the others wait for the first one and get its model.
        route_prefix: path at which Serve's ingress also takes forwards over HTTP (`brayx.model.http`); None: none.
        tracking: MLflow's URI or database file, for checkpoints; default: as for a job.
        config: engine, batches, versions and replicas; default: `ModelConfig`'s, but ``placement`` is ``remote``.
        **options: single fields of `ModelConfig` in place of those of ``config``: ``max_batch_size=8``,
            ``num_workers=2``. Bray's ``use_onnx=False`` is ``engine="torch"``, its ``local_mode=True`` is
            ``placement="local"``: forwards run in the calling process, which follows the weights.

    Raises:
        ModelNotFound: no model of that name runs, and ``model`` is None; names the nearest.
        ConfigError: an option of a model to start is unknown or out of range; names it, and what fits.
        ModelError: the model does not fit its arguments, or cannot be exported.
        StartupError: it did not start in time.
    """

    def __init__(
        self,
        name: str,
        model: torch.nn.Module | None = None,
        forward_args: tuple[NestedArray, ...] = (),
        forward_kwargs: Mapping[str, NestedArray] | None = None,
        *,
        checkpoint_interval: CheckpointInterval = None,
        checkpoint: str | None = None,
        override_model: bool = False,
        start_timeout_s: float = 120.0,
        route_prefix: str | None = None,
        tracking: str | None = None,
        config: ModelConfig | None = None,
        _lineage: tuple[Origin, ...] = (),
        **options: Any,
    ) -> None:
        if not _NAME.fullmatch(name):
            raise ConfigError(f"name is {name!r}, expected up to 100 letters, digits, _ . or -", key="name")
        self._name = name
        override = override_model and model is not None
        store, trial, token = None if override else find(name), None, ""
        if store is None:
            if model is None:
                raise not_found(name)
            checkpoint_interval = checked_interval(checkpoint_interval)
            recipe, weights = prepare(model, forward_args, forward_kwargs or {}, config_of(config, **options))
            uri = tracking_uri(tracking)
        until = time.monotonic() + start_timeout_s
        with contextlib.ExitStack() as alone:
            if store is None and (override or checkpoint_interval is not None):
                # Without the lock, a process that overrides could end or take over what another has just started, and
                # one that starts could find its trial in use by the other.
                alone.enter_context(named_lock(name, until))
                until = time.monotonic() + start_timeout_s  # the wait for the lock does not count
                store = None if override else find(name)
            try:
                if store is None:
                    assert model is not None  # otherwise `not_found`
                    if checkpoint_interval is not None:
                        # A clone, or a model that overrides another, does not resume what that has learned.
                        trial = Trial.open(PROJECT, name, initialise(uri), resume=not (override or _lineage))
                    initial = InitialWeights.of(weights, trial, checkpoint, uri, _lineage)
                    recipe, weights = initial_recipe(model, recipe, initial)
                    recipe = replace(recipe, trial=trial, checkpoint_interval=checkpoint_interval)
                    if override:
                        remove(name)  # not before the new one is known to be sound
                        until = time.monotonic() + start_timeout_s
                    token, keep = recipe.token, recipe.config.max_versions
                    store = create_weight_store(f"model/{name}", keep=keep, about=recipe.pickled(), detached=True)
                self._store = store
                self._recipe = recipe_of(store, start_timeout_s)
                started = self._recipe.token == token
                if trial is not None and not started:  # another process was first
                    if trial.run_id != getattr(self._recipe.trial, "run_id", None):
                        abandon_trial(trial)
                    trial = None
                if override and not started:
                    raise StartupError(
                        f"model {name!r} has not ended in time, or was started again meanwhile", name=name
                    )
                self._started = started
                self._deadline_s = self._recipe.config.deadline_s
                self._lock = threading.Lock()
                self._closed = False
                self._callers: dict[Model, Model] = {}
                self._publisher = WeightPublisher(store, last_version=initial.version if started else 0)
                self._checkpoints = Checkpoints(self._recipe.trial, self._recipe.checkpoint_interval)
                if started:
                    self._publisher.publish(weights, initial.step)
                    if not self._recipe.local:
                        deploy(name, self._recipe, route_prefix, until)
                self._shared = process_model(name, store, self._recipe, max(until - time.monotonic(), 0.0), self)
            except BaseException:
                if token:
                    withdraw(name, token, trial)
                else:
                    abandon_trial(trial)
                raise

    @property
    def name(self) -> str:
        """Name of the model."""
        return self._name

    @property
    def spec(self) -> ModelSpec:
        """Signature of the model."""
        return self._recipe.spec

    @property
    def lineage(self) -> tuple[Origin, ...]:
        """The models that its initial weights come from, the nearest first: clones' origins, or a registered version as
        ``models:/NAME``. Empty if it started from a module."""
        return self._recipe.lineage

    @property
    def step(self) -> int:
        """Step of the newest published weights."""
        return self._newest()[1]

    @property
    def version(self) -> int:
        """Policy version of the newest weights, from 1."""
        return self._newest()[0]

    async def forward(
        self, *args: NestedArray, batch: bool = False, deadline_s: float | None = None, **kwargs: NestedArray
    ) -> NestedArray:
        """The model's outputs, on any event loop.

        Args:
            *args: the model's arguments, nested arrays; without batch axis unless ``batch``.
            batch: every leaf has a leading batch axis ``[N, ...]``, and so have the outputs. If new weights arrive
                meanwhile, rows may be of two versions.
            deadline_s: seconds after which it fails; at most the model's own deadline.
            **kwargs: arguments by name.

        Raises:
            ShapeMismatch: the arguments do not fit; shows expected and got for each leaf. Other callers' rows are not
                affected.
            QueueFull, DeadlineExceeded, ModelError: as for `Model.forward`; also `ModelError` if the handle is closed.
        """
        arguments = self._recipe.positional(args, kwargs)
        model = self._acting()
        if not batch:
            return (await self._as_caller(model).forward(*arguments, deadline_s=deadline_s)).outputs
        longest_s = sooner(self._deadline_s, deadline_s)
        # An engine runs one call at a time: with more calls from here, other callers would wait for all of them.
        calls = 1 if self._recipe.local else _CALLS_AT_ONCE
        columns, size = to_columns(self.spec, arguments), abs(self._recipe.config.max_batch_size)
        return self.spec.unflatten_outputs(await _in_parts(model, columns, size, calls, longest_s))

    def __call__(
        self, *args: NestedArray, batch: bool = False, deadline_s: float | None = None, **kwargs: NestedArray
    ) -> NestedArray:
        """`forward` for synchronous code, such as a notebook; blocks the calling thread."""
        longest_s = (self._deadline_s if deadline_s is None else deadline_s) + ANSWER_S
        return background_loop().run(self.forward(*args, batch=batch, deadline_s=deadline_s, **kwargs), longest_s)

    @classmethod
    async def connect(
        cls,
        name: str,
        model: torch.nn.Module | None = None,
        forward_args: tuple[NestedArray, ...] = (),
        forward_kwargs: Mapping[str, NestedArray] | None = None,
        **options: Any,
    ) -> RemoteModel:
        """The constructor for code on an event loop, such as an agent; the plain constructor would block the loop.

        It runs in a thread, which finishes even if this is cancelled. Arguments and errors are the same.
        """
        return await asyncio.to_thread(cls, name, model, forward_args, forward_kwargs, **options)

    def client(self) -> Model:
        """The model for this event loop, with the interface `Model` that agents use: versions can be pinned."""
        return self._acting()

    def publish_weights(self, weights: Weights | Mapping[str, torch.Tensor] | torch.nn.Module, step: int = -1) -> int:
        """Publishes ``weights`` for all following batches; blocks until the store has them.

        Args:
            weights: arrays or tensors by their `state_dict` name, or a module of the same layout. Copied.
            step: the learner's step, an integer from 0; -1: one more than the last.

        Returns:
            Their policy version.

        Raises:
            ConfigError: the step is invalid; nothing was published.
            BadWeights: they do not fit, or contain NaN or infinity; names the leaf. Nothing was published.
            DeadlineExceeded: the store did not answer in time, including a restart.
            ModelError: the handle is closed; nothing was published.
        """
        arrays = _arrays(weights)
        arrays = completed(self._recipe.layout, arrays)
        check_weights(self._recipe.layout, arrays)
        with self._lock:
            if self._closed:
                raise ModelError(f"this handle of model {self._name!r} is closed and cannot publish")
            version = self._publisher.publish(arrays, step)
            self._checkpoints.offer(arrays, version, self._publisher.last_step)
        return version

    def get_model(self, step: int = -1) -> torch.nn.Module:
        """A copy of the torch module with the newest weights, or with those of ``step``.

        Raises:
            VersionUnknown: the store keeps no weights of that step; names the nearest.
            ModelError: this process cannot import the module's code.
        """
        return self._recipe.module(_weights_of(self._name, self._store, step)[1])

    def clone(self, step: int = -1, name: str | None = None) -> RemoteModel:
        """A new model that starts from this one's weights: the newest, or those of ``step``.

        It has the same options, except ``route_prefix``: a path leads to one model, so a clone has no HTTP path.

        Args:
            step: as for `get_model`.
            name: name of the clone; default: this model's name with a number.

        Raises:
            VersionUnknown: as for `get_model`.
            ConfigError: a model of that name already runs.
        """
        version, weights, step = _weights_of(self._name, self._store, step)
        recipe = self._recipe
        module = recipe.module(weights)
        names = [name] if name is not None else (f"{self._name}-{i}" for i in range(1, 10_000))
        for free in names:
            if find(free) is not None:
                continue
            made = RemoteModel(
                free,
                module,
                recipe.example_args,
                checkpoint_interval=recipe.checkpoint_interval,
                config=recipe.config,
                tracking=recipe.trial.uri if recipe.trial is not None else None,
                _lineage=(Origin(self._name, version, step), *recipe.lineage),
            )
            if made._started:
                return made
            made.close()  # another process took that name in between
        raise ConfigError(f"a model {name!r} already runs", key="name")

    def close(self) -> None:
        """Ends this handle, after finishing a checkpoint in progress; the model and other handles keep running."""
        with self._lock:
            self._closed = True
        self._checkpoints.close()
        self._shared.leave(self)

    def delete(self) -> None:
        """Ends the model itself with its replicas and weights, but not a model that has overridden it. Checkpoints stay
        in MLflow; a later start of the model resumes from them."""
        self.close()
        remove(self._name, self._store)

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteModel, (self._name,)

    def __repr__(self) -> str:
        return f"<RemoteModel {self._name!r}>"

    def _acting(self) -> ModelClient | LocalModel:
        if self._closed:
            raise ModelError(f"this handle of model {self._name!r} is closed")
        return self._shared.on_this_loop()

    def _as_caller(self, model: ModelClient | LocalModel) -> Model:
        """The model, with this handle as one of the process's callers."""
        caller = self._callers.get(model)
        if caller is None:
            caller = model.as_caller()
            self._callers = {model: caller}  # most handles are used on one loop; drop those of loops that ended
        return caller

    def _newest(self) -> tuple[int, int]:
        version, step = call_with_retry(self._store.standing)
        return version, step


async def _in_parts(
    model: ModelClient | LocalModel, columns: list[np.ndarray], size: int, calls: int, longest_s: float
) -> list[np.ndarray]:
    """Forwards columns ``[N, ...]`` in parts of ``size`` rows, at most so many calls at once; fails as a whole."""
    slots = asyncio.Semaphore(calls)
    loop = asyncio.get_running_loop()
    until = loop.time() + longest_s

    async def part(start: int) -> list[np.ndarray]:
        async with slots:
            left_s = until - loop.time()
            if left_s <= 0:
                raise DeadlineExceeded(f"{len(columns[0])} forwards took more than {longest_s:g} s")
            some = [leaf[start : start + size] for leaf in columns]
            outputs, _ = await model.forward_columns(some, deadline_s=left_s)
            return outputs

    try:
        async with asyncio.TaskGroup() as group:
            parts = [group.create_task(part(start)) for start in range(0, len(columns[0]), size)]
    except ExceptionGroup as failed:
        first = failed.exceptions[0]  # the others were cancelled
    else:
        return [np.concatenate(leaf) for leaf in zip(*(done.result() for done in parts), strict=True)]
    raise first


def _weights_of(name: str, store: Any, step: int) -> tuple[int, Weights, int]:
    """Version, weights and step of a model's newest publish with ``step``; -1: of its newest publish.

    Waits for a restarted store until it has weights again.
    """
    deadline = time.monotonic() + ANSWER_S
    while True:
        steps: dict[int, int] = call_with_retry(store.steps)
        having = [version for version, published in steps.items() if step in (-1, published)]
        try:
            if having:
                version = max(having)
                return version, background_loop().run(fetch_weights(store, version), ANSWER_S), steps[version]
            if steps or time.monotonic() > deadline:
                raise _step_unknown(name, step, steps)
        except ModelError:  # lost with a store that was killed after the call, or replaced by newer ones
            if not having or time.monotonic() > deadline:
                raise
        time.sleep(0.1)


def _step_unknown(name: str, step: int, steps: Mapping[int, int]) -> VersionUnknown:
    nearest = min(steps.values(), key=lambda other: (abs(other - step), -other), default=None)
    known = f", nearest is {nearest}; there are {', '.join(map(str, steps.values()))}" if steps else ""
    return VersionUnknown(f"model {name!r} keeps nothing of step {step}{known}", step=step, nearest=nearest)


def _arrays(weights: Any) -> Weights:
    import torch

    if isinstance(weights, torch.nn.Module):
        weights = weights.state_dict()
    return {
        name: value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
        for name, value in weights.items()
    }
