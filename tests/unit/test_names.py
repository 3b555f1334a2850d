"""Names in stores that allow fewer characters."""

from __future__ import annotations

import itertools

import pytest

from brayx.names import escape_of, shortened, unescaped
from brayx.tracking.trial import _escape


def test_ordinary_names_do_not_change_and_refused_characters_become_codes() -> None:
    for name in ("episode_return", "return/last_100_games", "pos_x", "max_x2", "hero:3.side:left", "接球"):
        assert _escape(name) == name
    assert _escape("hit%") == "hit_x25_"
    assert _escape("a//b") == "a/_x2f_b"


@pytest.mark.parametrize("escape", [_escape, escape_of(r"[^\w-]")], ids=["of MLflow's keys", "of a label's name"])
def test_every_escaped_name_can_be_decoded(escape: object) -> None:
    # All names of up to seven of the characters that escapes are made of, or that are refused.
    for length in range(8):
        for letters in itertools.product("_x2/.%" if length < 7 else "_x2%", repeat=length):
            name = "".join(letters)
            assert unescaped(escape(name)) == name  # type: ignore[operator]


def test_long_names_end_in_a_checksum_of_the_whole() -> None:
    assert shortened("name", 20) == "name"
    first, second = (shortened("long" * 70 + end, 50) for end in "ab")
    assert first != second
    assert len(first) == len(second) == 50
