"""``brayx trials``: a row for each trial, of one project or of all."""

from __future__ import annotations

from pathlib import Path

from brayx.metrics import BEST_METRIC
from brayx.metrics.charts import CHARTS, RETURN_CHART
from brayx.tracking import Trial, register
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


def test_trials_are_listed_with_their_champion(command: Run, tmp_path: Path, tracking_db: str) -> None:
    ids = []
    for name, value, best in (("first", 20.0, {}), ("second", 480.0, {BEST_METRIC: 500.0})):
        trial = Trial.open("cartpole", name, tracking_db)
        ids.append(trial.run_id)
        trial.log_metrics({CHARTS["env_steps"]: 1000.0, RETURN_CHART: value}, 1000)
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights.npz").write_bytes(b"weights")
        register(trial, trial.save_checkpoint(tmp_path / name, 1000, best), "cartpole", alias="champion")
        trial.finish("FINISHED")
    trial = Trial.open("cartpole", "third", tracking_db)
    ids.append(trial.run_id)
    trial.finish("KILLED")
    shown = command("trials", "--tracking", tracking_db)
    heading, third, second, first = (line.split() for line in shown.stdout.splitlines())
    assert heading[:2] == ["project", "trial"]
    assert third == ["cartpole", "third", "interrupted", "-", "-", "-", ids[2]]
    assert second == ["cartpole", "second", "finished", "1,000", "480", "500", "cartpole", "version", "2", ids[1]]
    assert first == ["cartpole", "first", "finished", "1,000", "20", "-", ids[0]]
    nowhere = command("trials", "--project", "none", "--tracking", tracking_db)
    assert nowhere.returncode == 2
    assert "there is no project 'none'" in nowhere.stderr
