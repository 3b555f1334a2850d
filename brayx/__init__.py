"""brayx: train game agents and serve them with one code path: `train`, `serve`, `evaluate` and `tune`.

Names are imported when first used: a game client that needs `Client` loads neither ray nor torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from brayx.actor.actor import Actor
    from brayx.actor.agent import Agent, Services, State, forward, keep_recording, pinned, push, record, result
    from brayx.actor.config import ActorConfig
    from brayx.actor.decode import sample_categorical
    from brayx.cluster.remote_buffer import RemoteBuffer
    from brayx.cluster.remote_model import RemoteModel
    from brayx.cluster.replica import ActorRuntime, actor_deployment
    from brayx.engines import build_engine
    from brayx.engines.base import Recurrence
    from brayx.errors import BrayxError
    from brayx.front import serve, train
    from brayx.gamecore.client import AsyncClient, Client
    from brayx.gamecore.contract import Contract
    from brayx.gamecore.contract_client import ContractClient
    from brayx.gamecore.fields import array_field, index_field, number_field
    from brayx.jobs.evaluate import evaluate
    from brayx.local.train import train_local
    from brayx.local.trainer import Trainer
    from brayx.local.training import Training
    from brayx.model.config import ModelConfig
    from brayx.model.dialled import DialledModel
    from brayx.model.local import LocalModel
    from brayx.regression.replay import replay_recording
    from brayx.replay.buffer import ReplayBuffer
    from brayx.replay.config import BufferConfig
    from brayx.replay.files import Dataset
    from brayx.rollout.multi import AgentsAsRows
    from brayx.search.space import Domain
    from brayx.search.tune import tune
    from brayx.types import Columns, Forward, Fragment, NestedArray, Step, Weights, flatten

_HOME = {
    "Actor": "brayx.actor.actor",
    "ActorConfig": "brayx.actor.config",
    "ActorRuntime": "brayx.cluster.replica",
    "Agent": "brayx.actor.agent",
    "AgentsAsRows": "brayx.rollout.multi",
    "AsyncClient": "brayx.gamecore.client",
    "BrayxError": "brayx.errors",
    "BufferConfig": "brayx.replay.config",
    "Client": "brayx.gamecore.client",
    "Columns": "brayx.types",
    "Contract": "brayx.gamecore.contract",
    "ContractClient": "brayx.gamecore.contract_client",
    "Dataset": "brayx.replay.files",
    "DialledModel": "brayx.model.dialled",
    "Domain": "brayx.search.space",
    "Forward": "brayx.types",
    "Fragment": "brayx.types",
    "LocalModel": "brayx.model.local",
    "ModelConfig": "brayx.model.config",
    "NestedArray": "brayx.types",
    "Recurrence": "brayx.engines.base",
    "RemoteBuffer": "brayx.front",
    "RemoteModel": "brayx.front",
    "ReplayBuffer": "brayx.replay.buffer",
    "Services": "brayx.actor.agent",
    "State": "brayx.actor.agent",
    "Step": "brayx.types",
    "Trainer": "brayx.local.trainer",
    "Training": "brayx.local.training",
    "Weights": "brayx.types",
    "actor_deployment": "brayx.cluster.replica",
    "array_field": "brayx.gamecore.fields",
    "build_engine": "brayx.engines",
    "evaluate": "brayx.jobs.evaluate",
    "flatten": "brayx.types",
    "forward": "brayx.actor.agent",
    "index_field": "brayx.gamecore.fields",
    "keep_recording": "brayx.actor.agent",
    "number_field": "brayx.gamecore.fields",
    "pinned": "brayx.actor.agent",
    "push": "brayx.actor.agent",
    "record": "brayx.actor.agent",
    "replay_recording": "brayx.regression.replay",
    "result": "brayx.actor.agent",
    "sample_categorical": "brayx.actor.decode",
    "serve": "brayx.front",
    "train": "brayx.front",
    "train_local": "brayx.local.train",
    "tune": "brayx.search.tune",
}

__all__ = [
    "Actor",
    "ActorConfig",
    "ActorRuntime",
    "Agent",
    "AgentsAsRows",
    "AsyncClient",
    "BrayxError",
    "BufferConfig",
    "Client",
    "Columns",
    "Contract",
    "ContractClient",
    "Dataset",
    "DialledModel",
    "Domain",
    "Forward",
    "Fragment",
    "LocalModel",
    "ModelConfig",
    "NestedArray",
    "Recurrence",
    "RemoteBuffer",
    "RemoteModel",
    "ReplayBuffer",
    "Services",
    "State",
    "Step",
    "Trainer",
    "Training",
    "Weights",
    "actor_deployment",
    "array_field",
    "build_engine",
    "evaluate",
    "flatten",
    "forward",
    "index_field",
    "keep_recording",
    "number_field",
    "pinned",
    "push",
    "record",
    "replay_recording",
    "result",
    "sample_categorical",
    "serve",
    "train",
    "train_local",
    "tune",
]

__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    try:
        return getattr(importlib.import_module(_HOME[name]), name)
    except KeyError:
        raise AttributeError(f"module 'brayx' has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
