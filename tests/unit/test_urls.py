"""URLs of paths with characters that have a meaning in a URL."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import pytest

from brayx.urls import read_only_url, sqlite_path, sqlite_url

NAMES = ["plain.db", "a b.db", "50%.db", "50%25.db", "a?b#c.db", "接球.db"]


@pytest.mark.parametrize("name", NAMES)
def test_a_path_comes_back_from_its_url(name: str) -> None:
    path = Path("/folder") / name
    assert sqlite_path(sqlite_url(path)) == path
    assert sqlite_path(f"{sqlite_url(path)}?timeout=5") == path


def test_other_databases_have_no_path() -> None:
    assert sqlite_path("postgresql://host/db") is None


@pytest.mark.parametrize("name", NAMES)
def test_a_file_is_opened_for_reading_only(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE numbers (number)")
        database.commit()
    with contextlib.closing(sqlite3.connect(read_only_url(path), uri=True)) as database:
        assert database.execute("SELECT * FROM numbers").fetchall() == []
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            database.execute("INSERT INTO numbers VALUES (1)")
