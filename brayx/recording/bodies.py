"""Bodies of ticks as columns: a skeleton (the text without its numbers) and the numbers as float32.

JSON that is mostly numbers then compresses to a third of the size. Bodies are split only if joining them restores the
same bytes. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

MAX_NUMBERS = 64
"""Maximum numbers in a body that is split. With more, splitting takes more time than it is worth."""
_MAX_BYTES = 2048
_FLOAT, _INT, _SEPARATOR = b"\x00", b"\x01", b"\x02"
_FRACTION_MARK, _WHOLE_MARK = _FLOAT.decode(), _INT.decode()
# Groups: a number, and its fraction and exponent. Each alternative begins with a fixed character, so that `re` quickly
# skips the text between numbers: with -?[0-9] it takes four times as long.
_NUMBER = re.compile(r"((?:-[0-9]|0|1|2|3|4|5|6|7|8|9)[0-9]*((?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?))")
_DIGITS = b"0123456789"
_MARK = re.compile(rb"([\x00\x01])")


class Bodies(NamedTuple):
    """Bodies, split into skeletons and numbers.

    Attributes:
        skeletons: the distinct texts, with byte 0 in the place of a fraction and byte 1 in that of a whole number.
        indices: index of each body's skeleton, ``[N]`` int32.
        numbers: the numbers of each body in order, ``[N, K]`` float32, padded with zeros.
    """

    skeletons: list[bytes]
    indices: np.ndarray
    numbers: np.ndarray


class BodyBuffer(NamedTuple):
    """Bodies in one buffer, to send them to another process.

    Attributes:
        data: all bodies, one after the other.
        sizes: the size of each body, in bytes.
    """

    data: bytes
    sizes: list[int]

    @classmethod
    def join(cls, bodies: Sequence[bytes]) -> BodyBuffer:
        """Joins bodies."""
        return cls(b"".join(bodies), list(map(len, bodies)))

    def split(self) -> list[bytes]:
        """The bodies."""
        ends = list(accumulate(self.sizes))
        return [self.data[end - size : end] for end, size in zip(ends, self.sizes, strict=True)]


def split(bodies: Sequence[bytes]) -> Bodies | None:
    """Splits bodies into skeletons and numbers; None: joining them would change a byte, or splitting saves no space."""
    if not bodies or not _may_split(bodies[0]):
        return None
    joined = _SEPARATOR.join(bodies)
    if len(joined) > _MAX_BYTES * len(bodies):
        return None
    if _FLOAT in joined or _INT in joined or joined.count(_SEPARATOR) != len(bodies) - 1:
        return None
    pieces = _NUMBER.split(joined.decode("latin-1"))  # text, number, its fraction, text, ...
    tokens, fractions = pieces[1::3], pieces[2::3]
    if not 0 < len(tokens) <= MAX_NUMBERS * len(bodies):
        return None
    pieces[1::3] = [_FRACTION_MARK if fraction else _WHOLE_MARK for fraction in fractions]
    pieces[2::3] = [""] * len(tokens)
    skeletons = "".join(pieces).encode("latin-1").split(_SEPARATOR)
    known: dict[bytes, int] = {}
    indices = np.array([known.setdefault(skeleton, len(known)) for skeleton in skeletons], np.int32)
    if len(known) > 4 + len(bodies) // 8:
        return None
    counts = np.array([number_count(skeleton) for skeleton in known])[indices]
    if counts.max() > MAX_NUMBERS:
        return None
    exact = np.array(list(map(float, tokens)))
    with np.errstate(over="ignore"):
        flat = exact.astype(np.float32)
    if not (np.isfinite(flat).all() and (flat == exact).all()):
        return None
    written = zip(flat.tolist(), fractions, strict=True)
    if [repr(number) if fraction else str(int(number)) for number, fraction in written] != tokens:
        return None
    numbers = np.zeros((len(bodies), int(counts.max())), np.float32)
    numbers[np.arange(numbers.shape[1]) < counts[:, None]] = flat
    return Bodies(list(known), indices, numbers)


def number_count(skeleton: bytes) -> int:
    """How many numbers a body with this skeleton has."""
    return skeleton.count(_FLOAT) + skeleton.count(_INT)


def _may_split(body: bytes) -> bool:
    """A quick test of one body: most bodies that cannot be split fail it."""
    digits = len(body) - len(body.translate(None, _DIGITS))
    if not digits or len(body) > _MAX_BYTES:
        return not body
    return len(_NUMBER.findall(body.decode("latin-1"))) <= MAX_NUMBERS


def joined(bodies: Bodies) -> list[bytes]:
    """The original bodies: the inverse of `split`."""
    pieces = [_MARK.split(skeleton) for skeleton in bodies.skeletons]
    return [
        _filled(pieces[index], row) for index, row in zip(bodies.indices.tolist(), bodies.numbers.tolist(), strict=True)
    ]


def _filled(pieces: list[bytes], numbers: list[float]) -> bytes:
    """Replaces the marks in a skeleton, split by `_MARK`, with numbers."""
    filled = pieces[:]
    for index in range(1, len(filled), 2):
        number = numbers[index // 2]
        filled[index] = repr(number).encode() if filled[index] == _FLOAT else b"%d" % int(number)
    return b"".join(filled)
