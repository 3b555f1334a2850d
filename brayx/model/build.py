"""A model component's own ``build_model``: called and checked, for acting and for learning alike.

Knows nothing of what the model must give to be learned from; the trainer looks at that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from brayx.components import load
from brayx.engines import build_engine
from brayx.errors import BrayxError, ConfigError, ModelError, first_line

if TYPE_CHECKING:
    from torch import nn

    from brayx.engines.base import Engine
    from brayx.model.config import ModelConfig
    from brayx.types import Weights


def build_model(folder: str, module: str, name: str, config: Mapping[str, Any]) -> tuple[nn.Module, tuple[Any, ...]]:
    """The torch module and its example arguments.

    Args:
        folder: where ``module`` is looked up first.
        module: import path of the user's module that has ``build_model(name, config)``.
        name: of the model component.
        config: the whole job as plain dicts.

    Raises:
        ConfigError: it is not there, or returns something else.
        ModelError: it raised.
    """
    from torch import nn  # here, so that importing this file does not load torch

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
    return built[0], tuple(built[1])


def engine_of(
    config: ModelConfig, module: nn.Module, example_args: tuple[Any, ...], weights: Weights | None = None
) -> Engine:
    """The engine that a model component's options ask for.

    Args:
        config: its options.
        module, example_args: what `build_model` gave.
        weights: to begin with, instead of the module's own; a frozen engine keeps them.

    Raises:
        ConfigError, BadWeights, ModelError, EngineMismatch: as `build_engine`.
    """
    return build_engine(
        config.engine,
        module,
        example_args,
        threads=config.threads,
        device=config.device,
        compiled=config.compile,
        weights=weights,
    )
