"""The game of docs/guide-own-game.md trains, as it stands there, with the command that stands there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.jobs import FREE_PORTS, ROOT, brayx, setting, without_ray
from tests.unit.test_docs import snippets_of

pytestmark = pytest.mark.slow


def test_the_guides_game_trains_to_its_target(tmp_path: Path) -> None:
    files = [f"match/{name}" for name in ("match_game.py", "match_agent.py", "match_model.py", "match.yaml")]
    snippets = snippets_of(ROOT / "docs" / "guide-own-game.md")
    shown = {name: snippet.text for snippet in snippets if (name := snippet.is_("file")) in files}
    assert list(shown) == files
    for name, text in shown.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text + "\n")
    words = ["train", "match/match.yaml", *setting(*FREE_PORTS)]
    with brayx(tmp_path, *words, environment=without_ray(tmp_path)) as command:
        assert command.ended() == 0, command.err
        assert "champion: match version 1" in command.out
        command.gone()
    assert (tmp_path / "mlflow.db").exists()
