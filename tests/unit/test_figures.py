"""Figures with text in any script."""

from __future__ import annotations

import io
import pickle
import warnings

import pytest

from brayx.figures import families
from brayx.jobs.evaluate import draw_curve


@pytest.mark.parametrize("options", [{}, {"bbox_inches": "tight"}])
def test_characters_that_the_font_lacks_are_drawn_without_a_warning(options: dict[str, str]) -> None:
    figure = pickle.loads(pickle.dumps(draw_curve([(0, 1.0), (1, 2.0)], title="接球")))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure.savefig(io.BytesIO(), **options)


def test_fonts_with_more_characters_come_after_the_default() -> None:
    installed = ["DejaVu Sans", "Noto Sans CJK SC", "Noto Sans", "WenQuanYi Zen Hei", "Noto Sans CJK SC"]
    assert families(installed) == ["sans-serif", "Noto Sans CJK SC", "WenQuanYi Zen Hei"]
    assert families(["DejaVu Sans"]) == ["sans-serif"]
