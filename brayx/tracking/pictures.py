"""Pictures of a trial: bar charts of distributions.

Drawn with Pillow, which takes milliseconds where Matplotlib takes tenths of a second: a training needs the processor
while they are drawn. Knows nothing of what the numbers mean.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from brayx.metrics import Bars, significant
from brayx.tracking.tensorboard import events_of, writing_events

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

    from brayx.tracking.trial import Trial

_SERIES = "distributions"
"""Group of the charts on MLflow's page."""
_PANEL = (320, 200)
_PANEL_COLUMNS = 4
_MARGIN, _HEADER, _FOOTER = 12, 26, 22
_WIDE_BAR = 12
_PAPER, _INK, _PALE, _BAR = "#ffffff", "#1f2933", "#cbd2d9", "#2f6fb0"


def log_shapes(trial: Trial, shapes: Mapping[tuple[str, str], Bars], step: int) -> None:
    """Saves distributions as one picture for each metric, and in the trial's event file if it has one.

    Args:
        trial: the trial.
        shapes: the distributions, by metric and label.
        step: env steps.

    Raises:
        TrackingError: they cannot be saved.
    """
    for name in dict.fromkeys(name for name, _ in shapes):
        panels = {label: bars for (chart_name, label), bars in shapes.items() if chart_name == name}
        trial.log_image(chart(name, panels), f"{_SERIES}/{name}", step)
        if trial.tensorboard:
            with writing_events(trial):
                tags = {f"{name}/{label}" if label else name: bars for label, bars in panels.items()}
                events_of(trial.tensorboard).histograms(tags, step)


def chart(title: str, panels: Mapping[str, Bars]) -> np.ndarray:
    """Draws distributions side by side, ``[height, width, 3]`` uint8.

    Args:
        title: name of the quantity.
        panels: the distributions by label; an empty label is shown as the title.
    """
    from PIL import Image, ImageDraw

    columns = min(len(panels), _PANEL_COLUMNS)
    width, height = _PANEL
    image = Image.new("RGB", (columns * width, math.ceil(len(panels) / columns) * height), _PAPER)
    draw = ImageDraw.Draw(image)
    for place, (label, bars) in enumerate(panels.items()):
        row, column = divmod(place, columns)
        _draw_bars(draw, (column * width, row * height), f"{title} {label}" if label else title, bars)
    return np.asarray(image)


def _draw_bars(draw: ImageDraw, corner: tuple[int, int], title: str, bars: Bars) -> None:
    """One panel: a title, the bars, and the range and the mean below them."""
    font, small = _font(13), _font(11)
    x, y = corner
    left, right = x + _MARGIN, x + _PANEL[0] - _MARGIN
    top, bottom = y + _HEADER, y + _PANEL[1] - _FOOTER
    edges, highest = bars.edges, max(bars.counts, default=0.0) or 1.0
    span = (edges[-1] - edges[0]) or 1.0

    def across(value: float) -> float:
        return left + (right - left) * (value - edges[0]) / span

    draw.text((left, y + 6), title, fill=_INK, font=font)
    for (low, high), count in zip(itertools.pairwise(edges), bars.counts, strict=True):
        if count:
            start, end = across(low), across(high) - 1
            end = max(start, end - 2 if end - start > _WIDE_BAR else end)  # a gap between bars that are wide
            draw.rectangle((start, bottom - (bottom - top) * count / highest, end, bottom), fill=_BAR)
    draw.line((left, bottom, right, bottom), fill=_INK)
    if edges[0] < 0 < edges[-1]:
        draw.line((across(0.0), top, across(0.0), bottom), fill=_PALE)
    total = sum(bars.counts) or 1.0
    mean = sum(middle * count for middle, count in zip(bars.middles, bars.counts, strict=True)) / total
    for text, text_x, anchor in (
        (significant(edges[0], 3), left, "lt"),
        (f"mean {significant(mean, 3)}", (left + right) / 2, "mt"),
        (significant(edges[-1], 3), right, "rt"),
    ):
        draw.text((text_x, bottom + 5), text, fill=_INK, font=small, anchor=anchor)


@functools.cache
def _font(size: int) -> Any:
    from PIL import ImageFont

    return ImageFont.load_default(size)
