"""`brayx.nets.policy`: every kind of policy follows the conventions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from brayx.nets.distributions import log_prob_entropy, sample
from brayx.nets.policy import NetworkConfig, policy_for
from tests.unit.nets.kinds import FLAT, KINDS, MASKED, make


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_are_a_distribution_and_a_value(kind):
    module, example = make(kind)
    outputs = module(*example)
    action, drawn = sample(outputs)
    log_prob, entropy = log_prob_entropy(outputs, action)
    assert action.dtype in (torch.int64, torch.float32)
    several = {"multi-discrete": 2, "masked heads": 2, "gaussian": 2, "sde": 2, "squashed": 2}
    several |= {"hybrid": 4, "squashed hybrid": 4, "hybrid of one head and sde": 3, "hybrid memory": 3}
    assert action.shape[1:] == ((several[kind],) if kind in several else ())
    torch.testing.assert_close(log_prob, drawn, rtol=1e-4, atol=1e-4)
    assert log_prob.shape == entropy.shape == (2,)
    assert outputs["value"].shape == ((2, 4) if kind == "reward heads" else (2,))
    assert ("state" in outputs) == ("memory" in kind)


@pytest.mark.parametrize("kind", ["discrete", "multi-discrete", "gaussian"])
def test_a_new_policy_is_nearly_constant(kind):
    """The last layer's small gain makes action and deviation almost independent of the observation."""
    module, _ = make(kind)
    outputs = module(torch.randn(100, 5))
    for head in (
        outputs.get("logits", outputs.get("mean")).split(1) if kind == "gaussian" else _tuple(outputs["logits"])
    ):
        assert head.abs().max() < 0.1
    assert outputs["value"].std() > 0.1


def _tuple(logits):
    return logits if isinstance(logits, tuple) else (logits,)


def test_towers_share_layers_only_if_asked():
    for kind, shares in (("discrete", False), ("shared", True)):
        module, _ = make(kind)
        module(torch.randn(2, 5))["value"].sum().backward()
        assert any(p.grad is not None and p.grad.any() for p in module.trunk.parameters()) == shares


def test_a_mask_forbids_actions_and_an_empty_mask_has_no_gradient():
    module, example = make("masked heads")
    mask = torch.tensor([[1, 0, 1, 0, 1], [0, 0, 0, 1, 1]], dtype=torch.int8)
    outputs = module({**example[0], "action_mask": mask})
    first, second = outputs["logits"]
    assert first[0].softmax(-1)[1] == 0
    assert second[0].softmax(-1).tolist() == [0, 1]
    torch.testing.assert_close(first[1].softmax(-1), torch.full((3,), 1 / 3))
    log_prob, entropy = log_prob_entropy({"logits": (first[1:], first[1:])}, torch.zeros(1, 2).long())
    (log_prob + entropy).sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in module.parameters())
    assert torch.isfinite(log_prob_entropy(outputs, torch.ones(2, 2).long())[1]).all()


def test_unsupported_arguments_are_refused():
    with pytest.raises(ValueError, match="num_actions, action_size or both"):
        policy_for(FLAT)
    with pytest.raises(ValueError, match="expected shape"):
        policy_for(MASKED, num_actions=4)
    with pytest.raises(ValueError, match=r"8 x 9 .*'nature'.* 36 x 36; .* impala$"):
        policy_for(np.zeros((8, 9, 1), np.uint8), num_actions=2)
    with pytest.raises(ValueError, match="besides its action_mask"):
        policy_for({"action_mask": np.zeros(2)}, num_actions=2)


@pytest.mark.parametrize(
    ("obs", "action", "network", "message"),
    [
        (MASKED, {"num_actions": 5}, {"entities": ["nope"]}, r"network\.entities .*'nope'.*\['table'\]"),
        (FLAT, {"num_actions": 3}, {"distribution": "sde"}, r"network\.distribution is sde.*continuous"),
        (FLAT, {"num_actions": [3, 2]}, {"log_std": -1.0}, r"network\.log_std is -1.0, .*discrete"),
        (
            FLAT,
            {"action_size": 2},
            {"distribution": "squashed", "log_std": 0.0},
            r"network\.log_std is 0.0, .*deviation",
        ),
        (FLAT, {"num_actions": 3}, {"lstm": 8, "shared": False}, r"network\.shared is False.*null or true"),
        (
            FLAT,
            {"num_actions": 3},
            {"convolutions": "impala"},
            r"network\.convolutions is impala.*uint8",
        ),
    ],
)
def test_an_option_without_effect_is_refused_naming_what_it_needs(obs, action, network, message):
    with pytest.raises(ValueError, match=message):
        policy_for(obs, **action, network=NetworkConfig(**network))


def spread(layer):
    """The largest weight of a layer as a share of 1 / sqrt(inputs)."""
    return layer.weight.abs().max() * layer.weight[0].numel() ** 0.5


@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize(
    ("obs", "network"),
    [
        (FLAT, {"distribution": "sde"}),
        (FLAT, {"lstm": 8}),
        (np.zeros((36, 36, 3), np.uint8), {"convolutions": "small"}),
        (np.zeros((36, 36, 3), np.uint8), {"convolutions": "impala"}),
    ],
)
def test_layers_start_uniform_with_uniform_init(obs, network, uniform):
    torch.manual_seed(0)
    module, _ = policy_for(obs, action_size=2, network=NetworkConfig(**network, uniform_init=uniform))
    layers = [layer for layer in module.modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
    assert len(layers) >= 4
    assert all(0.5 < spread(layer) <= 1 for layer in layers) == uniform
    assert (spread(module.head.mean) > 0.5) == uniform
    assert all(layer.bias.any() for layer in layers if layer.bias is not None) == uniform


@pytest.mark.parametrize("action", [{"num_actions": 3}, {"action_size": 2}])
def test_options_at_their_defaults_are_never_refused(action):
    """A template writes down every option."""
    policy_for(FLAT, **action, network=NetworkConfig(**NetworkConfig().model_dump()))


def test_integers_are_not_a_set():
    """They are encoded one-hot, so they cannot be entities."""
    obs = {"kind": np.zeros((4, 3), np.int64)}
    with pytest.raises(ValueError, match=r"network\.entities has 'kind'"):
        policy_for(obs, num_actions=2, categories={"kind": 5}, network=NetworkConfig(entities=["kind"]))
