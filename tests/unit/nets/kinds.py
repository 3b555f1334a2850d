"""Kinds of ready-made policies, each with its observation, its actions and the options of its network."""

from __future__ import annotations

import numpy as np
import torch

from brayx.nets.policy import NetworkConfig, policy_for

FLAT = np.zeros(5, np.float32)
IMAGE = np.zeros((3, 20, 20), np.uint8)
MASKED = {"action_mask": np.zeros(5, np.int8), "table": np.zeros((2, 3), np.float32)}

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
    "reward heads": (FLAT, {"num_actions": 3}, {"value_heads": 4}),
    "categories": (np.int64(0), {"num_actions": 3, "categories": 7}, {}),
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
