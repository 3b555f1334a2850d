"""Finds trials in a store: one by its id or name, or the newest ones."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from brayx.errors import ConfigError
from brayx.tracking.store import client_of, telling
from brayx.tracking.trial import PARENT_TAG, Trial
from brayx.urls import missing_database

if TYPE_CHECKING:
    from mlflow.entities import Run

logger = logging.getLogger(__name__)

NEWEST = 1000
"""Maximum number of runs in a list of trials."""
_SAME_NAME = 100
"""Maximum number of trials of one name that are looked at."""


def find_trial(reference: str, uri: str) -> Trial:
    """The trial with that id, or the newest of that name, in any project. Failed ones of the name come last.

    Raises:
        ConfigError: there is none.
        TrackingError: the store could not be read.
    """
    if (path := missing_database(uri)) is not None:
        raise ConfigError(f"no trial {reference!r}: there is no MLflow database {path}", trial=reference)
    with telling(f"cannot look for trial {reference!r} in {uri}"):
        client = client_of(uri)
        experiments = [experiment.experiment_id for experiment in client.search_experiments()]
        for field in ("run_id", "run_name"):
            runs = client.search_runs(
                experiments,
                f"attributes.{field} = '{reference}'",
                order_by=["attributes.start_time DESC"],
                max_results=_SAME_NAME,
            )
            if not runs:
                continue
            ids = [run.info.run_id for run in sorted(runs, key=lambda run: run.info.status == "FAILED")]
            if len(ids) > 1:
                logger.warning(
                    "several trials are called %r: the newest is used, %s; name another by its id, see `brayx trials`",
                    reference,
                    ids[0],
                )
            return Trial.attach(uri, ids[0])
    raise ConfigError(f"no trial has the id or the name {reference!r} in {uri}: see `brayx trials`", trial=reference)


def children_of(trial: Trial) -> list[Trial]:
    """The newest child trial of each name.

    Raises:
        TrackingError: the store could not be read.
    """
    with telling(f"cannot look for the children of trial {trial.name!r} in {trial.uri}"):
        client = client_of(trial.uri)
        experiment = client.get_run(trial.run_id).info.experiment_id
        of_parent = f"tags.`{PARENT_TAG}` = '{trial.run_id}'"
        runs = client.search_runs([experiment], of_parent, order_by=["attributes.start_time"], max_results=_SAME_NAME)
        newest = {run.info.run_name or "": run.info.run_id for run in runs}
        return [Trial(trial.uri, run_id, trial.project, name) for name, run_id in newest.items()]


def newest_runs(uri: str, project: str = "") -> tuple[dict[str, str], list[Run]]:
    """The `NEWEST` newest runs of a store, newest first, and the names of all projects by experiment id.

    Args:
        uri: tracking URI.
        project: only this project's runs; empty: of all.

    Raises:
        ConfigError: the store or the project does not exist.
        TrackingError: the store could not be read.
    """
    if (path := missing_database(uri)) is not None:
        raise ConfigError(
            f"there is no MLflow database {path}: run this where `brayx train` ran, or name another with --tracking",
            file=str(path),
        )
    with telling(f"cannot read the trials in {uri}"):
        client = client_of(uri)
        projects = {experiment.experiment_id: experiment.name for experiment in client.search_experiments()}
        chosen = [number for number, name in projects.items() if project in ("", name)]
        if not chosen:
            raise ConfigError(f"there is no project {project!r}; there are: {', '.join(projects.values())}")
        runs = client.search_runs(chosen, order_by=["attributes.start_time DESC"], max_results=NEWEST)
        return projects, list(runs)


def all_runs(uri: str) -> list[str]:
    """The ids of all runs of a store, of deleted ones and of those of deleted projects, too.

    Raises:
        TrackingError: the store could not be read.
    """
    from mlflow.entities import ViewType

    runs: list[str] = []
    token: str | None = None
    with telling(f"cannot read the trials in {uri}"):
        client = client_of(uri)
        projects = [project.experiment_id for project in client.search_experiments(view_type=ViewType.ALL)]
        while token != "":
            page = client.search_runs(projects, run_view_type=ViewType.ALL, page_token=token)
            runs += [run.info.run_id for run in page]
            token = page.token or ""
    return runs
