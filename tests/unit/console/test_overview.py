"""The overview's learning curve."""

from __future__ import annotations

from brayx.console.overview import _curve
from brayx.console.source import Source
from brayx.metrics.charts import CHARTS, RETURN_CHART
from brayx.tracking import Trial


def test_the_curve_is_over_env_steps_whatever_the_trial_is_written_over(tracking_db: str) -> None:
    trial = Trial.open("project", "by updates", tracking_db)
    source = Source(tracking_db)
    assert _curve(source, trial.run_id, RETURN_CHART) == _curve(source, "", RETURN_CHART) == []
    for update in (1, 2):
        trial.log_metrics({RETURN_CHART: 10.0 * update, CHARTS["env_steps"]: 500 * update}, update)
    assert _curve(source, trial.run_id, RETURN_CHART) == [(500, 10.0), (1000, 20.0)]
