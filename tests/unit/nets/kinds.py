"""Kinds of ready-made policies, each with its observation, actions and network options; and a set of entities."""

from __future__ import annotations

import numpy as np
import torch

from brayx.nets.policy import NetworkConfig, policy_for
from brayx.spaces import Limits

FLAT = np.zeros(5, np.float32)
IMAGE = np.zeros((3, 20, 20), np.uint8)
MASKED = {"action_mask": np.zeros(5, np.int8), "table": np.zeros((2, 3), np.float32)}

NESTED = {"me": {"kind": np.int64(5), "seen": np.asarray([[7, 250]], np.uint8)}, "map": np.zeros(4, np.float32)}
LIMITS = {"me": {"kind": Limits.of(3, 5), "seen": Limits(np.asarray([[7, 250]]), np.asarray([[9, 255]]))}}

KINDS = {
    "discrete": (FLAT, {"num_actions": 3}, {}),
    "shared": (FLAT, {"num_actions": 3}, {"shared": True, "activation": "relu"}),
    "no hidden layers": (FLAT, {"num_actions": 3}, {"hidden": []}),
    "multi-discrete": (FLAT, {"num_actions": [3, 2]}, {}),
    "masked": (MASKED, {"num_actions": 5}, {}),
    "masked heads": (MASKED, {"num_actions": [3, 2]}, {}),
    "gaussian": (FLAT, {"action_size": 2}, {}),
    "sde": (FLAT, {"action_size": 2}, {"distribution": "sde"}),
    "squashed": (FLAT, {"action_size": 2}, {"distribution": "squashed"}),
    "hybrid": (MASKED, {"num_actions": [3, 2], "action_size": 2}, {}),
    "squashed hybrid": (MASKED, {"num_actions": [3, 2], "action_size": 2}, {"distribution": "squashed"}),
    "hybrid of one head and sde": (FLAT, {"num_actions": 3, "action_size": 2}, {"distribution": "sde"}),
    "hybrid memory": (FLAT, {"num_actions": 3, "action_size": 2}, {"lstm": 8}),
    "reward heads": (FLAT, {"num_actions": 3}, {"value_heads": 4}),
    "categories": (np.int64(0), {"num_actions": 3, "categories": 7}, {}),
    "nested": (NESTED, {"num_actions": 3, "categories": LIMITS}, {}),
    "image": (IMAGE, {"num_actions": 3}, {"convolutions": "impala", "hidden": [32]}),
    "entities": (np.zeros((4, 3), np.float32), {"num_actions": 3}, {"entities": [""]}),
    "small image": (IMAGE, {"num_actions": 3}, {"convolutions": "small", "hidden": [32]}),
    "memory": (FLAT, {"num_actions": 3}, {"lstm": 8}),
    "masked memory": (MASKED, {"num_actions": 5}, {"lstm": 8}),
}


def make(kind):
    torch.manual_seed(0)
    obs, action, network = KINDS[kind]
    return policy_for(obs, **action, network=NetworkConfig(**network))


def entities():
    torch.manual_seed(0)
    return torch.randn(5, 6, 3), torch.rand(5, 6) < 0.6
