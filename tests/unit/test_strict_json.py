"""Strict JSON: every number that is not finite is refused by its path, without memory or errors that grow with it."""

from __future__ import annotations

import json
import tracemalloc

import pytest

from brayx.errors import BadBody
from brayx.strict_json import parse_json

NINES = "9" * 400


@pytest.mark.parametrize(
    ("text", "field", "got"),
    [
        ("1e999", "the body", "inf"),
        ("[0, NaN, Infinity]", "[1]", "nan"),
        (' {"a": {"b": [[], {}, [1, -1E+999]]}} ', "a.b[2][1]", "-inf"),
        ('{"a": [[1, 2], {"x": 1}], "b": {"c": 2}, "d": [0, {"e": 1e400}], "f": NaN}', "d[1].e", "inf"),
        ('{"": {"x": [[1e999]]}}', ".x[0][0]", "inf"),
        ('[{"a": 1}, {".b": 1e999}]', "[1]..b", "inf"),
        (f"[{NINES}.0]", "[0]", "inf"),
        (f'{{"x": -{NINES}.5}}', "x", "-inf"),
        (f'{{"x": [1, {"9" * 301}e50]}}', "x[1]", "inf"),
        (f"[1{'0' * 210}E99]", "[0]", "inf"),
        ("[" * 20 + "1e999" + "]" * 20, "[0]" * 20, "inf"),
    ],
)
def test_a_number_that_is_not_finite_is_refused_by_its_path(text: str, field: str, got: str) -> None:
    with pytest.raises(BadBody) as refused:
        parse_json(text.encode())
    assert refused.value.message == f"{field} is {got}, expected a finite number"
    assert refused.value.details == {"field": field}


@pytest.mark.parametrize(
    "text",
    [
        "1.7976931348623157e308",
        '{"e999": ["1e999", "NaN", 1e-999, 2E-400]}',
        f'["{NINES}.0", {NINES}]',
        f"[0.{NINES}, {'1' * 308}.5, {'9' * 209}e99, -0.0]",
        "[[], {}, null, true]",
    ],
)
def test_what_only_looks_like_it_is_accepted(text: str) -> None:
    assert parse_json(text.encode()) == json.loads(text)


LONG = "k" * 100_000


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (f'{{"{LONG}": [{"0," * 20_000} 1e999]}}', "k" * 100 + "..."),
        (f"[{'0,' * 100_000} 1e999]", "[100000]"),
        (f'{{"{LONG}": 1e999}}', "k" * 100),
        ("[" * 500 + f'{{"{LONG}": 1e999}}' + "]" * 500, ("[0]" * 34)[:100] + "..."),
        (f"[{'[' * 90}{'],[' * 50_000}1e999{']' * 91}", None),
    ],
    ids=["a long key of many values", "many values", "a long key", "a deep one", "many lists"],
)
def test_memory_and_the_error_do_not_grow_with_the_paths(body: str, field: str | None) -> None:
    data = body.encode()
    tracemalloc.start()
    try:
        with pytest.raises(BadBody, match="expected a finite number") as refused:
            parse_json(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 50 * len(data), "an empty list takes 64 bytes, and two of the body's"
    assert len(refused.value.to_wire()) < 500
    if field is not None:
        assert refused.value.details == {"field": field}


def test_of_a_key_that_comes_twice_the_last_one_counts() -> None:
    assert parse_json(b'{"a": 1, "b": {"c": 2, "c": 3}, "a": 4}') == {"a": 4, "b": {"c": 3}}
