"""`brayx.tracking.trial`, against a real sqlite database: a trial's life, and its checkpoints."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import socket
import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from mlflow import MlflowClient

from brayx.errors import ConfigError, TrackingError, TrialNotFound
from brayx.tracking import (
    Trial,
)
from brayx.tracking.lineage import LINEAGE_TAG, Origin, lineage_text, origins_in
from tests.unit.tracking.folders import folder_with, text_of

OWNER = """
import sys
from brayx.tracking import Trial
print(Trial.open("project", "trial", sys.argv[1]).run_id, flush=True)
sys.stdin.read()
"""
WRITER = """
import sys
from brayx.tracking import Trial
trial = Trial.attach(sys.argv[1], sys.argv[2])
for step in range(30):
    trial.log_metrics({f"m{sys.argv[3]}.{i}": step for i in range(10)}, step)
"""


class TestTrial:
    def test_artifacts_lie_beside_the_database(self, tracking_db: str, tmp_path: Path) -> None:
        trial = Trial.open("project", "trial", tracking_db)
        trial.log_file(folder_with(tmp_path, "a") / "meta.json", "notes")
        assert list((tmp_path / "mlartifacts" / "project").rglob("notes/meta.json"))

    def test_an_interrupted_trial_continues_in_the_same_run(self, tracking_db: str) -> None:
        first = Trial.open("project", "trial", tracking_db)
        assert not first.resumed
        for status in ("KILLED", "FAILED"):
            first.finish(status)
            again = Trial.open("project", "trial", tracking_db)
            assert (again.run_id, again.resumed, again.status) == (first.run_id, True, "RUNNING")
        # A killed process could not change the status.
        assert Trial.open("project", "trial", tracking_db).run_id == first.run_id

    def test_a_finished_trial_is_not_continued(self, tracking_db: str) -> None:
        first = Trial.open("project", "trial", tracking_db)
        first.finish()
        second = Trial.open("project", "trial", tracking_db)
        assert second.run_id != first.run_id
        assert not second.resumed

    def test_resume_can_be_refused(self, tracking_db: str) -> None:
        first = Trial.open("project", "trial", tracking_db)
        assert Trial.open("project", "trial", tracking_db, resume=False).run_id != first.run_id

    @pytest.mark.slow  # starts MLflow in a separate process
    def test_a_trial_of_a_living_process_is_not_taken_over_and_that_of_a_killed_one_continues(
        self, tracking_db: str
    ) -> None:
        with subprocess.Popen(
            [sys.executable, "-c", OWNER, tracking_db], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as other:
            assert other.stdout is not None
            run_id = other.stdout.readline().strip()
            with pytest.raises(TrackingError) as refused:
                Trial.open("project", "trial", tracking_db)
            assert refused.value.details == {"pid": other.pid, "run_id": run_id}
            other.kill()
        again = Trial.open("project", "trial", tracking_db)
        assert (again.run_id, again.resumed) == (run_id, True)
        assert Trial.open("project", "trial", tracking_db, resume=False).run_id != run_id, "a living process has that"

    def test_projects_do_not_share_names(self, tracking_db: str) -> None:
        assert Trial.open("a", "trial", tracking_db).run_id != Trial.open("b", "trial", tracking_db).run_id

    @pytest.mark.parametrize("name", ["", "it's", "a\nb", "a/b", '"'])
    def test_unsearchable_names_are_refused(self, tracking_db: str, name: str) -> None:
        with pytest.raises(ConfigError, match="trial is"):
            Trial.open("project", name, tracking_db)

    def test_attach_and_pickle_give_the_same_trial(self, tracking_db: str) -> None:
        trial = Trial.open("project", "trial", tracking_db)
        assert Trial.attach(tracking_db, trial.run_id) == trial
        assert pickle.loads(pickle.dumps(trial)) == trial

    def test_attaching_to_a_missing_run_is_an_error(self, tracking_db: str) -> None:
        for run_id in ("nothing", "'"):
            with pytest.raises(TrialNotFound, match="see `brayx trials`"):
                Trial.attach(tracking_db, run_id)

    def test_metrics_have_a_history(self, tracking_db: str) -> None:
        trial = Trial.open("project", "trial", tracking_db)
        trial.log_metrics({"episode_return": 1.5, "hit%": 1.0, "hit#": 2.0}, 10)
        trial.log_metrics({"episode_return": 2.5}, 20)
        assert trial.history("episode_return") == [(10, 1.5), (20, 2.5)]
        assert trial.metrics() == {"episode_return": 2.5, "hit%": 1.0, "hit#": 2.0}
        assert trial.history("hit#") == [(10, 2.0)]
        assert MlflowClient(tracking_db).get_run(trial.run_id).data.metrics["hit_u0025_"] == 1.0

    def test_names_that_an_earlier_brayx_wrote_are_read_unchanged(self, tracking_db: str) -> None:
        trial = Trial.open("project", "trial", tracking_db)
        client = MlflowClient(tracking_db)
        names = ["pos_x_mean", "dist_x_y", "mouse_x_delta", "game/kills", "game/gold.hero:3.side:left", "k" * 250]
        for name in names:
            client.log_metric(trial.run_id, name, 1.0, step=5)
        for tag in ("my_x_tag", "brayx.sum.pos_x_hits"):
            client.set_tag(trial.run_id, tag, "1")
        assert trial.metrics() == dict.fromkeys(names, 1.0)
        assert {"my_x_tag", "brayx.sum.pos_x_hits"} <= trial.tags().keys()
        trial.log_metrics(dict.fromkeys(names, 2.0), 6)
        assert [trial.history(name) for name in names] == [[(5, 1.0), (6, 2.0)]] * len(names)

    def test_a_name_that_mlflow_refuses_loses_no_other_metric(self, tracking_db: str) -> None:
        trial = Trial.open("project", "trial", tracking_db)
        odd = ["/x", "x", "y/", "a//b", "a/b", "../up", "..", ".", "_", "a\n/", "\ud800", "_u002f_", "_u002f//"]
        trial.log_metrics({**dict.fromkeys(odd, 1.0), "env_steps": 5.0}, 10)
        assert trial.metrics() == {**dict.fromkeys(odd, 1.0), "env_steps": 5.0}
        trial.log_metrics({f"{'long' * 70}{number}": 1.0 for number in (1, 2)}, 10)
        written = trial.metrics()
        assert sum(name.startswith("longlong") for name in written) == 2, "they stay two metrics"

    def test_more_metrics_than_one_transaction_takes(self, tracking_db: str) -> None:
        trial = Trial.open("project", "trial", tracking_db)
        trial.log_metrics({f"m{i}": float(i) for i in range(2500)}, 0)
        assert len(trial.metrics()) == 2500

    def test_changed_params_are_logged_beside_the_first(self, tracking_db: str) -> None:
        from mlflow.tracking import MlflowClient

        trial = Trial.open("project", "trial", tracking_db)
        trial.log_params({"share%": 1, "share#": 1, "k" * 300: 1})
        trial.log_params({"k" * 300: 2})
        trial.set_tag("why?", "a")
        trial.set_tag("why!", "b")
        assert (trial.tags()["why?"], trial.tags()["why!"]) == ("a", "b")
        for rate in (1e-3, 1e-3, 1e-4, 1e-5, 1e-4):
            trial.log_params({"trainer": {"learning_rate": rate, "model": "net"}, "empty": {}})
        params = MlflowClient(tracking_db).get_run(trial.run_id).data.params
        assert [params.pop(name) for name in ("share_u0025_", "share_u0023_")] == ["1", "1"]
        assert sorted(params.pop(name) for name in list(params) if name.startswith("kkk")) == ["1", "2"]
        assert params == {
            "trainer.learning_rate": "0.001",
            "trainer.learning_rate:2": "0.0001",
            "trainer.learning_rate:3": "1e-05",
            "trainer.model": "net",
            "empty": "{}",
        }

    def test_a_value_that_json_lacks_is_saved_as_text(self, tracking_db: str, tmp_path: Path) -> None:
        Trial.open("project", "trial", tracking_db).log_dict({"folder": Path("data"), "n": 1}, "values.json")
        (file,) = tmp_path.rglob("values.json")
        assert json.loads(file.read_text()) == {"folder": "data", "n": 1}


class TestCheckpoints:
    def test_latest_and_best(self, tracking_db: str, tmp_path: Path) -> None:
        trial = Trial.open("project", "trial", tracking_db)
        assert trial.latest_checkpoint() is None
        assert trial.best_checkpoint("episode_return") is None
        for step, score in ((100, 5.0), (200, 9.0), (300, 7.0)):
            trial.save_checkpoint(folder_with(tmp_path, str(step)), step, {"episode_return": score})
        trial.save_checkpoint(folder_with(tmp_path, "400"), 400, {"episode_return": float("nan")})
        assert [c.step for c in trial.checkpoints()] == [100, 200, 300, 400]
        assert text_of(trial.latest_checkpoint()) == "400"
        best = trial.best_checkpoint("episode_return")
        assert best is not None
        assert (best.step, text_of(trial.local(best))) == (200, "200")
        assert trial.best_checkpoint("unheard_of") is None

    def test_an_incomplete_checkpoint_does_not_count(self, tracking_db: str, tmp_path: Path) -> None:
        trial = Trial.open("project", "trial", tracking_db)
        whole = trial.save_checkpoint(folder_with(tmp_path, "whole"), 1)
        # A kill between the files and the record leaves this.
        trial.log_file(folder_with(tmp_path, "half") / "meta.json", "checkpoints/000000000002")
        assert trial.checkpoints() == [whole]

    @pytest.mark.parametrize(("dead", "copies"), [(True, False), (False, False), (True, True)])
    def test_incomplete_checkpoints_are_deleted_if_their_owner_has_ended_and_nothing_still_copies(
        self, tracking_db: str, tmp_path: Path, dead: bool, copies: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if not copies:
            monkeypatch.setattr("brayx.tracking.trial._COPYING_S", 0.0)
        trial = Trial.open("project", "trial", tracking_db)
        whole = trial.save_checkpoint(folder_with(tmp_path, "whole"), 1)
        trial.log_file(folder_with(tmp_path, "half") / "meta.json", "checkpoints/000000000002")
        trial.log_file(folder_with(tmp_path, "other") / "meta.json", "other")
        if dead:
            trial.set_tag("brayx.owner", f"{socket.gethostname()}:{os.getpid()}0000:1")
        else:
            trial.set_tag("brayx.owner", "another-machine:1:1")
        assert Trial.open("project", "trial", tracking_db).run_id == trial.run_id
        assert trial.checkpoints() == [whole]
        assert text_of(trial.latest_checkpoint()) == "whole"
        folders = {path.parent.name for path in tmp_path.glob("mlartifacts/**/meta.json")}
        assert folders == {"000000000001", "other", *([] if dead and not copies else ["000000000002"])}

    def test_saving_the_same_step_again_replaces_it(self, tracking_db: str, tmp_path: Path) -> None:
        trial = Trial.open("project", "trial", tracking_db)
        trial.save_checkpoint(folder_with(tmp_path, "one"), 5)
        trial.save_checkpoint(folder_with(tmp_path, "two"), 5)
        assert len(trial.checkpoints()) == 1
        assert text_of(trial.latest_checkpoint()) == "two"
        assert len(list(tmp_path.glob("mlartifacts/**/weights.npz"))) == 1

    def test_a_failed_replacement_leaves_the_previous_checkpoint(
        self, tracking_db: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from mlflow.tracking import MlflowClient

        def no_tag(*_: object) -> None:
            raise OSError("killed")

        trial = Trial.open("project", "trial", tracking_db)
        trial.save_checkpoint(folder_with(tmp_path, "one"), 5)
        again = folder_with(tmp_path, "two")
        monkeypatch.setattr(MlflowClient, "set_tag", no_tag)
        with pytest.raises(TrackingError, match="killed"):
            trial.save_checkpoint(again, 5)
        assert text_of(trial.latest_checkpoint()) == "one"

    @pytest.mark.parametrize("step", [5, 6])  # in place of the existing one, and beside it
    def test_a_checkpoint_whose_record_fails_leaves_no_files(self, tracking_db: str, tmp_path: Path, step: int) -> None:
        trial = Trial.open("project", "trial", tracking_db)
        trial.save_checkpoint(folder_with(tmp_path, "one"), 5)
        again = folder_with(tmp_path, "two")
        with sqlite3.connect(tracking_db.removeprefix("sqlite:///")) as database:
            for change in ("INSERT", "UPDATE"):
                full = "BEGIN SELECT RAISE(ABORT, 'database or disk is full'); END"
                database.execute(f"CREATE TRIGGER full_{change} BEFORE {change} ON tags {full}")
        for _ in range(3):
            with pytest.raises(TrackingError, match="database or disk is full"):
                trial.save_checkpoint(again, step)
        assert len(list(tmp_path.glob("mlartifacts/**/weights.npz"))) == 1
        assert text_of(trial.latest_checkpoint()) == "one"

    def test_the_previous_one_is_used_if_the_newest_has_lost_files(self, tracking_db: str, tmp_path: Path) -> None:
        trial = Trial.open("project", "trial", tracking_db)
        saved = [trial.save_checkpoint(folder_with(tmp_path, str(n)), n) for n in range(3)]
        first, second, third = (next(tmp_path.glob(f"mlartifacts/**/{entry.artifact_path}")) for entry in saved)
        shutil.rmtree(third)
        assert text_of(trial.latest_checkpoint()) == "1"
        (second / "weights.npz").unlink()
        assert text_of(trial.latest_checkpoint()) == "0"
        (first / "weights.npz").unlink()
        with pytest.raises(TrackingError, match="cannot read checkpoint 2"):
            trial.latest_checkpoint()

    def test_prune_keeps_the_newest_and_the_best(self, tracking_db: str, tmp_path: Path) -> None:
        trial = Trial.open("project", "trial", tracking_db)
        for step in range(5):
            trial.save_checkpoint(folder_with(tmp_path, str(step)), step, {"score": 10.0 if step == 1 else 0.0})
        trial.prune_checkpoints(keep_last=2, best_by="score")
        assert [c.step for c in trial.checkpoints()] == [1, 3, 4]
        assert len(list(tmp_path.glob("mlartifacts/**/weights.npz"))) == 3

    def test_a_missing_folder_is_an_error(self, tracking_db: str, tmp_path: Path) -> None:
        trial = Trial.open("project", "trial", tracking_db)
        with pytest.raises(TrackingError, match=r"checkpoint .*'trial'"):
            trial.save_checkpoint(tmp_path / "absent", 1)
        assert trial.checkpoints() == []

    @pytest.mark.parametrize("refused", [False, True], ids=["does nothing", "is refused"])
    def test_a_store_that_cannot_delete_replaces_files_and_reports_the_remaining_ones(
        self,
        tracking_db: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        refused: bool,
    ) -> None:
        from mlflow.artifacts import download_artifacts
        from mlflow.exceptions import MlflowException
        from mlflow.store.artifact.artifact_repo import ArtifactRepository
        from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository

        def refuse(store: ArtifactRepository, path: str) -> None:
            raise MlflowException("not allowed")

        # As in MLflow's stores without their own way of deleting.
        delete = refuse if refused else ArtifactRepository.delete_artifacts
        monkeypatch.setattr(LocalArtifactRepository, "delete_artifacts", delete)
        trial = Trial.open("project", "trial", tracking_db)
        for text, names in (("old", ["model.onnx", "report.json"]), ("new", ["report.json"])):
            for name in names:
                (tmp_path / name).write_text(text)
            trial.replace_files(tmp_path, names, "export/m-1")
        folder = Path(download_artifacts(run_id=trial.run_id, artifact_path="export/m-1", tracking_uri=tracking_db))
        assert {path.name: path.read_text() for path in folder.iterdir()} == {"model.onnx": "old", "report.json": "new"}
        (warning,) = [record.message for record in caplog.records if record.name == "brayx.tracking.trial"]
        assert warning.startswith("export/m-1 of trial 'trial' overwrites what the store has there: ")
        assert warning.endswith("not allowed" if refused else "it deletes nothing")


@pytest.mark.cluster
@pytest.mark.slow
def test_processes_write_and_read_at_the_same_time(tracking_db: str) -> None:
    trial = Trial.open("project", "trial", tracking_db)

    def write(number: int) -> None:
        command = [sys.executable, "-c", WRITER, tracking_db, trial.run_id, str(number)]
        subprocess.run(command, check=True, timeout=120)

    with ThreadPoolExecutor(2) as pool:
        writers = [pool.submit(write, number) for number in range(2)]
        while not all(writer.done() for writer in writers):
            trial.metrics()
        for writer in writers:
            writer.result()
    assert trial.metrics() == {f"m{number}.{i}": 29.0 for number in range(2) for i in range(10)}


def test_a_project_is_shown_as_training_even_an_older_one(tracking_db: str) -> None:
    client = MlflowClient(tracking_db)
    client.create_experiment("old")
    for project in ("old", "new"):
        Trial.open(project, "first", tracking_db)
        tags = client.get_experiment_by_name(project).tags
        assert tags["mlflow.experimentKind"] == "custom_model_development"
        assert "metrics.`return/last_100_games`" in json.loads(tags["mlflow.sharedViewState.brayx"])["selectedColumns"]


def test_tags_of_a_run_are_not_json_and_those_of_an_earlier_brayx_are_read(tracking_db: str, tmp_path: Path) -> None:
    trial = Trial.open("p", "t", tracking_db)
    saved = trial.save_checkpoint(folder_with(tmp_path, "a"), 100, {"episode_return": -1.25, "games": 20})
    trial.set_tag(LINEAGE_TAG, lineage_text([Origin("models:/old", 3, 200), Origin("older one", 1, 0)]))
    tags = trial.tags()
    assert tags["brayx.lineage"] == "models:/old version 3 step 200; older one version 1 step 0"
    assert origins_in(tags["brayx.lineage"])[1] == Origin("older one", 1, 0)
    assert not [value for value in tags.values() if value.startswith(("{", "["))]
    assert trial.checkpoints() == [saved]
    record = {"path": saved.artifact_path, "metrics": {"episode_return": 7.0}, "saved_at_s": 1.5, "files": 1}
    trial.set_tag("brayx.checkpoint.000000000100", json.dumps(record))
    (old,) = trial.checkpoints()
    assert (old.step, old.metrics, old.saved_at_s) == (100, {"episode_return": 7.0}, 1.5)
