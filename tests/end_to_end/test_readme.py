"""The README's own game trains, as it stands there, with the command that stands there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.jobs import FREE_PORTS, ROOT, brayx, setting, without_ray
from tests.unit.test_docs import snippets_of

pytestmark = pytest.mark.slow


def test_the_readme_game_trains_to_its_target(tmp_path: Path) -> None:
    shown = {name: snippet.text for snippet in snippets_of(ROOT / "README.md") if (name := snippet.is_("file"))}
    assert len(shown) == 4
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
