"""`brayx.jobs.contract_model`: the network that a contract gets, and that it acts the same in ONNX."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from brayx import actions
from brayx.algorithms.mappo import MAPPOConfig
from brayx.algorithms.ppo import PPOConfig
from brayx.algorithms.sac import SACConfig
from brayx.engines.export import verify
from brayx.engines.onnx import OnnxEngine
from brayx.engines.torch import module_weights
from brayx.errors import BadBody, ConfigError
from brayx.gamecore.contract import Contract
from brayx.jobs.contract_model import ContractNetworkConfig, build_model, check_parameters, network_of
from brayx.nets.distributions import log_prob_entropy, sample
from brayx.nets.encoders import Embedding, Numbers, OneHot, Spatial, Text, features_of
from brayx.nets.normaliser import Normalised, follow
from brayx.nets.policy import leaf_encoders
from brayx.nets.transformer import Entities
from brayx.spaces import MASK

VECTOR = {"dx.dy (m)": {"shape": [2, 3]}}
DASH, GEAR = {"kind": "discrete", "size": 2, "mask": True}, {"kind": "discrete", "size": 3}
STEER = {"kind": "continuous", "size": 2}
OBSERVATIONS: dict[str, dict[str, Any]] = {
    "vector": {"shape": [3]},
    "flags": {"shape": [2], "dtype": "uint8"},
    "last": {"kind": "image", "shape": [40, 36, 3]},
    "first": {"kind": "image", "shape": [1, 20, 22], "layout": "CHW", "dtype": "float32"},
    "tiny": {"kind": "image", "shape": [7, 7, 3]},
    "units": {"kind": "entities", "shape": [4, 3]},
    "suit": {"kind": "category", "size": 4, "start": 1},
    "cards": {"kind": "category", "size": 500, "shape": [2]},
    "order": {"kind": "text", "size": 12},
}
CONTRACTS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "discrete": (VECTOR, {"gear": GEAR}, {}),
    "masked heads": (VECTOR, {"dash": DASH, "gear": GEAR}, {}),
    "continuous": (VECTOR, {"steer": STEER, "aim": STEER}, {}),
    "hybrid": (VECTOR, {"steer": STEER, "dash": DASH}, {}),
    "hybrid with a memory": (VECTOR, {"gear": GEAR, "steer": STEER, "dash": DASH}, {"lstm": 8}),
    "everything": (OBSERVATIONS, {"gear": GEAR, "steer": STEER, "dash": DASH}, {"hidden": [16]}),
    **{name: ({name: spec}, {"gear": GEAR}, {"hidden": [16]}) for name, spec in OBSERVATIONS.items()},
}


def contract_of(observations: dict[str, Any], acts: dict[str, Any]) -> Contract:
    return Contract.parse({"contract": 1, "observations": observations, "actions": acts})


def made(case: str) -> tuple[Contract, torch.nn.Module, tuple[Any, ...]]:
    observations, acts, options = CONTRACTS[case]
    torch.manual_seed(0)
    contract = contract_of(observations, acts)
    return (contract, *network_of(contract, ContractNetworkConfig(**options)))


def random_obs(contract: Contract, *leading: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Observations as a model gets them; ``order`` ends early, and the last unit is absent."""
    rng = np.random.default_rng(seed)
    obs = {}
    for name, example in contract.example().items():
        spec = next((spec for spec in contract.observations if spec.name == name), None)
        shape = (*leading, *example.shape)
        most = 1 if spec is None else spec.size if spec.kind == "category" else 256
        drawn = rng.normal(5, 3, shape) if example.dtype.kind == "f" else rng.integers(0, most, shape)
        obs[name] = torch.from_numpy(np.asarray(drawn, example.dtype))
    if "units" in obs:
        obs["units"][..., -1, :] = 0
    if "order" in obs:
        obs["order"][..., 5:] = 0
    if "action_mask" in obs:
        obs["action_mask"][:] = 1
    return obs


def learned(contract: Contract, module: torch.nn.Module) -> None:
    """Moments and weights as after some learning: a new policy is almost constant."""
    follow(module, random_obs(contract, 8, 5), torch.ones(8, 5), lambda x: x)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))


@pytest.mark.parametrize("case", CONTRACTS)
def test_it_takes_the_contracts_observation_and_gives_its_actions(case: str) -> None:
    contract, module, args = made(case)
    assert {name: leaf.dtype for name, leaf in args[0].items()} == {
        name: torch.from_numpy(leaf).dtype for name, leaf in contract.example().items()
    }
    outputs = module(random_obs(contract, 5), *[{k: v[:1].repeat(5, 1) for k, v in s.items()} for s in args[1:]])
    action, drawn = sample({name: leaf for name, leaf in outputs.items() if name != "state"})
    width = len(contract.sizes) + contract.dimensions
    assert action.shape == ((5,) if width == 1 else (5, width))
    torch.testing.assert_close(log_prob_entropy(outputs, action)[0], drawn, rtol=1e-4, atol=1e-4)
    assert outputs["value"].shape == (5,)


@pytest.mark.parametrize("case", CONTRACTS)
def test_it_acts_the_same_in_onnx(case: str) -> None:
    """With newer weights and moments than those at the export, as when a learner publishes."""
    contract, module, args = made(case)
    engine = OnnxEngine(module, args, traced=True, verify_outputs=False)
    verify(engine, module, args, batch_sizes=(1, 3))
    learned(contract, module)
    obs = random_obs(contract, 3, seed=1)
    state = [{name: leaf[:1].repeat(3, 1) for name, leaf in part.items()} for part in args[1:]]
    with torch.no_grad():
        expected = module(obs, *state)
    leaves = engine.spec.input_tree.flatten_up_to((obs, *state))
    outputs = engine.spec.output_tree.unflatten(
        engine.run(engine.bind(module_weights(module)), [leaf.numpy() for leaf in leaves])
    )
    found = actions.greedy({name: leaf for name, leaf in outputs.items() if name != "state"})
    wanted = {
        name: tuple(head.detach().numpy() for head in leaf) if isinstance(leaf, tuple) else leaf.detach().numpy()
        for name, leaf in expected.items()
        if name != "state"
    }
    np.testing.assert_allclose(found, actions.greedy(wanted), atol=1e-5)


def test_each_kind_of_observation_has_its_encoder() -> None:
    _, module, _ = made("everything")
    encoders = dict(leaf_encoders(module.encoder))
    bare = {name: e.encoder if isinstance(e, Normalised) else e for name, e in encoders.items()}
    assert {name: type(encoder) for name, encoder in bare.items()} == {
        "vector": Numbers,
        "flags": Numbers,
        "last": Spatial,
        "first": Spatial,
        "tiny": Spatial,
        "units": Entities,
        "suit": OneHot,
        "cards": Embedding,
        "order": Text,
    }
    kinds = {name: type(bare[name].network).__name__ for name in ("last", "first", "tiny")}
    assert kinds == {"last": "NatureCNN", "first": "SmallCNN", "tiny": "ImpalaCNN"}
    assert (bare["last"].last, bare["first"].last) == (True, False)
    assert {bare[name].features for name in kinds} == {256}
    image = contract_of({"last": OBSERVATIONS["last"]}, {"gear": GEAR})
    assert features_of(network_of(image, ContractNetworkConfig(image_features=512))[0].encoder) == 512
    assert not network_of(image)[0].shared
    assert network_of(image, ContractNetworkConfig(lstm=8))[0].shared
    normalised = [name for name, encoder in encoders.items() if isinstance(encoder, Normalised)]
    assert normalised == ["vector", "flags", "units"]
    _, raw, _ = (None, *network_of(contract_of(OBSERVATIONS, {"gear": GEAR}), ContractNetworkConfig(normalise=False)))
    assert not any(isinstance(part, Normalised) for part in raw.modules())


def test_heads_come_before_numbers_in_the_contracts_order_and_masks_forbid() -> None:
    contract, module, _ = made("hybrid with a memory")
    obs = random_obs(contract, 4)
    obs["action_mask"][:] = torch.tensor([0, 1, 0, 1, 0])
    outputs = module(obs, {name: leaf.repeat(4, 1) for name, leaf in module.memory.initial(1).items()})
    assert [head.shape[-1] for head in outputs["logits"]] == [3, 2]
    action, _ = sample({name: leaf for name, leaf in outputs.items() if name != "state"})
    assert action[:, :2].tolist() == [[1, 0]] * 4


def test_the_padding_of_a_text_makes_no_difference() -> None:
    torch.manual_seed(0)
    encoder, text = Text(8), torch.tensor(list(b"attack"), dtype=torch.uint8)
    long = torch.cat([text, torch.zeros(20, dtype=torch.uint8)])
    torch.testing.assert_close(encoder(text), encoder(long))
    assert not encoder(torch.zeros(2, 3, 4, dtype=torch.uint8)).any()
    assert not torch.allclose(encoder(text), encoder(text.flip(0)))


def test_the_algorithm_gets_the_network_that_it_learns() -> None:
    continuous, hybrid = contract_of(VECTOR, {"steer": STEER}), contract_of(VECTOR, {"steer": STEER, "gear": GEAR})
    module, (obs,) = network_of(continuous, algorithm=SACConfig())
    assert set(module(obs)) == {"tanh_mean", "tanh_log_std"}
    assert module.critic(obs, torch.zeros(2, 2)).shape == (2, 2)
    network_of(hybrid, algorithm=PPOConfig())
    module, (obs,) = network_of(hybrid, algorithm=SACConfig())
    assert set(module(obs)) == {"logits", "tanh_mean", "tanh_log_std"}
    assert module.critic(obs, torch.zeros(2, 2)).shape == (2, 2, 3)
    masked = contract_of(VECTOR, {"gear": GEAR, "dash": DASH})
    module, (obs,) = network_of(masked, algorithm=SACConfig())
    assert [head.shape for head in module({**obs, MASK: torch.ones(2, 5)})["logits"]] == [(2, 3), (2, 2)]
    assert module.critic(obs, torch.zeros(2, 0)).shape == (2, 2, 5)
    module, (obs,) = network_of(hybrid, algorithm=MAPPOConfig())
    assert set(module(obs)) == {"logits", "mean", "log_std"}
    with pytest.raises(ConfigError, match=r"network\.lstm is 4: a policy with a central value has no memory"):
        network_of(continuous, ContractNetworkConfig(lstm=4), MAPPOConfig())


def test_a_job_says_contract_options_and_algorithm() -> None:
    document = contract_of(VECTOR, {"gear": GEAR}).as_dict()
    trainer = {"kind": "trainer", "model": "model", "buffers": ["buffer"], "algorithm": {"name": "ppo"}}
    job = {"contract": document, "network": {"kind": "config", "hidden": [7], "normalise": False}, "trainer": trainer}
    module, _ = build_model("model", job)
    assert module.trunk(torch.zeros(1, 6)).shape == (1, 7)
    module, (obs,) = build_model("model", {**job, "trainer": {**trainer, "algorithm": {"name": "sac"}}})
    assert module.critic(obs, torch.zeros(2, 0)).shape == (2, 2, 3)
    for network, message in (
        ({"hiden": [7]}, "network.hiden: unknown key; nearest is 'hidden'"),
        ({"log_std": 1.0}, "network.log_std is 1.0"),
    ):
        with pytest.raises(ConfigError, match=message):
            build_model("model", {**job, "network": network})
    small = contract_of({"eye": OBSERVATIONS["first"]}, {"gear": GEAR}).as_dict()
    with pytest.raises(ConfigError, match="20 x 22 pixels is too small for convolutions 'nature'"):
        build_model("model", {**job, "contract": small, "network": {"convolutions": "nature"}})
    with pytest.raises(ConfigError, match="contract is None, and model 'model' is built from it"):
        build_model("model", {**job, "contract": None})


JOB: dict[str, Any] = {"model": {"kind": "model", "module": "brayx.jobs.contract_model"}}


@pytest.mark.parametrize(
    "observation",
    [
        {"shape": [2**23]},
        {"kind": "image", "shape": [1, 2**23, 1]},
        {"kind": "image", "shape": [2048, 4096, 1]},
        {"kind": "image", "shape": [1, 1, 2**23]},
        {"kind": "entities", "shape": [1, 2**23]},
        {"kind": "category", "size": 65535, "shape": [2**20]},
    ],
    ids=str,
)
def test_a_contract_of_a_few_bytes_cannot_fill_the_memory(observation: dict[str, Any]) -> None:
    contract = contract_of({"small": {"shape": [4]}, "large": observation}, {"gear": GEAR})
    with pytest.raises(BadBody, match=rf"observations\.large takes the network to \d+ .* at most {2**28}") as refusal:
        check_parameters(contract, JOB)
    assert refusal.value.details["field"] == "observations.large"
    check_parameters(contract, {"model": {**JOB["model"], "module": "model.py"}})


def test_parameters_are_counted_with_the_options_of_the_network_and_over_all_observations() -> None:
    contract = contract_of({name: {"shape": [2**19]} for name in "abc"}, {"gear": GEAR})
    check_parameters(contract, JOB)
    with pytest.raises(BadBody, match=r"observations\.b takes the network to"):
        check_parameters(contract, {**JOB, "network": {"kind": "config", "hidden": [200]}})
    check_parameters(contract_of(OBSERVATIONS, {"gear": GEAR}), JOB)
    tiny = contract_of({"tiny": OBSERVATIONS["tiny"]}, {"gear": GEAR})
    with pytest.raises(BadBody, match=r"observations\.tiny: an image of 7 x 7 pixels is too small"):
        check_parameters(tiny, {**JOB, "network": {"kind": "config", "convolutions": "nature"}})
