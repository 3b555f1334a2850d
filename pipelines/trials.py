"""The trials of a tracking store as a table: project, name, status, env steps, return, and the champions.

Knows nothing of training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from brayx.charts import CHARTS, RETURN_CHART
from brayx.errors import ConfigError
from brayx.metrics import significant
from brayx.tracking.store import client_of, sqlite_path, telling

_HEADINGS = ("project", "trial", "status", "env steps", "last return", "champion")
_STATUS = {"KILLED": "interrupted"}
"""Our word, where it differs from MLflow's: the same command resumes such a trial."""


@dataclass(frozen=True)
class Row:
    """One trial.

    Attributes:
        project, name: as in MLflow.
        status: as in MLflow, but ``interrupted`` for what MLflow calls killed.
        env_steps, mean_return: newest values; None: not written.
        champion: ``NAME version N`` if the champion of a registered model comes from this trial; otherwise empty.
    """

    project: str
    name: str
    status: str
    env_steps: float | None
    mean_return: float | None
    champion: str


def trials(uri: str, project: str = "") -> list[Row]:
    """The trials of a store, newest first.

    Args:
        uri: tracking URI.
        project: only this project's trials; empty: all.

    Raises:
        ConfigError: the store or the project does not exist.
        TrackingError: the store could not be read.
    """
    path = sqlite_path(uri)
    if path is not None and not path.exists():
        raise ConfigError(f"there is no MLflow database {path}: name another with --tracking", file=str(path))
    with telling(f"cannot read the trials in {uri}"):
        client = client_of(uri)
        projects = {each.experiment_id: each.name for each in client.search_experiments()}
        chosen = [number for number, name in projects.items() if project in ("", name)]
        if not chosen:
            raise ConfigError(f"there is no project {project!r}; there are: {', '.join(projects.values())}")
        champions = {}
        for model in client.search_registered_models():
            if "champion" in model.aliases:
                version = client.get_model_version_by_alias(model.name, "champion")
                champions[version.run_id] = f"{model.name} version {version.version}"
        runs = client.search_runs(chosen, order_by=["attributes.start_time DESC"], max_results=1000)
    return [
        Row(
            projects[run.info.experiment_id],
            run.info.run_name or run.info.run_id,
            _STATUS.get(run.info.status, run.info.status.lower()),
            run.data.metrics.get(CHARTS["env_steps"]),
            run.data.metrics.get(RETURN_CHART),
            champions.get(run.info.run_id, ""),
        )
        for run in runs
    ]


def table(rows: Sequence[Row]) -> str:
    """The rows as a text table."""
    cells = [
        _HEADINGS,
        *(
            (
                row.project,
                row.name,
                row.status,
                "-" if row.env_steps is None else f"{row.env_steps:,.0f}",
                "-" if row.mean_return is None else significant(row.mean_return),
                row.champion,
            )
            for row in rows
        ),
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in cells)
