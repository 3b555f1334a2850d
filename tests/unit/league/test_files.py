"""Where a league's files are: beside the tracking database, else in the working directory."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from brayx.league.files import books_file, league_folder, levels_file


def test_they_are_beside_a_sqlite_file(tmp_path: Path) -> None:
    trial = SimpleNamespace(uri=f"sqlite:///{tmp_path / 'mlflow.db'}", run_id="abc")
    assert league_folder(trial) == tmp_path / "leagues" / "abc"
    assert books_file(trial) == tmp_path / "leagues" / "abc" / "books.sqlite"


def test_with_a_server_they_are_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert league_folder(SimpleNamespace(uri="http://127.0.0.1:5000", run_id="abc")) == tmp_path / "leagues" / "abc"


@pytest.mark.parametrize(
    ("name", "file"), [("levels.yaml", "job/levels.yaml"), ("/etc/levels.yaml", "/etc/levels.yaml")]
)
def test_levels_are_in_the_jobs_folder_unless_their_path_is_absolute(name: str, file: str) -> None:
    assert levels_file("job", SimpleNamespace(levels=name)) == Path(file)
