"""Calls and checks a model component's ``build_model``, for acting and for learning.

Knows nothing of an algorithm's requirements; the trainer checks those.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from brayx.components import load
from brayx.engines import FROZEN, build_engine
from brayx.engines.base import load_weights
from brayx.engines.scaling import Scaling, from_weights, unscaled
from brayx.errors import BrayxError, ConfigError, ModelError, first_line
from brayx.types import NestedArray

if TYPE_CHECKING:
    from torch import nn

    from brayx.engines.base import Engine
    from brayx.model.config import ModelConfig
    from brayx.types import Weights

exporting = threading.RLock()
"""Lock of torch's exporter, which is not thread-safe: concurrent exports break each other."""


def build_model(folder: str, module: str, name: str, config: Mapping[str, Any]) -> tuple[nn.Module, tuple[Any, ...]]:
    """The torch module and its example arguments.

    Args:
        folder: searched first for ``module``.
        module: import path of the user's module that has ``build_model(name, config)``.
        name: name of the model component.
        config: the whole job as plain dicts.

    Raises:
        ConfigError: it does not exist, or returns something else.
        ModelError: it raised, or the example does not initialise all lazy layers.
    """
    from torch import nn  # here, so that importing this file does not load torch

    from brayx.engines.torch import initialise_lazy

    build = load(module, "build_model", folder)
    try:
        built = build(name, config)
    except BrayxError:
        raise
    except Exception as error:
        raise ModelError(f"model {name!r}: build_model raised {type(error).__name__}: {first_line(error)}") from error
    if not (
        isinstance(built, tuple)
        and len(built) == 2
        and isinstance(built[0], nn.Module)
        and isinstance(built[1], tuple | list)
    ):
        raise ConfigError(f"{module}.build_model must return (module, tuple of example arguments), got {built!r:.200}")
    initialise_lazy(built[0], tuple(built[1]))
    return built[0], tuple(built[1])


def acting_model(folder: str, module: str, name: str, config: Mapping[str, Any]) -> tuple[nn.Module, tuple[Any, ...]]:
    """As `build_model`, for acting on raw observations: normalises them if the job's rollouts do.

    The moments come with a version's weights; without moments, observations are unchanged.
    """
    built, example = build_model(folder, module, name, config)
    parts = [part for part in config.values() if isinstance(part, Mapping) and part.get("kind") == "rollout"]
    if not any(part.get("model") == name and part.get("normalise_obs") for part in parts):
        return built, example
    from brayx.engines.normalised import normalised, observed

    leaves = {path: leaf for path, leaf in observed(built, example).items() if leaf.dtype.kind == "f"}
    return normalised(built, {path: Scaling.none(leaf.shape[1:]) for path, leaf in leaves.items()}), example


def engine_of(
    config: ModelConfig,
    module: nn.Module,
    example_args: tuple[Any, ...],
    weights: Weights | None = None,
    checkpoint: str | Path | None = None,
) -> Engine:
    """The engine of a model component's options.

    Args:
        config: the options.
        module, example_args: results of `build_model`.
        weights: initial weights, instead of the module's own; a frozen engine keeps them.
        checkpoint: folder of these weights; its recorded samples calibrate and verify a frozen engine.

    Raises:
        ConfigError, BadWeights, ModelError, EngineMismatch: as `build_engine`.
    """
    frozen = checkpoint is not None and config.engine in FROZEN
    samples = recorded_samples(Path(checkpoint), module, example_args) if frozen and checkpoint else None
    with exporting:
        return build_engine(
            config.engine,
            module,
            example_args,
            threads=config.threads,
            max_batch_size=config.max_batch_size,
            device=config.device,
            compiled=config.compile,
            weights=weights,
            samples=samples,
        )


def warm_up(config: ModelConfig) -> None:
    """Builds a component's engine for a tiny model: the first export to ONNX takes four times as long as the next."""
    if config.engine == "onnx":
        from torch import nn

        with contextlib.suppress(Exception):  # the component's own model may fit all the same
            engine_of(config, nn.Linear(1, 1), (np.zeros((1, 1), np.float32),))


def recorded_samples(folder: Path, module: nn.Module, example_args: tuple[NestedArray, ...]) -> list[np.ndarray] | None:
    """Input leaves ``[N, ...]`` that a checkpoint recorded; None if it has none, or the model takes others.

    Normalised observations are converted back to raw ones. A recurrent model's states are those that the checkpoint
    computes from them.

    Raises:
        BadWeights: they cannot be read, or the checkpoint's weights do not fit this module.
    """
    from brayx.engines.export import with_states
    from brayx.engines.normalised import observed
    from brayx.engines.torch import describe, with_weights

    path = folder / "samples.npz"
    if not path.is_file():
        return None
    recorded, weights = load_weights(path), load_weights(folder / "weights.npz")
    for leaf, scaling in from_weights(weights).items():
        if leaf in recorded:
            recorded[leaf] = unscaled(scaling, recorded[leaf])
    leaves = [recorded[key] for key in observed(module, example_args) if key in recorded]
    spec = describe(module, example_args)
    given = spec.state.inputs if spec.state is not None else ()
    wanted = [(leaf.shape, leaf.dtype) for index, leaf in enumerate(spec.inputs) if index not in given]
    if [(leaf.shape[1:], leaf.dtype) for leaf in leaves] != wanted or not leaves or not len(leaves[0]):
        return None
    return leaves if spec.state is None else with_states(with_weights(module, weights), example_args, leaves)
