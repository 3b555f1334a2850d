"""Names in stores that allow fewer characters."""

from __future__ import annotations

import itertools

import pytest

from brayx.names import escape_of, shortened, unescaped
from brayx.tracking.trial import _escape

ORDINARY = (
    "episode_return",
    "return/last_100_games",
    "pos_x_mean",
    "dist_x_y",
    "mouse_x_delta",
    "my_x_tag",
    "hit_x25_",
    "__u__",
    "a_u0041_b",
    "a_u025_",
    "a_U0025_",
    "a_u00025_",
    "game/kills",
    "hero:3.side:left",
    "map 2 - level-1",
    "接球",
)


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_names_are_written_and_read_unchanged(name: str) -> None:
    assert (_escape(name), unescaped(name)) == (name, name)


def test_refused_characters_become_codes() -> None:
    assert _escape("hit%") == "hit_u0025_"
    assert _escape("a//b") == "a/_u002f_b"
    assert _escape("hit_u0025_") == "hit_u005f_u0025_"


@pytest.mark.parametrize("escape", [_escape, escape_of(r"[^\w-]")], ids=["of MLflow's keys", "of a label's name"])
def test_every_escaped_name_can_be_decoded(escape: object) -> None:
    # All names of up to five of the parts that escapes are made of, or that are refused; U+0041 never is.
    for length in range(6):
        for parts in itertools.product(("_", "u", "0025", "005f", "0041", "%", "/", "."), repeat=length):
            name = "".join(parts)
            assert unescaped(escape(name)) == name  # type: ignore[operator]


def test_long_names_end_in_a_checksum_of_the_whole() -> None:
    assert shortened("name", 20) == "name"
    first, second = (shortened("long" * 70 + end, 50) for end in "ab")
    assert first != second
    assert len(first) == len(second) == 50
