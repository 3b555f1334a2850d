"""A league that is written and read by tests of several modules."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.league.written import Written, new_league


@pytest.fixture
def written(tracking_db: str, tmp_path: Path) -> Written:
    """A league whose champion is main:1, which main:2 has not played."""
    league = new_league(tracking_db)
    first = league.freeze(tmp_path / "files", 1.0, 1000)
    assert league.league.crown(first).passed
    league.play(0, 30, "win")
    league.freeze(tmp_path / "files", 2.0, 2000)
    return league
