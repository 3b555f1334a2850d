"""`brayx.jobs.layouts`: files that are read as the engines read them give the actions that brayx serves."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch

from brayx.actions import greedy
from brayx.algorithms.sac import SACConfig
from brayx.errors import ConfigError, EngineMismatch
from brayx.gamecore.contract import Contract
from brayx.gamecore.contract_actions import named_actions
from brayx.jobs import layouts
from brayx.jobs.contract_model import ContractNetworkConfig, network_of
from brayx.jobs.layouts import LAYOUTS, GodotLayout, random_rows, write_layout
from tests.unit.jobs.test_contract_model import learned

DASH, GEAR = {"kind": "discrete", "size": 2, "mask": True}, {"kind": "discrete", "size": 3}
STEER, AIM = {"kind": "continuous", "size": 2}, {"kind": "continuous", "size": 1, "low": 0, "high": 0.5}
VECTOR = {"shape": [3]}
UNITS = {"kind": "entities", "shape": [3, 2]}
Case = tuple[dict[str, Any], dict[str, Any], dict[str, Any], Any]
"""Observations, actions, options of the network, the algorithm."""
GODOT: dict[str, Case] = {
    "numbers": ({"obs": VECTOR}, {"steer": STEER, "aim": AIM}, {}, None),
    "squashed numbers": ({"obs": VECTOR}, {"steer": STEER}, {}, SACConfig()),
    "squashed numbers and choices": ({"obs": VECTOR}, {"steer": STEER, "gear": GEAR}, {}, SACConfig()),
    "hybrid": (
        {"obs": VECTOR, "map": {"shape": [2, 2]}, "suit": {"kind": "category", "size": 4, "start": 1}},
        {"steer": STEER, "gear": GEAR, "aim": AIM, "door": {"kind": "discrete", "size": 2}},
        {}, None,
    ),
}  # fmt: skip
LARGE = (
    {"eye": {"kind": "image", "shape": [84, 84, 3]}, "sensor": VECTOR},
    {"continuous": {**STEER, "low": -10, "high": 10}, "branch_0": DASH, "branch_1": {**GEAR, "mask": True}},
)
UNITY: dict[str, Case] = {
    "numbers": ({"sensor": VECTOR}, {"continuous": {"kind": "continuous", "size": 2, "high": 3}}, {}, None),
    "masks without any": ({"sensor": VECTOR}, {"door": {**GEAR, "start": 2}, "gear": GEAR}, {}, None),
    "pictures, masks, hybrid, with a memory": (
        {
            "eye": {"kind": "image", "shape": [20, 22, 3]},
            "grid": {"kind": "image", "shape": [1, 20, 20], "layout": "CHW", "dtype": "float32"},
            "sensor": VECTOR,
            "units": UNITS,
        },
        {"continuous": STEER, "branch_0": DASH, "branch_1": {**GEAR, "mask": True}},
        {"lstm": 4, "hidden": [16]}, None,
    ),
    "masks of sac": ({"sensor": VECTOR}, {"branch_0": DASH, "branch_1": {**GEAR, "mask": True}}, {}, SACConfig()),
    "a large picture": (*LARGE, {}, None),
    "a large picture, with a memory": (*LARGE, {"lstm": 4}, None),
}  # fmt: skip


def made(case: Case, seed: int = 0) -> tuple[Contract, torch.nn.Module, tuple[Any, ...]]:
    """A contract and its model, as after some learning."""
    observations, actions, options, algorithm = case
    torch.manual_seed(seed)
    contract = Contract.parse({"contract": 1, "observations": observations, "actions": actions})
    module, example = network_of(contract, ContractNetworkConfig(**options) if options else None, algorithm)
    learned(contract, module)
    return contract, module.eval().requires_grad_(False), example


class Served:
    """The actions that brayx serves: those of the torch model, which keeps its memory."""

    def __init__(self, contract: Contract, module: torch.nn.Module, example: tuple[Any, ...]) -> None:
        self.contract, self.module = contract, module
        self.state = [{name: torch.zeros_like(leaf[:1]) for name, leaf in part.items()} for part in example[1:]]

    def __call__(self, obs: dict[str, np.ndarray]) -> dict[str, Any]:
        with torch.no_grad():
            outputs = self.module({name: torch.from_numpy(leaf) for name, leaf in obs.items()}, *self.state)
        self.state = [outputs.pop("state")] * len(self.state) if self.state else []
        policy = {
            name: tuple(head.numpy() for head in leaf) if isinstance(leaf, tuple) else leaf.numpy()
            for name, leaf in outputs.items()
        }
        return named_actions(self.contract, greedy(policy)[0])


def steps(contract: Contract, count: int = 6) -> list[dict[str, np.ndarray]]:
    """What one agent observes, step by step."""
    rng = np.random.default_rng(7)
    return [random_rows(contract, 1, rng) for _ in range(count)]


def same(got: dict[str, Any], served: dict[str, Any], within: float = 1e-5) -> None:
    assert set(got) == set(served)
    for name, action in served.items():
        np.testing.assert_allclose(got[name], action, rtol=1e-5, atol=within, err_msg=name)


def read_by_godot(output: list[float], contract: Contract) -> dict[str, Any]:
    """The add-on's way: by the size of the output it knows whether deviations stand beside the numbers."""
    only_numbers = all(part.kind == "continuous" for part in contract.actions)
    has_means_only = only_numbers and len(output) == sum(part.size for part in contract.actions)
    read: dict[str, Any] = {}
    first = 0
    for part in contract.actions:
        if part.kind == "discrete":
            largest, chosen = 0.0, 0  # from 0, as its older versions begin
            for index in range(part.size):
                if output[first + index] > largest:
                    largest, chosen = output[first + index], index
            read[part.name] = chosen
            first += part.size
        else:
            read[part.name] = [min(max(number, -1.0), 1.0) for number in output[first : first + part.size]]
            first += part.size if has_means_only else 2 * part.size
    assert first == len(output)
    return read


@pytest.mark.parametrize("case", GODOT)
def test_godots_add_on_acts_as_brayx_serves(tmp_path: Any, case: str) -> None:
    contract, module, example = made(GODOT[case])
    written = write_layout(tmp_path / "model.godot.onnx", module, example, contract, "godot")
    session = ort.InferenceSession(tmp_path / written.file)
    assert session.get_outputs()[0].shape[1] > 0, "the add-on reads the number of columns from the file"
    served = Served(contract, module, example)
    for obs in steps(contract):
        starts = {spec.name: spec.start for spec in contract.observations}
        fed = {name: (leaf + starts[name]).reshape(1, -1).astype(np.float32) for name, leaf in obs.items()}
        output, state = session.run(["output", "state_outs"], {**fed, "state_ins": np.ones(1, np.float32)})
        same(read_by_godot(output[0].tolist(), contract), served(obs))
        np.testing.assert_array_equal(state, [1])
    assert written.difference < 1e-5


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("case", UNITY)
def test_unitys_inference_acts_as_brayx_serves(tmp_path: Any, case: str, seed: int) -> None:
    contract, module, example = made(UNITY[case], seed)
    within = 1e-3 if "large" in case else 1e-5  # of bounds of 10, and float32 sums over 84 x 84 pixels
    written = write_layout(tmp_path / "model.unity.onnx", module, example, contract, "unity")
    assert {opset.version for opset in onnx.load(tmp_path / written.file).opset_import} == {opset_of(contract)}
    session = ort.InferenceSession(tmp_path / written.file)
    known = dict(zip(written.outputs, session.run(None, _first(session)), strict=True))
    assert known["version_number"] == [3]
    memory = 2 * 4 if example[1:] else 0
    assert known["memory_size"] == [memory]
    served = Served(contract, module, example)
    memories = np.zeros((1, 1, memory), np.float32)
    for obs in steps(contract):
        fed: dict[str, Any] = {}
        for index, spec in enumerate(contract.observations):
            leaf = obs[spec.name].astype(np.float32)
            leaf = leaf / 255 if spec.dtype == "uint8" else leaf
            fed[f"obs_{index}"] = leaf.transpose(0, 3, 1, 2) if spec.kind == "image" and spec.layout == "HWC" else leaf
        if contract.discrete:
            assert known["discrete_action_output_shape"].tolist() == [list(contract.sizes)]
            allowed = obs.get("action_mask", np.ones((1, sum(contract.sizes))))
            fed["action_masks"] = allowed.astype(np.float32)
        if memory:
            fed["recurrent_in"] = memories
        got = dict(zip(written.outputs, session.run(None, fed), strict=True))
        memories = got.get("recurrent_out", memories)
        assert memories.shape == (1, 1, memory)
        wanted = served(obs)
        for way in ("", "deterministic_"):
            read = {part.name: got[f"{way}discrete_actions"][0, n] for n, part in enumerate(contract.discrete)}
            if contract.continuous:
                assert known["continuous_action_output_shape"] == [contract.dimensions]
                read["continuous"] = got[f"{way}continuous_actions"][0]
            same(read, wanted, within)
    assert set(fed) == {value.name for value in session.get_inputs()} == set(written.inputs)


def opset_of(contract: Contract) -> int:
    return 15 if any(spec.kind == "entities" for spec in contract.observations) else 9


def _first(session: ort.InferenceSession) -> dict[str, Any]:
    """Zeros for all inputs, as Unity asks a model about itself."""
    return {value.name: np.zeros([1, *value.shape[1:]], np.float32) for value in session.get_inputs()}


def test_unity_forbids_choices_that_no_mask_was_learned_for(tmp_path: Any) -> None:
    contract, module, example = made(UNITY["masks without any"])
    layout = LAYOUTS["unity"](module, example, contract)
    with torch.no_grad():
        outputs = layout(torch.zeros(1, 3), torch.tensor([[0.0, 1, 0, 0, 0, 1]]))
    chosen = dict(zip(layout.outputs, outputs, strict=True))["discrete_actions"]
    assert chosen.tolist() == [[3, 2]], "the first branch counts from 2"


EYE, TEXT = {"kind": "image", "shape": [20, 20, 3]}, {"kind": "text", "size": 8}
REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "a picture in Godot": ("godot", {"eye": EYE}, {"gear": GEAR}, "observations.eye"),
    "a mask in Godot": ("godot", {"obs": VECTOR}, {"dash": DASH}, "actions.dash.mask"),
    "a start in Godot": ("godot", {"obs": VECTOR}, {"gear": {**GEAR, "start": 1}}, "actions.gear.start"),
    "wide bounds in Godot": ("godot", {"obs": VECTOR}, {"steer": {**STEER, "high": 2}}, "actions.steer"),
    "a taken name in Godot": ("godot", {"state_ins": VECTOR}, {"gear": GEAR}, "observations.state_ins"),
    "a text": ("unity", {"order": TEXT}, {"gear": GEAR}, "observations.order"),
    "four axes in Unity": ("unity", {"cube": {"shape": [2, 2, 2, 2]}}, {"gear": GEAR}, "observations.cube"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_an_engine_cannot_express_is_refused_by_name(tmp_path: Any, case: str) -> None:
    layout, observations, actions, place = REFUSED[case]
    contract, module, example = made((observations, actions, {}, None))
    with pytest.raises(ConfigError, match=place) as refusal:
        write_layout(tmp_path / "model.onnx", module, example, contract, layout)
    assert f"layout {layout}" in refusal.value.message
    assert not any(tmp_path.iterdir())


def test_godot_has_no_memory_for_a_model(tmp_path: Any) -> None:
    contract, module, example = made(({"obs": VECTOR}, {"gear": GEAR}, {"lstm": 4}, None))
    with pytest.raises(ConfigError, match=r"layout godot: the model has a memory.* network.lstm 0"):
        write_layout(tmp_path / "model.onnx", module, example, contract, "godot")


def test_a_model_of_other_observations_is_refused(tmp_path: Any) -> None:
    contract, module, example = made(GODOT["numbers"])
    other = Contract.parse({**contract.as_dict(), "observations": {"seen": VECTOR}})
    with pytest.raises(ConfigError, match=r"takes other observations than its contract's \['seen'\]"):
        write_layout(tmp_path / "model.onnx", module, example, other, "godot")


def test_a_file_that_acts_otherwise_is_not_written(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(GodotLayout):
        def forward(self, *leaves: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            output, state = super().forward(*leaves)
            return output + 2e-4, state

    monkeypatch.setitem(layouts.LAYOUTS, "godot", Wrong)
    contract, module, example = made(GODOT["numbers"])
    with pytest.raises(EngineMismatch, match="the file differs from what brayx serves: steer, absolute error"):
        write_layout(tmp_path / "model.onnx", module, example, contract, "godot")
    assert not any(tmp_path.iterdir())
