"""`brayx.tracking.store`: where the store is, and a database that cannot be one is named."""

from __future__ import annotations

import contextlib
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from brayx.errors import TrackingError
from brayx.tracking import (
    Trial,
    initialise,
    local_files,
    register,
    tracking_uri,
)
from brayx.tracking.store import _close_connections, check_writable, client_of
from brayx.urls import read_only_url, sqlite_path, sqlite_url
from tests.unit.tracking.folders import folder_with, text_at, text_of


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


def test_importing_the_module_loads_no_mlflow() -> None:
    code = (
        "import sys, brayx.tracking, brayx.tracking.hub; assert not {'mlflow', 'ray', 'matplotlib'} & set(sys.modules);"
        "import brayx.cluster.hub; assert not {'mlflow', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


def test_a_process_that_ends_leaves_no_log_of_sqlite(tracking_db: str) -> None:
    path = Path(tracking_db.removeprefix("sqlite:///"))
    log = path.with_name(f"{path.name}-wal")
    initialise(tracking_db)
    client_of(tracking_db).search_registered_models(max_results=1)
    assert log.exists(), "MLflow keeps its connections open"
    _close_connections()
    assert not log.exists()
