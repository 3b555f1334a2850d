"""Escapes names for stores that allow few characters. Different names stay different; ordinary ones do not change."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable

_CODE = "u(?P<code>[0-9a-f]{4}|[1-9a-f][0-9a-f]{4}|10[0-9a-f]{4})"
"""A character's code, written in one way only."""
_ESCAPED = re.compile(f"_{_CODE}_")


def escape_of(refused: str) -> Callable[[str], str]:
    """Returns a function that replaces refused characters by their code: ``hit%`` by ``hit_u0025_``. See `unescaped`.

    Args:
        refused: a regular expression that matches one character that the store refuses: no letter, digit, ``_``, ``-``
            or space.
    """
    # Also escape an underscore that would be read as the start of an escape.
    pattern = re.compile(rf"{refused}|_(?={_CODE}(?:_|{refused}))")

    def escaped(match: re.Match[str]) -> str:
        code = match["code"]
        return match[0] if code and not _escapable(code) else f"_u{ord(match[0]):04x}_"

    return lambda name: pattern.sub(escaped, name)


def unescaped(name: str) -> str:
    """Reverses a function of `escape_of`; leaves what such a function never returns, as ``pos_x_mean``."""
    start = 0
    while match := _ESCAPED.search(name, start):
        if _escapable(match["code"]):
            name = f"{name[: match.start()]}{chr(int(match['code'], 16))}{name[match.end() :]}"
        start = match.start() + 1  # an underscore may end one code and start another
    return name


def _escapable(code: str) -> bool:
    return re.fullmatch(r"[^\w -]|_", chr(int(code, 16))) is not None


def shortened(name: str, most: int) -> str:
    """Cuts a name to ``most`` characters; a name that is cut ends in a checksum of the whole name."""
    if len(name) <= most:
        return name
    return f"{name[: most - 9]}-{zlib.crc32(name.encode(errors='surrogatepass')):08x}"
