"""Shapes and the initialisation that PPO depends on."""

from __future__ import annotations

import pytest
import torch

from brayx.nets.mlp import MLP, ActorCritic


def test_actor_critic_shapes_with_any_leading_axes():
    net = ActorCritic(4, 3, hidden=(16, 8))
    for leading in ((), (5,), (7, 5)):
        out = net(torch.zeros(*leading, 4))
        assert out["logits"].shape == (*leading, 3)
        assert out["value"].shape == leading


@pytest.mark.parametrize(("layer", "gain"), [(0, 2**0.5), (2, 2**0.5)])
def test_hidden_layers_are_orthogonal_with_gain_sqrt_two(layer, gain):
    weight = ActorCritic(4, 3).policy.layers[layer].weight
    gram = weight.T @ weight
    torch.testing.assert_close(gram, gain**2 * torch.eye(len(gram)), rtol=1e-4, atol=1e-4)


def test_last_layers_and_biases():
    net = ActorCritic(4, 3)
    policy, value = net.policy.layers[-1].weight, net.value.layers[-1].weight
    torch.testing.assert_close(policy @ policy.T, 1e-4 * torch.eye(3), rtol=1e-3, atol=1e-8)
    torch.testing.assert_close(value @ value.T, torch.eye(1), rtol=1e-4, atol=1e-5)
    assert all((parameter == 0).all() for name, parameter in net.named_parameters() if name.endswith("bias"))


def test_towers_share_nothing():
    net = ActorCritic(4, 2)
    net(torch.ones(1, 4))["value"].sum().backward()
    assert all(parameter.grad is None for parameter in net.policy.parameters())


@pytest.mark.parametrize("sizes", [[], [4], [4, 0]])
def test_invalid_sizes_are_refused(sizes):
    with pytest.raises(ValueError, match="sizes must have"):
        MLP(sizes)
