"""Tables that commands print."""

from __future__ import annotations

from brayx.tables import aligned


def test_names_are_at_the_left_and_numbers_at_the_right() -> None:
    rows = [("player", "points", ""), ("main:12", "900", "champion"), ("random", "1,200", "")]
    assert aligned(rows) == ["player   points", "main:12     900  champion", "random    1,200"]


def test_columns_line_up_below_wide_and_combining_characters() -> None:
    rows = [("name", "what", "n"), ("接球", "a", "1"), ("cafe\u0301", "球", "23")]
    assert aligned(rows, left=(0, 1)) == ["name  what   n", "接球  a      1", "cafe\u0301  球    23"]
