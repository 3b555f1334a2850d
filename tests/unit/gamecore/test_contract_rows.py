"""A tick with rows is as many ticks without: every encoding carries them, and refuses by field and index."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import msgpack
import numpy as np
import pytest

from brayx.errors import AgentError, BadBody
from brayx.gamecore.contract import ENCODINGS, Contract
from brayx.gamecore.contract_bodies import ContractBodies
from brayx.gamecore.contract_rows import MAX_ROWS, RowBodies
from tests.unit.gamecore.test_contract_bodies import CONTRACT, OBS

SMALL = Contract.parse(
    {
        "contract": 1,
        "observations": {"vector": {"shape": [2]}},
        "actions": {"push": {"kind": "discrete", "size": 2, "start": 1, "mask": True}},
    }
)
OTHER: dict[str, Any] = {
    "vector": [0, 0, 0],
    "camera": [[[9], [8]], [[7], [6]]],
    "units": [],
    "card": 1,
    "chat": "",
}


def rows_of(encoding: str, contract: Contract = CONTRACT) -> RowBodies:
    return RowBodies(dataclasses.replace(contract, encoding=encoding))  # type: ignore[arg-type]


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_each_row_is_as_a_tick_without_rows(encoding: str) -> None:
    rows, single = rows_of(encoding), ContractBodies(rows_of(encoding).contract)
    seen, rewards, masks = [OBS, OTHER, OBS], [(1, 0), (0, 2), (0, 3)], [[1, 0], [1, 1], [0, 1]]
    body = bytes(
        rows.decoded_rows(
            [3, 4, 3],
            {name: [obs[name] for obs in seen] for name in OBS},
            {"win": [win for win, _ in rewards], "style": [style for _, style in rewards]},
            mask={"dash": masks},
            terminated=[True, False, False],
            truncated=[True, False, False],
            groups=[7, 0, 7],
            extras={"info": [{"level": 3}, {}, {"map": "ice"}], "forbidden": {"jump": [2]}, "forced": {"dash": 2}},
        )
    )
    tick = rows.decode(body)
    assert tick.agents is not None
    assert tick.acting is not None
    assert (tick.agents.tolist(), tick.acting.tolist()) == ([3, 4, 3], [1, 2])
    assert tick.groups is not None
    assert tick.groups.tolist() == [7, 0, 7]
    for index, (obs, (win, style), mask) in enumerate(zip(seen, rewards, masks, strict=True)):
        row = tick.row(index)
        expected = single.decode(single.encode_tick(obs, {"win": win, "style": style}, mask={"dash": mask}))
        assert list(row.obs) == list(expected.obs)
        for name, array in expected.obs.items():
            np.testing.assert_array_equal(row.obs[name], array)
            assert row.obs[name].dtype == array.dtype
        assert (row.reward, row.rewards) == (expected.reward, expected.rewards)
        assert (row.terminated, row.truncated) == (index == 0, index == 0)
    assert [tick.row(index).info for index in range(3)] == [{"level": 3}, {}, {"map": "ice"}]
    assert (tick.forbidden, tick.forced) == ({"jump": (2,)}, {"dash": 1})


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_decoded_body_is_what_its_bytes_decode_to(encoding: str) -> None:
    rows = rows_of(encoding)
    body = rows.decoded_rows(
        [3, 4],
        {name: [OBS[name], OTHER[name]] for name in OBS},
        {"win": [0.1, 2], "style": [-0.3, 0]},
        mask={"dash": [[1, 0], [0, 1]]},
        truncated=[True, False],
        groups=[7, 0],
        extras={"info": [{"level": 3}, {}]},
    )
    tick, sent = rows.decode(body), rows.decode(bytes(body))
    for attribute in dataclasses.fields(tick):
        np.testing.assert_equal(getattr(tick, attribute.name), getattr(sent, attribute.name))
    action = {"jump": [2], "dash": [1], "steer": [[-0.25, 0.1]]}
    reply = rows.encode_decoded(action)
    assert bytes(reply) == rows.encode(action)
    np.testing.assert_equal(rows.decode_reply(reply), rows.decode_reply(bytes(reply)))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_what_is_left_out_has_a_default(encoding: str) -> None:
    rows = rows_of(encoding)
    tick = rows.decode(bytes(rows.decoded_rows([0, 1], {name: [value] * 2 for name, value in OBS.items()})))
    assert tick.acting is None
    assert tick.groups is None
    assert (tick.reward.tolist(), tick.info) == ([0, 0], {})
    assert tick.obs["action_mask"].tolist() == [[1] * 5] * 2
    assert rows.decode_stop(b"") is None


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_reply_has_the_actions_of_the_rows_that_go_on(encoding: str) -> None:
    rows = rows_of(encoding)
    steer = np.array([[-0.25, 0.1], [1, 0]])
    reply = rows.decode_reply(rows.encode({"jump": np.array([2, 0]), "dash": [1, 2], "steer": steer}))
    assert list(reply) == ["steer", "dash", "jump"]
    assert (reply["dash"].tolist(), reply["jump"].tolist()) == ([1, 2], [2, 0])
    np.testing.assert_array_equal(reply["steer"], np.float32(steer))
    nothing = rows.decode_reply(rows.encode({}))
    assert [len(column) for column in nothing.values()] == [0, 0, 0]
    with pytest.raises(AgentError, match=r"steer\[1, 1\] is 0\.5, expected 0 to 0\.1"):
        rows.encode({"jump": [2, 0], "dash": [1, 2], "steer": [[0, 0], [0, 0.5]]})
    with pytest.raises(AgentError, match=r"dash\[0\] is 0, expected a whole number from 1 to 2"):
        rows.encode({"jump": [2], "dash": [0], "steer": [[0, 0]]})
    with pytest.raises(AgentError, match="no action 'jump'"):
        rows.encode({"dash": [1], "steer": [[0, 0]]})


def test_packed_rows_are_arrays_one_after_the_other() -> None:
    rows = rows_of("packed", SMALL)
    body = bytes(
        rows.decoded_rows([1, 258], [[0.5, 0], [0, 1]], [1, 0], mask=[[1, 1], [0, 1]], truncated=[True, False])
    )
    assert body == (
        b"\2\0\1"  # rows, flags: masks follow
        + b"\1\0\0\0\2\1\0\0"  # agents
        + np.float32([1, 0]).tobytes()
        + b"\4\0"  # ends
        + np.float32([0.5, 0, 0, 1]).tobytes()
        + b"\1\1\0\1"
    )
    assert rows.encode({"push": [2]}) == b"\2\0\0\0"
    grouped = bytes(rows.decoded_rows([1, 258], [[0.5, 0], [0, 1]], [1, 0], truncated=[True, False], groups=[3, 0]))
    assert grouped == b"\2\0\x20" + body[3:21] + b"\3\0\0\0\0\0\0\0" + body[21:37]  # groups follow the ends


def test_values_may_be_flat_or_bytes() -> None:
    rows = rows_of("json", SMALL)
    assert rows.decode(b'{"agent": [5], "obs": [0, 1], "reward": [0.5]}').obs["vector"].tolist() == [[0, 1]]
    binary = rows_of("msgpack", SMALL)
    document = {"agent": b"\5\0\0\0", "obs": {"vector": np.float32([0, 1]).tobytes()}, "mask": {"push": b"\0\1"}}
    tick = binary.decode(msgpack.packb(document))
    assert (tick.obs["vector"].tolist(), tick.obs["action_mask"].tolist()) == ([[0, 1]], [[0, 1]])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"agent": None}, "^agent is missing"),
        ({"agent": []}, f"^agent has 0 rows, expected 1 to {MAX_ROWS}"),
        ({"agent": [-1, 0]}, r"^agent\[0\] is -1, expected a whole number from 0"),
        ({"agent": [0, 2**31]}, r"^agent\[1\] is 2147483648"),
        ({"agent": [4, 4]}, r"^agent\[1\] is 4, which has a row before it that has not ended"),
        ({"agent": [4, 4], "terminated": [False, True]}, r"^agent\[1\] is 4, which has a row before it"),
        ({"group": [1]}, r"^group has 1 rows, expected 2"),
        ({"group": [1, -1]}, r"^group\[1\] is -1, expected a whole number from 0"),
        ({"group": [[1], [2]]}, r"^group has the shape \[2, 1\]"),
        ({"agents": [1]}, "^agents is unknown; nearest is 'agent'"),
        ({"obs": None}, "^obs is missing|^obs is null|expected an object"),
        ({"obs": {"vector": [[0, 1]]}}, r"^obs\.vector has shape \[1, 2\], expected \[2, 2\]"),
        ({"obs": {"vector": [[0, 1], [None, 1]]}}, r"^obs\.vector\[1, 0\] is null"),
        ({"obs": {"vectro": [[0, 1], [0, 1]]}}, "^obs.vectro is unknown"),
        ({"reward": None}, r"^reward is null, as some languages write NaN"),
        ({"reward": [1]}, r"^reward is shape \[1\]"),
        ({"reward": [1, 1e300]}, r"^reward\[1\] is 1e\+300, expected a finite number"),
        ({"reward": [1, None]}, r"^reward\[1\] is null"),
        ({"terminated": [True]}, "^terminated is shape"),
        ({"truncated": [0.5, 1]}, r"^truncated\[0\] is 0\.5"),
        ({"mask": [[1, 1]]}, r"^mask\.push has shape \[1, 2\], expected \[2, 2\]"),
        ({"mask": [[1, 1], [2, 1]]}, r"^mask\.push\[1, 0\] is 2, expected 0 or 1"),
        ({"mask": [[1, 1], [0, 0]]}, r"^mask\.push\[1\] allows no choice"),
        ({"info": [{}]}, "^info is .*, expected 2 objects"),
    ],
)
def test_what_does_not_fit_is_refused_by_field_and_row(change: dict[str, Any], message: str) -> None:
    document = {"agent": [4, 5], "obs": {"vector": [[0, 1], [2, 3]]}, **change}
    with pytest.raises(BadBody, match=message):
        rows_of("json", SMALL).decode(json.dumps(document).encode())


def test_agents_that_are_no_numbers_are_refused() -> None:
    for encoding, agent in (("json", [[1], [2, 3]]), ("msgpack", [[1], [2, 3]]), ("msgpack", b"\0\0\0")):
        dumps: Any = msgpack.packb if encoding == "msgpack" else lambda document: json.dumps(document).encode()
        with pytest.raises(BadBody, match=r"^agent (is lists of different lengths|has 3 bytes)"):
            rows_of(encoding, SMALL).decode(dumps({"agent": agent, "obs": {"vector": [[0, 1], [2, 3]]}}))


def test_packed_rows_are_refused_at_each_length_and_with_unknown_flags() -> None:
    rows = rows_of("packed")
    body = bytes(
        rows.decoded_rows(
            [3, 4], {name: [OBS[name], OTHER[name]] for name in OBS}, mask={"dash": [[1, 1], [0, 1]]}, groups=[1, 0]
        )
    )
    for size in range(len(body)):
        with pytest.raises(BadBody):
            rows.decode(body[:size])
    with pytest.raises(BadBody, match="expected"):
        rows.decode(body + b"\0")
    with pytest.raises(BadBody, match=r"^flags is 19"):
        rows.decode(body[:2] + b"\x13" + body[3:])
    small = rows_of("packed", SMALL)
    body = bytes(small.decoded_rows([3], [[0, 1]]))
    with pytest.raises(BadBody, match=r"^ends\[0\] is 1"):
        small.decode(body[:11] + b"\1" + body[12:])


@pytest.mark.parametrize(
    ("observations", "choices", "rows", "most"),
    [({"units": {"kind": "entities", "shape": [60000, 100]}}, 2, 3, 2), ({"vector": {"shape": [1]}}, 65535, 257, 256)],
    ids=["large observations", "many choices"],
)
def test_rows_are_bounded(observations: dict[str, Any], choices: int, rows: int, most: int) -> None:
    actions = {"push": {"kind": "discrete", "size": choices}}
    contract = Contract.parse({"contract": 1, "observations": observations, "actions": actions})
    with pytest.raises(BadBody, match=f"agent has {rows} rows, expected 1 to {most}"):
        bytes(RowBodies(contract).decoded_rows(range(rows), [[0]] * rows))
