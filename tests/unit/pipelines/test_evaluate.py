"""The curve, and the words for a result."""

from __future__ import annotations

import io

import pytest

from brayx.errors import BrayxError
from pipelines.evaluate import Evaluation, draw_curve


def test_the_words_for_an_evaluation() -> None:
    assert str(Evaluation([500.0, 400.0])) == "450.0 ± 50.0 over 2 games (lowest 400, highest 500)"


def test_the_curve_is_a_picture_with_its_points() -> None:
    figure = draw_curve([(100, 20.0), (200, 40.0)], title="cartpole", target=475.0)
    (axes,) = figure.axes
    assert axes.lines[0].get_xydata().tolist() == [[100, 20.0], [200, 40.0]]
    assert axes.lines[1].get_ydata()[0] == 475.0
    png = io.BytesIO()
    figure.savefig(png)
    assert png.getvalue().startswith(b"\x89PNG")


def test_no_points_no_picture() -> None:
    with pytest.raises(BrayxError, match="no finished game"):
        draw_curve([], title="x")
