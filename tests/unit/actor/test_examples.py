"""The bodies that a service accepts: by a contract, or as a game has sent them."""

from __future__ import annotations

import json

import pytest

from brayx.actor.examples import AcceptedBodies, contract_example
from brayx.errors import BadBody, BrayxError
from brayx.gamecore.contract import Contract
from brayx.gamecore.contract_bodies import ContractBodies
from brayx.gamecore.protocol import StepKind, StepRequest

CONTRACT = {
    "contract": 1,
    "observations": {
        "speed": {"shape": [2], "labels": ["x", "y"]},
        "seen": {"kind": "entities", "shape": [3, 2]},
        "cards": {"kind": "category", "shape": [2], "size": 4, "start": 1},
        "said": {"kind": "text", "size": 10},
        "screen": {"kind": "image", "shape": [2, 2, 3], "dtype": "uint8"},
    },
    "actions": {"go": {"kind": "discrete", "size": 3, "mask": True}, "aim": {"kind": "continuous", "size": 2}},
    "rewards": {"gold": 1.0},
    "encoding": "packed",
}


def asked(
    accepted: AcceptedBodies, kind: StepKind, session: str, body: bytes, result: bytes | BrayxError = b""
) -> None:
    replies: list[bytes | BrayxError] = []
    accepted.watch(StepRequest(kind, session, body), replies.append)(result)
    assert replies == [result]


def test_the_example_of_a_contract_is_accepted_by_it() -> None:
    example = contract_example(Contract.parse(CONTRACT))
    contract = Contract.parse(json.loads(example["start"]))
    assert (contract.id, contract.encoding) == (Contract.parse(CONTRACT).id, "json")
    tick = ContractBodies(contract).decode(example["tick"].encode())
    assert {name: array.shape for name, array in tick.obs.items()} == {
        name: array.shape for name, array in contract.example().items()
    }


def test_a_tick_too_large_to_read_is_left_out() -> None:
    wide = Contract.parse(CONTRACT | {"observations": {"wide": {"shape": [5000]}}})
    assert contract_example(wide).keys() == {"start"}


def test_a_start_and_a_tick_of_one_session_are_kept_once_both_were_answered() -> None:
    accepted = AcceptedBodies()
    asked(accepted, StepKind.START, "refused", b"1", BadBody("no"))
    asked(accepted, StepKind.TICK, "refused", b"2")
    asked(accepted, StepKind.START, "silent", b"3")
    asked(accepted, StepKind.START, "plays", b"4")
    asked(accepted, StepKind.TICK, "silent", b"5")
    asked(accepted, StepKind.TICK, "plays", b"6", BadBody("no"))
    asked(accepted, StepKind.STOP, "plays", b"7")
    assert accepted.wanted
    asked(accepted, StepKind.TICK, "plays", b"8")
    assert (accepted.wanted, accepted.example) == (False, {"start": "4", "tick": "8"})
    asked(accepted, StepKind.START, "late", b"9")
    assert accepted.example == {"start": "4", "tick": "8"}


@pytest.mark.parametrize("body", [b"\xff", b"x" * 5000])
def test_a_body_that_is_no_text_or_too_long_is_left_out(body: bytes) -> None:
    accepted = AcceptedBodies()
    asked(accepted, StepKind.START, "s", b"")
    asked(accepted, StepKind.TICK, "s", body)
    assert accepted.example == {"start": ""}


def test_a_start_that_is_a_contract_suffices() -> None:
    accepted = AcceptedBodies()
    asked(accepted, StepKind.START, "s", json.dumps(CONTRACT).encode())
    assert (accepted.wanted, accepted.example) == (False, contract_example(Contract.parse(CONTRACT)))
