"""Every encoding carries the same tick; every value that does not fit the contract is refused by field and index."""

from __future__ import annotations

import dataclasses
import json
import struct
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brayx.errors import AgentError, BadBody
from brayx.gamecore.contract import ENCODINGS, Contract
from brayx.gamecore.contract_bodies import ContractBodies, Tick
from tests.unit.gamecore.test_contract import CHASER

CONTRACT = Contract.parse(
    {
        "contract": 1,
        "observations": {
            "vector": {"shape": [3]},
            "camera": {"kind": "image", "shape": [2, 2, 1]},
            "units": {"kind": "entities", "shape": [3, 2], "dtype": "int16"},
            "card": {"kind": "category", "size": 52, "start": 1},
            "chat": {"kind": "text", "size": 8},
        },
        "actions": {
            "steer": {"kind": "continuous", "size": 2, "low": [-1, 0], "high": [1, 0.1]},
            "dash": {"kind": "discrete", "size": 2, "start": 1, "mask": True},
            "jump": {"kind": "discrete", "size": 3},
        },
        "rewards": {"win": 1.0, "style": 0.5},
    }
)
OBS: dict[str, Any] = {
    "vector": [0.5, -1, 2],
    "camera": [[[1], [2]], [[3], [255]]],
    "units": [[1, -2], [3, 4]],
    "card": 52,
    "chat": "hé",
}
EXTRAS: dict[str, Any] = {
    "info": {"level": 3, "map": "ice"},
    "forbidden": {"jump": [2, 0]},
    "forced": {"dash": 2, "steer": [0.5, 0.0]},
    "result": "win",
}


def bodies(encoding: str, contract: Contract = CONTRACT) -> ContractBodies:
    return ContractBodies(dataclasses.replace(contract, encoding=encoding))  # type: ignore[arg-type]


def simple(**options: Any) -> ContractBodies:
    """Bodies of a contract with one observation and one action."""
    contract = {
        "contract": 1,
        "observations": {"vector": {"shape": [4]}},
        "actions": {"push": {"kind": "discrete", "size": 2, "mask": True}},
    }
    return ContractBodies(Contract.parse({**contract, **options}))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_encoding_carries_the_same_tick(encoding: str) -> None:
    codec = bodies(encoding)
    tick = codec.decode(codec.encode_tick(OBS, {"win": 1, "style": 3}, mask={"dash": [0, 1]}, extras=EXTRAS))
    expected = {
        "vector": np.array([0.5, -1, 2], np.float32),
        "camera": np.array([[[1], [2]], [[3], [255]]], np.uint8),
        "units": np.array([[1, -2], [3, 4], [0, 0]], np.float32),
        "card": np.array(51),
        "chat": np.frombuffer("hé".encode() + bytes(5), np.uint8),
        "action_mask": np.array([0, 1, 1, 1, 1], np.uint8),
    }
    assert list(tick.obs) == list(CONTRACT.example())
    for name, example in CONTRACT.example().items():
        np.testing.assert_array_equal(tick.obs[name], expected[name])
        assert isinstance(tick.obs[name], np.ndarray)
        assert (tick.obs[name].dtype, tick.obs[name].shape) == (example.dtype, example.shape)
        assert tick.obs[name].flags.writeable
    assert (tick.reward, tick.rewards) == (2.5, {"win": 1.0, "style": 3.0})
    assert (tick.terminated, tick.truncated) == (False, False)
    assert (tick.info, tick.forbidden, tick.result) == ({"level": 3, "map": "ice"}, {"jump": (0, 2)}, "win")
    assert tick.forced["dash"] == 1
    np.testing.assert_array_equal(tick.forced["steer"], np.array([0.5, 0], np.float32))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_what_is_left_out_has_a_default(encoding: str) -> None:
    codec = bodies(encoding)
    tick = codec.decode(codec.encode_tick({**OBS, "units": [], "chat": ""}))
    assert (tick.reward, tick.rewards, tick.info, tick.forbidden, tick.forced) == (
        0,
        {"win": 0, "style": 0},
        {},
        {},
        {},
    )
    assert tick.obs["action_mask"].tolist() == [1, 1, 1, 1, 1]
    assert not tick.obs["units"].any()
    assert not tick.obs["chat"].any()


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_encoding_carries_the_same_reply(encoding: str) -> None:
    codec = bodies(encoding)
    sent = {"jump": 2, "dash": 1, "steer": np.array([-0.25, 0.1])}
    reply = codec.decode_reply(codec.encode(sent))
    assert list(reply) == ["steer", "dash", "jump"]
    assert (reply["dash"], reply["jump"]) == (1, 2)
    np.testing.assert_array_equal(reply["steer"], np.array([-0.25, 0.1], np.float32))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_stop_says_how_the_game_ended(encoding: str) -> None:
    codec = bodies(encoding)
    assert codec.decode_stop(b"") is None
    over = codec.decode_stop(codec.encode_tick(None, {"win": 1}, terminated=True, extras={"result": "win"}))
    assert over == Tick({}, 1.0, {"win": 1.0, "style": 0.0}, terminated=True, result="win")
    cut = codec.decode_stop(codec.encode_tick(OBS, truncated=True))
    assert cut is not None
    assert (cut.truncated, cut.terminated, cut.obs["card"]) == (True, False, 51)
    with pytest.raises(BadBody, match=r"^obs is missing"):
        codec.decode_stop(codec.encode_tick(None, truncated=True))
    with pytest.raises(BadBody, match=r"^obs is missing"):
        codec.decode(codec.encode_tick(None))
    with pytest.raises(BadBody, match=r"^terminated is true"):
        codec.decode(codec.encode_tick(OBS, terminated=True))


def test_the_json_of_a_game_that_is_written_by_hand() -> None:
    codec = simple()
    tick = codec.decode(b'{"obs": [0, 1, 2, 3], "reward": 0.5, "mask": [0, 1]}')
    assert tick.obs["vector"].tolist() == [0, 1, 2, 3]
    assert tick.obs["action_mask"].tolist() == [0, 1]
    assert tick.reward == 0.5
    assert codec.encode({"push": np.int64(1)}) == b'{"push":1}'
    assert bodies("json").encode({"steer": [1, 0], "dash": 2, "jump": 0}) == b'{"steer":[1.0,0.0],"dash":2,"jump":0}'


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("vector", "numbers of shape [3]"),
        ("camera", "numbers of shape [2, 2, 1]"),
        ("units", "up to 3 rows of 2 numbers"),
        ("card", "a whole number from 1 to 52"),
        ("chat", "a text"),
    ],
)
def test_a_missing_observation_is_described(name: str, expected: str) -> None:
    with pytest.raises(BadBody) as refused:
        bodies("json").encode_tick({key: value for key, value in OBS.items() if key != name})
    assert refused.value.message == f"obs.{name} is missing, expected {expected}"


def test_a_reward_that_is_null_is_refused() -> None:
    with pytest.raises(BadBody, match=r"^reward is null, as some languages write NaN"):
        simple().decode(b'{"obs": [0, 1, 2, 3], "reward": null}')


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_numbers_of_a_reply_keep_the_bounds_that_float32_cannot_hold(encoding: str) -> None:
    codec = simple(encoding=encoding, actions={"turn": {"kind": "continuous", "size": 2, "low": -0.1, "high": 0.1}})
    reply = codec.encode({"turn": [-0.1, np.float32(0.1)]})
    np.testing.assert_array_equal(codec.decode_reply(reply)["turn"], np.array([-0.1, 0.1], np.float32))
    if encoding == "json":
        assert reply == b'{"turn":[-0.1,0.1]}'


def test_the_bytes_of_a_packed_game() -> None:
    codec = bodies("packed")
    body = codec.encode_tick(OBS, {"win": 1, "style": 3}, mask={"dash": [0, 1]}, extras={"result": 1})
    assert body == (
        struct.pack("<2fB", 1, 3, 1 + 8)
        + struct.pack("<3f", 0.5, -1, 2)
        + bytes([1, 2, 3, 255])
        + struct.pack("<H4h", 2, 1, -2, 3, 4)
        + struct.pack("<i", 52)
        + struct.pack("<H", 3)
        + "hé".encode()
        + bytes([0, 1])
        + b'{"result":1}'
    )
    assert codec.encode_tick(None, {"win": 1}, terminated=True) == struct.pack("<2fB", 1, 0, 2 + 16)
    assert codec.encode({"steer": [0.5, 0], "dash": 2, "jump": 1}) == struct.pack("<2f2i", 0.5, 0, 2, 1)
    assert simple(encoding="packed").encode_tick([0, 1, 2, 3], 0.5) == struct.pack("<fB4f", 0.5, 0, 0, 1, 2, 3)


@pytest.mark.parametrize("flag", [32, 64, 128])
def test_an_unknown_flag_of_a_packed_body_is_refused(flag: int) -> None:
    body = bytearray(simple(encoding="packed").encode_tick([0, 1, 2, 3]))
    body[4] |= flag
    with pytest.raises(BadBody, match=rf"flags is {flag}, expected a number below 32"):
        simple(encoding="packed").decode(bytes(body))


def test_json_instead_of_a_packed_body_is_refused_by_the_encoding() -> None:
    with pytest.raises(BadBody, match="looks like JSON, but the contract's encoding is packed"):
        simple(encoding="packed").decode(b'{"obs": [0, 1, 2, 3], "reward": 0}')


def test_the_values_of_a_msgpack_game() -> None:
    codec = bodies("msgpack")
    document = msgpack.unpackb(codec.encode_tick(OBS, {"win": 1}, mask={"dash": [0, 1]}))
    assert document == {
        "reward": {"win": 1.0, "style": 0.0},
        "obs": {
            "vector": struct.pack("<3f", 0.5, -1, 2),
            "camera": bytes([1, 2, 3, 255]),
            "units": struct.pack("<4h", 1, -2, 3, 4),
            "card": struct.pack("<i", 52),
            "chat": "hé",
        },
        "mask": {"dash": bytes([0, 1])},
    }
    lists = codec.decode(msgpack.packb({"obs": OBS, "reward": {"win": 1.0}, "mask": {"dash": [0, 1]}}))
    binary = codec.decode(msgpack.packb(document))
    for name, array in lists.obs.items():
        np.testing.assert_array_equal(array, binary.obs[name])
    reply = msgpack.unpackb(codec.encode({"steer": [0.5, 0], "dash": 2, "jump": 1}))
    assert reply == {"steer": struct.pack("<2f", 0.5, 0), "dash": 2, "jump": 1}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"obs": None}, "obs is missing"),
    ({"obs": [1]}, "obs is [1]"),
    ({"obs": {**OBS, "vectr": [1]}}, "obs.vectr is unknown"),
    ({"obs": {**OBS, "camera": None}}, "obs.camera is missing"),
    ({"obs": {**OBS, "vector": [1, 2]}}, "obs.vector has shape [2]"),
    ({"obs": {**OBS, "vector": [[1, 2, 3]]}}, "obs.vector has shape [1, 3]"),
    ({"obs": {**OBS, "vector": 1}}, "obs.vector has shape []"),
    ({"obs": {**OBS, "vector": [1, "2", 3]}}, "obs.vector[1] is '2'"),
    ({"obs": {**OBS, "vector": [1, None, 3]}}, "obs.vector[1] is null"),
    ({"obs": {**OBS, "vector": [1, True, 3]}}, "obs.vector[1] is true"),
    ({"obs": {**OBS, "vector": [1, [2], 3]}}, "obs.vector is lists of different lengths"),
    ({"obs": {**OBS, "camera": [[[1, 2], [3, 4]]]}}, "obs.camera has shape [1, 2, 2]"),
    ({"obs": {**OBS, "camera": [1, 2, 3, 256]}}, "obs.camera[3] is 256"),
    ({"obs": {**OBS, "camera": [1, 2, 3, 0.5]}}, "obs.camera[3] is 0.5"),
    ({"obs": {**OBS, "units": [[1, 2]] * 4}}, "obs.units has 4 rows"),
    ({"obs": {**OBS, "units": [[1, 2, 3]]}}, "obs.units has shape [1, 3]"),
    ({"obs": {**OBS, "card": 53}}, "obs.card is 53"),
    ({"obs": {**OBS, "card": 0}}, "obs.card is 0"),
    ({"obs": {**OBS, "card": 1.5}}, "obs.card is 1.5"),
    ({"obs": {**OBS, "chat": "123456789"}}, "obs.chat has 9 bytes"),
    ({"obs": {**OBS, "chat": [1] * 8}}, "obs.chat is [1, 1, 1, 1, 1, 1, 1, 1]"),
    ({"reward": 1}, "reward is 1"),
    ({"reward": None}, "reward is null, as some languages write NaN; expected a finite number"),
    ({"reward": {"win": None}}, "reward.win is null"),
    ({"reward": {"wim": 1}}, "reward.wim is unknown"),
    ({"reward": {"win": "1"}}, "reward.win is '1'"),
    ({"mask": {"jump": [1, 1, 1]}}, "mask.jump is unknown"),
    ({"mask": {"dash": [1, 1, 1]}}, "mask.dash has shape [3]"),
    ({"mask": {"dash": [0, 2]}}, "mask.dash[1] is 2"),
    ({"mask": {"dash": [0, 0]}}, "mask.dash allows no choice"),
    ({"terminated": 1}, "terminated is 1"),
    ({"truncated": True}, "truncated is true in a tick"),
    ({"info": 3}, "info is 3"),
    ({"forbidden": {"steer": [1]}}, "forbidden.steer is [1]"),
    ({"forbidden": {"dash": [0]}}, "forbidden.dash is 0"),
    ({"forbidden": {"dash": [1, 2]}}, "forbidden.dash leaves no choice"),
    ({"forced": {"dash": 3}}, "forced.dash is 3"),
    ({"forced": {"steer": [0.5, 0.2]}}, "forced.steer[1] is 0.200000"),
    ({"forced": {"fly": 1}}, "forced.fly is unknown"),
    ({"observation": OBS}, "observation is unknown; use 'obs'"),
    ({"done": True}, "done is unknown; use 'terminated', or 'truncated' at a time limit"),
]


@pytest.mark.parametrize("encoding", ["json", "msgpack"])
@pytest.mark.parametrize(("part", "message"), REFUSED)
def test_what_does_not_fit_is_refused_by_field_and_index(part: dict[str, Any], message: str, encoding: str) -> None:
    document = {"obs": OBS, **part}
    body = msgpack.packb(document) if encoding == "msgpack" else json.dumps(document).encode()
    with pytest.raises(BadBody) as refused:
        bodies(encoding).decode(body)
    assert refused.value.message.startswith(message)
    assert refused.value.details["field"]


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_are_named(value: float, encoding: str) -> None:
    codec = simple(encoding=encoding)
    if encoding == "packed":
        body, reward = struct.pack("<fB4f", 0, 0, 0, 1, value, 3), struct.pack("<fB4f", value, 0, 0, 1, 2, 3)
    else:
        dump = json.dumps if encoding == "json" else msgpack.packb
        body, reward = (
            data.encode() if isinstance(data, str) else data
            for data in (
                dump({"obs": {"vector": [0, 1, value, 3]}}),  # type: ignore[operator]
                dump({"obs": {"vector": [0, 1, 2, 3]}, "reward": value}),  # type: ignore[operator]
            )
        )
    with pytest.raises(BadBody, match=rf"^obs\.vector\[2\] is {value}"):
        codec.decode(body)
    with pytest.raises(BadBody, match=rf"^reward is {value}"):
        codec.decode(reward)
    with pytest.raises(BadBody, match=rf"^obs\.vector\[2\] is {value}"):
        codec.encode_tick([0, 1, value, 3])


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_number_that_the_model_cannot_hold_is_named(encoding: str) -> None:
    codec = simple(encoding=encoding, observations={"v": {"shape": [2], "dtype": "float64"}})
    with pytest.raises(BadBody, match=r"^obs\.v\[1\] is 1e\+300"):
        codec.encode_tick([1, 1e300])
    assert codec.decode(codec.encode_tick([0.1, 2])).obs["v"].tolist() == [np.float32(0.1), 2.0]


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_body_that_is_cut_anywhere_is_refused(encoding: str) -> None:
    codec = bodies(encoding)
    body = codec.encode_tick(OBS, {"win": 1}, mask={"dash": [0, 1]}, extras=EXTRAS)
    codec.decode(body)
    for size in range(len(body)):
        with pytest.raises(BadBody):
            codec.decode(body[:size])
    with pytest.raises(BadBody):
        codec.decode(body + b"1")
    reply = codec.encode({"steer": [0.5, 0], "dash": 2, "jump": 1})
    for size in range(len(reply)):
        with pytest.raises(BadBody):
            codec.decode_reply(reply[:size])


@pytest.mark.parametrize("encoding", ENCODINGS)
@settings(max_examples=200)
@given(data=st.data())
def test_no_bytes_raise_anything_but_a_refusal(encoding: str, data: st.DataObject) -> None:
    codec = bodies(encoding)
    body = bytearray(codec.encode_tick(OBS, {"win": 1}, mask={"dash": [0, 1]}, extras=EXTRAS))
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    for read in (codec.decode, codec.decode_stop, codec.decode_reply):
        try:
            read(bytes(body))
        except BadBody:
            pass


def test_a_mask_needs_an_action_that_has_one() -> None:
    codec = simple(actions={"push": {"kind": "discrete", "size": 2}})
    with pytest.raises(BadBody, match=r"^mask "):
        codec.decode(b'{"obs": [0, 1, 2, 3], "mask": [0, 1]}')
    assert list(codec.decode(b'{"obs": [0, 1, 2, 3]}').obs) == ["vector"]


def test_a_start_has_the_limits_of_its_session() -> None:
    forbidden, forced = bodies("packed").limits({**CHASER, "forbidden": {"jump": [1]}, "forced": {"dash": 2}})
    assert (forbidden, forced) == ({"jump": (1,)}, {"dash": 1})
    assert bodies("json").limits({}) == ({}, {})
    with pytest.raises(BadBody, match=r"^forbidden\.fly is unknown"):
        bodies("json").limits({"forbidden": {"fly": [1]}})


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize(
    ("action", "message"),
    [
        ({"steer": [0, 0], "dash": 1}, "'jump'"),
        ({"steer": [0, 0], "dash": 0, "jump": 0}, "dash is 0"),
        ({"steer": [0, float("nan")], "dash": 1, "jump": 0}, r"steer\[1\] is nan"),
        ({"steer": [0, 1], "dash": 1, "jump": 0}, r"steer\[1\] is 1.0"),
    ],
)
def test_an_agents_wrong_action_never_reaches_the_game(action: dict[str, Any], message: str, encoding: str) -> None:
    with pytest.raises(AgentError, match=message):
        bodies(encoding).encode(action)


@pytest.mark.parametrize("extras", [{"info": {"x": float("nan")}}, {"info": {"x": b"1"}}, {"infos": {}}])
def test_extras_are_json_values(extras: dict[str, Any]) -> None:
    codec = bodies("msgpack")
    with pytest.raises(BadBody, match=r"^info"):
        codec.decode(msgpack.packb({"obs": OBS, **extras}))
    with pytest.raises(BadBody, match=r"^info"):
        codec.encode_tick(OBS, extras=extras)
