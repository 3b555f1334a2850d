"""Environments by contract: what their spaces say, and bodies that a service with the same contract reads."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from brayx.bridges.env_bodies import EnvBodies, TickBodies
from brayx.gamecore.contract import Contract
from brayx.gamecore.contract_bodies import ContractBodies

ONE = spaces.Discrete(2)
SMALL = spaces.Box(-1, 1, (2,))


def started(observation: Any = SMALL, action: Any = ONE, **options: Any) -> tuple[ContractBodies, TickBodies]:
    """The bodies of both sides, after the start of a session."""
    bodies = EnvBodies(observation, action, **options)
    service = ContractBodies(Contract.parse(json.loads(bodies.start({"env_id": "x", "seed": 1}))))
    return service, bodies.started(json.dumps({"contract": 1, "id": service.contract.id}).encode())


@pytest.mark.parametrize(
    ("space", "said", "obs", "arrays"),
    [
        (SMALL, {"obs": {"shape": (2,)}}, [0.5, -1.0], {"obs": [0.5, -1.0]}),
        (spaces.Box(-1, 1, ()), {"obs": {"shape": (1,)}}, np.float32(0.5), {"obs": [0.5]}),
        (spaces.Box(0, 9, (1, 1, 1, 1, 2), np.uint64), {"obs": {"shape": (2,), "dtype": "int64"}}, None, None),
        (spaces.Box(0, 255, (5, 4), np.uint8), {"obs": {"kind": "image", "shape": (5, 4, 1)}}, None, None),
        (spaces.Box(0, 255, (3, 9, 8), np.uint8), {"obs": {"kind": "image", "layout": "CHW"}}, None, None),
        (spaces.Box(0, 1, (9, 8, 3), np.float64), {"obs": {"layout": "HWC", "dtype": "float32"}}, None, None),
        (spaces.Box(0, 1, (8, 8, 20), np.bool_), {"obs": {"layout": "HWC", "dtype": "bool"}}, None, None),
        (spaces.Discrete(3, start=5), {"obs": {"kind": "category", "size": 3, "start": 5}}, 6, {"obs": 1}),
        (spaces.MultiDiscrete([4, 4], start=[1, 1]), {"obs": {"size": 4, "shape": (2,)}}, [1, 4], {"obs": [0, 3]}),
        (
            spaces.MultiDiscrete([[2], [3]]),
            {"(0, 0)": {"kind": "category", "size": 2}, "(1, 0)": {"size": 3}},
            [[1], [2]],
            {"(0, 0)": 1, "(1, 0)": 2},
        ),
        (
            spaces.MultiBinary([2, 2]),
            {"obs": {"shape": (4,), "dtype": "int8"}},
            [[1, 0], [0, 1]],
            {"obs": [1, 0, 0, 1]},
        ),
        (spaces.Text(3), {"obs": {"kind": "text", "size": 12}}, "né", {"obs": [*"né".encode(), *[0] * 9]}),
        (
            spaces.Dict(at=SMALL, has=spaces.Tuple([ONE, spaces.Dict(key=ONE)])),
            {"at": {"shape": (2,)}, "has.0": {"size": 2}, "has.1.key": {"size": 2}},
            {"at": np.array([0, 1]), "has": (0, {"key": 1})},
            {"at": [0, 1], "has.0": 0, "has.1.key": 1},
        ),
    ],
)
def test_observations_by_contract(space: Any, said: dict[str, Any], obs: Any, arrays: dict[str, Any] | None) -> None:
    service, session = started(space)
    assert [spec.name for spec in service.contract.observations] == list(said)
    for spec in service.contract.observations:
        assert {name: getattr(spec, name) for name in said[spec.name]} == said[spec.name]
    obs = space.sample() if obs is None else np.asarray(obs, space.dtype) if isinstance(obs, list) else obs
    tick = service.decode(session.tick(obs, 0.5, {}))
    assert tick.reward == 0.5
    if arrays is None:
        np.testing.assert_allclose(tick.obs["obs"].reshape(-1), obs.reshape(-1), rtol=1e-6)
    else:
        assert {name: array.tolist() for name, array in tick.obs.items()} == arrays


@pytest.mark.parametrize(
    ("space", "said", "chosen", "action"),
    [
        (spaces.Discrete(3, start=4, dtype=np.int32), {"action": 3}, {"action": 5}, np.int32(5)),
        (spaces.MultiDiscrete([2, 3], start=[0, 7]), {"0": 2, "1": 3}, {"0": 1, "1": 9}, np.array([1, 9])),
        (spaces.MultiBinary(2), {"0": 2, "1": 2}, {"0": 0, "1": 1}, np.array([0, 1], np.int8)),
        (
            spaces.Box(-0.1, 0.1, (2, 1), np.float64),
            {"action": 2},
            {"action": np.float32([0.1, -0.05])},
            np.array([[0.1], [-0.05]]),
        ),
        (spaces.Box(0, 9, (2,), np.int64), {"action": 2}, {"action": [8.6, 0.2]}, np.array([9, 0])),
        (
            spaces.Dict(go=ONE, by=spaces.Tuple([spaces.Box(-1, 1, (1,))])),
            {"go": 2, "by.0": 1},
            {"go": 1, "by.0": [0.5]},
            {"go": np.int64(1), "by": (np.float32([0.5]),)},
        ),
    ],
)
def test_actions_by_contract(space: Any, said: dict[str, int], chosen: dict[str, Any], action: Any) -> None:
    service, session = started(action=space)
    assert {part.name: part.size for part in service.contract.actions} == said
    given = session.action(service.encode(chosen))
    assert space.contains(given)
    assert type(given) is type(action)
    assert str(given) == str(action) or np.allclose(given, action, rtol=1e-6)


def test_the_end_of_a_game() -> None:
    service, session = started()
    session.tick(np.float32([0.5, 0]), 0.0, {})
    last = service.decode_stop(session.stop(np.float32([1, 0]), 2.0, terminated=True, truncated=False))
    assert last is not None
    assert (last.reward, last.terminated, last.truncated, last.obs["obs"].tolist()) == (2.0, True, False, [1.0, 0.0])
    cut = service.decode_stop(session.stop(None, 0.0, terminated=False, truncated=True))
    assert cut is not None
    assert (cut.truncated, cut.obs["obs"].tolist()) == (True, [0.5, 0.0]), "what it saw last, where nothing follows"
    gone = service.decode_stop(session.stop(None, 0.0, terminated=True, truncated=False))
    assert gone is not None
    assert gone.obs == {}


@pytest.mark.parametrize("dtype", [bool, np.int8, np.float32])
def test_a_mask_of_an_info(dtype: Any) -> None:
    service, session = started(has_mask=True)
    tick = service.decode(session.tick(np.zeros(2), 0.0, {"action_mask": np.array([0, 1], dtype)}))
    assert tick.obs["action_mask"].tolist() == [0, 1]
    assert service.decode(session.tick(np.zeros(2), 0.0, {})).obs["action_mask"].tolist() == [1, 1]


def test_a_mask_for_each_of_several_actions() -> None:
    service, session = started(action=spaces.Tuple([ONE, SMALL, spaces.Discrete(3)]), has_mask=True)
    tick = service.decode(session.tick(np.zeros(2), 0.0, {"action_mask": (np.array([1, 0]), np.array([0, 1, 1]))}))
    assert tick.obs["action_mask"].tolist() == [1, 0, 0, 1, 1]


def test_a_mask_in_the_observation_is_none_of_it() -> None:
    space = spaces.Dict(observation=SMALL, action_mask=spaces.Box(0, 1, (2,), np.int8))
    service, session = started(space)
    seen = {"observation": np.zeros(2), "action_mask": np.int8([0, 1])}
    tick = service.decode(session.tick(seen, 0.0, {}))
    assert {name: array.tolist() for name, array in tick.obs.items()} == {"observation": [0, 0], "action_mask": [0, 1]}
    last = {"observation": np.zeros(2), "action_mask": np.int8([0, 0])}  # nothing is allowed when the game is over
    assert service.decode_stop(session.stop(last, 1.0, terminated=True, truncated=False)) is not None


@pytest.mark.parametrize(
    ("observation", "action", "said"),
    [
        (spaces.Sequence(ONE), ONE, "Sequence"),
        (SMALL, spaces.Box(-np.inf, np.inf, (1,)), "has no bounds"),
        (SMALL, spaces.Text(3), "Text"),
    ],
)
def test_spaces_without_a_contract(
    observation: Any, action: Any, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        bodies = EnvBodies(observation, action)
    assert set(json.loads(bodies.start({"seed": 1}))) <= {"seed", "num_actions"}
    (line,) = capsys.readouterr().err.splitlines()
    assert "plays without a contract" in line
    assert said in line


@pytest.mark.parametrize("reply", [b"", b"Game Started", b"[]", b'{"id": "sha256:other"}', b'{"contract": 1}'])
def test_a_service_without_contracts_gets_the_gym_profile(reply: bytes) -> None:
    bodies = EnvBodies(SMALL, spaces.Discrete(2, start=1))
    start = json.loads(bodies.start({"env_id": "x"}))
    assert (start["env_id"], start["num_actions"], start["first_action"]) == ("x", 2, 1)
    session = bodies.started(reply)
    assert session.tick(np.zeros(1), 1.0, {"action_mask": np.ones(2, np.int8)}) == (
        b'{"obs":[0.0],"reward":1.0,"action_mask":[1,1]}'
    )
    assert session.action(b'{"action": 2}') == 2
