"""A trial's pictures and event files: written by its hub into a real store, read back by MLflow and by TensorBoard."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from mlflow import MlflowClient
from PIL import Image

from brayx.errors import TrackingError
from brayx.metrics import METRICS, Bars, Kind
from brayx.metrics.charts import CHARTS
from brayx.tracking import Trial
from brayx.tracking.pictures import chart
from tests.unit.tracking.pushed import BARS, written


def images(trial: Trial) -> list[str]:
    """Series and step of each full image of a trial."""
    files = [file.path for file in MlflowClient(trial.uri).list_artifacts(trial.run_id, "images")]
    return sorted(Path(path).name.split("+timestamp")[0] for path in files if path.endswith(".png"))


def test_distributions_become_series_of_images_and_no_metrics(tracking_db: str) -> None:
    trial = Trial.open("p", "t", tracking_db)
    written(trial)
    assert images(trial) == [
        f"distributions~{name}+step+{step}" for name in ("actions", "weights") for step in (100, 200, 300)
    ]
    assert set(trial.metrics()) <= set(CHARTS.values())
    assert not trial.tensorboard


def test_no_distribution_is_a_chart_of_mlflow() -> None:
    assert not [name for name in CHARTS if name in METRICS and METRICS[name].kind is Kind.SHAPE]


def test_a_chart_has_a_panel_for_each_distribution_and_draws_the_bars_where_they_are() -> None:
    image = chart("actions", {"": Bars((0.0, 1.0, 2.0), (0.0, 5.0))})
    assert image.shape == (200, 320, 3)
    bar = np.all(image == (47, 111, 176), axis=2)
    assert not bar[:, :160].any()
    assert bar[100, 170:300].all()
    assert chart("weights", {str(index): BARS for index in range(6)}).shape == (400, 1280, 3)
    chart("constant", {"": Bars((1.0, 1.0), (2.0,))})
    assert Image.fromarray(image).size == (320, 200)


def test_an_image_that_cannot_be_saved_is_an_error(tracking_db: str) -> None:
    trial = Trial.open("p", "t", tracking_db)
    with pytest.raises(TrackingError, match="cannot save image"):
        trial.log_image(np.zeros((2, 2, 3), np.uint8), "no: such key", 1)
