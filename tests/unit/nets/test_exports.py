"""Every network of `brayx.nets`, and every kind of ready-made policy, computes the same in ONNX as in torch.

Rollout policies are exported by tracing, so each network is tested. Served models use torch's other exporter, which
takes seconds, so all networks are tested in one graph.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from typing import get_args

import numpy as np
import pytest
import torch
from torch import nn

import brayx.nets
from brayx.engines.export import to_onnx, verify
from brayx.engines.onnx import OnnxEngine, open_session
from brayx.nets.central import Central, CentralisedPolicy, GroupedPolicy, GroupValue
from brayx.nets.cnn import ImpalaCNN, NatureCNN, SmallCNN
from brayx.nets.encoders import Binary, Custom, Embedding, Numbers, Observation, OneHot, Spatial, Text
from brayx.nets.heads import Categorical, Gaussian, Hybrid, MultiHead, Pointer, Squashed, StateDependent, Value
from brayx.nets.lstm import LSTM
from brayx.nets.mlp import MLP, ActorCritic
from brayx.nets.normaliser import Normalised
from brayx.nets.policy import NetworkConfig
from brayx.nets.soft import Critics, SoftActorCritic
from brayx.nets.transformer import Entities, Transformer
from brayx.spaces import MASK
from tests.unit.nets.kinds import KINDS, make

CONVOLUTIONS = get_args(NetworkConfig.model_fields["convolutions"].annotation)
SMALLEST = {"small": 20, "nature": 36, "impala": 8}
WHOLE = torch.arange(2)
FLAT = torch.zeros(2, 3)
SET = torch.tensor([[[1.0, 2.0], [0.0, 0.0], [3.0, 4.0]]] * 2)
SPEEDS = torch.zeros(2, 3, 3)
PRESENT = torch.tensor([[1, 0, 1], [0, 0, 0]], dtype=torch.int8)


def image(*shape):
    return torch.from_numpy(np.random.default_rng(0).integers(0, 256, (2, *shape), np.uint8))


def cases():
    """Networks with their arguments, by name."""
    torch.manual_seed(0)
    numbers = {"speed": Numbers((3,)), "kind": OneHot(4)}
    network = NetworkConfig(hidden=[8])
    parts = [
        (Numbers((2, 2)), (torch.zeros(2, 2, 2),)),
        (OneHot(4, (1,), -1), (WHOLE.unsqueeze(-1),)),
        (Binary(5), (WHOLE,)),
        (Embedding(4, 3), (WHOLE,)),
        (Text(4), (torch.tensor([[104, 105, 0, 0]] * 2, dtype=torch.uint8),)),
        (Normalised(Entities((3, 2), 8, 2, 1), (3, 2), "x", entities=True), (SET,)),
        (Observation(numbers), ({"speed": FLAT, "kind": WHOLE},)),
        (Custom(nn.Sequential(nn.Flatten(), nn.LazyLinear(3)), torch.zeros(3, 2)), (SET,)),
        (SmallCNN((2, 20, 21), 4), (image(2, 20, 21),)),
        (NatureCNN((2, 36, 37), 4), (image(2, 36, 37),)),
        (ImpalaCNN((2, 8, 9), 4), (image(2, 8, 9),)),
        (Transformer(2, 8, 2, 1), (SET, PRESENT > 0)),
        (Entities((3, 2), 8, 2, 1), (SET,)),
        (Categorical(3, 2), (FLAT, torch.tensor([[1, 0], [1, 1]], dtype=torch.int8))),
        (MultiHead(3, [2, 2]), (FLAT,)),
        (Pointer(3, 2, 4), (FLAT, SET, PRESENT)),
        (Gaussian(3, 2), (FLAT,)),
        (Squashed(3, 2), (FLAT,)),
        (StateDependent(3, 2), (FLAT,)),
        (Hybrid(Categorical(3, 2), Gaussian(3, 1)), (FLAT,)),
        (Value(3, 2), (FLAT,)),
        (LSTM(3, 4), (FLAT, LSTM(3, 4).initial(2))),
        (MLP([3, 4, 2]), (FLAT,)),
        (ActorCritic(3, 2, (4,)), (FLAT,)),
        (Central(np.zeros(3, np.float32), network), (FLAT,)),
        (CentralisedPolicy(FLAT[0], FLAT[0], num_actions=2, network=network), ({"obs": FLAT},)),
        (GroupValue(Observation({"speed": Numbers((3,))}), network), ({"obs": {"speed": SPEEDS}, "present": PRESENT},)),
        (GroupedPolicy({"speed": FLAT[0]}, num_actions=2, network=network), ({"speed": FLAT},)),
        (Critics(Numbers((3,)), 2, [4]), (FLAT, torch.zeros(2, 2))),
        (SoftActorCritic(np.zeros(3, np.float32), 2), (FLAT,)),
    ]
    modules = {type(module).__name__: (module, args) for module, args in parts}
    choosing = SoftActorCritic({"speed": np.zeros(3), MASK: np.ones(4)}, 2, num_actions=[2, 2])
    modules["SoftActorCritic hybrid"] = choosing, ({"speed": FLAT, MASK: torch.tensor([[1, 0, 1, 1]] * 2)},)
    modules["Critics of choices"] = Critics(Numbers((3,)), 0, [4], choices=4), (FLAT, torch.zeros(2, 0))
    for name in CONVOLUTIONS:
        size = SMALLEST[name]
        modules[f"Spatial {name} channels first"] = Spatial((3, size, size), name, 4), (image(3, size, size),)
        modules[f"Spatial {name} channels last"] = Spatial((size, size, 1), name, 4), (image(size, size, 1),)
    return {**modules, **{f"policy {kind}": make(kind) for kind in KINDS}}


def in_one_graph():
    """Every policy, every network that no policy uses, and channels-last images."""
    policies = [module for name, (module, _) in CASES.items() if name.startswith("policy")]
    parts = {type(part) for policy in policies for part in policy.modules() if part is not policy}
    whole = {name: case for name, case in CASES.items() if type(case[0]) not in parts}
    return whole | {name: CASES[name] for name in ["Spatial small channels last"]}


CASES = cases()
SERVED = in_one_graph()


class ServedNetworks(nn.Module):
    """All served networks in one graph."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(module for module, _ in SERVED.values())

    def forward(self, args):
        return {name: part(*args[name]) for name, part in zip(SERVED, self.parts, strict=True)}


def test_every_network_has_a_case():
    shipped = set()
    for info in pkgutil.iter_modules(brayx.nets.__path__, "brayx.nets."):
        for name, kind in vars(importlib.import_module(info.name)).items():
            if inspect.isclass(kind) and issubclass(kind, nn.Module) and kind.__module__ == info.name:
                shipped |= {kind} if not name.startswith("_") else set()
    assert len(shipped) > 20
    assert shipped <= {type(module) for module, _ in CASES.values()}, "a network is missing from the cases"


@pytest.mark.parametrize("name", CASES)
def test_the_engine_for_acting_computes_what_torch_computes(name):
    module, args = CASES[name]
    verify(OnnxEngine(module, args, traced=True, verify_outputs=False), module, args, batch_sizes=(1, 3))
    graph = to_onnx(module, args, traced=True)
    assert graph.traced or name == "LSTM", "the slower exporter was taken"  # an LSTM's outputs have no names
    open_session(graph.proto, 1)  # raises where the engine would fall back to the slower exporter


@pytest.mark.slow  # an export of many networks
def test_the_engine_for_serving_computes_what_torch_computes():
    module, args = ServedNetworks(), ({name: args for name, (_, args) in SERVED.items()},)
    verify(OnnxEngine(module, args, verify_outputs=False), module, args, batch_sizes=(1, 3))
