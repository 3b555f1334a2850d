"""The error tree: the drawing equals the classes, and every error survives pickling and the doors."""

from __future__ import annotations

import json
import pickle
import re
from typing import Any

import grpc
import pytest

from brayx import errors
from brayx.errors import BY_CODE, BrayxError, SessionLost, TransportError, from_wire

ALL = sorted(BY_CODE.values(), key=lambda cls: cls.__name__)


def drawn() -> dict[str, tuple[str, str, int]]:
    """Name -> (parent, code, status), as drawn at the top of the module."""
    tree: dict[str, tuple[str, str, int]] = {}
    above: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"^([ │├└─]*)(\w+)\s+([a-z_]+)\s+(\d{3})\b", line)
        if match is None:
            continue
        depth, name = len(match[1]), match[2]
        above = [(d, n) for d, n in above if d < depth]
        tree[name] = (above[-1][1] if above else "Exception", match[3], int(match[4]))
        above.append((depth, name))
    return tree


def defined() -> dict[str, tuple[str, str, int]]:
    return {cls.__name__: (cls.__bases__[0].__name__, cls.code, cls.http_status) for cls in ALL}


def test_the_drawing_equals_the_tree() -> None:
    assert drawn() == defined()


def test_every_class_of_the_module_is_in_the_tree() -> None:
    classes = {v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, Exception)}
    assert classes == set(ALL)


def test_each_class_has_its_own_code() -> None:
    assert [cls.code for cls in ALL] == [code for cls in ALL for code, other in BY_CODE.items() if other is cls]


def test_codes_are_plain_words() -> None:
    assert all(re.fullmatch(r"[a-z][a-z_]*", code) for code in BY_CODE)


@pytest.mark.parametrize("cls", ALL)
def test_grpc_status_exists(cls: type[BrayxError]) -> None:
    assert cls.grpc_status in grpc.StatusCode.__members__


@pytest.mark.parametrize(
    ("statuses", "grpc_status"),
    [
        ({"http_status": 418}, "INVALID_ARGUMENT"),
        ({"http_status": 507}, "INTERNAL"),
        ({"http_status": 404}, "NOT_FOUND"),
        ({"http_status": 409, "grpc_status": "ALREADY_EXISTS"}, "ALREADY_EXISTS"),
    ],
)
def test_a_class_of_a_user_may_have_any_status(statuses: dict[str, Any], grpc_status: str) -> None:
    assert type("Own", (BrayxError,), statuses).grpc_status == grpc_status  # type: ignore[attr-defined]


@pytest.mark.parametrize("cls", ALL)
def test_it_pickles(cls: type[BrayxError]) -> None:
    error = pickle.loads(pickle.dumps(cls("what came", field="obs", got=[1, 2])))
    assert type(error) is cls
    assert (str(error), error.message, error.details) == ("what came", "what came", {"field": "obs", "got": [1, 2]})


@pytest.mark.parametrize("cls", ALL)
def test_it_crosses_the_wire(cls: type[BrayxError]) -> None:
    error = from_wire(cls("what came", reason="idle").to_wire())
    assert type(error) is cls
    assert (error.message, error.details) == ("what came", {"reason": "idle"})


def test_the_document_on_the_wire() -> None:
    assert SessionLost("gone", reason="idle").to_wire() == (
        b'{"error": "session_lost", "message": "gone", "details": {"reason": "idle"}}'
    )


def test_details_that_json_cannot_hold_are_written_as_text() -> None:
    assert json.loads(BrayxError("x", path={1}).to_wire())["details"] == {"path": "{1}"}


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"<html>502 Bad Gateway</html>",
        b"\xff\xfe",
        b"[]",
        b"3",
        b"{}",
        b'{"error": "no_such_code", "message": "x"}',
        b'{"error": ["bad_body"], "message": "x"}',
        b'{"error": "bad_body", "message": "x", "details": [1]}',
        b'{"error": "bad_body", "message": "x", "details": {"message": "twice"}}',
    ],
)
def test_an_answer_that_is_no_error_document_is_quoted(answer: bytes) -> None:
    error = from_wire(answer, http_status=502)
    assert type(error) is TransportError
    assert "status 502" in error.message
    assert error.details == {"http_status": 502}


def test_a_long_answer_is_cut() -> None:
    assert len(from_wire(b"x" * 100_000).message) < 400
