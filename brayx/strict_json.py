"""Parses JSON from clients, and refuses numbers that are not finite. Python's parser takes NaN, Infinity and 1e999."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from brayx.errors import BadBody


def _refuse(constant: str) -> Any:
    raise ValueError(constant)


_decoder = json.JSONDecoder(parse_constant=_refuse)
_scan, _decode = _decoder.scan_once, _decoder.decode  # type: ignore[attr-defined]
# They find numbers that may overflow. A pattern that begins with one letter is thirty times as fast as one with [eE].
_huge, _huge_capital = (re.compile(rf"{letter}\+?\d\d\d").search for letter in "eE")


def parse_json(body: bytes) -> Any:
    """Parses a JSON document.

    Raises:
        BadBody: the body is not JSON; or a number is NaN or infinite, such as 1e999. Names the field and the index.
    """
    try:
        text = str(body, "utf-8")
        try:
            value, end = _scan(text, 0)
        except StopIteration:
            end = -1
        if end != len(text):  # the slower `decode` accepts surrounding whitespace, and raises for invalid JSON
            value = _decode(text)
        if _huge(text) is None and ("E" not in text or _huge_capital(text) is None):
            return value
    except (ValueError, RecursionError):
        try:
            value = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise BadBody(f"body is not JSON: {error}; it starts with {bytes(body[:40])!r}") from None
    _check(value)
    return value


def _check(value: Any) -> None:
    """Raises `BadBody` for the first number that is not finite."""
    left = [("", value)]
    while left:
        place, value = left.pop()
        if isinstance(value, dict):
            left += [(f"{place}.{key}" if place else key, part) for key, part in reversed(value.items())]
        elif isinstance(value, list):
            left += [(f"{place}[{index}]", part) for index, part in reversed([*enumerate(value)])]
        elif isinstance(value, float) and not math.isfinite(value):
            place = place or "the body"
            raise BadBody(f"{place} is {value!r}, expected a finite number", field=place)
