"""brayx: train game agents and serve them with one code path: `train`, `serve`, `evaluate` and `tune`.

Names are imported when first used: a game client that needs `Client` loads neither ray nor torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from brayx.actor.actor import Actor
    from brayx.actor.agent import Agent, Services, State, forward, pinned, push, record
    from brayx.actor.decode import sample_categorical
    from brayx.cluster.remote_buffer import RemoteBuffer
    from brayx.cluster.remote_model import RemoteModel
    from brayx.errors import BrayxError
    from brayx.gamecore.client import AsyncClient, Client
    from brayx.types import Columns, Fragment, NestedArray, Step, Weights

_HOME = {  # pipelines is above brayx, which must not import it: by name only
    "Actor": "brayx.actor.actor",
    "Agent": "brayx.actor.agent",
    "AsyncClient": "brayx.gamecore.client",
    "BrayxError": "brayx.errors",
    "Client": "brayx.gamecore.client",
    "Columns": "brayx.types",
    "Fragment": "brayx.types",
    "NestedArray": "brayx.types",
    "RemoteBuffer": "brayx.remote",
    "RemoteModel": "brayx.remote",
    "Services": "brayx.actor.agent",
    "State": "brayx.actor.agent",
    "Step": "brayx.types",
    "Weights": "brayx.types",
    "evaluate": "pipelines.front",
    "forward": "brayx.actor.agent",
    "pinned": "brayx.actor.agent",
    "push": "brayx.actor.agent",
    "record": "brayx.actor.agent",
    "sample_categorical": "brayx.actor.decode",
    "serve": "pipelines.front",
    "train": "pipelines.front",
    "tune": "pipelines.tune",
}

__all__ = [
    "Actor",
    "Agent",
    "AsyncClient",
    "BrayxError",
    "Client",
    "Columns",
    "Fragment",
    "NestedArray",
    "RemoteBuffer",
    "RemoteModel",
    "Services",
    "State",
    "Step",
    "Weights",
    "evaluate",
    "forward",
    "pinned",
    "push",
    "record",
    "sample_categorical",
    "serve",
    "train",
    "tune",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    try:
        return getattr(importlib.import_module(_HOME[name]), name)
    except KeyError:
        raise AttributeError(f"module 'brayx' has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
