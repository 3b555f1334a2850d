"""`brayx.replay.engine_demos`: what Unity's and Godot's recorders write is read, and a policy is cloned from it.

ML-Agents' own Python wrote ``demos/peer.demo``: `write_demo` in `mlagents.trainers.demo_loader` of mlagents 1.1.0.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from brayx.algorithms.bc import BC, BCConfig
from brayx.bridges.unity_demo import UnityDemo
from brayx.bridges.v1 import unity_pb2 as pb
from brayx.errors import ConfigError
from brayx.gamecore.contract import Contract
from brayx.jobs.contract_model import network_of
from brayx.jobs.contracts import read_contracts
from brayx.local.demonstrations import Demonstrations
from brayx.replay.files import Dataset
from brayx.replay.packing import Layout
from brayx.trainer.prefetch import Prepare
from brayx.types import Fragment
from tests.unity_game import delimited, demo_bytes, vector

PEER = Path(__file__).parent / "demos" / "peer.demo"
GODOT = Contract.parse(
    {
        "contract": 1,
        "observations": {"obs": {"shape": [2]}},
        "actions": {
            "steer": {"kind": "continuous", "size": 2, "low": -2, "high": 2},
            "gear": {"kind": "discrete", "size": 3},
            "brake": {"kind": "continuous", "size": 1},
        },
    }
)
EPISODES = [
    [[[0.0, 1.0], [1.0, 1.0], [2.0, 1.0]], [[1.0, -2.0, 2.0, 0.5], [0.0, 0.0, 0, -1]]],
    [[[5, 6], [7, 8]], [[2, 2, 1, 1]]],
    [[[9, 9]], []],
]


def pair(number: float, choice: int, *, done: bool = False) -> pb.Demonstrated:
    agent = pb.Agent(id=1, done=done, observations=[vector([number, 0.5])])
    return pb.Demonstrated(agent=agent, action=pb.Action(discrete=[choice]))


def godot_file(folder: Path, episodes: Any) -> Path:
    file = folder / "expert.json"
    file.write_text(json.dumps(episodes))
    return file


def test_ml_agents_own_file_is_read() -> None:
    contract = read_contracts(PEER)[0]
    assert [(spec.name, spec.kind, spec.shape) for spec in contract.observations] == [
        ("sensor", "vector", (3,)),
        ("eye", "image", (3, 2, 4)),
    ]
    assert contract.sizes == (2, 3)
    first, second, third = Dataset(PEER)
    assert [(len(episode), episode.terminated, episode.truncated) for episode in (first, second, third)] == [
        (3, True, False),
        (1, False, True),
        (1, False, True),  # the recording ended
    ]
    np.testing.assert_array_equal(first.obs["sensor"], [[1, step, -1.5] for step in range(4)])
    np.testing.assert_array_equal(first.obs["eye"][:, 0, 0, 0], [10, 11, 12, 13])
    assert first.obs["eye"].dtype == np.uint8
    np.testing.assert_array_equal(first.obs["action_mask"][0], [1, 1, 0, 1, 1])
    np.testing.assert_allclose(first.reward, [0.75, 1.25, 1.75], err_msg="with the next step's, and the group's")
    np.testing.assert_allclose(first.action, [[0, 2, 0, -1], [1, 2, 0.25, -1], [0, 2, 0.5, -1]])
    assert first.action.dtype == np.float32
    assert Dataset(PEER).check() == {"obs", "action", "reward", "terminated"}


def test_a_demo_that_is_cut_anywhere_is_refused_by_its_place(tmp_path: Path) -> None:
    file, data = tmp_path / "cut.demo", PEER.read_bytes()
    for end in range(0, len(data), 5):
        file.write_bytes(data[:end])
        with pytest.raises(ConfigError, match=r"cut\.demo: at byte \d+: "):
            list(UnityDemo(file).steps())


BROKEN: dict[str, tuple[bytes, str]] = {
    "another file": (b"\x0b" + b"PNG" * 40, "at byte 0: "),
    "another version": (delimited(pb.Demonstration(api_version=7)).ljust(33, b"\0") + b"\0", "the version is 7"),
    "no step": (demo_bytes([]), "the file has no step"),
    "fewer steps": (demo_bytes([pair(0, 1)], num_steps=4), "the file ends after 1 steps, and its head says 4"),
    "no action": (
        demo_bytes([pb.Demonstrated(agent=pb.Agent(observations=[vector([1.0])])), pair(0, 1)]),
        "step 0: action has 0 branches, expected 1",
    ),
    "a choice too high": (
        demo_bytes([pair(0, 1), pair(0, 2)]),
        r"step 1 .*: branch_0 is 2, expected a whole number from 0",
    ),
    "NaN": (demo_bytes([pair(float("nan"), 1), pair(0, 1)]), r"VectorSensor\[0\] is nan"),
    "an old package": (demo_bytes([pair(0, 1)], announced=pb.Behaviour(name="Old")), "'Old' has no actions"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_demo_is_refused_by_its_place(tmp_path: Path, case: str) -> None:
    data, why = BROKEN[case]
    file = tmp_path / "broken.demo"
    file.write_bytes(data)
    with pytest.raises(ConfigError, match=why) as refusal:
        list(Dataset(file))
    assert refusal.value.message.startswith(f"{file}: ")


def test_a_recording_that_was_not_closed_is_read_to_its_end(tmp_path: Path) -> None:
    file = tmp_path / "open.demo"
    file.write_bytes(demo_bytes([pair(step, 1) for step in range(4)], num_steps=0))
    (episode,) = Dataset(file)
    assert (len(episode), episode.truncated) == (3, True)


def test_a_demo_of_another_contract_is_refused_by_its_fields() -> None:
    (contract,) = read_contracts(PEER)
    job = Contract.parse({**contract.as_dict(), "actions": {"branch_0": {"kind": "discrete", "size": 2}}})
    with pytest.raises(ConfigError, match=r"peer\.demo: it does not fit the job's contract: .*branch_0\.mask is true"):
        list(Dataset(PEER, contract=job))


def test_godots_file_is_read_by_the_jobs_contract(tmp_path: Path) -> None:
    episodes = list(Dataset(godot_file(tmp_path, EPISODES), contract=GODOT))
    assert [(len(episode), episode.terminated) for episode in episodes] == [(2, True), (1, True)]
    np.testing.assert_array_equal(episodes[0].obs["obs"], EPISODES[0][0])
    np.testing.assert_allclose(episodes[0].action, [[2, 0.5, -1, 0.5], [0, 0, 0, -1]], err_msg="choices come first")
    assert Dataset(godot_file(tmp_path, EPISODES), contract=GODOT).check() == {"obs", "action", "terminated"}


WRONG: dict[str, tuple[Any, str]] = {
    "an object": ({"obs": []}, "expected a list of episodes"),
    "no pair": ([[[]]], "episode 0 .* has something else"),
    "too few observations": ([[[[0, 1]], [[0, 0, 0, 0]]]], "episode 0 .* has 1 observations and 1 actions"),
    "too few numbers": ([EPISODES[1], [[[0, 1], [0, 1]], [[0, 0]]]], "episode 1 .*, step 0: action is 2 numbers"),
    "half a choice": ([[[[0, 1], [0, 1]], [[0, 0, 0.5, 0]]]], "step 0: gear is 0.5, expected a whole number"),
    "out of bounds": ([[[[0, 1], [0, 1]], [[0, 3, 0, 0]]]], r"step 0: steer\[1\] is 3.0, expected -2 to 2"),
    "a longer observation": ([[[[0, 1, 2], [0, 1]], [[0, 0, 0, 0]]]], "step 0: obs.obs has shape"),
    "infinity": ([[[[0, float("inf")], [0, 1]], [[0, 0, 0, 0]]]], r"step 0: obs.obs\[1\] is inf"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_file_of_godot_is_refused_by_its_place(tmp_path: Path, case: str) -> None:
    episodes, why = WRONG[case]
    with pytest.raises(ConfigError, match=why) as refusal:
        list(Dataset(godot_file(tmp_path, episodes), contract=GODOT))
    assert "expert.json" in refusal.value.message


def test_a_cut_file_of_godot_is_refused_by_its_place(tmp_path: Path) -> None:
    file = godot_file(tmp_path, EPISODES)
    file.write_bytes(file.read_bytes()[:40])
    with pytest.raises(ConfigError, match=r"expert\.json: it is no JSON: .*char \d+"):
        list(Dataset(file, contract=GODOT))


def test_godots_file_needs_a_contract_of_what_it_records(tmp_path: Path) -> None:
    file = godot_file(tmp_path, EPISODES)
    with pytest.raises(ConfigError, match="do not say what their numbers are: expected a job with a contract"):
        list(Dataset(file))
    other = Contract.parse({**GODOT.as_dict(), "observations": {"obs": {"shape": [2]}, "map": {"shape": [2]}}})
    with pytest.raises(ConfigError, match="records the observation 'obs' alone, and the contract has obs, map"):
        list(Dataset(file, contract=other))


def unity_expert(folder: Path, signs: list[float], choices: list[int]) -> tuple[Path, Contract]:
    file = folder / "expert.demo"
    file.write_bytes(demo_bytes([*map(pair, signs, choices), pair(1, 0, done=True)]))
    return file, read_contracts(file)[0]


def godot_expert(folder: Path, signs: list[float], choices: list[int]) -> tuple[Path, Contract]:
    file = godot_file(folder, [[[[sign, 0.5] for sign in [*signs, 1.0]], [[choice] for choice in choices]]])
    return file, Contract.parse({**GODOT.as_dict(), "actions": {"gear": {"kind": "discrete", "size": 2}}})


@pytest.mark.parametrize("expert", [unity_expert, godot_expert])
def test_a_policy_is_cloned_from_a_recorders_file(
    tmp_path: Path, expert: Callable[[Path, list[float], list[int]], tuple[Path, Contract]]
) -> None:
    """The expert chooses by the sign of the first number."""
    signs = [1.0 if step % 3 else -1.0 for step in range(32)]
    file, contract = expert(tmp_path, signs, [int(sign > 0) for sign in signs])
    data = Dataset(file, contract=contract)
    torch.manual_seed(0)
    module, example = network_of(contract)
    layout = Layout.of_model(example)
    demonstrations = Demonstrations(data, layout, batch_size=4, unroll_length=8, seed=0)
    clone = BC(module, torch.optim.Adam(module.parameters(), 1e-2), BCConfig())
    prepare = Prepare(example, torch.device("cpu"))
    for _ in range(60):
        clone.update(prepare(demonstrations.draw()).tensors, 0.0)
    (episode,) = data
    assert isinstance(episode, Fragment)
    with torch.no_grad():
        logits = module({name: torch.from_numpy(leaf[:-1]) for name, leaf in episode.obs.items()})["logits"]
    np.testing.assert_array_equal(logits.argmax(-1).numpy(), episode.action)
    np.testing.assert_array_equal(episode.action, np.array(signs) > 0)
