"""`brayx.algorithms.build`: each name gives its algorithm, and refusals name what would fit."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from brayx.algorithms.build import AnyAlgorithm, build, check_critic, check_fits, check_outputs, check_space
from brayx.algorithms.config import AlgorithmConfig, Policy
from brayx.errors import ConfigError
from brayx.nets.encoders import Numbers
from brayx.nets.soft import Critics
from tests.unit.algorithms.tables import Table, sgd

CONFIGS = TypeAdapter(AnyAlgorithm)
NAMES = ("ppo", "impala", "sac", "bc", "mixed", "mappo")


@pytest.mark.parametrize("name", NAMES)
def test_a_name_selects_its_algorithm(name):
    module = Table(3, 2)
    module.critic = Critics(Numbers((3,)), 2, [4])
    config = CONFIGS.validate_python({"name": name})
    algorithm = build(config, module, sgd(module))
    assert type(algorithm).__name__.lower() == name
    assert algorithm.priorities is None
    algorithm.load_state_dict(algorithm.state_dict())


def test_ppo_is_the_default():
    assert CONFIGS.validate_python({"gamma": 0.5}).name == "ppo"


def test_an_unknown_name_or_option_is_refused():
    with pytest.raises(ValidationError, match="impala"):
        CONFIGS.validate_python({"name": "impalla"})
    with pytest.raises(ValidationError, match="clip_param"):
        CONFIGS.validate_python({"name": "impala", "clip_param": 0.1})
    with pytest.raises(ValidationError, match="clip_rho"):
        CONFIGS.validate_python({"name": "impala", "clip_rho": 0.0})


class Continuous(AlgorithmConfig):
    """A user's own, for numbers alone."""

    name: str = "own"
    policies: ClassVar[tuple[Policy, ...]] = ("gaussian", "squashed")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["discrete", "multi_discrete", "box", "hybrid"])
def test_brayxs_algorithms_accept_every_action_space(name, kind):
    check_space(CONFIGS.validate_python({"name": name}), kind)


@pytest.mark.parametrize(
    "outputs",
    [
        ["logits", "value"],
        ["logits/0", "logits/1", "value"],
        ["mean", "log_std", "value"],
        ["logits/0", "mean", "log_std", "value"],
        ["logits/0", "tanh_mean", "tanh_log_std", "value"],
    ],
)
def test_matching_outputs_pass(outputs):
    check_outputs(CONFIGS.validate_python({"name": "impala"}), outputs)


def test_wrong_outputs_are_refused_with_a_remedy():
    impala = CONFIGS.validate_python({"name": "impala"})
    with pytest.raises(ConfigError, match=r"\['value'\], .*logits, or mean"):
        check_outputs(impala, ["value"])
    with pytest.raises(ConfigError, match="needs an output 'value'"):
        check_outputs(impala, ["logits"])
    sac = CONFIGS.validate_python({"name": "sac"})
    with pytest.raises(ConfigError, match="tanh_mean and tanh_log_std") as refused:
        check_outputs(sac, ["mean", "log_std", "value"])
    assert "ppo" in refused.value.details["fits"]
    with pytest.raises(ConfigError, match=r"logits and mean and log_std: .*logits and tanh_mean"):
        check_outputs(sac, ["logits", "mean", "log_std", "value"])
    with pytest.raises(ConfigError, match="with a memory; ppo"):
        check_outputs(sac, ["tanh_mean", "tanh_log_std", "state/h"], recurrent=True)
    for outputs in (["tanh_mean", "tanh_log_std"], ["logits"], ["logits/0", "logits/1", "tanh_mean", "tanh_log_std"]):
        check_outputs(sac, outputs)


@pytest.mark.parametrize("kind", ["discrete", "multi_discrete", "hybrid"])
def test_a_wrong_action_space_is_refused_with_a_remedy(kind):
    check_space(Continuous(), "box")
    with pytest.raises(ConfigError, match=f"'own' does not learn actions that are {kind}; these do: ppo") as refused:
        check_space(Continuous(), kind)
    assert {"ppo", "impala", "sac", "bc"} <= set(refused.value.details["fits"])


def test_a_critic_that_gives_other_values_is_refused():
    sac, obs, numbers = CONFIGS.validate_python({"name": "sac"}), torch.zeros(2, 3), torch.zeros(2, 1)
    module = torch.nn.Module()
    for choices in (0, 5):
        module.critic = Critics(Numbers((3,)), 1, [4], choices=choices)
        check_critic(sac, module, (obs, numbers), choices)
        with pytest.raises(ConfigError, match=r"needs a critic .*numbers .*choices\]; for N = 2 it gave \[2, 2"):
            check_critic(sac, module, (obs, numbers), 4)


@pytest.mark.parametrize(
    ("options", "known", "message"),
    [
        ({"name": "sac", "n_step": 3}, {"unroll_length": 2}, "n_step 3, .*unroll_length 2"),
        ({}, {"sampler": "prioritised"}, "'ppo' neither gives priorities .* these do: impala, sac$"),
        ({}, {"sampler": "prioritised", "kind": "discrete"}, "these do: impala, sac$"),
        ({"name": "mappo"}, {"sampler": "prioritised"}, "'mappo' neither gives priorities"),
        ({"name": "mixed"}, {"sampler": "prioritised"}, "'ppo' neither gives priorities"),
        ({"name": "mappo"}, {"gives": {"obs"}}, "needs obs/state"),
        ({"name": "bc"}, {"gives": {"obs"}}, "learn without: ppo, impala, sac"),
        ({"name": "bc"}, {"gives": {"obs"}, "kind": "discrete"}, "learn without: ppo, impala, sac$"),
        ({"name": "mixed"}, {"gives": {"obs"}}, "no data is marked as such"),
        ({"reward_heads": [{}]}, {"gives": {"obs"}}, r"reward_heads \[T, K\]"),
    ],
)
def test_unsuitable_data_is_refused(options, known, message):
    config = CONFIGS.validate_python(options)
    with pytest.raises(ConfigError, match=message):
        check_fits(config, **known)
    check_fits(config, kind="box", unroll_length=3, gives={"obs", "obs/state", "demonstration", "reward_heads"})
    check_fits(config)


@pytest.mark.parametrize("name", ["impala", "sac", "bc"])
def test_algorithms_that_weigh_columns_accept_priorities(name):
    check_fits(CONFIGS.validate_python({"name": name}), sampler="prioritised")


def test_mixed_accepts_priorities_if_its_reinforcement_does():
    mixed = {"name": "mixed", "reinforcement": {"name": "impala"}}
    check_fits(CONFIGS.validate_python(mixed), sampler="prioritised")
