"""The tracking store, against a real sqlite database."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mlflow
import numpy as np
import pytest
import torch
from mlflow import MlflowClient

from brayx.engines.base import save_weights
from brayx.engines.torch import describe
from brayx.errors import BadWeights, ConfigError, ModelNotFound, TrackingError, TrialNotFound
from brayx.tracking import (
    Checkpoint,
    PoolEntry,
    Trial,
    aliases,
    files_of,
    find,
    initialise,
    local_files,
    promote,
    register,
    registered_models,
    roll_back,
    tracking_uri,
)
from brayx.tracking.lineage import LINEAGE_TAG, Origin, lineage_text, origins_in
from brayx.tracking.store import check_writable
from brayx.types import Weights
from brayx.urls import read_only_url, sqlite_path, sqlite_url


def folder_with(tmp_path: Path, text: str) -> Path:
    folder = tmp_path / f"made-{text}"
    folder.mkdir()
    np.savez(folder / "weights.npz", w=np.arange(3, dtype=np.float32))
    (folder / "meta.json").write_text(json.dumps({"text": text}))
    return folder


def text_of(folder: Path | None) -> str:
    assert folder is not None
    return str(json.loads((folder / "meta.json").read_text())["text"])


def text_at(reference: str, uri: str) -> str:
    with files_of(reference, uri) as folder:
        return text_of(folder)


class TestUri:
    def test_the_default_file_is_in_the_current_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        assert tracking_uri() == f"sqlite:///{tmp_path}/mlflow.db"

    def test_the_environment_comes_before_the_default(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://localhost:5000")
        assert tracking_uri() == "http://localhost:5000"

    def test_a_folder_means_the_file_in_it(self, tmp_path: Path) -> None:
        assert tracking_uri(tmp_path) == f"sqlite:///{tmp_path}/mlflow.db"
        assert tracking_uri(tmp_path / "books.db") == f"sqlite:///{tmp_path}/books.db"

    def test_a_relative_uri_becomes_absolute(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        assert tracking_uri("sqlite:///books.db") == f"sqlite:///{tmp_path}/books.db"
        assert tracking_uri("postgresql://host/db") == "postgresql://host/db"

    def test_a_path_may_have_any_characters(self, new_tracking_db: Callable[[Path], str], tmp_path: Path) -> None:
        folder = tmp_path / "50% ?#%41 é接" / "deeper"
        folder.mkdir(parents=True)
        uri = new_tracking_db(folder)
        assert tracking_uri(uri) == tracking_uri(folder) == uri
        assert sqlite_path(uri) == sqlite_path(f"{uri}?timeout=60") == folder / "mlflow.db"
        assert tracking_uri(f"{uri}?timeout=60") == f"{uri}?timeout=60"
        assert read_only_url(folder / "mlflow.db").endswith(
            "50%25%20%3F%23%2541%20%C3%A9%E6%8E%A5/deeper/mlflow.db?mode=ro"
        )
        trial = Trial.open("project", "trial", uri)
        checkpoint = trial.save_checkpoint(folder_with(tmp_path, "a"), 1)
        version = register(trial, checkpoint, "pool")
        assert text_of(trial.latest_checkpoint()) == text_at("models:/pool@champion", uri) == "a"
        trial.log_bytes(b"kept", "notes/text.txt")
        assert next(folder.rglob("notes/text.txt")).read_bytes() == b"kept"
        assert local_files(version, uri) is not None
        assert sorted(path.name for path in folder.iterdir() if "-" not in path.name) == ["mlartifacts", "mlflow.db"]
        assert sorted(tmp_path.iterdir()) == [folder.parent, tmp_path / "made-a"], "MLflow's own reading of the URL"


class TestInitialise:
    def test_a_read_only_folder_is_named(self, tmp_path: Path) -> None:
        # Below a file, so that root cannot write there either.
        (tmp_path / "file").write_text("")
        with pytest.raises(TrackingError, match=r"/file/books/mlflow.db .*not writable"):
            initialise(tracking_uri(tmp_path / "file" / "books" / "mlflow.db"))

    def test_a_database_that_cannot_be_written_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "mlflow.db").mkdir()  # as unwritable, also for root
        with pytest.raises(TrackingError, match=r"/mlflow\.db .*\(Is a directory\)"):
            check_writable(sqlite_url(tmp_path / "mlflow.db"))

    def test_a_check_drops_no_lock_of_an_open_database(self, tmp_path: Path) -> None:
        path = tmp_path / "mlflow.db"
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("CREATE TABLE numbers (number)")
            check_writable(sqlite_url(path))
            # The last connection of a database deletes its log, and a process knows of others by their locks alone.
            other = "import sqlite3, sys; sqlite3.connect(sys.argv[1]).execute('SELECT * FROM numbers').fetchall()"
            subprocess.run([sys.executable, "-c", other, path], check=True)
            connection.execute("INSERT INTO numbers VALUES (1)")
            read = (
                "import sqlite3, sys; print(sqlite3.connect(sys.argv[1]).execute('SELECT * FROM numbers').fetchall())"
            )
            reader = subprocess.run([sys.executable, "-c", read, path], check=True, capture_output=True, text=True)
            assert reader.stdout.strip() == "[(1,)]"

    def test_a_file_that_is_no_database_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "mlflow.db").write_text("this is not a database, it is a text " * 100)
        with pytest.raises(TrackingError, match=r"mlflow\.db cannot be used"):
            initialise(tracking_uri(tmp_path))

    def test_a_schema_of_another_mlflow_is_reported(self, tracking_db: str) -> None:
        path = tracking_db.removeprefix("sqlite:///")
        other = f"{path}.other.db"
        with sqlite3.connect(path) as source, sqlite3.connect(other) as copy:
            source.backup(copy)
            copy.execute("UPDATE alembic_version SET version_num = '451aebb31d03'")
        with pytest.raises(TrackingError, match="out-of-date database schema"):
            initialise(tracking_uri(other))


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
    def test_a_trial_of_a_living_process_is_not_taken_over(self, tracking_db: str) -> None:
        with subprocess.Popen(
            [sys.executable, "-c", OWNER, tracking_db], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as other:
            assert other.stdout is not None
            run_id = other.stdout.readline().strip()
            with pytest.raises(TrackingError) as refused:
                Trial.open("project", "trial", tracking_db)
            assert refused.value.details == {"pid": other.pid, "run_id": run_id}
            assert Trial.open("project", "trial", tracking_db, resume=False).run_id != run_id
            other.kill()

    @pytest.mark.slow  # starts MLflow in a separate process
    def test_a_trial_of_a_killed_process_continues(self, tracking_db: str) -> None:
        with subprocess.Popen(
            [sys.executable, "-c", OWNER, tracking_db], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as other:
            assert other.stdout is not None
            run_id = other.stdout.readline().strip()
            other.kill()
        again = Trial.open("project", "trial", tracking_db)
        assert (again.run_id, again.resumed) == (run_id, True)

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


@pytest.fixture
def trained(tracking_db: str, tmp_path: Path) -> tuple[Trial, Checkpoint]:
    trial = Trial.open("project", "trial", tracking_db)
    return trial, trial.save_checkpoint(folder_with(tmp_path, "best"), 100, {"score": 1.0})


@pytest.fixture
def no_leftovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails a test that leaves temporary files."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    yield
    assert list((tmp_path / "temporary").iterdir()) == []


def logged(trial: Trial, folder: Path, name: str) -> PoolEntry:
    """A version that is one of MLflow's logged models: below the run's URI, but outside the run's folder."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(trial.uri)
    experiment = client.get_run(trial.run_id).info.experiment_id
    model = client.create_logged_model(experiment, name, source_run_id=trial.run_id)
    client.log_model_artifacts(model.model_id, str(folder))
    client.create_registered_model(name)
    client.create_model_version(name, source=f"runs:/{trial.run_id}/{name}", run_id=trial.run_id)
    return find(f"models:/{name}", trial.uri)


class TestRegistry:
    def test_the_champion_resolves_to_its_files(self, trained: tuple[Trial, Checkpoint]) -> None:
        trial, checkpoint = trained
        entry = register(trial, checkpoint, "cartpole", tags={"engine": "onnx"})
        assert (entry.name, entry.version, entry.run_id) == ("cartpole", 1, trial.run_id)
        assert text_at("models:/cartpole@champion", trial.uri) == "best"
        tags = dict(find("models:/cartpole/1", trial.uri).tags)
        assert len(tags.pop("brayx.content")) == 16
        assert tags.pop("brayx.checkpoint") == f"checkpoints/000000000100@{checkpoint.saved_at_s!r}"
        assert tags == {"engine": "onnx", "brayx.step": "100"}

    def test_another_tools_model_may_have_any_name(self, trained: tuple[Trial, Checkpoint]) -> None:
        trial, checkpoint = trained
        register(trial, checkpoint, "it's")
        (model,) = registered_models(trial.uri)
        assert (model.name, [entry.version for entry, _ in model.versions]) == ("it's", [1])
        assert find("models:/it's/1", trial.uri).name == "it's"

    def test_registering_again_gives_the_same_version(self, trained: tuple[Trial, Checkpoint]) -> None:
        trial, checkpoint = trained
        assert register(trial, checkpoint, "cartpole").version == 1
        assert register(trial, checkpoint, "cartpole", alias="candidate").version == 1
        assert find("models:/cartpole@candidate", trial.uri).version == 1

    def test_a_registered_checkpoint_is_recognised_without_its_files(self, trained: tuple[Trial, Checkpoint]) -> None:
        """The files may be in a remote store."""
        trial, checkpoint = trained
        register(trial, checkpoint, "cartpole")
        shutil.rmtree(trial.local(checkpoint))
        (again,) = trial.checkpoints()
        assert register(trial, again, "cartpole", alias="candidate").version == 1
        with pytest.raises(TrackingError, match="cannot read checkpoint 100"):
            register(trial, again, "other")

    @pytest.mark.parametrize("file", ["weights.npz", "model.txt"])
    def test_a_replaced_checkpoint_of_the_same_step_is_another_version(
        self, tracking_db: str, tmp_path: Path, file: str
    ) -> None:
        trial = Trial.open("project", "trial", tracking_db)
        folder = tmp_path / "saved"
        folder.mkdir()
        for number, (weights, version) in enumerate([("first", 1), ("other", 2), ("other", 2), ("first", 1)]):
            (folder / file).write_text(weights)
            if file == "weights.npz":
                (folder / "meta.json").write_text(f'{{"saved": {number}}}')  # with the same weights, at another time
            entry = register(trial, trial.save_checkpoint(folder, 100), "cartpole")
            assert entry.version == version
            with files_of("models:/cartpole@champion", trial.uri) as files:
                assert (files / file).read_text() == weights
        with files_of("models:/cartpole/1", trial.uri) as files:
            assert (files / file).read_text() == "first"

    def test_an_alias_moves_and_versions_stay(self, trained: tuple[Trial, Checkpoint], tmp_path: Path) -> None:
        trial, checkpoint = trained
        register(trial, checkpoint, "cartpole")
        better = trial.save_checkpoint(folder_with(tmp_path, "better"), 200)
        register(trial, better, "cartpole")
        assert text_at("models:/cartpole@champion", trial.uri) == "better"
        assert text_at("models:/cartpole/1", trial.uri) == "best"
        assert find("models:/cartpole", trial.uri).version == 2

    def test_promoting_moves_an_alias_to_a_known_version(
        self, trained: tuple[Trial, Checkpoint], tmp_path: Path
    ) -> None:
        trial, checkpoint = trained
        register(trial, checkpoint, "cartpole")
        register(trial, trial.save_checkpoint(folder_with(tmp_path, "new"), 200), "cartpole", alias="candidate")
        assert aliases("cartpole", trial.uri) == {"champion": 1, "candidate": 2}
        entry, before = promote("models:/cartpole@candidate", trial.uri)
        assert (entry.version, before) == (2, 1)
        assert aliases("cartpole", trial.uri) == {"champion": 2, "candidate": 2}
        assert promote("models:/cartpole", trial.uri, version=1)[1] == 2
        assert promote("models:/cartpole/1", trial.uri, to="staging")[1] is None
        assert aliases("cartpole", trial.uri) == {"champion": 1, "candidate": 2, "staging": 1}
        with pytest.raises(ModelNotFound, match="version 9") as refused:
            promote("models:/cartpole", trial.uri, version=9)
        assert (refused.value.details["nearest"], refused.value.details["known"]) == (2, [1, 2])
        with pytest.raises(ModelNotFound, match="nearest is 'candidate'"):
            promote("models:/cartpole@candidat", trial.uri)
        for bad in ("v1", "latest", "a/b", "", "a" * 201):
            with pytest.raises(ConfigError, match="is invalid"):
                promote("models:/cartpole@candidate", trial.uri, to=bad)
        assert aliases("cartpole", trial.uri) == {"champion": 1, "candidate": 2, "staging": 1}
        assert aliases("other", trial.uri) == {}

    @pytest.mark.parametrize("table", ["registered_model_aliases", "model_version_tags"])
    def test_a_failed_promotion_leaves_the_alias(
        self, trained: tuple[Trial, Checkpoint], tmp_path: Path, table: str
    ) -> None:
        trial, checkpoint = trained
        register(trial, checkpoint, "cartpole")
        for step in (200, 300):
            register(trial, trial.save_checkpoint(folder_with(tmp_path, str(step)), step), "cartpole", alias=None)
        long = "a" * 200
        promote("models:/cartpole/1", trial.uri, to=long)
        promote("models:/cartpole/2", trial.uri, to=long)
        promote("models:/cartpole/2", trial.uri)
        with sqlite3.connect(trial.uri.removeprefix("sqlite:///")) as database:
            for change in ("INSERT", "UPDATE"):
                full = "BEGIN SELECT RAISE(ABORT, 'database or disk is full'); END"
                database.execute(f"CREATE TRIGGER full_{change} BEFORE {change} ON {table} {full}")
        with pytest.raises(TrackingError, match="database or disk is full"):
            promote("models:/cartpole/3", trial.uri)
        assert aliases("cartpole", trial.uri) == {"champion": 2, long: 2}
        with sqlite3.connect(trial.uri.removeprefix("sqlite:///")) as database:
            for change in ("INSERT", "UPDATE"):
                database.execute(f"DROP TRIGGER full_{change}")
        promote("models:/cartpole/3", trial.uri)
        assert [roll_back("cartpole", trial.uri)[0].version for _ in range(2)] == [2, 1]
        assert roll_back("cartpole", trial.uri, alias=long)[0].version == 1

    @pytest.mark.parametrize(
        ("weights", "why"),
        [
            (
                {"bias": np.zeros(1, np.float32), "layer.weight": np.array([1, np.nan], np.float32)},
                "'layer.weight' holds 1",
            ),
            (None, "no weights could be read"),
        ],
        ids=["nan", "absent"],
    )
    def test_a_version_that_services_would_refuse_is_not_promoted(
        self, trained: tuple[Trial, Checkpoint], tmp_path: Path, weights: Weights | None, why: str
    ) -> None:
        trial, checkpoint = trained
        register(trial, checkpoint, "cartpole")
        folder = folder_with(tmp_path, "bad")
        (folder / "weights.npz").unlink()
        if weights is not None:
            save_weights(folder / "weights.npz", weights)
        register(trial, trial.save_checkpoint(folder, 200), "cartpole", alias="candidate")
        with pytest.raises(BadWeights, match=f"version 2 .*'cartpole': .*{why}"):
            promote("models:/cartpole@candidate", trial.uri)
        assert aliases("cartpole", trial.uri) == {"champion": 1, "candidate": 2}

    def test_a_missing_version_is_reported_with_the_nearest_of_any_number(
        self, trained: tuple[Trial, Checkpoint]
    ) -> None:
        from mlflow.tracking import MlflowClient

        trial, checkpoint = trained
        entry = register(trial, checkpoint, "cartpole")
        client = MlflowClient(trial.uri)
        for _ in range(2, 21):
            client.create_model_version("cartpole", source=entry.source, run_id=trial.run_id)
        for deleted in (3, 4):
            client.delete_model_version("cartpole", str(deleted))
        for version, nearest in ((99, 20), (3, 2), (4, 5)):
            with pytest.raises(ModelNotFound) as raised:
                find(f"models:/cartpole/{version}", trial.uri)
            assert raised.value.details["nearest"] == nearest
            assert f"no version {version}, nearest is {nearest}; there are ..., 5, 6, " in raised.value.message
        assert raised.value.details["known"] == [1, 2, *range(5, 21)]
        client.create_registered_model("empty")
        for reference in ("models:/empty", "models:/empty/1"):
            with pytest.raises(ModelNotFound, match="'empty' has no versions"):
                find(reference, trial.uri)

    def test_pruning_never_touches_the_pool(self, trained: tuple[Trial, Checkpoint]) -> None:
        trial, checkpoint = trained
        register(trial, checkpoint, "cartpole")
        trial.prune_checkpoints(keep_last=0)
        assert text_at("models:/cartpole@champion", trial.uri) == "best"

    @pytest.mark.parametrize("name", ["cartpole", "policy (v2) 100%"])
    def test_local_files_are_read_in_place(
        self, trained: tuple[Trial, Checkpoint], no_leftovers: None, name: str
    ) -> None:
        trial, checkpoint = trained
        entry = register(trial, checkpoint, name)
        with files_of(f"models:/{name}@champion", trial.uri) as folder:
            assert text_of(folder) == "best"
            assert folder == local_files(entry, trial.uri)
        assert folder.is_dir()

    def test_a_download_is_deleted_after_use(
        self, trained: tuple[Trial, Checkpoint], no_leftovers: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", trained[0].uri)  # where MLflow looks for logged models
        entry = logged(trained[0], folder_with(tmp_path, "logged"), "theirs")
        assert local_files(entry, trained[0].uri) is None
        with files_of("models:/theirs", trained[0].uri) as folder:
            assert text_of(folder) == "logged"
        assert not folder.exists()

    def test_missing_files_are_reported(self, trained: tuple[Trial, Checkpoint]) -> None:
        trial, checkpoint = trained
        folder = local_files(register(trial, checkpoint, "cartpole"), trial.uri)
        assert folder is not None
        shutil.rmtree(folder)
        with pytest.raises(TrackingError, match=r"models:/cartpole@champion \(version 1\)"):
            text_at("models:/cartpole@champion", trial.uri)

    def test_mlflow_itself_loads_a_version_with_onnx(
        self, trained: tuple[Trial, Checkpoint], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import mlflow.onnx
        from onnx import TensorProto, helper

        x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [None, 3]) for name in "xy")
        graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "negate", [x], [y])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
        trial, checkpoint = trained
        register(trial, checkpoint, "cartpole", onnx=model.SerializeToString())
        assert text_at("models:/cartpole@champion", trial.uri) == "best"
        monkeypatch.setenv("MLFLOW_TRACKING_URI", trial.uri)
        assert mlflow.onnx.load_model("models:/cartpole@champion").graph.name == "negate"

    def test_errors_name_the_nearest(self, trained: tuple[Trial, Checkpoint]) -> None:
        trial, checkpoint = trained
        with pytest.raises(ModelNotFound, match=r"'cartpole'.*none.*brayx train"):
            text_at("models:/cartpole@champion", trial.uri)
        register(trial, checkpoint, "cartpole")
        with pytest.raises(ModelNotFound, match=r"'cart-pole'.*nearest is 'cartpole'"):
            text_at("models:/cart-pole@champion", trial.uri)
        with pytest.raises(ModelNotFound, match="'champoin', nearest is 'champion'"):
            text_at("models:/cartpole@champoin", trial.uri)
        with pytest.raises(ModelNotFound, match="version 7") as refused:
            text_at("models:/cartpole/7", trial.uri)
        assert (refused.value.details["nearest"], refused.value.details["known"]) == (1, [1])
        with pytest.raises(ConfigError, match="expected models:/name@alias"):
            text_at("cartpole", trial.uri)

    def test_an_unreadable_store_is_another_error(self, tmp_path: Path) -> None:
        (tmp_path / "mlflow.db").write_text("this is not a database, it is a text " * 100)
        with pytest.raises(TrackingError) as raised:
            text_at("models:/cartpole@champion", tracking_uri(tmp_path))
        assert not isinstance(raised.value, ModelNotFound)

    def test_a_model_past_the_first_page_is_found(self, trained: tuple[Trial, Checkpoint]) -> None:
        from mlflow.tracking import MlflowClient

        trial, checkpoint = trained
        client = MlflowClient(trial.uri)
        for number in range(101):
            client.create_registered_model(f"a{number:03d}")
        register(trial, checkpoint, "cartpole")
        assert find("models:/cartpole@champion", trial.uri).version == 1

    def test_reading_creates_no_database(self, tmp_path: Path) -> None:
        with pytest.raises(ModelNotFound, match=r"no MLflow database .*make demo"):
            text_at("models:/cartpole@champion", tracking_uri(tmp_path))
        assert list(tmp_path.iterdir()) == []


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


def test_importing_the_module_loads_no_mlflow() -> None:
    code = (
        "import sys, brayx.tracking, brayx.tracking.hub; assert not {'mlflow', 'ray', 'matplotlib'} & set(sys.modules);"
        "import brayx.cluster.hub; assert not {'mlflow', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_mlflow_shows_a_version_with_its_signature_source_and_description(tracking_db: str, tmp_path: Path) -> None:
    spec = describe(torch.nn.Linear(4, 2), (np.zeros((1, 4), np.float32),))
    trial = Trial.open("walker", "first", tracking_db)
    checkpoint = trial.save_checkpoint(folder_with(tmp_path, "a"), 100, {"episode_return": 21.5, "games": 100})
    register(trial, checkpoint, "walker", spec=spec, description="mean return 21.5 over 100 games")
    client = MlflowClient(tracking_db)
    (version,) = client.search_model_versions("name = 'walker'")
    assert (version.run_id, version.description) == (trial.run_id, "mean return 21.5 over 100 games")
    assert "walker" in client.get_registered_model("walker").description
    mlflow.set_tracking_uri(tracking_db)
    signature = mlflow.models.get_model_info("models:/walker/1").signature
    assert [(leaf.name, leaf.type, leaf.shape) for leaf in signature.inputs] == [("input", np.dtype("f4"), (-1, 4))]
    assert [(leaf.name, leaf.type, leaf.shape) for leaf in signature.outputs] == [("output", np.dtype("f4"), (-1, 2))]


def test_a_project_is_shown_as_training_even_an_older_one(tracking_db: str) -> None:
    client = MlflowClient(tracking_db)
    client.create_experiment("old")
    for project in ("old", "new"):
        Trial.open(project, "first", tracking_db)
        tags = client.get_experiment_by_name(project).tags
        assert tags["mlflow.experimentKind"] == "custom_model_development"


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
