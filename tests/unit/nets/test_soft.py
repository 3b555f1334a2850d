"""`brayx.nets.soft`: each critic is a separate network, and an engine can compute the policy without them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from brayx.engines import build_engine
from brayx.nets.encoders import Numbers, features_of
from brayx.nets.policy import NetworkConfig
from brayx.nets.soft import Critics, soft_policy_for
from brayx.nets.transformer import Entities


def test_critics_are_separate_networks():
    torch.manual_seed(0)
    critics = Critics(Numbers((3,)), 2, [8, 8], count=3)
    obs, action = torch.randn(5, 3), torch.randn(5, 2)
    q = critics(obs, action)
    assert q.shape == (5, 3)
    for index in range(3):
        x = torch.cat([obs, action], -1)
        for layer in range(3):
            x = x @ critics.weights[layer][index] + critics.biases[layer][index]
            x = x if layer == 2 else x.relu()
        torch.testing.assert_close(q[:, index], x[:, 0])
    (gradient,) = torch.autograd.grad(q[:, 0].sum(), critics.weights[0])
    assert gradient[0].abs().sum() > 0
    assert not gradient[1:].any()


@pytest.mark.parametrize(
    ("chosen", "function"),
    [({"activation": "tanh"}, torch.tanh), ({"activation": "silu"}, torch.nn.functional.silu), ({}, torch.relu)],
)
def test_policy_and_critics_have_the_chosen_activation_or_the_papers(chosen, function):
    torch.manual_seed(0)
    module, _ = soft_policy_for(np.zeros(3, np.float32), action_size=2, network=NetworkConfig(hidden=[8], **chosen))
    obs, action = torch.randn(5, 3), torch.randn(5, 2)
    first, last = zip(module.critic.weights, module.critic.biases, strict=True)
    hidden = function(torch.cat([obs, action], -1) @ first[0] + first[1])
    torch.testing.assert_close(module.critic(obs, action), (hidden @ last[0] + last[1])[..., 0].T)
    linear = next(layer for layer in module.trunk.modules() if isinstance(layer, torch.nn.Linear))
    torch.testing.assert_close(module(obs)["tanh_mean"], module.head(function(linear(obs)))["tanh_mean"])


def test_acting_computes_no_critic():
    """Also with an observation of several leaves; an ONNX graph has the policy's weights only."""
    obs = {"speed": np.zeros(3, np.float32), "place": np.zeros((2, 2), np.float32)}
    module, example = soft_policy_for(obs, action_size=2, network=NetworkConfig(hidden=[8], activation="relu"))
    outputs = module(*example)
    assert {name: leaf.shape for name, leaf in outputs.items()} == {"tanh_mean": (2, 2), "tanh_log_std": (2, 2)}
    assert module.critic(*example, torch.zeros(2, 2)).shape == (2, 2)
    arrays = tuple({name: leaf.numpy() for name, leaf in arg.items()} for arg in example)
    engine = build_engine("onnx", module, arrays)
    assert not any("critic" in name for name in engine._weights)
    bound = engine.bind(engine.initial)
    leaves = engine.run(bound, [np.ones((4, 2, 2), np.float32), np.ones((4, 3), np.float32)])
    assert [leaf.shape for leaf in leaves] == [(4, 2), (4, 2)]


def test_policy_and_critics_see_integers_one_hot_and_sets_by_a_transformer():
    obs = {"kind": np.int64(0), "others": np.zeros((4, 3), np.float32)}
    network = NetworkConfig(hidden=[8], entities=["others"])
    module, _ = soft_policy_for(obs, action_size=2, network=network, categories={"kind": 5})
    for encoder in (module.encoder, module.critic.encoder):
        kind, others = encoder.encoders
        assert isinstance(others, Entities)
        assert torch.equal(kind(torch.tensor([3])), torch.eye(5)[3:4])
    bare, example = soft_policy_for(np.int64(0), action_size=2, network=NetworkConfig(hidden=[8]), categories=6)
    assert features_of(bare.encoder) == features_of(bare.critic.encoder) == 6
    assert bare(*example)["tanh_mean"].shape == (2, 2)


@pytest.mark.parametrize(
    ("option", "value"), [("lstm", 4), ("shared", True), ("value_heads", 2), ("uniform_init", True)]
)
def test_inapplicable_options_are_refused_by_name(option, value):
    with pytest.raises(ValueError, match=f"network.{option} is {value}:"):
        soft_policy_for(np.zeros(3, np.float32), action_size=2, network=NetworkConfig(**{option: value}))


@pytest.mark.parametrize(
    ("network", "option"),
    [
        ({"distribution": "sde"}, "distribution"),
        ({"log_std": -1.0}, "log_std"),
        ({"convolutions": "small"}, "convolutions"),
    ],
)
def test_options_without_effect_are_refused(network, option):
    with pytest.raises(ValueError, match=f"network.{option} .*(needs|expected) "):
        soft_policy_for(np.zeros(3, np.float32), action_size=2, network=NetworkConfig(**network))
