"""Bodies of ticks as columns: a skeleton (the text without its numbers) and the numbers as float32.

JSON of mostly numbers then compresses to a third of what its text would. Bodies are split only if joining gives back
the same bytes. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

MOST_NUMBERS = 64
"""Maximum numbers in a body; with more, splitting takes longer than it saves."""
_LONGEST = 2048
_FLOAT, _INT, _BETWEEN = b"\x00", b"\x01", b"\x02"
_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
_FRACTION = re.compile(rb"-?\d+(?:\.\d+(?:[eE][+-]?\d+)?|[eE][+-]?\d+)")
_WHOLE = re.compile(rb"-?\d+")
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


def split(bodies: Sequence[bytes]) -> Bodies | None:
    """Splits bodies into skeletons and numbers; None: joining would change a byte, or it would save no space."""
    joined = _BETWEEN.join(bodies)
    if not bodies or len(joined) > _LONGEST * len(bodies):
        return None
    if _FLOAT in joined or _INT in joined or joined.count(_BETWEEN) != len(bodies) - 1:
        return None
    tokens = _NUMBER.findall(joined)
    if not 0 < len(tokens) <= MOST_NUMBERS * len(bodies):
        return None
    skeletons = _WHOLE.sub(_INT, _FRACTION.sub(_FLOAT, joined)).split(_BETWEEN)
    counts = np.array([each.count(_FLOAT) + each.count(_INT) for each in skeletons])
    if counts.sum() != len(tokens) or counts.max() > MOST_NUMBERS:
        return None
    known: dict[bytes, int] = {}
    which = np.array([known.setdefault(each, len(known)) for each in skeletons], np.int32)
    if len(known) > 4 + len(bodies) // 8:
        return None
    exact = np.array(tokens, "S").astype(np.float64)
    with np.errstate(over="ignore"):
        flat = exact.astype(np.float32)
    if not (np.isfinite(flat).all() and (flat == exact).all()):
        return None
    if [_token(number, token) for number, token in zip(flat.tolist(), tokens, strict=True)] != tokens:
        return None
    numbers = np.zeros((len(bodies), int(counts.max())), np.float32)
    numbers[np.arange(numbers.shape[1]) < counts[:, None]] = flat
    return Bodies(list(known), which, numbers)


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


def _token(number: float, like: bytes) -> bytes:
    """A number as text: whole if ``like`` is, else a fraction."""
    return b"%d" % int(number) if like.lstrip(b"-").isdigit() else repr(number).encode()
