"""A named model: its recipe, and functions that start, find and end its parts on the cluster.

The recipe is the pickled module without weights, an example, options and lineage. It is small, so every process gets
it; weights travel through the model's weight store. A module that is defined in a notebook or script is pickled by
value, so only processes that trust each other may share a recipe.

The store is a detached Ray actor, because Serve's replicas also outlive the process that deployed them. The model
exists as long as its store, which starts first and ends last.
"""

from __future__ import annotations

import copy
import difflib
import functools
import inspect
import logging
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
from pydantic import ValidationError
from ray import cloudpickle, serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from brayx.cluster import NAMESPACE
from brayx.cluster.applications import delete_application, start_application
from brayx.cluster.model import model_application
from brayx.cluster.named import ANSWER_S, WEIGHT_STORE, call_with_retry, find_actor, get_actor, result
from brayx.cluster.weight_store import KEPT_VERSIONS, end_weight_store
from brayx.cluster.weights import AGAIN_S
from brayx.engines import refuse_frozen
from brayx.engines.base import LeafSpec, ModelSpec, check_weights, layout_of
from brayx.engines.scaling import completed, learned
from brayx.errors import (
    BrayxError,
    ConfigError,
    DeadlineExceeded,
    ModelError,
    ModelNotFound,
    ShapeMismatch,
    StartupError,
    TrackingError,
    first_line,
)
from brayx.model.arms import WeightSource
from brayx.model.checkpoints import CheckpointInterval, InitialWeights, starting_weights
from brayx.model.config import ModelConfig
from brayx.tracking import Trial
from brayx.tracking.lineage import Origin
from brayx.types import NestedArray, Weights

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)

MODULE = "brayx.cluster.remote_model"
_ANEW = "if no other process is starting it, start it again with `override_model=True`, `model` and `forward_args`"
_GIVEN_BACK_S = 5.0
"""Time for a restarted store to get its weights back from a process that follows it."""


@dataclass(frozen=True)
class Recipe:
    """A model without its weights.

    Attributes:
        skeleton: the module, pickled, with empty weights.
        example_args: positional arguments ``[B, ...]`` that it runs on.
        names: names of its positional parameters, as far as they can be given by name.
        spec: signature of the model.
        layout: shapes and dtypes of its weights.
        config: engine, batcher and replicas.
        lineage: the models that its initial weights come from, the nearest first.
        trial: trial for checkpoints; None: none are saved.
        checkpoint_interval: interval of checkpoints.
        token: distinguishes models that use the same name one after the other.
    """

    skeleton: bytes
    example_args: tuple[NestedArray, ...]
    names: tuple[str, ...]
    spec: ModelSpec
    layout: Mapping[str, LeafSpec]
    config: ModelConfig
    lineage: tuple[Origin, ...] = ()
    trial: Trial | None = None
    checkpoint_interval: CheckpointInterval = None
    token: str = ""

    @property
    def local(self) -> bool:
        """Whether forwards run in the calling process, without a deployment."""
        return self.config.placement == "local"

    def pickled(self) -> bytes:
        """The recipe for `ray.cloudpickle`."""
        pickled: bytes = cloudpickle.dumps(self)  # type: ignore[no-untyped-call]
        return pickled

    def positional(self, args: tuple[NestedArray, ...], kwargs: Mapping[str, NestedArray]) -> tuple[NestedArray, ...]:
        """The arguments of a call in the module's order.

        Raises:
            ShapeMismatch: an argument is missing, given twice or unknown.
        """
        return _positional(self.names, args, kwargs) if kwargs else args

    def module(self, weights: Weights) -> torch.nn.Module:
        """The module with ``weights``, which are copied.

        Raises:
            ModelError: this process cannot import its code.
        """
        import torch

        try:
            module: torch.nn.Module = cloudpickle.loads(self.skeleton)
        except Exception as error:
            raise ModelError(f"the model's code cannot be loaded here: {first_line(error)}") from error
        _on_device(module, "cpu")
        module.load_state_dict({name: torch.from_numpy(np.array(array)) for name, array in weights.items()})
        return module


def prepare(
    module: torch.nn.Module,
    forward_args: tuple[NestedArray, ...],
    forward_kwargs: Mapping[str, NestedArray],
    config: ModelConfig,
) -> tuple[Recipe, Weights]:
    """Makes a module's recipe, without lineage, trial and token, and returns it with the module's current weights.

    Raises:
        ModelError: it is not a module, fails on its example, or cannot be pickled.
    """
    from torch import nn

    from brayx.engines.torch import describe, frozen_copy, module_weights

    if not isinstance(module, nn.Module):
        raise ModelError(f"model must be a torch.nn.Module, got {type(module).__name__}")
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = tuple(name for name, p in inspect.signature(module.forward).parameters.items() if p.kind in kinds)
    try:
        example = _positional(names, tuple(forward_args), forward_kwargs)
    except ShapeMismatch as error:
        raise ModelError(f"forward_args and forward_kwargs: {error}") from None
    spec = describe(frozen_copy(module), example)
    weights = module_weights(module)
    bare = copy.deepcopy(module)
    _on_device(bare, "meta")
    try:
        skeleton: bytes = cloudpickle.dumps(bare)  # type: ignore[no-untyped-call]
    except Exception as error:
        raise ModelError(f"the model cannot be pickled: {first_line(error)}") from error
    return Recipe(skeleton, example, names, spec, layout_of(weights), config), weights


def initial_recipe(module: torch.nn.Module, recipe: Recipe, initial: InitialWeights) -> tuple[Recipe, Weights]:
    """The recipe and the initial weights of a model.

    Args:
        module: the argument of `prepare`.
        recipe: the result of `prepare`.
        initial: initial weights: the module's own, or a checkpoint's.

    Raises:
        BadWeights: the checkpoint's weights do not fit the module; names the leaf.
    """
    weights = initial.weights
    if len(learned(weights)) < len(weights) and len(learned(recipe.layout)) == len(recipe.layout):
        # The checkpoint was trained on normalised observations: make the model normalise them itself.
        from brayx.engines.torch import with_weights

        recipe, weights = prepare(with_weights(module, weights), recipe.example_args, {}, recipe.config)
    weights = completed(recipe.layout, weights)
    check_weights(recipe.layout, weights)
    return replace(recipe, lineage=initial.lineage, token=secrets.token_hex(8)), weights


def _positional(
    names: tuple[str, ...], args: tuple[NestedArray, ...], kwargs: Mapping[str, NestedArray]
) -> tuple[NestedArray, ...]:
    following = names[len(args) : len(args) + len(kwargs)]
    if set(following) != set(kwargs):
        raise ShapeMismatch(
            f"arguments by name: expected {', '.join(following) or 'none'} after {len(args)} others, "
            f"got {', '.join(kwargs)}",
            expected=list(following),
            got=list(kwargs),
        )
    return (*args, *(kwargs[name] for name in following))


def _on_device(module: torch.nn.Module, device: str) -> None:
    """Moves the tensors of the state dict in place, without their values; shared tensors stay shared."""
    import torch

    names = set(module.state_dict())
    moved: dict[int, Any] = {}
    for prefix, part in module.named_modules(remove_duplicate=False):
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is None or (f"{prefix}.{name}" if prefix else name) not in names:
                    continue
                if id(tensor) not in moved:
                    empty: torch.Tensor = torch.empty_like(tensor.detach(), device=device)
                    if isinstance(tensor, torch.nn.Parameter):
                        empty = torch.nn.Parameter(empty, requires_grad=tensor.requires_grad)
                    # Keep the old tensor too, so that no other tensor gets its id.
                    moved[id(tensor)] = (tensor, empty)
                tensors[name] = moved[id(tensor)][1]


def config_of(config: ModelConfig | None = None, **options: Any) -> ModelConfig:
    """The options of a named model: ``config`` with ``options`` replaced; accepts Bray's names of options.

    Raises:
        ConfigError: an option is unknown, or its value is out of range; names it.
    """
    fields: dict[str, Any] = {"module": MODULE, "placement": "remote", "max_versions": KEPT_VERSIONS}
    if config is not None:
        fields = config.model_dump()
    if "use_onnx" in options:
        fields["engine"] = "onnx" if options.pop("use_onnx") else "torch"
    if "local_mode" in options:
        fields["placement"] = "local" if options.pop("local_mode") else "remote"
    fields |= options
    gpus = fields.get("gpus_per_worker")
    if gpus and fields.get("engine", "onnx") == "onnx":
        raise ConfigError(
            f"gpus_per_worker is {gpus!r}, expected 0 while ONNX Runtime acts, on CPUs alone: with use_onnx=False "
            "torch acts, on a GPU",
            key="gpus_per_worker",
        )
    if gpus and fields.get("engine") == "torch":
        fields["device"] = "cuda"
    try:
        made = ModelConfig(**fields)
    except ValidationError as error:
        problem = error.errors()[0]
        key = str(problem["loc"][0])
        if problem["type"] == "extra_forbidden":
            near = difflib.get_close_matches(key, ModelConfig.model_fields, n=1)
            hint = f", nearest is {near[0]!r}" if near else ""
            raise ConfigError(f"a model has no option {key!r}{hint}", key=key) from None
        raise ConfigError(f"{key} is {problem['input']!r}: {problem['msg']}", key=key) from None
    refuse_frozen(made.engine)
    return made


def deploy(name: str, recipe: Recipe, route_prefix: str | None, until: float) -> None:
    """Starts the replicas and waits until ``until``, on the monotonic clock; errors as for `start_application`."""
    build = functools.partial(_build_in_replica, name)
    application = model_application(build, recipe.config, WeightSource(store=f"model/{name}"))
    start_application(application, f"model-{name}", route_prefix, until, what=f"model {name!r}")


def _build_in_replica(name: str) -> tuple[torch.nn.Module, tuple[NestedArray, ...]]:
    """The module with the newest weights; raises while there are none, so that Serve retries."""
    store = get_actor(f"model/{name}", WEIGHT_STORE)
    recipe: Recipe = recipe_of(store, ANSWER_S)
    newest = call_with_retry(store.newest)
    if newest is None and recipe.trial is not None:
        weights = _from_checkpoint(store, recipe.trial)
    elif newest is None:
        raise StartupError(f"the weight store of model {name!r} holds nothing yet", name=name)
    else:
        weights = taken(newest[2][0])
    return recipe.module(weights), recipe.example_args


def _from_checkpoint(store: Any, trial: Trial) -> Weights:
    """Returns the weights of the trial's newest checkpoint, and puts them into the empty store."""
    version, step, weights = starting_weights(None, trial, None, "")
    call_with_retry(store.restore, version, step, weights)
    return weights


def deployed(name: str, timeout_s: float) -> Any:
    """Waits for the application, which another process may be starting, and returns its handle."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return serve.get_app_handle(f"model-{name}")
        except (RayServeException, RayError) as error:
            if time.monotonic() > deadline:
                raise StartupError(
                    f"model {name!r} did not start within {timeout_s:g} s: {first_line(error)}; {_ANEW}", name=name
                ) from error
            time.sleep(0.2)


def remove(name: str, expected: Any = None) -> None:
    """Ends the model of that name, if it runs: its replicas, weights and name. Then its trial can be resumed.

    Args:
        name: name of the model.
        expected: weight store of the model, so that a newer model of that name, with another store, is not ended. None:
            end any.
    """
    store = find(name)
    if store is None or (expected is not None and store != expected):
        return
    try:
        trial = recipe_of(store, ANSWER_S).trial
    except BrayxError as error:
        _log.warning("model %r is ended, and its trial goes on in MLflow: %s", name, error)
        trial = None
    if (now := find(name)) is not None and now != store:  # check again, since the rest deletes by name
        return
    if not delete_application(f"model-{name}", ANSWER_S):
        _log.warning("model %r has ended, but its replicas may still run after %g s", name, ANSWER_S)
    end_weight_store(store)
    deadline = time.monotonic() + ANSWER_S
    while find(name) is not None and time.monotonic() < deadline:
        time.sleep(0.05)
    _finish(trial)


def withdraw(name: str, token: str, trial: Trial | None) -> None:
    """Cleans up after a failed or interrupted start; another model may have the name by now.

    Args:
        name: name of the model.
        token: token of its recipe.
        trial: the trial that was opened for it; a store may not have it yet.
    """
    try:
        store = find(name)
        if store is not None and recipe_of(store, ANSWER_S).token == token:
            remove(name, store)
    except (BrayxError, RayError) as error:
        _log.warning("parts of model %r may still be running: %s", name, error)
    finally:
        _finish(trial)


def _finish(trial: Trial | None) -> None:
    """Ends a model's trial, so that any process can resume it."""
    if trial is None:
        return
    try:
        trial.finish("KILLED")
    except TrackingError as error:
        _log.warning("model %r has ended, and its trial goes on in MLflow: %s", trial.name, error)


def find(name: str) -> Any | None:
    """The weight store of the model of that name; None if no such model runs."""
    return find_actor(f"model/{name}")


def not_found(name: str) -> ModelNotFound:
    """The error for a name without a running model."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    known = sorted(
        actor["name"].removeprefix("model/")
        for actor in actors
        if actor["namespace"] == NAMESPACE and actor["name"].startswith("model/")
    )
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    others = f"nearest is {near[0]!r}" if near else f"there are {', '.join(known) or 'none'}"
    return ModelNotFound(f"no model {name!r} runs, {others}; give `model` and `forward_args` to start it", name=name)


def recipe_of(store: Any, timeout_s: float) -> Recipe:
    """Gets the recipe from a model's store."""
    recipe: Recipe = cloudpickle.loads(call_with_retry(store.about, timeout_s=timeout_s))
    return recipe


def taken(reference: Any, timeout_s: float = ANSWER_S) -> Weights:
    """Fetches the weights that a store's answer refers to.

    Raises:
        DeadlineExceeded: they did not arrive in time.
        ModelError: they were lost with their store.
    """
    weights: Weights = result(reference, timeout_s, WEIGHT_STORE)
    return weights


def first_weights(name: str, store: Any, trial: Trial | None) -> tuple[int, Weights]:
    """Waits for the newest weights and returns their version and them; if the store lost its weights, those of the
    newest checkpoint.

    Raises:
        StartupError: no weights arrived in time.
        BadWeights, TrackingError: a checkpoint cannot be read.
        ModelError: as for `call_with_retry`.
    """
    deadline, longest_s = time.monotonic() + ANSWER_S, AGAIN_S
    while True:
        newest = call_with_retry(store.wait_newer, 0, _GIVEN_BACK_S, timeout_s=2 * ANSWER_S)
        if not isinstance(newest, tuple):
            if time.monotonic() > deadline:
                raise StartupError(f"the weight store of model {name!r} holds nothing; {_ANEW}", name=name)
            # A store that never had weights is about to get its first.
            if trial is not None and call_with_retry(store.standing)[0] and trial.checkpoints():
                _from_checkpoint(store, trial)
            continue
        version, _, [reference] = newest
        try:
            return version, taken(reference, longest_s)
        except (ModelError, DeadlineExceeded):  # lost with a killed store, which will get these or newer ones back
            if time.monotonic() > deadline:
                raise
            longest_s *= 2  # large weights may take longer between nodes
            time.sleep(0.1)
