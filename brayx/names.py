"""Escapes names for stores that allow few characters. Different names stay different; ordinary ones do not change."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable

_ESCAPED = re.compile(r"_x([0-9a-f]{0,6})_")
_LAST_CHARACTER = 0x10FFFF


def escape_of(refused: str) -> Callable[[str], str]:
    """Returns a function that replaces refused characters by their code: ``hit%`` by ``hit_x25_``. See `unescaped`.

    Args:
        refused: a regular expression that matches one character that the store refuses.
    """
    # Also escape an underscore that would look like the start of an escape.
    pattern = re.compile(rf"{refused}|_(?=x[0-9a-f]*(?:_|{refused}))")
    return lambda name: pattern.sub(lambda found: f"_x{ord(found[0]):x}_", name) or "_x_"


def unescaped(name: str) -> str:
    """Reverses a function of `escape_of`."""

    def character(found: re.Match[str]) -> str:
        code = int(found[1] or "0", 16)
        return "" if not found[1] else chr(code) if code <= _LAST_CHARACTER else found[0]

    return _ESCAPED.sub(character, name)


def shortened(name: str, most: int) -> str:
    """Cuts a name to ``most`` characters; a name that is cut ends in a checksum of the whole name."""
    if len(name) <= most:
        return name
    return f"{name[: most - 9]}-{zlib.crc32(name.encode(errors='surrogatepass')):08x}"
