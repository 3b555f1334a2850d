"""Where a league stores what: the folder of its books and snapshots, and its tags on registered versions.

Loads neither torch nor MLflow.
"""

from __future__ import annotations

from pathlib import Path

from brayx.league.config import LeagueConfig
from brayx.tracking import Trial
from brayx.urls import sqlite_path

PLAYER_TAG = "brayx.player"
"""Tag of a registered version: the player of a league that it is a snapshot of."""
DIGEST_TAG = "brayx.digest"
"""Tag of a registered version: the hash of a snapshot's weights, as in the league's books."""
POINTS_TAG = "brayx.points"
"""Tag of a registered version: its points, for services without the league's books. The tag ``rating`` of any version
is a mean return."""


def league_folder(trial: Trial) -> Path:
    """The folder of a league's books and snapshots: next to a sqlite tracking file, else in the working directory."""
    path = sqlite_path(trial.uri)
    return (Path.cwd() if path is None else path.parent) / "leagues" / trial.run_id


def books_file(trial: Trial) -> Path:
    """The file of a league's books; it may not exist."""
    return league_folder(trial) / "books.sqlite"


def levels_file(folder: str, league: LeagueConfig) -> Path:
    """The file of a league's difficulty levels, in a job's folder; it may not exist."""
    return Path(folder, league.levels)
