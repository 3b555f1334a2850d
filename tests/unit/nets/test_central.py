"""`brayx.nets.central`: the policy sees the agent's own observation, and acting does not run the critic."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from brayx.engines import build_engine
from brayx.nets.central import GroupedPolicy, central_policy_for
from brayx.nets.encoders import OneHot
from brayx.nets.policy import NetworkConfig
from brayx.nets.transformer import Entities

NETWORK = NetworkConfig(hidden=[8])


def test_acting_takes_no_state_and_computes_no_critic():
    obs = {"obs": np.zeros(3, np.float32), "state": np.zeros(5, np.float32)}
    module, example = central_policy_for(obs, num_actions=4, network=NETWORK)
    assert module(*example)["logits"].shape == (2, 4)
    assert module.critic(torch.zeros(2, 5)).shape == (2,)
    engine = build_engine("onnx", module, ({"obs": example[0]["obs"].numpy()},))
    assert not any("critic" in name for name in engine._weights)
    (logits,) = engine.run(engine.bind(engine.initial), [np.ones((6, 3), np.float32)])
    assert logits.shape == (6, 4)


@pytest.mark.parametrize(
    ("options", "expected"),
    [({"num_actions": [2, 3]}, [(2, 2), (2, 3)]), ({"action_size": 2}, [(2, 2), (2, 2)])],
)
def test_other_actions(options, expected):
    obs = {"obs": {"a": np.zeros(3, np.float32)}, "state": np.zeros(5, np.float32)}
    module, example = central_policy_for(obs, network=NETWORK, **options)
    outputs = module(*example)
    leaves = outputs["logits"] if "logits" in outputs else (outputs["mean"], outputs["log_std"])
    assert [tuple(leaf.shape) for leaf in leaves] == expected


def test_masked_actions_of_an_agent():
    obs = {"obs": {"a": np.zeros(3, np.float32), "action_mask": np.zeros(4, np.int8)}, "state": np.zeros(5, np.float32)}
    module, _ = central_policy_for(obs, num_actions=4, network=NETWORK)
    mask = torch.tensor([[1, 0, 1, 0]], dtype=torch.int8)
    logits = module({"obs": {"a": torch.randn(1, 3), "action_mask": mask}})["logits"]
    assert (logits.softmax(-1)[0, [1, 3]] == 0).all()


def test_recurrent_options_are_refused():
    obs = {"obs": np.zeros(3, np.float32), "state": np.zeros(5, np.float32)}
    with pytest.raises(ValueError, match=r"network\.lstm is 16: .* has no memory"):
        central_policy_for(obs, num_actions=4, network=NetworkConfig(hidden=[8], lstm=16))


def test_an_observation_without_a_state_is_refused():
    with pytest.raises(ValueError, match="'obs' and 'state', got ndarray"):
        central_policy_for(np.zeros(3, np.float32), num_actions=2)
    with pytest.raises(ValueError, match="num_actions, action_size or both"):
        central_policy_for({"obs": np.zeros(3), "state": np.zeros(3)})


def test_integers_are_one_hot_and_sets_use_a_transformer():
    obs = {"obs": {"kind": np.int64(0), "others": np.zeros((4, 3), np.float32)}, "state": np.int64(0)}
    network = NetworkConfig(hidden=[8], entities=["others"])
    module, _ = central_policy_for(obs, num_actions=2, categories={"obs": {"kind": 5}, "state": 7}, network=network)
    kind, others = module.encoder.encoders
    assert isinstance(kind, OneHot)
    assert isinstance(others, Entities)
    assert torch.equal(kind(torch.tensor([3])), torch.eye(5)[3:4])
    assert torch.equal(module.critic.encoder(torch.tensor([6])), torch.eye(7)[6:])
    seen = {"obs": {"kind": torch.zeros(2, dtype=torch.int64), "others": torch.randn(2, 4, 3)}}
    assert module(seen)["logits"].shape == (2, 2)
    units = np.zeros((4, 3), np.float32)
    module, _ = central_policy_for(
        {"obs": np.zeros(3, np.float32), "state": units}, num_actions=2, network=NetworkConfig(entities=["state"])
    )
    assert isinstance(module.critic.encoder, Entities)


@pytest.mark.parametrize(
    ("distribution", "names"),
    [("gaussian", {"mean", "log_std"}), ("squashed", {"tanh_mean", "tanh_log_std"}), ("sde", {"mean", "sde_std"})],
)
def test_options_select_the_distribution_of_continuous_actions(distribution, names):
    obs = {"obs": np.zeros(3, np.float32), "state": np.zeros(5, np.float32)}
    network = NetworkConfig(hidden=[8], distribution=distribution)
    module, example = central_policy_for(obs, action_size=2, network=network)
    assert names <= set(module(*example))


def test_policy_and_value_start_uniform_with_uniform_init():
    obs = {"obs": np.zeros(3, np.float32), "state": np.zeros(5, np.float32)}
    module, _ = central_policy_for(obs, num_actions=2, network=NetworkConfig(hidden=[8], uniform_init=True))
    assert all(layer.bias.any() for layer in module.modules() if isinstance(layer, torch.nn.Linear))


@pytest.mark.parametrize(("option", "value"), [("lstm", 4), ("shared", True), ("value_heads", 2)])
def test_inapplicable_options_are_refused_by_name(option, value):
    obs = {"obs": np.zeros(3, np.float32), "state": np.zeros(5, np.float32)}
    with pytest.raises(ValueError, match=f"network.{option} is {value}: .*central value"):
        central_policy_for(obs, num_actions=2, network=NetworkConfig(**{option: value}))
    central_policy_for(obs, num_actions=2, network=NetworkConfig(shared=False))


@pytest.mark.parametrize(
    ("network", "option"), [({"entities": ["others"]}, "entities"), ({"distribution": "sde"}, "distribution")]
)
def test_options_without_effect_on_policy_and_value_are_refused(network, option):
    obs = {"obs": np.zeros(3, np.float32), "state": np.zeros(5, np.float32)}
    with pytest.raises(ValueError, match=f"network.{option} .*(needs|expected)"):
        central_policy_for(obs, num_actions=2, network=NetworkConfig(**network))


def test_the_value_of_a_group_depends_on_the_members_that_are_present():
    obs = {"a": np.zeros(3, np.float32)}
    module = GroupedPolicy(obs, num_actions=4, network=NETWORK)
    assert module({"a": torch.zeros(2, 3)})["logits"].shape == (2, 4)
    members, present = torch.randn(5, 4, 3), torch.tensor([[1, 1, 1, 0]] * 5, dtype=torch.uint8)

    def value(members, present=present):
        return module.critic({"obs": {"a": members}, "present": present})

    assert value(members).shape == (5,)
    torch.testing.assert_close(value(members[:, [0, 2, 1, 3]]), value(members))
    torch.testing.assert_close(value(torch.cat([members[:, :3], 9 + members[:, 3:]], 1)), value(members))
    torch.testing.assert_close(value(members[:, :3], present[:, :3]), value(members))
    assert not torch.allclose(value(members[:, [1, 0, 2, 3]]), value(members)), "the first is the agent's own"
    assert not torch.allclose(value(members, torch.ones_like(present)), value(members))


def test_the_value_of_a_group_encodes_as_the_policy_without_weights_of_a_second_name():
    module = GroupedPolicy({"a": np.zeros((4, 3), np.float32)}, num_actions=2, network=NetworkConfig(entities=["a"]))
    assert [name for name in module.state_dict() if "critic" in name and "encoder" in name] == []
    copied = copy.deepcopy(module)
    assert copied.critic._encoders[0] is copied.encoder
    module.critic({"obs": {"a": torch.randn(2, 5, 4, 3)}, "present": torch.ones(2, 5)}).sum().backward()
    assert all(p.grad is not None for p in module.encoder.parameters())
