"""Where the parts of a named model are: its weight store and its Serve application, found, started and ended.

The store is a detached Ray actor, since Serve's replicas outlive whoever deployed them, too. Its existence is the
model's: it is made first and ended last.
"""

from __future__ import annotations

import difflib
import functools
import time
from typing import TYPE_CHECKING, Any

import ray
from pydantic import ValidationError
from ray import cloudpickle, serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from brayx.errors import ConfigError, DeadlineExceeded, ModelError, ModelNotFound, StartupError, first_line
from brayx.model.checkpoints import starting_weights
from brayx.model.config import ModelConfig
from brayx.model.deployment import model_application
from brayx.model.recipe import Recipe
from brayx.model.weights import get_weight_store, unwrap
from brayx.types import NestedArray

if TYPE_CHECKING:
    import torch

NAMESPACE = "brayx"
MODULE = "brayx.model.remote"
ANSWER_S = 30.0
"""What a question to a part of the model may take."""


def config_of(**options: Any) -> ModelConfig:
    """The options of a model that has no module to name; `ConfigError` names what is wrong with one."""
    try:
        return ModelConfig(module=MODULE, **options)
    except ValidationError as error:
        problem = error.errors()[0]
        key = str(problem["loc"][0])
        raise ConfigError(f"{key} is {problem['input']!r}: {problem['msg']}", key=key) from None


def deploy(name: str, recipe: Recipe, route_prefix: str | None) -> None:
    """Starts the replicas and waits for them.

    Raises:
        StartupError: they did not start.
    """
    build = functools.partial(_build_in_replica, name)
    application = model_application(build, recipe.config, weight_store=(f"model/{name}", NAMESPACE))
    try:
        ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
    except ValueError:
        # Serve would open its door otherwise, which is for whoever wants one.
        serve.start(proxy_location="Disabled" if route_prefix is None else "HeadOnly")
    try:
        serve.run(application, name=f"model-{name}", route_prefix=route_prefix)
    except (RuntimeError, RayError, RayServeException) as error:
        raise StartupError(f"the replicas of model {name!r} did not start: {first_line(error)}") from error


def _build_in_replica(name: str) -> tuple[torch.nn.Module, tuple[NestedArray, ...]]:
    """The module with the newest weights. Without any there is nothing to act with: Serve tries again."""
    store = get_weight_store(f"model/{name}", NAMESPACE)
    recipe: Recipe = recipe_of(store, ANSWER_S)
    found = asked(store.newest.remote())
    if found is None and recipe.trial is not None:
        version, step, weights = starting_weights(None, recipe.trial, None, "")
        asked(store.restore.remote(version, step, weights))
    elif found is None:
        raise StartupError(f"the weight store of model {name!r} holds nothing yet", name=name)
    else:
        weights = asked(found[2][0])
    return recipe.module(weights), recipe.example_args


def deployed(name: str, timeout_s: float) -> Any:
    """The handle of the application, once it runs: another process may be about to start it."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return serve.get_app_handle(f"model-{name}")
        except (RayServeException, RayError) as error:
            if time.monotonic() > deadline:
                raise StartupError(
                    f"model {name!r} did not start within {timeout_s:g} s: {first_line(error)}"
                ) from error
            time.sleep(0.2)


def remove(name: str) -> None:
    """Ends the model of that name, if there is one: replicas, weights, and then its name."""
    store = find(name)
    if store is None:
        return
    try:
        ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
        serve.delete(f"model-{name}")
    except ValueError:
        pass  # no Serve: it was in local mode
    ray.kill(store)
    deadline = time.monotonic() + ANSWER_S
    while find(name) is not None and time.monotonic() < deadline:
        time.sleep(0.05)


def find(name: str) -> Any | None:
    """The weight store of the model of that name; None: there is no such model."""
    try:
        return get_weight_store(f"model/{name}", NAMESPACE)
    except StartupError:
        return None


def not_found(name: str) -> ModelNotFound:
    """The error of a name that no model has."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    known = sorted(
        actor["name"].removeprefix("model/")
        for actor in actors
        if actor["namespace"] == NAMESPACE and actor["name"].startswith("model/")
    )
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    told = f"nearest is {near[0]!r}" if near else f"there are {', '.join(known) or 'none'}"
    return ModelNotFound(f"no model {name!r} runs, {told}; give `model` and `forward_args` to start it", name=name)


def recipe_of(store: Any, timeout_s: float) -> Recipe:
    """The recipe that a model's store keeps."""
    recipe: Recipe = cloudpickle.loads(asked(store.about.remote(), timeout_s))
    return recipe


def asked(reference: Any, timeout_s: float = ANSWER_S) -> Any:
    """What a Ray call gives, or a typed error; a weight store that is being restarted is not asked again."""
    try:
        return ray.get(reference, timeout=timeout_s)
    except ray.exceptions.GetTimeoutError as error:
        raise DeadlineExceeded(f"the model's weight store did not answer in {timeout_s:g} s") from error
    except RayError as error:
        cause = unwrap(error)
        raise cause if cause is not error else ModelError(f"the weight store failed: {first_line(error)}") from error
