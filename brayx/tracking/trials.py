"""The trials of a tracking store as a table: project, name, status, env steps, return, and the champions.

Knows nothing of training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from brayx.metrics import BEST_METRIC, GAMES_OF_BEST, games_text, significant
from brayx.metrics.charts import CHARTS, RETURN_CHART
from brayx.metrics.totals import GAMES_IN_WINDOW, RETURN_ERROR, SECONDS
from brayx.tables import aligned
from brayx.tracking import checkpoints
from brayx.tracking.finding import newest_runs
from brayx.tracking.mlflow_page import NOTE_TAG, page_of
from brayx.tracking.owner import owner_is_gone
from brayx.tracking.store import client_of, telling
from brayx.tracking.trial import PARENT_TAG

if TYPE_CHECKING:
    from mlflow.entities import Run

_HEADINGS = ("project", "trial", "status", "env steps", "last return", "best return", "champion", "id")


@dataclass(frozen=True)
class TrialRow:
    """One trial.

    Attributes:
        project, name: as in MLflow.
        status: as in MLflow, but ``interrupted`` for what MLflow calls killed, or running though its process, one of
            this machine, has ended.
        env_steps, mean_return: newest values; None: not written. The return is the mean of the last 100 games, or, in
            a search, the one that its trials were compared by.
        games: number of games in that mean; None: not written.
        error: that mean's standard error; None: not written.
        page, project_page: its page in MLflow and its project's, below the address of MLflow's server.
        champion: ``NAME version N`` if the champion of a registered model comes from this trial; otherwise empty.
        is_child: it belongs to the trial above, as a player's trial to its league's, and is named after the player.
        run_id: MLflow's id of it.
        began_s, ended_s: Unix times; None: it has not ended.
        points: points of a league's player, or of the league's leader; None: it is of no league.
        seconds: how long it has trained, without interruptions; None: not written.
        note: what it registered, or the error that ended it; empty: neither.
        best_return, best_games: mean return of its best checkpoint, which its end registers, and the number of games in
            that mean; None: no checkpoint has one.
    """

    project: str
    name: str
    status: str
    env_steps: float | None
    mean_return: float | None
    games: float | None
    champion: str
    is_child: bool = False
    run_id: str = ""
    began_s: float = 0.0
    ended_s: float | None = None
    error: float | None = None
    page: str = ""
    project_page: str = ""
    points: float | None = None
    seconds: float | None = None
    note: str = ""
    best_return: float | None = None
    best_games: float | None = None


def trials(uri: str, project: str = "") -> list[TrialRow]:
    """The trials of a store, newest first; below each its children, by name.

    Args:
        uri: tracking URI.
        project: only this project's trials; empty: all.

    Raises:
        ConfigError: the store or the project does not exist.
        TrackingError: the store could not be read.
    """
    projects, runs = newest_runs(uri, project)
    with telling(f"cannot read the trials in {uri}"):
        client = client_of(uri)
        champions = {}
        for model in client.search_registered_models():
            if "champion" in model.aliases:
                version = client.get_model_version_by_alias(model.name, "champion")
                champions[version.run_id] = f"{model.name} version {version.version}"
    points = {run.info.run_id: _points(run) for run in runs}
    return [
        TrialRow(
            projects[run.info.experiment_id],
            run.info.run_name or run.info.run_id,
            _status(run.info.status, run.data.tags),
            run.data.metrics.get(CHARTS["env_steps"]),
            run.data.metrics.get(RETURN_CHART, run.data.metrics.get(CHARTS["episode_return"])),  # of a search's trial
            run.data.metrics.get(CHARTS[GAMES_IN_WINDOW]),
            champions.get(run.info.run_id, ""),
            is_child,
            run.info.run_id,
            run.info.start_time / 1e3,
            run.info.end_time / 1e3 if run.info.end_time else None,
            run.data.metrics.get(CHARTS[RETURN_ERROR]),
            page_of(run.info.experiment_id, run.info.run_id),
            page_of(run.info.experiment_id),
            max(points[run.info.run_id].values(), default=_points_in_parent(run, points)),
            run.data.metrics.get(CHARTS[SECONDS]),
            run.data.tags.get(NOTE_TAG, "") if run.info.status in ("FINISHED", "FAILED") else "",
            *_best(run),
        )
        for run, is_child in _below_parents(runs)
    ]


def _best(run: Run) -> tuple[float | None, float | None]:
    """The return of its best checkpoint, and the number of its games."""
    best = checkpoints.best(checkpoints.of_tags(run.info.run_id, run.data.tags), BEST_METRIC)
    return (None, None) if best is None else (best.metrics[BEST_METRIC], best.metrics.get(GAMES_OF_BEST))


def _points(run: Run) -> dict[str, float]:
    """Points by player, if the run is a league's."""
    prefix = f"{CHARTS['league_points']}."
    return {name.removeprefix(prefix): value for name, value in run.data.metrics.items() if name.startswith(prefix)}


def _points_in_parent(run: Run, points: Mapping[str, Mapping[str, float]]) -> float | None:
    return points.get(run.data.tags.get(PARENT_TAG, ""), {}).get(run.info.run_name)


def _below_parents(runs: Sequence[Run]) -> list[tuple[Run, bool]]:
    """The runs, each followed by its children among them, and whether each is such a child."""
    ids = {run.info.run_id for run in runs}
    children: dict[str, list[Run]] = {}
    for run in runs:
        children.setdefault(run.data.tags.get(PARENT_TAG, ""), []).append(run)
    ordered: list[tuple[Run, bool]] = []
    for run in runs:
        if run.data.tags.get(PARENT_TAG, "") not in ids:
            ordered.append((run, False))
            below = sorted(children.get(run.info.run_id, []), key=lambda child: child.info.run_name or "")
            ordered += [(child, True) for child in below]
    return ordered


def _status(status: str, tags: Mapping[str, str]) -> str:
    """brayx's name for the status of an MLflow run with these tags."""
    if status == "KILLED" or (status == "RUNNING" and owner_is_gone(tags)):
        return "interrupted"
    return status.lower()


def table(rows: Sequence[TrialRow]) -> str:
    """The rows as a text table."""
    cells = [
        _HEADINGS,
        *(
            (
                row.project,
                f"  {row.name}" if row.is_child else row.name,
                row.status,
                "-" if row.env_steps is None else f"{row.env_steps:,.0f}",
                _return(row.mean_return, row.games),
                _return(row.best_return, row.best_games),
                row.champion,
                row.run_id,
            )
            for row in rows
        ),
    ]
    return "\n".join(aligned(cells, left=range(len(_HEADINGS))))


def _return(mean: float | None, games: float | None) -> str:
    """A mean return and, if it is known, the number of its games."""
    if mean is None:
        return "-"
    return significant(mean) + ("" if games is None else f" ({games_text(games)})")
