"""Who plays a running session, in words."""

from __future__ import annotations

import pytest

from brayx.console.page.frame import who_plays
from brayx.console.sessions import SessionDocument


@pytest.mark.parametrize(
    ("player", "arms", "shown"),
    [
        ("", [], ""),
        ("", ["model/champion/3"], "champion 3"),
        ("", ["eyes/champion/3", "hands/candidate/4"], "eyes: champion 3, hands: candidate 4"),
        ("main:7", ["model/champion/3"], "main:7"),
    ],
)
def test_a_session_names_its_player_or_its_versions(player: str, arms: list[str], shown: str) -> None:
    session = SessionDocument(session="a", ticks=1, idle_s=0.0, followed=False, player=player, arms=arms)
    assert who_plays(session) == shown
