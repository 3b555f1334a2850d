"""A named model that runs in this process, as far as its handles use it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch

from brayx.cluster import process_model as process_module
from brayx.cluster import remote_model as remote
from brayx.cluster.model import ModelReplica
from brayx.cluster.named_model import prepare
from brayx.model.config import ModelConfig

X = np.ones(2, np.float32)


def build():
    return torch.nn.Linear(2, 1), (np.zeros((1, 2), np.float32),)


class Subscriber:
    """A subscriber that follows no store."""

    def __init__(self, store, on_weights):
        self.running = False

    async def start(self):
        self.running = True

    async def stop(self):
        self.running = False


class Running:
    """A running model ``m``, as far as handles use it; its replica counts the calls."""

    def __init__(self, monkeypatch, *, local, **options):
        placement = "local" if local else "remote"
        config = ModelConfig(module="unused", engine="torch", placement=placement, deadline_s=5, **options)
        module, example = build()
        recipe, self.weights = prepare(module, example, {}, config)
        self.recipe = replace(recipe, token="token")
        self.replica = ModelReplica(build, config)
        self.calls: list[int] = []
        self.built = 0
        self.removed: list[str] = []
        self.connection = "1"
        monkeypatch.setattr(remote, "find", lambda name: self)
        monkeypatch.setattr(remote, "remove", lambda name, expected: self.removed.append(name))
        monkeypatch.setattr(remote, "recipe_of", lambda store, timeout_s: self.recipe)
        monkeypatch.setattr(process_module, "deployed", lambda name, timeout_s: self)
        monkeypatch.setattr(process_module, "first_weights", lambda name, store, trial: self._newest())
        monkeypatch.setattr(process_module, "WeightSubscriber", Subscriber)
        monkeypatch.setattr(process_module, "_connection", lambda: self.connection)
        self.forward = SimpleNamespace(remote=self._forward)

    async def _forward(self, columns, version, deadline_s):
        self.calls.append(len(columns[0]))
        return await self.replica.forward(columns, version, deadline_s)

    def _newest(self):
        self.built += 1
        return 3, self.weights
