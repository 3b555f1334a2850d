"""Parses JSON from clients, and refuses numbers that are not finite. Python's parser takes NaN, Infinity and 1e999."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from brayx.errors import BadBody


def _refuse(constant: str) -> Any:
    raise ValueError(constant)


_decoder = json.JSONDecoder(parse_constant=_refuse)
_scan, _decode = _decoder.scan_once, _decoder.decode  # type: ignore[attr-defined]
# They find numbers that may overflow. A pattern that begins with one letter is thirty times as fast as one with [eE].
_huge, _huge_capital = (re.compile(rf"{letter}\+?\d\d\d").search for letter in "eE")
_ZEROS, _LONG = bytes.maketrans(b"123456789", b"000000000"), b"0" * 100
"""Makes all digits zeros, to find long numbers. If the exponent has two digits, only 210 before it can overflow."""
_MAX_SHOWN = 100
"""Maximum length of the shown path."""


def parse_json(body: bytes) -> Any:
    """Parses a JSON document.

    Raises:
        BadBody: the body is not JSON; or a number is NaN or infinite, such as 1e999. Names the field and the
            index, in at most about 100 characters.
    """
    try:
        text = str(body, "utf-8")
        try:
            value, end = _scan(text, 0)
        except StopIteration:
            end = -1
        if end != len(text):  # the slower `decode` accepts surrounding whitespace, and raises for invalid JSON
            value = _decode(text)
        huge = _huge(text) or ("E" in text and _huge_capital(text))
        if not huge and _LONG not in body.translate(_ZEROS):
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
    keys: list[str | int] = []
    levels: list[Iterator[tuple[str | int, Any]]] = [iter([("", value)])]
    while levels:
        for key, part in levels[-1]:
            kind = type(part)
            if kind is float:
                if not math.isfinite(part):
                    place = _place([*keys, key][1:]) or "the body"
                    raise BadBody(f"{place} is {part!r}, expected a finite number", field=place)
            elif kind is dict or kind is list:
                keys.append(key)
                levels.append(iter(part.items()) if kind is dict else enumerate(part))
                break
        else:
            levels.pop()
            del keys[-1:]


def _place(keys: Sequence[str | int]) -> str:
    """A path like ``args[0].x[2]``, cut where it is too long."""
    parts = (f"[{key}]" if isinstance(key, int) else f".{key:.{_MAX_SHOWN}}" for key in keys)
    place = "".join(parts).removeprefix(".")
    return place if len(place) <= _MAX_SHOWN else f"{place[:_MAX_SHOWN]}..."
