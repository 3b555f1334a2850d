"""``network.encoders``: the user's own encoders in the network for a contract, and what is said about wrong ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from brayx.algorithms.mappo import MAPPOConfig
from brayx.algorithms.ppo import PPOConfig
from brayx.algorithms.sac import SACConfig
from brayx.engines.onnx import OnnxEngine
from brayx.errors import BadBody, BrayxError, ConfigError, ModelError
from brayx.gamecore.contract import Contract
from brayx.jobs.code import check_code
from brayx.jobs.config import JobConfig
from brayx.jobs.contract_model import MAX_PARAMETERS, ContractNetworkConfig, build_model, check_parameters, network_of
from brayx.nets.encoders import Custom
from brayx.nets.normaliser import Normalised, follow
from brayx.nets.policy import leaf_encoders
from tests.unit.conftest import Run
from tests.unit.jobs import own_encoders
from tests.unit.jobs.contracts import GAME

MODULE = own_encoders.__name__
CONTRACT = {
    "contract": 1,
    "observations": {
        "ball": {"shape": [2, 2]},
        "camera": {"kind": "image", "shape": [24, 20, 3]},
        "units": {"kind": "entities", "shape": [3, 4]},
    },
    "actions": {"steer": {"kind": "continuous", "size": 2}},
}
OWN = {"camera": "Eyes", "units": "Rows", "ball": "Same"}


def options(encoders: dict[str, str], **others: Any) -> ContractNetworkConfig:
    return ContractNetworkConfig(encoders={name: f"{MODULE}.{path}" for name, path in encoders.items()}, **others)


def network(encoders: dict[str, str], algorithm: Any = None, **others: Any) -> tuple[Any, tuple[Any, ...]]:
    return network_of(Contract.parse(CONTRACT), options(encoders, **others), algorithm)


def job(encoders: dict[str, str]) -> dict[str, Any]:
    own = {name: f"{MODULE}.{path}" for name, path in encoders.items()}
    model = {"kind": "model", "module": "brayx.jobs.contract_model"}
    return {"contract": CONTRACT, "model": model, "network": {"kind": "config", "encoders": own}}


@pytest.mark.parametrize(
    ("algorithm", "others"),
    [(PPOConfig(), {}), (PPOConfig(), {"lstm": 4}), (SACConfig(), {}), (MAPPOConfig(), {})],
    ids=["ppo", "memory", "sac", "mappo"],
)
def test_every_network_has_them_and_learns_over_sequences(algorithm: Any, others: dict[str, Any]) -> None:
    torch.manual_seed(0)
    module, (example, *_) = network(OWN, algorithm, **others)
    custom = {name: part for name, part in leaf_encoders(module.encoder) if not isinstance(part, Normalised)}
    assert [(name, type(part), part.features) for name, part in custom.items()] == [("camera", Custom, 7)]
    assert module.encoder.features == 4 + 7 + 3
    module.eval()
    obs = {name: torch.randint(0, 9, (5, 3, *leaf.shape[1:])).to(leaf.dtype) for name, leaf in example.items()}
    features = module.encoder(obs)
    torch.testing.assert_close(features[2, 1], module.encoder({name: leaf[2, 1:2] for name, leaf in obs.items()})[0])
    features.sum().backward()
    assert all(part.grad is not None for part in custom["camera"].parameters())
    if isinstance(algorithm, SACConfig):
        assert module.critic.encoder is not module.encoder
        assert module.critic(example, torch.zeros(2, 2)).shape == (2, 2)
    if isinstance(algorithm, MAPPOConfig):
        assert module.critic({"obs": obs, "present": torch.ones(5, 3)}).shape == (5,)


@pytest.mark.parametrize("normalise", [True, False])
def test_they_get_what_other_encoders_get_and_absent_rows_are_zeros(normalise: bool) -> None:
    module, _ = network({"units": "Same", "ball": "Same", "camera": "Same"}, normalise=normalise)
    obs = {
        "ball": torch.tensor([[[1.0, 2.0], [3.0, 4.0]], [[3.0, 4.0], [5.0, 6.0]]]),
        "camera": torch.full((2, 24, 20, 3), 200, dtype=torch.uint8),
        "units": torch.tensor([[[1.0, 2.0, 3.0, 4.0], [3.0, 4.0, 5.0, 6.0], [0.0] * 4]] * 2),
    }
    follow(module, {name: leaf[None] for name, leaf in obs.items()}, torch.ones(1, 2), lambda x: x)
    ball, camera, units = module.encoder(obs).split([4, 24 * 20 * 3, 12], -1)
    assert (camera == 200).all()
    assert units[0, 8:].tolist() == [0.0] * 4
    if normalise:
        torch.testing.assert_close(ball, torch.tensor([[-1.0], [1.0]]).expand(2, 4))
        torch.testing.assert_close(units[0, :8].reshape(2, 4), torch.tensor([[-1.0], [1.0]]).expand(2, 4))
    else:
        torch.testing.assert_close(ball, obs["ball"].flatten(1))
        torch.testing.assert_close(units, obs["units"].flatten(1))


def test_their_statistics_and_first_weights_are_their_own() -> None:
    module, _ = network({"units": "Rows"}, uniform_init=True)
    own = dict(leaf_encoders(module.encoder))["units"].encoder.encoder
    assert own.training
    assert not own.layers[1].running_mean.any()
    assert (own.layers[2].weight == 0.5).all()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("Eyez", rf"ball: module '{MODULE}' .*'Eyez'; nearest is 'Eyes'"),
        ("raising", rf"ball: {MODULE}\.raising raised KeyError: 'ball'"),
        ("nothing", rf"ball: {MODULE}\.nothing returned None, expected a torch module"),
        ("Unfit", r"ball: \S+ forward raised RuntimeError for an input \[2, 2, 2\] of float32: "),
        ("Squeezed", r"ball: \S+ forward gave \[4\] of float32 for an input \[1, 2, 2\] of .* expected \[1, F\] of "),
        ("Whole", r"ball: \S+ forward gave \[1, 8\] of float32 for an input \[2, 2, 2\] .* expected \[2, F\]"),
        ("Deep", r"ball: \S+ forward gave \[2, 1, 4\] of float32 for an input"),
        ("Double", r"ball: \S+ forward gave \[2, 4\] of float64 .* expected \[2, F\] of float32"),
        ("Pair", r"ball: \S+ forward gave tuple for an input .* expected a tensor \[2, F\]"),
    ],
)
def test_a_wrong_encoder_is_named_with_what_was_expected(path: str, message: str) -> None:
    check_parameters(Contract.parse(CONTRACT), job({"ball": path}))  # no game's fault
    with pytest.raises(BrayxError, match=rf"^network\.encoders\.{message}") as error:
        build_model("model", job({"ball": path}))
    assert isinstance(error.value, ConfigError | ModelError)


def test_an_encoder_of_an_observation_that_the_game_lacks_is_refused_with_those_that_it_has() -> None:
    message = r"network\.encoders\.bal: behaviour 'agent' observes no 'bal', expected one of ball, camera, units"
    with pytest.raises(ConfigError, match=message):
        build_model("model", job({"bal": "Same"}))
    with pytest.raises(BadBody, match=message) as refusal:
        check_parameters(Contract.parse(CONTRACT), job({"bal": "Same"}))
    assert refusal.value.details["field"] == "observations"
    document = job({})
    document["network"]["encoders"] = {"ball": "Same"}
    with pytest.raises(ConfigError, match=r"network\.encoders\.ball: is 'Same', expected .* as module\.Name"):
        build_model("model", document)


def test_their_parameters_count_without_memory_for_them() -> None:
    with pytest.raises(BadBody, match=rf"^observations\.ball takes the network to \d+ .* at most {MAX_PARAMETERS}"):
        check_parameters(Contract.parse(CONTRACT), job({"ball": "Huge"}))
    check_parameters(Contract.parse(CONTRACT), job({"ball": "Real"}))
    build_model("model", job({"ball": "Real"}))


def test_one_that_cannot_be_exported_is_named() -> None:
    module, example = network({"ball": "Branching"})
    with pytest.raises(ModelError, match=rf"with network\.encoders\.ball: {MODULE}\.Branching cannot be exported"):
        OnnxEngine(module, example, traced=True)


def test_they_are_found_beside_the_yaml_and_shown_by_brayx_check(tmp_path: Path, command: Run) -> None:
    shutil.copy(GAME, tmp_path / "game.yaml")
    shutil.copy(str(own_encoders.__file__), tmp_path / "beside.py")
    (tmp_path / "contract.json").write_text(json.dumps(CONTRACT))

    def check(encoders: str, *words: str) -> tuple[int, str, str]:
        done = command("check", str(tmp_path / "game.yaml"), "--set", f"network.encoders={encoders}", *words)
        return done.returncode, done.stdout, done.stderr

    contract = ("--contract", str(tmp_path / "contract.json"))
    code, out, err = check("{camera: beside.Eyes, ball: beside.Same}", *contract)
    assert code == 0, err
    assert "\nencoders: camera: beside.Eyes; ball: beside.Same\n" in out
    besides = JobConfig.load(tmp_path / "game.yaml", ["behaviours.a.network.encoders={camera: besides.Eyes}"])
    where = rf"network\.encoders\.camera: module 'besides' is neither in {tmp_path} nor .* nearest is 'beside'"
    with pytest.raises(ConfigError, match=where):
        check_code(besides, ["actor"], mode="serve")
    code, _, err = check("{camera: beside.Eye}")
    assert (code, "network.encoders.camera: module 'beside'" in err, "nearest is 'Eyes'" in err) == (2, True, True), err
