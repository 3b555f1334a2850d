"""The wire of ML-Agents: contracts, observations in each form, masks, actions, side channels, and what is refused."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from brayx.bridges import unity_wire
from brayx.bridges.unity_settings import GameSettings
from brayx.bridges.unity_wire import UnityBehaviour, decode_pngs, parse_message, statistics, welcome
from brayx.bridges.v1 import unity_pb2 as pb
from brayx.errors import BadBody, ProtocolError
from brayx.gamecore.contract_bodies import ContractBodies
from tests.unity_game import behaviour, picture, png, statistic, vector

ROOT = Path(__file__).parents[3]
RNG = np.random.default_rng(1)


def pixels(height: int = 4, width: int = 5) -> np.ndarray:
    return RNG.integers(0, 256, (height, width, 3), np.uint8)


def agent(*observations: pb.Observation, **more: object) -> pb.Agent:
    return pb.Agent(id=7, observations=observations or [vector([1.0, 2.0])], **more)  # type: ignore[arg-type]


# Literal bytes


def test_the_wire_is_literally_this() -> None:
    # As mlagents_envs 1.1.0 writes the same messages.
    assert pb.Message(header=pb.Header(status=200)).SerializeToString() == b"\n\x03\x08\xc8\x01"
    one = pb.Agent(reward=1.0, done=True, max_step_reached=True, id=7, action_mask=[False, True], group_reward=2.0)
    assert one.SerializeToString() == b"=\x00\x00\x80?@\x01H\x01P\x07Z\x02\x00\x01}\x00\x00\x00@"
    action = pb.Action(continuous=[1.0], discrete=[3])
    assert action.SerializeToString() == b"2\x04\x00\x00\x80?:\x01\x03"
    observation = pb.Observation(
        shape=[2], floats=pb.Observation.Floats(data=[1.0]), channel_mapping=[0], dimensions=[1], name="s"
    )
    assert observation.SerializeToString() == b'\n\x01\x02"\x06\n\x04\x00\x00\x80?*\x01\x002\x01\x01B\x01s'
    announced = pb.Hello(behaviours=[behaviour("B", 1, [3])], communicator_version="1", package_version="2")
    assert announced.SerializeToString() == b"\x12\x011*\x0c:\x01BJ\x07\x08\x01\x10\x01\x1a\x01\x03:\x012"
    actions = pb.Actions(command=pb.Actions.RESET, side_channel=b"x", by_behaviour={"B": pb.Actions.List()})
    assert actions.SerializeToString(deterministic=True) == b"\n\x05\n\x01B\x12\x00 \x01*\x01x"


def test_a_call_that_is_no_message_is_refused() -> None:
    with pytest.raises(ProtocolError, match="is this a Unity game"):
        parse_message(b"GET / HTTP/1.1\r\n")


# Hello and side channels


def test_versions() -> None:
    answer = welcome(pb.Hello(communicator_version="1.2.0"), 5).input.welcome
    assert (answer.seed, answer.communicator_version, answer.capabilities.hybrid_actions) == (5, "1.5.0", True)
    with pytest.raises(ProtocolError, match=r"update the package com\.unity\.ml-agents"):
        welcome(pb.Hello(communicator_version="0.15.0"), 5)


def test_statistics() -> None:
    values = [("mean", 1.0, 0), ("mean", 2.0, 0), ("last", 1.0, 1), ("last", 5.0, 1), ("sum", 1.0, 2), ("sum", 2.0, 2)]
    other = GameSettings().side_channel(0)
    nan = statistic("nan", float("nan"))
    assert statistics(other + b"".join(statistic(*value) for value in values) + nan) == {
        "mean": 1.5,
        "last": 5.0,
        "sum": 3.0,
    }
    assert statistics(b"") == {}
    whole = statistic("mean", 1.0)
    for end in range(1, len(whole)):
        with pytest.raises(ProtocolError, match="unmodified"):
            statistics(whole[:end])
    negative = whole[:16] + struct.pack("<i", -1) + whole[20:]
    with pytest.raises(ProtocolError, match="-1 bytes"):
        statistics(negative)


# Contracts


def test_the_contract_of_a_behaviour() -> None:
    entities = pb.Observation(shape=[20, 3], floats=pb.Observation.Floats(data=[0.0] * 60), dimensions=[4, 1])
    grid = pb.Observation(
        shape=[6, 7, 2], floats=pb.Observation.Floats(data=[0.0] * 84), dimensions=[2, 2, 1], name="a/b"
    )
    made = UnityBehaviour(
        behaviour("Striker?team=1", 2, [3, 2]),
        agent(vector([0.0] * 8), picture([pixels()], 1, name="Camera"), entities, grid, vector([0.0])),
    )
    assert made.contract.as_dict() == {
        "contract": 1,
        "behaviour": "Striker",
        "team": 1,
        "observations": [
            {"name": "VectorSensor_0", "kind": "vector", "shape": [8], "dtype": "float32"},
            {"name": "Camera", "kind": "image", "shape": [1, 4, 5], "dtype": "uint8", "layout": "CHW"},
            {"name": "obs_2", "kind": "entities", "shape": [20, 3], "dtype": "float32"},
            {"name": "a_b", "kind": "image", "shape": [6, 7, 2], "dtype": "float32", "layout": "HWC"},
            {"name": "VectorSensor_4", "kind": "vector", "shape": [1], "dtype": "float32"},
        ],
        "actions": [
            {"name": "continuous", "kind": "continuous", "size": 2, "low": -1.0, "high": 1.0},
            {"name": "branch_0", "kind": "discrete", "size": 3, "start": 0, "mask": True},
            {"name": "branch_1", "kind": "discrete", "size": 2, "start": 0, "mask": True},
        ],
        "encoding": "packed",
    }


def test_a_behaviour_without_actions_or_observations_is_refused() -> None:
    with pytest.raises(BadBody, match="behaviour 'Striker' has no actions"):
        UnityBehaviour(behaviour("Striker", 0, []), agent())
    with pytest.raises(BadBody, match="observations has 0 entries"):
        UnityBehaviour(behaviour(), pb.Agent(id=7))


# Steps and actions


def test_steps_and_actions() -> None:
    made = UnityBehaviour(behaviour("B", 2, [3, 2]), agent())
    step = made.step(agent(reward=0.5, group_reward=0.25, action_mask=[False, True, False, True, False]), {"x": 1.0})
    assert step.obs is not None
    assert step.obs["VectorSensor"] == [1.0, 2.0]
    assert (step.agent, step.reward, step.ended, step.info) == (7, 0.75, None, {"x": 1.0})
    assert step.mask == {"branch_0": [1, 0, 1], "branch_1": [0, 1]}
    assert (made.step(agent()).mask, made.step(agent()).group, made.step(agent(group_id=3)).group) == (None, 0, 3)
    assert made.step(agent(done=True)).ended == "terminated"
    assert made.step(agent(done=True, max_step_reached=True)).ended == "truncated"
    action = made.action({"continuous": np.array([0.5, -1.0], np.float32), "branch_0": 2, "branch_1": 1})
    assert (list(action.continuous), list(action.discrete)) == ([0.5, -1.0], [2, 1])


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        (agent(vector([1.0])), r"agent 7: obs\.VectorSensor has shape \[1\], expected \[2\]"),
        (agent(pb.Observation(shape=[2])), r"obs\.VectorSensor has 0 values, expected 2"),
        (agent(vector([1.0, 2.0]), vector([1.0])), "obs has 2 observations, expected 1"),
        (pb.Agent(id=7), "agent 7: obs has 0 observations, expected 1"),
        (agent(action_mask=[True]), "action_mask has 1 values, expected 2"),
    ],
)
def test_steps_that_do_not_fit(wrong: pb.Agent, expected: str) -> None:
    with pytest.raises(BadBody, match=expected):
        UnityBehaviour(behaviour(), agent()).step(wrong)


def test_values_that_are_not_finite_are_refused_by_the_contract() -> None:
    made = UnityBehaviour(behaviour(), agent())
    bodies = ContractBodies(made.contract)
    for wrong, expected in (
        (agent(vector([1.0, float("nan")])), r"obs\.VectorSensor\[1\] is nan"),
        (agent(reward=float("inf")), "reward is inf"),
    ):
        step = made.step(wrong)
        with pytest.raises(BadBody, match=expected):
            bodies.encode_tick(step.obs, step.reward)
    with pytest.raises(BadBody, match=r"mask\.branch_0 allows no choice"):
        bodies.encode_tick({"VectorSensor": [0.0, 0.0]}, mask=made.step(agent(action_mask=[True, True])).mask)


# Pictures


def test_pictures_in_each_form() -> None:
    first, second = pixels(), pixels()
    channels_first = np.moveaxis(first, -1, 0)
    both = np.concatenate([channels_first, np.moveaxis(second, -1, 0)])
    grey = channels_first.mean(0).round()

    def decoded(pngs: list[np.ndarray], channels: int, mapping: list[int]) -> np.ndarray:
        data = b"".join(map(png, pngs))
        return decode_pngs(data, (channels, 4, 5), mapping, "CHW", "obs.camera")

    np.testing.assert_array_equal(decoded([first], 3, []), channels_first)
    np.testing.assert_array_equal(decoded([first], 1, []), [grey])
    np.testing.assert_array_equal(decoded([first, second], 6, []), both)
    np.testing.assert_array_equal(decoded([first, second], 4, [0, 1, 2, 3, -1, -1]), both[:4])
    np.testing.assert_array_equal(decoded([first, second], 4, []), both[:4])
    stacked_grey = decoded([first, second], 2, [0, 0, 0, 1, 1, 1])
    np.testing.assert_array_equal(stacked_grey, [grey, both[3:].mean(0).round()])
    observed = picture([first], 3)
    observed.shape[:] = [4, 5, 3]
    observed.dimensions[:] = [2, 2, 1]
    made = UnityBehaviour(behaviour(), agent(observed))
    step = made.step(agent(observed))
    assert step.obs is not None
    np.testing.assert_array_equal(step.obs["CameraSensor"], first)
    assert (
        ContractBodies(made.contract)
        .decode(ContractBodies(made.contract).encode_tick(step.obs))
        .obs["CameraSensor"]
        .tolist()
        == first.tolist()
    )


def test_float_pictures() -> None:
    values = np.arange(12, dtype=np.float32)
    observed = pb.Observation(
        shape=[3, 2, 2], floats=pb.Observation.Floats(data=values), dimensions=[1, 2, 2], name="Grid"
    )
    step = UnityBehaviour(behaviour(), agent(observed)).step(agent(observed))
    assert step.obs is not None
    np.testing.assert_array_equal(step.obs["Grid"], values.reshape(3, 2, 2))


def test_pictures_that_do_not_fit() -> None:
    made = UnityBehaviour(behaviour(), agent(picture([pixels()], 3)))
    for wrong, expected in (
        (picture([pixels(8, 8)], 3), r"obs\.CameraSensor has shape \[3, 8, 8\], expected \[3, 4, 5\]"),
        (picture([pixels()] * 2, 3), "more PNGs than its 3 channels need"),
        (picture([pixels()], 3, [0, 1, 5]), "with the mapping"),
        (picture([pixels()], 3, [0, 1, 1]), "with the mapping"),
        (vector([0.0]), "has shape"),
    ):
        with pytest.raises(BadBody, match=expected):
            made.step(agent(wrong))
    other_size = picture([pixels(8, 8)], 3)
    other_size.shape[:] = [3, 4, 5]
    with pytest.raises(BadBody, match="a picture of 8 x 8, expected 5 x 4"):
        made.step(agent(other_size))
    floats = pb.Observation(shape=[3, 4, 5], floats=pb.Observation.Floats(data=[0.0] * 60), name="CameraSensor")
    with pytest.raises(BadBody, match="changed its compression"):
        made.step(agent(floats))


def test_a_picture_cut_at_each_byte_is_refused() -> None:
    whole = png(pixels())
    for end in range(len(whole)):
        with pytest.raises(BadBody):
            decode_pngs(whole[:end], (3, 4, 5), [], "CHW", "obs.camera")


def test_the_bridge_loads_nothing_heavy() -> None:
    code = "import sys\nimport brayx.bridges.unity\nprint(*sorted({'ray', 'torch', 'mlflow'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == ""
    assert unity_wire.VERSION == "1.5.0"
