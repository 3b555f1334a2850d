"""Finds the jobs that brayx ships by their name. Imports nothing slow, since parsers use it."""

from __future__ import annotations

from pathlib import Path

TEMPLATES = Path(__file__).parents[2] / "pipelines" / "templates"


def job_file(path: str | Path) -> str:
    """The file of a job: ``path`` itself if it exists or nothing shipped has its name, else the shipped job."""
    shipped = TEMPLATES / path
    return str(shipped if not Path(path).exists() and shipped.is_file() else path)


def files_folder_of(folder: str) -> str:
    """Where the relative paths of a job start, by its YAML's folder: there; of a job that brayx ships where the command
    runs, which is ``""``."""
    return "" if Path(folder).resolve() == TEMPLATES.resolve() else folder
