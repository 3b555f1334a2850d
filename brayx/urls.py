"""Converts paths to URLs and back, escaped: a path may have ``%``, ``?``, ``#``, spaces and any letters."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import unquote

SQLITE = "sqlite:///"
_SPECIAL = str.maketrans({"%": "%25", "?": "%3F", "#": "%23"})
"""Characters with a meaning in a URL. Others stay as they are, so that printed URLs are easy to read."""


def sqlite_url(path: str | os.PathLike[str]) -> str:
    """SQLAlchemy's URL of an absolute path."""
    return f"{SQLITE}{os.fspath(path).translate(_SPECIAL)}"


def sqlite_path(url: str) -> Path | None:
    """The database file of SQLAlchemy's URL; None if the URL is not for SQLite."""
    return Path(unquote(url.removeprefix(SQLITE).partition("?")[0])) if url.startswith(SQLITE) else None


def missing_database(url: str) -> Path | None:
    """The database file of SQLAlchemy's URL if it does not exist yet; None: it does, or the URL is not for SQLite."""
    path = sqlite_path(url)
    return None if path is None or path.exists() else path


def read_only_url(path: str | os.PathLike[str]) -> str:
    """The URL that `sqlite3.connect` takes with ``uri=True``, to open a file only for reading."""
    return f"{Path(path).absolute().as_uri()}?mode=ro"
