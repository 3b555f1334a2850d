"""Which league a command means: one rule for the commands that show, match, calibrate, promote and serve.

The newest league is the one with the newest snapshot, wherever it trains. Leagues without a snapshot come last, the
latest started first. Knows nothing of what the books hold.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from brayx.errors import ConfigError, LeagueError
from brayx.jobs.contracts import RIVALS_TAG, SELF_PLAY_TAG
from brayx.league.files import PLAYER_TAG, books_file
from brayx.tracking import Trial
from brayx.tracking.finding import newest_runs
from brayx.tracking.store import client_of, get_or_none, telling
from brayx.tracking.trial import PARENT_TAG
from brayx.urls import missing_database

if TYPE_CHECKING:
    from mlflow.entities import Run

_SNAPSHOTS_A_PAGE = 200
_TRIALS_NAMED = 10
"""Maximum trials that a message names."""


def newest_league(uri: str, project: str = "", trial: str = "", *, model: str = "") -> Trial:
    """The trial of the newest league.

    Args:
        uri: tracking URI.
        project: only leagues of this project; empty: of any.
        trial: only the league of this trial, by its name or id; empty: any.
        model: look only at snapshots that are versions of this registered model; empty: at all.

    Raises:
        ConfigError: there is none; the message says where leagues were looked for, what is there, and what to do.
        TrackingError: the store cannot be read.
    """
    if (path := missing_database(uri)) is not None:
        raise ConfigError(
            f"no league: there is no MLflow database {path}. Run the command in the folder where `brayx train` ran, or "
            f"name its database with --tracking",
            file=str(path),
        )
    trials: list[str] = []
    for league in leagues(uri, project, model):
        if trial in ("", league.name, league.run_id):
            return league
        trials.append(league.name)
    scope = f" of project {project!r}" if project else ""
    if trials:
        listed = ", ".join(dict.fromkeys(trials))
        raise ConfigError(f"no league{scope} has the trial {trial!r}; there are: {listed} in {uri}")
    _, runs = newest_runs(uri, project)  # names the projects, if there is none of this name
    names = list(dict.fromkeys(run.info.run_name or run.info.run_id for run in runs))
    listed = ", ".join(names[:_TRIALS_NAMED]) + (" ..." if len(names) > _TRIALS_NAMED else "")
    why = f"none of its trials ({listed}) has" if names else "it has no trial with"
    raise ConfigError(
        f"there is no league{scope} in {uri}: {why} a registered snapshot, or books in {_books_folder(uri)}. Train one "
        "with `brayx train`, or name another database with --tracking"
    )


def leagues(uri: str, project: str = "", model: str = "") -> Iterator[Trial]:
    """All leagues of a store, the newest first; arguments and errors as for `newest_league`.

    Leagues without a snapshot are known by their books, so they are only those of this machine.
    """
    seen: set[str] = set()
    for run_id in _snapshot_runs(uri, model):
        parent = parent_of(uri, run_id)
        if parent is None or parent in seen:
            continue
        seen.add(parent)
        league = _league(uri, parent)
        if league is not None and project in ("", league.project):
            yield league
    projects, runs = newest_runs(uri, project)
    for run in runs:
        if PARENT_TAG in run.data.tags or run.info.run_id in seen:
            continue
        league = Trial(uri, run.info.run_id, projects[run.info.experiment_id], run.info.run_name or "")
        if books_file(league).exists():
            yield league


def league_of(run_id: str, uri: str) -> Trial:
    """The league's trial of a snapshot, by the trial of the player that the snapshot is of.

    Raises:
        LeagueError: that trial is in no league.
        TrackingError: the store cannot be read.
    """
    player = Trial.attach(uri, run_id)
    parent = _league_run(run_id, player.tags())
    if parent is None:
        raise LeagueError(f"trial {player.name!r} (run {run_id}) belongs to no league", run_id=run_id)
    return Trial.attach(uri, parent)


def books_of(trial: Trial) -> Path:
    """The file of a league's books.

    Raises:
        LeagueError: it is not here; the message says where it was looked for, and what to do.
    """
    file = books_file(trial)
    if not file.exists():
        raise LeagueError(
            f"the books of league {trial.name!r} of project {trial.project!r} are not here: there is no {file}. Run "
            "the command in the folder where the league trained, or copy the folder `leagues` from there",
            file=str(file),
        )
    return file


def _snapshot_runs(uri: str, model: str) -> Iterator[str]:
    """Trials of the registered snapshots, that of the newest first, each once."""
    seen, page = set(), ""
    selection = f"tags.`{PLAYER_TAG}` != ''" + (f" and name = '{model}'" if model else "")
    while True:
        with telling(f"cannot read the snapshots in {uri}"):
            versions = client_of(uri).search_model_versions(
                selection,
                max_results=_SNAPSHOTS_A_PAGE,
                order_by=["creation_timestamp DESC", "version_number DESC"],
                page_token=page or None,
            )
        for run_id in (str(version.run_id) for version in versions):
            if run_id not in seen:
                seen.add(run_id)
                yield run_id
        page = versions.token or ""
        if not page:
            return


@functools.lru_cache(10_000)
def parent_of(uri: str, run_id: str) -> str | None:
    """The run of a player's league, or the run itself if it has no parent or plays itself; None: `mlflow gc` removed
    it.

    Neither changes, and services ask every few seconds: it is read once.

    Raises:
        TrackingError: the store cannot be read.
    """
    player = _run(uri, run_id)
    if player is None:
        return None
    return _league_run(run_id, player.data.tags) or run_id


def _league_run(run_id: str, tags: Mapping[str, str]) -> str | None:
    """The run that has the books of a player's league: the player's own run if it plays itself. None: it has no parent.

    Args:
        run_id: the player's run.
        tags: the tags of that run.
    """
    return tags.get(RIVALS_TAG) or (run_id if SELF_PLAY_TAG in tags else tags.get(PARENT_TAG))


def _league(uri: str, run_id: str) -> Trial | None:
    """A league's trial; None: it has been deleted."""
    league = _run(uri, run_id)
    if league is None or league.info.lifecycle_stage != "active":
        return None
    with telling(f"cannot read trial {run_id!r} from {uri}"):
        project = client_of(uri).get_experiment(league.info.experiment_id).name
    return Trial(uri, league.info.run_id, project, league.info.run_name or "")


def _run(uri: str, run_id: str) -> Run | None:
    """A run of the store; None: there is none."""
    with telling(f"cannot read trial {run_id!r} from {uri}"):
        return get_or_none(client_of(uri).get_run, run_id)


def _books_folder(uri: str) -> Path:
    return books_file(Trial(uri, "RUN_ID", "", "")).parents[1]
