"""Tables that commands print."""

from __future__ import annotations

from pipelines.columns import aligned


def test_names_are_at_the_left_and_numbers_at_the_right() -> None:
    rows = [("player", "points", ""), ("main:12", "900", "champion"), ("random", "1,200", "")]
    assert aligned(rows) == ["player   points", "main:12     900  champion", "random    1,200"]
