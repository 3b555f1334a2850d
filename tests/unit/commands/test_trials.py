"""``brayx trials``: a row for each trial, of one project or of all."""

from __future__ import annotations

from brayx.tracking import Trial
from tests.unit.conftest import Run


def test_trials_are_listed_by_project(command: Run, tracking_db: str) -> None:
    for project in ("chess", "poker"):
        Trial.open(project, f"{project}-trial", tracking_db).finish()
    listed = command("trials", "--tracking", tracking_db)
    assert listed.returncode == 0
    assert "chess-trial" in listed.stdout
    assert "poker-trial" in listed.stdout
    only = command("trials", "--tracking", tracking_db, "--project", "chess").stdout
    assert "chess-trial" in only
    assert "poker-trial" not in only
