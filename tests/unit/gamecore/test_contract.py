"""A contract is read strictly: what is wrong is refused by field. Its id changes with what decides the network only."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import yaml

from brayx.errors import BadBody
from brayx.gamecore.contract import Contract

CHASER: dict[str, Any] = {
    "contract": 1,
    "behaviour": "chaser",
    "team": 1,
    "seat": "red",
    "observations": {
        "vector": {"shape": [4], "dtype": "float32", "low": -1, "high": 1, "labels": ["dx", "dy", "vx", "vy"]},
        "camera": {"kind": "image", "shape": [84, 84, 3], "dtype": "uint8"},
        "units": {"kind": "entities", "shape": [64, 12], "dtype": "float32"},
        "card": {"kind": "category", "size": 52, "start": 1},
        "chat": {"kind": "text", "size": 32},
    },
    "actions": {
        "steer": {"kind": "continuous", "size": 2, "low": [-1, 0], "high": 1},
        "dash": {"kind": "discrete", "size": 2, "start": 1, "labels": ["walk", "dash"], "mask": True},
        "jump": {"kind": "discrete", "size": 3},
    },
    "rewards": {"win": 1.0, "style": 0.1},
    "encoding": "packed",
}

Edit = Callable[[dict[str, Any]], object]


def edited(edit: Edit) -> dict[str, Any]:
    document = copy.deepcopy(CHASER)
    edit(document)
    return document


def test_a_contract_is_read_in_its_order() -> None:
    contract = Contract.parse(CHASER)
    assert (contract.behaviour, contract.team, contract.seat, contract.encoding) == ("chaser", 1, "red", "packed")
    assert [spec.name for spec in contract.observations] == ["vector", "camera", "units", "card", "chat"]
    assert contract.observations[0].labels == ("dx", "dy", "vx", "vy")
    assert contract.observations[0].low == (-1.0,)
    assert (contract.observations[3].size, contract.observations[3].start) == (52, 1)
    steer, dash, jump = contract.actions
    assert (steer.low, steer.high) == ((-1.0, 0.0), (1.0, 1.0))
    assert (dash.size, dash.start, dash.labels, dash.mask) == (2, 1, ("walk", "dash"), True)
    assert (jump.start, jump.mask) == (0, False)
    assert (contract.sizes, contract.dimensions, contract.has_mask) == ((2, 3), 2, True)
    assert contract.rewards == {"win": 1.0, "style": 0.1}


def test_the_defaults() -> None:
    contract = Contract.parse(
        {"contract": 1, "observations": {"o": {"shape": [2]}}, "actions": {"a": {"kind": "continuous"}}}
    )
    assert (contract.behaviour, contract.team, contract.seat, contract.encoding) == ("agent", 0, "", "json")
    (observation,) = contract.observations
    assert (observation.kind, observation.dtype, observation.low) == ("vector", "float32", ())
    assert (contract.actions[0].size, contract.actions[0].low, contract.actions[0].high) == (1, (-1.0,), (1.0,))
    assert not contract.rewards
    assert not contract.has_mask


@pytest.mark.parametrize("sort_keys", [False, True])
def test_a_contract_survives_files_that_sort_their_keys(sort_keys: bool) -> None:
    contract = Contract.parse(CHASER)
    assert Contract.parse(contract.as_dict()) == contract
    assert Contract.parse(json.loads(json.dumps(contract.as_dict(), sort_keys=sort_keys))) == contract
    read = Contract.parse(yaml.safe_load(yaml.safe_dump(contract.as_dict(), sort_keys=sort_keys)))
    assert read == contract
    assert read.id == contract.id


def test_an_example_is_what_a_model_gets() -> None:
    example = Contract.parse(CHASER).example()
    assert {name: (array.shape, array.dtype.name) for name, array in example.items()} == {
        "vector": ((4,), "float32"),
        "camera": ((84, 84, 3), "uint8"),
        "units": ((64, 12), "float32"),
        "card": ((), "int64"),
        "chat": ((32,), "uint8"),
        "action_mask": ((5,), "uint8"),
    }
    assert all(np.all(array == (name == "action_mask")) for name, array in example.items())
    unmasked = edited(lambda c: c["actions"].pop("dash"))
    assert "action_mask" not in Contract.parse(unmasked).example()


def test_a_start_may_hold_more_than_the_contract() -> None:
    further = {"opponent": {"level": "easy"}, "forbidden": {"jump": [2]}, "forced": {}, "info": {}}
    assert Contract.parse({**CHASER, **further}) == Contract.parse(CHASER)


NOT_PART_OF_THE_ID: list[Edit] = [
    lambda c: c.update(behaviour="other", team=0, seat="blue", encoding="json"),
    lambda c: c.update(rewards={}),
    lambda c: c["observations"]["vector"].update(low=-5, high=[1, 2, 3, 4], labels=["a", "b", "c", "d"]),
    lambda c: c["observations"]["card"].update(start=7),
    lambda c: c["actions"]["steer"].update(low=-3),
    lambda c: c["actions"]["dash"].update(start=4, labels=["a", "b"]),
]


@pytest.mark.parametrize("edit", NOT_PART_OF_THE_ID)
def test_names_for_people_bounds_and_encodings_leave_the_id(edit: Edit) -> None:
    changed = Contract.parse(edited(edit))
    assert changed != Contract.parse(CHASER)
    assert changed.id == Contract.parse(CHASER).id
    assert changed.differences(Contract.parse(CHASER)) == []


def swap(group: dict[str, Any], name: str) -> None:
    """Moves an entry to the end."""
    group[name] = group.pop(name)


PART_OF_THE_ID: list[tuple[Edit, str]] = [
    (
        lambda c: c["observations"]["vector"].update(shape=[5], labels=[]),
        "observations.vector.shape is [5], expected [4]",
    ),
    (
        lambda c: c["observations"]["vector"].update(dtype="float64"),
        'observations.vector.dtype is "float64", expected "float32"',
    ),
    (lambda c: c["observations"]["camera"].update(layout="CHW"), 'observations.camera.layout is "CHW", expected "HWC"'),
    (lambda c: c["observations"]["card"].update(size=53), "observations.card.size is 53, expected 52"),
    (lambda c: c["observations"].pop("chat"), "observations.chat is missing, expected "),
    (lambda c: c["observations"].update(fog={"shape": [1]}), "observations.fog is unknown, expected only vector, "),
    (
        lambda c: swap(c["observations"], "vector"),
        "observations are in the order camera, units, card, chat, vector, expected vector, camera, ",
    ),
    (lambda c: c["actions"]["jump"].update(size=4), "actions.jump.size is 4, expected 3"),
    (lambda c: c["actions"]["jump"].update(mask=True), "actions.jump.mask is true, expected false"),
    (lambda c: c["actions"].update(jump={"kind": "continuous"}), 'actions.jump.kind is "continuous", expected "discre'),
]


@pytest.mark.parametrize(("edit", "difference"), PART_OF_THE_ID)
def test_what_decides_the_network_is_in_the_id_and_named(edit: Edit, difference: str) -> None:
    changed = Contract.parse(edited(edit))
    assert changed.id != Contract.parse(CHASER).id
    assert changed.differences(Contract.parse(CHASER))[0].startswith(difference)


def test_a_difference_names_only_fields_of_its_kind() -> None:
    parts = {"side": {"shape": [2]}, "card": {"kind": "category", "size": 3}, "said": {"kind": "text", "size": 8}}
    contract = {"contract": 1, "observations": parts, "actions": {"go": {"kind": "discrete", "size": 2}}}
    expected = Contract.parse(contract)
    other = {"card": {"kind": "text", "size": 3}, "said": {"kind": "text", "size": 9}}
    assert Contract.parse({**contract, "observations": other}).differences(expected) == [
        'observations.side is missing, expected {"kind": "vector", "shape": [2], "dtype": "float32"}',
        'observations.card.kind is "text", expected "category"',
        "observations.said.size is 9, expected 8",
    ]


def test_the_id_stays_the_same_in_later_versions() -> None:
    """Champions keep it: a change here makes every kept contract a stranger."""
    contract = {"contract": 1, "observations": {"o": {"shape": [2]}}, "actions": {"a": {"kind": "discrete", "size": 2}}}
    assert Contract.parse(contract).id == "sha256:edb748f32113081c1bef43d935dc3ee891dd493fc06dde25389c0a3ea68d3afe"


REFUSED: list[tuple[Edit, str]] = [
    (lambda c: c.pop("contract"), "contract is missing"),
    (lambda c: c.update(contract=2), "contract is 2"),
    (lambda c: c.update(contract=True), "contract is true"),
    (lambda c: c.update(behavior="x"), "behavior is unknown"),
    (lambda c: c.update(behaviour=""), 'behaviour is ""'),
    (lambda c: c.update(team=-1), "team is -1"),
    (lambda c: c.update(seat=3), "seat is 3"),
    (lambda c: c.update(encoding="xml"), 'encoding is "xml"'),
    (lambda c: c.pop("observations"), "observations is missing"),
    (lambda c: c.update(observations={}), "observations has 0 entries"),
    (lambda c: c.update(actions=[{"kind": "discrete"}]), "actions: the name is missing"),
    (lambda c: c.update(actions=[{"name": "a", "kind": "continuous"}] * 2), "actions.a comes twice in actions"),
    (lambda c: c["observations"].update({"a/b": {"shape": [1]}}), 'observations: the name is "a/b"'),
    (lambda c: c["observations"].update(action_mask={"shape": [1]}), "observations.action_mask: the name is taken by"),
    (lambda c: c["observations"].update(vector=4), "observations.vector is 4"),
    (lambda c: c["observations"]["vector"].update(kind="sound"), 'observations.vector.kind is "sound"'),
    (lambda c: c["observations"]["vector"].update(kind=[]), "observations.vector.kind is []"),
    (lambda c: c["observations"]["vector"].pop("shape"), "observations.vector.shape is missing"),
    (lambda c: c["observations"]["vector"].update(shape=[0]), "observations.vector.shape is [0]"),
    (lambda c: c["observations"]["vector"].update(shape=[True]), "observations.vector.shape is [true]"),
    (lambda c: c["observations"]["vector"].update(shape=[10**4000] * 4), "observations.vector.shape is [1000"),
    (lambda c: c["observations"]["vector"].update(hihg=1), "observations.vector.hihg is unknown"),
    (lambda c: c["observations"]["vector"].update(dtype="complex64"), 'observations.vector.dtype is "complex64"'),
    (lambda c: c["observations"]["vector"].update(low=2), "observations.vector.high is [1.0]"),
    (lambda c: c["observations"]["vector"].update(low=float("nan")), "observations.vector.low is NaN"),
    (lambda c: c["observations"]["vector"].update(low=[1, 2]), "observations.vector.low is [1, 2]"),
    (lambda c: c["observations"]["vector"].update(labels=["x"]), "observations.vector.labels has 1 labels"),
    (lambda c: c["observations"]["vector"].update(labels="dxyz"), 'observations.vector.labels is "dxyz"'),
    (lambda c: c["observations"]["units"].update(shape=[2**15, 2**15]), "observations have 1073763"),
    (lambda c: c["observations"]["camera"].update(shape=[84, 84]), "observations.camera.shape is [84, 84]"),
    (lambda c: c["observations"]["camera"].update(layout="WHC"), 'observations.camera.layout is "WHC"'),
    (lambda c: c["observations"]["units"].update(shape=[70_000, 2]), "observations.units.shape is [70000, 2]"),
    (lambda c: c["observations"]["card"].pop("size"), "observations.card.size is missing"),
    (lambda c: c["observations"]["card"].update(start=0.5), "observations.card.start is 0.5"),
    (lambda c: c["actions"]["dash"].update(size=0), "actions.dash.size is 0"),
    (lambda c: c["actions"]["jump"].update(size=65_535), "actions have 65539 choices and numbers together"),
    (lambda c: c["actions"]["dash"].update(mask=1), "actions.dash.mask is 1"),
    (lambda c: c["actions"]["dash"].update(low=0), "actions.dash.low is unknown"),
    (lambda c: c["actions"]["dash"].pop("kind"), "actions.dash.kind is missing"),
    (lambda c: c["actions"]["steer"].update(high=[1, 1e39]), "actions.steer.high is [1, 1e+39]"),
    (lambda c: c["actions"]["steer"].update(low=None), "actions.steer.low is missing"),
    (lambda c: c["actions"]["steer"].update(high=-2), "actions.steer.high is [-2.0]"),
    (lambda c: c.update(rewards=1), "rewards is 1"),
    (lambda c: c["rewards"].update(win="a"), 'rewards.win is "a"'),
]


@pytest.mark.parametrize(("edit", "message"), REFUSED)
def test_what_is_wrong_is_refused_by_its_field(edit: Edit, message: str) -> None:
    with pytest.raises(BadBody) as refused:
        Contract.parse(edited(edit))
    assert refused.value.message.startswith(message)
    assert refused.value.details["field"]


@pytest.mark.parametrize("document", [None, [], "sha256:1", 1])
def test_what_is_no_object_is_refused(document: Any) -> None:
    with pytest.raises(BadBody, match=r"the body is .*, expected an object: a contract"):
        Contract.parse(document)
