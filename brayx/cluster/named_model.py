"""A named model: its recipe, and its parts on the cluster, started, found and ended.

The recipe is the pickled module without weights, an example, options and lineage. It is small, so every process gets
it; weights travel through the model's weight store. A module that is defined in a notebook or script is pickled by
value, so only processes that trust each other may share a recipe.

The store is a detached Ray actor, since Serve's replicas outlive the process that deployed them, too. The model exists
as long as the store does, which is made first and ended last.
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
from brayx.cluster.named import ANSWER_S, WEIGHT_STORE, call_with_retry, find_actor, result
from brayx.cluster.weight_store import KEPT_VERSIONS, end_weight_store, get_weight_store
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
from brayx.model.checkpoints import CheckpointInterval, starting_weights
from brayx.model.config import ModelConfig
from brayx.model.initial import InitialWeights
from brayx.tracking import Trial
from brayx.tracking.lineage import Origin
from brayx.types import NestedArray, Weights

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)

MODULE = "brayx.cluster.remote_model"
_ANEW = "if nobody is starting it, `override_model=True` with `model` and `forward_args` does so anew"
_GIVEN_BACK_S = 5.0
"""Time in which a restarted store gets its weights back from a process that follows it, if there is one."""


@dataclass(frozen=True)
class Recipe:
    """A model without its weights.

    Attributes:
        skeleton: the module, pickled, with empty weights.
        example_args: positional arguments ``[B, ...]`` that it runs on.
        names: of its positional parameters, as far as they can be given by name.
        spec: its signature.
        layout: what its weights must be.
        config: engine, batcher and replicas.
        lineage: what it started from, and that from; the nearest first.
        trial: where checkpoints go; None: nowhere.
        checkpoint_interval: when one is due.
        token: tells models of one name apart.
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
        """Forwards run in the process that asks, without a deployment."""
        return self.config.placement == "local"

    def pickled(self) -> bytes:
        """The recipe for `ray.cloudpickle`."""
        pickled: bytes = cloudpickle.dumps(self)  # type: ignore[no-untyped-call]
        return pickled

    def positional(self, args: tuple[NestedArray, ...], kwargs: Mapping[str, NestedArray]) -> tuple[NestedArray, ...]:
        """The arguments of a call in the module's order.

        Raises:
            ShapeMismatch: one is missing, given twice or unknown.
        """
        return _positional(self.names, args, kwargs) if kwargs else args

    def module(self, weights: Weights) -> torch.nn.Module:
        """The module with ``weights``, which are copied.

        Raises:
            ModelError: its code is not here.
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
    """A module's recipe, without lineage, trial and token; and the weights that the module has now.

    Raises:
        ModelError: the module fails on its example, or is no module; or it cannot be pickled.
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
    """The recipe and the weights that a model starts with.

    Args:
        module: as `prepare` got it.
        recipe: as `prepare` gave it.
        initial: what the model starts from: the module's own weights, or a checkpoint's.

    Raises:
        BadWeights: the checkpoint's weights do not fit the module; names the leaf.
    """
    weights = initial.weights
    if len(learned(weights)) < len(weights) and len(learned(recipe.layout)) == len(recipe.layout):
        # The checkpoint was trained on normalised observations: the model normalises them itself from here on.
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
    """Moves what is in the state dict, without its values and in place; what is shared stays shared."""
    import torch

    kept = set(module.state_dict())
    moved: dict[int, Any] = {}
    for prefix, part in module.named_modules(remove_duplicate=False):
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is None or (f"{prefix}.{name}" if prefix else name) not in kept:
                    continue
                if id(tensor) not in moved:
                    empty: torch.Tensor = torch.empty_like(tensor.detach(), device=device)
                    if isinstance(tensor, torch.nn.Parameter):
                        empty = torch.nn.Parameter(empty, requires_grad=tensor.requires_grad)
                    # The old one is kept too, so that no other tensor gets its id.
                    moved[id(tensor)] = (tensor, empty)
                tensors[name] = moved[id(tensor)][1]


def config_of(config: ModelConfig | None = None, **options: Any) -> ModelConfig:
    """The options of a named model: those of ``config``, with ``options`` in their place, Bray's names among them.

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
    """Starts the replicas and waits for them until ``until``, on the monotonic clock; errors as `start_application`."""
    build = functools.partial(_build_in_replica, name)
    application = model_application(build, recipe.config, weight_store=(f"model/{name}", NAMESPACE))
    start_application(application, f"model-{name}", route_prefix, until, what=f"model {name!r}")


def _build_in_replica(name: str) -> tuple[torch.nn.Module, tuple[NestedArray, ...]]:
    """The module with the newest weights; raises while there are none, and Serve tries again."""
    store = get_weight_store(f"model/{name}", NAMESPACE)
    recipe: Recipe = recipe_of(store, ANSWER_S)
    found = call_with_retry(store.newest)
    if found is None and recipe.trial is not None:
        weights = _from_checkpoint(store, recipe.trial)
    elif found is None:
        raise StartupError(f"the weight store of model {name!r} holds nothing yet", name=name)
    else:
        weights = taken(found[2][0])
    return recipe.module(weights), recipe.example_args


def _from_checkpoint(store: Any, trial: Trial) -> Weights:
    """The weights of the trial's newest checkpoint; gives them to the store, which has none."""
    version, step, weights = starting_weights(None, trial, None, "")
    call_with_retry(store.restore, version, step, weights)
    return weights


def deployed(name: str, timeout_s: float) -> Any:
    """The handle of the application, once it runs: another process may just start it."""
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


def remove(name: str, of: Any = None) -> None:
    """Ends the model of that name, if there is one: its replicas, weights and name. Its trial can be resumed then.

    Args:
        name: of the model.
        of: its weight store: a model that has the name by now, with another store, goes on. None: any.
    """
    store = find(name)
    if store is None or (of is not None and store != of):
        return
    try:
        trial = recipe_of(store, ANSWER_S).trial
    except BrayxError as error:
        _log.warning("model %r is ended, and its trial goes on in MLflow: %s", name, error)
        trial = None
    if (now := find(name)) is not None and now != store:  # the answer took a while, and the rest deletes by name
        return
    if not delete_application(f"model-{name}", ANSWER_S):
        _log.warning("model %r has ended, and its replicas may be there still after %g s", name, ANSWER_S)
    end_weight_store(store)
    deadline = time.monotonic() + ANSWER_S
    while find(name) is not None and time.monotonic() < deadline:
        time.sleep(0.05)
    _finish(trial)


def withdraw(name: str, token: str, trial: Trial | None) -> None:
    """Ends what a failed or interrupted start has left; another model may have the name by now.

    Args:
        name: of the model.
        token: of its recipe.
        trial: that the start opened for it, which no store may know yet.
    """
    try:
        store = find(name)
        if store is not None and recipe_of(store, ANSWER_S).token == token:
            remove(name, store)
    except (BrayxError, RayError) as error:
        _log.warning("what was started of model %r may be there still: %s", name, error)
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
    """The weight store of the model of that name; None: there is no such model."""
    return find_actor(f"model/{name}")


def not_found(name: str) -> ModelNotFound:
    """The error of a name that no model has."""
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
    """The recipe that a model's store keeps."""
    recipe: Recipe = cloudpickle.loads(call_with_retry(store.about, timeout_s=timeout_s))
    return recipe


def taken(reference: Any, timeout_s: float = ANSWER_S) -> Weights:
    """The weights that a store's answer refers to.

    Raises:
        DeadlineExceeded: they did not come in time.
        ModelError: they are lost, with the store that had them.
    """
    weights: Weights = result(reference, timeout_s, WEIGHT_STORE)
    return weights


def first_weights(name: str, store: Any, trial: Trial | None) -> tuple[int, Weights]:
    """Version and weights of the newest, once there are some; the newest checkpoint's, if the store lost what it had.

    Raises:
        StartupError: there are none, and none come.
        BadWeights, TrackingError: a checkpoint cannot be read.
        ModelError: as of `call_with_retry`.
    """
    deadline, longest_s = time.monotonic() + ANSWER_S, AGAIN_S
    while True:
        found = call_with_retry(store.wait_newer, 0, _GIVEN_BACK_S, timeout_s=2 * ANSWER_S)
        if not isinstance(found, tuple):
            if time.monotonic() > deadline:
                raise StartupError(f"the weight store of model {name!r} holds nothing; {_ANEW}", name=name)
            # A store that never had weights is about to get its first.
            if trial is not None and call_with_retry(store.standing)[0] and trial.checkpoints():
                _from_checkpoint(store, trial)
            continue
        version, _, [reference] = found
        try:
            return version, taken(reference, longest_s)
        except (ModelError, DeadlineExceeded):  # lost with a killed store, which gets them back, or newer ones
            if time.monotonic() > deadline:
                raise
            longest_s *= 2  # large weights may take longer than that between nodes
            time.sleep(0.1)
