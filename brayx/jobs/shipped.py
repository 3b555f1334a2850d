"""Finds the jobs that brayx ships by their name. Imports nothing slow, since parsers use it."""

from __future__ import annotations

from pathlib import Path

from brayx.components import SHIPPED as TEMPLATES

__all__ = ["TEMPLATES", "files_folder_of", "is_shipped", "job_file", "read_job"]


def job_file(path: str | Path) -> str:
    """The file of a job: ``path`` itself if it exists or nothing shipped has its name, else the shipped job."""
    shipped = TEMPLATES / path
    return str(shipped if not Path(path).exists() and shipped.is_file() else path)


def is_shipped(file: str | Path) -> bool:
    """Whether brayx ships this job. Its modules and files are those of the folder where the command runs."""
    return Path(file).parent.resolve() == TEMPLATES.resolve()


def files_folder_of(file: str | Path, folder: str) -> str:
    """Where a job's games run and its relative paths start: its folder; of a shipped job ``""``, the current folder of
    each process, since another machine may lack that of the command."""
    return "" if is_shipped(file) else folder


def read_job(path: str | Path) -> str:
    """The text of a job's file; errors as of `read_yaml`, which name the nearest shipped job, too."""
    from brayx.jobs.document import read_yaml  # which loads pydantic

    return read_yaml(path, (file.name for file in TEMPLATES.glob("*.yaml")))
