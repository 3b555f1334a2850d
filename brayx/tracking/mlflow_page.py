"""How MLflow's own pages show a project: as machine learning, with the return as a column.

MLflow 3.17 ignores the tag ``mlflow.experimentKind``: it opens every experiment as GenAI until the viewer, or the
address of a page, says ``workflowType=machine_learning``. The columns of the runs' table are the viewer's, too, or
those of a shared view, which a tag of the experiment keeps and the address names. Knows nothing of MLflow's server.
"""

from __future__ import annotations

import json

from brayx.metrics.charts import CHARTS, RETURN_CHART
from brayx.metrics.totals import RETURN_ERROR

NOTE_TAG = "mlflow.note.content"
"""Tag of a run: its description, which MLflow shows as a column."""
MLFLOW_UI = "http://127.0.0.1:5000"
"""Address of ``mlflow ui``."""
_VIEW = "brayx"
_COLUMNS = [
    *(f"metrics.`{name}`" for name in (RETURN_CHART, CHARTS[RETURN_ERROR], CHARTS["env_steps"])),
    "attributes.`Description`",
]
EXPERIMENT_TAGS = {
    "mlflow.experimentKind": "custom_model_development",
    "mlflow.experiment.primaryMetric.name": RETURN_CHART,
    f"mlflow.sharedViewState.{_VIEW}": json.dumps({"selectedColumns": _COLUMNS, "columnOrder": _COLUMNS}),
}
"""Tags of every project."""


def page_of(experiment_id: str, run_id: str = "") -> str:
    """The page of a run in MLflow, below the address of its server; without one its project's: its runs, with the
    return as a column."""
    if run_id:
        return f"/#/experiments/{experiment_id}/runs/{run_id}?workflowType=machine_learning"
    return f"/#/experiments/{experiment_id}/runs?workflowType=machine_learning&viewStateShareKey={_VIEW}"
