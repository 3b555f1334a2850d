"""Bodies of ticks as columns: a skeleton (the text without its numbers) and the numbers as float32.

JSON of mostly numbers then compresses to a third of what its text would. Bodies are split only if joining gives back
the same bytes. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

MAX_NUMBERS = 64
"""Maximum numbers in a body; with more, splitting takes longer than it saves."""
_LONGEST = 2048
_FLOAT, _INT, _BETWEEN = b"\x00", b"\x01", b"\x02"
_FRACTION_MARK, _WHOLE_MARK = _FLOAT.decode(), _INT.decode()
# A number, and what makes it a fraction. Each alternative begins with a fixed character, so that `re` skips the text
# between numbers quickly: with -?[0-9] it takes four times as long.
_NUMBER = re.compile(r"((?:-[0-9]|0|1|2|3|4|5|6|7|8|9)[0-9]*((?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?))")
_DIGITS = b"0123456789"
_MARK = re.compile(rb"([\x00\x01])")


class Bodies(NamedTuple):
    """Bodies, split into skeletons and numbers.

    Attributes:
        skeletons: the distinct texts without numbers; byte 0 stands for a fraction, byte 1 for a whole number.
        which: index of each body's skeleton, ``[N]`` int32.
        numbers: numbers of each body in order, ``[N, K]`` float32, padded with zeros.
    """

    skeletons: list[bytes]
    which: np.ndarray
    numbers: np.ndarray


class Joined(NamedTuple):
    """Bodies in one piece, as they are sent to another process.

    Attributes:
        data: all bodies one after the other.
        sizes: of each, in bytes.
    """

    data: bytes
    sizes: list[int]

    @classmethod
    def of(cls, bodies: Sequence[bytes]) -> Joined:
        """Joins bodies."""
        return cls(b"".join(bodies), list(map(len, bodies)))

    def apart(self) -> list[bytes]:
        """The bodies."""
        ends = list(accumulate(self.sizes))
        return [self.data[end - size : end] for end, size in zip(ends, self.sizes, strict=True)]


def split(bodies: Sequence[bytes]) -> Bodies | None:
    """Splits bodies into skeletons and numbers; None: joining would change a byte, or it would save no space."""
    if not bodies or not _may_split(bodies[0]):
        return None
    joined = _BETWEEN.join(bodies)
    if len(joined) > _LONGEST * len(bodies):
        return None
    if _FLOAT in joined or _INT in joined or joined.count(_BETWEEN) != len(bodies) - 1:
        return None
    pieces = _NUMBER.split(joined.decode("latin-1"))  # text, number, its fraction, text, ...
    tokens, fractions = pieces[1::3], pieces[2::3]
    if not 0 < len(tokens) <= MAX_NUMBERS * len(bodies):
        return None
    pieces[1::3] = [_FRACTION_MARK if fraction else _WHOLE_MARK for fraction in fractions]
    pieces[2::3] = [""] * len(tokens)
    skeletons = "".join(pieces).encode("latin-1").split(_BETWEEN)
    known: dict[bytes, int] = {}
    which = np.array([known.setdefault(each, len(known)) for each in skeletons], np.int32)
    if len(known) > 4 + len(bodies) // 8:
        return None
    counts = np.array([marks(each) for each in known])[which]
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
    return Bodies(list(known), which, numbers)


def marks(skeleton: bytes) -> int:
    """Number of numbers in a body of this skeleton."""
    return skeleton.count(_FLOAT) + skeleton.count(_INT)


def _may_split(body: bytes) -> bool:
    """A quick test of one body: most bodies that cannot be split fail it."""
    digits = len(body) - len(body.translate(None, _DIGITS))
    if not digits or len(body) > _LONGEST:
        return not body
    return len(_NUMBER.findall(body.decode("latin-1"))) <= MAX_NUMBERS


def joined(bodies: Bodies) -> list[bytes]:
    """The original bodies: the inverse of `split`."""
    pieces = [_MARK.split(skeleton) for skeleton in bodies.skeletons]
    return [_filled(pieces[of], row) for of, row in zip(bodies.which.tolist(), bodies.numbers.tolist(), strict=True)]


def _filled(pieces: list[bytes], numbers: list[float]) -> bytes:
    """Replaces the marks in a skeleton, split by `_MARK`, with numbers."""
    made = pieces[:]
    for index in range(1, len(made), 2):
        number = numbers[index // 2]
        made[index] = repr(number).encode() if made[index] == _FLOAT else b"%d" % int(number)
    return b"".join(made)
