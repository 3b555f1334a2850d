"""The ends of a chart's axes."""

from __future__ import annotations

import pytest

from brayx.console.page.charts import rounded


@pytest.mark.parametrize(
    ("low", "high", "ends"),
    [
        (22.929411764705883, 501.0, (0.0, 600.0)),
        (-20.9, 20.5, (-30.0, 30.0)),
        (0.12, 0.95, (0.1, 1.0)),
        (500.0, 500.0, (500.0, 500.0)),
    ],
)
def test_an_axis_ends_at_round_numbers(low: float, high: float, ends: tuple[float, float]) -> None:
    assert rounded(low, high) == ends
