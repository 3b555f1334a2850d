"""Line charts and heat maps, by ECharts, readable in light and dark mode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nicegui import ui

COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c8c8c"]
"""Colours that colour-blind people can tell apart (Okabe and Ito 2008). The last one is grey instead of black, which
would be invisible in dark mode."""
_TEXT = {"color": "#888"}
_GRID_LINE = {"lineStyle": {"color": "#8884"}}
_FEW = 12
"""Maximum members in a heat map with numbers in its cells."""

Points = Sequence[tuple[float, float]]


class Lines(ui.echart):
    """A chart of curves over a common axis; hidden without points.

    Args:
        x: name of the axis.
        title: title above the curves; may be empty.
        height: CSS class of its height.
    """

    def __init__(self, x: str, title: str = "", height: str = "h-64") -> None:
        self._axis, self._title = x, title
        super().__init__(_line_options({}, x, title))
        self.classes(f"w-full {height}").set_visibility(False)

    def show(self, curves: Mapping[str, Points]) -> None:
        """Shows curves by name."""
        self.set_visibility(any(curves.values()))
        _put(self, _line_options(curves, self._axis, self._title))


class HeatMap(ui.echart):
    """The win rates of rows against columns."""

    def __init__(self) -> None:
        super().__init__(_heat_options([], []))
        self.classes("w-full")

    def show(self, members: Sequence[str], cells: Sequence[tuple[int, int, float]]) -> None:
        """Shows ``cells``, each ``(column, row, win rate)``."""
        self.style(f"height: {140 + 34 * len(members)}px")
        _put(self, _heat_options(members, cells))


def _put(chart: ui.echart, options: dict[str, Any]) -> None:
    """Replaces a chart's options if its data have changed."""
    if any(chart.options[part] != options[part] for part in ("series", "yAxis")):
        chart.options.clear()
        chart.options.update(options)
        chart.update()


def _line_options(curves: Mapping[str, Points], x: str, title: str) -> dict[str, Any]:
    return {
        "animation": False,
        "color": COLOURS,
        "title": {"text": title, "textStyle": {"fontSize": 12, "color": "#888"}, "show": bool(title)},
        "tooltip": {"trigger": "axis", "confine": True},
        "legend": {"show": len(curves) > 1, "textStyle": _TEXT, "type": "scroll", "bottom": 0},
        "grid": {"left": 8, "right": 28, "top": 28, "bottom": 44 if len(curves) > 1 else 24, "containLabel": True},
        "xAxis": {
            "type": "value", "name": x, "nameLocation": "middle", "nameGap": 22, "axisLabel": _TEXT, "min": "dataMin",
            "max": "dataMax", "nameTextStyle": _TEXT, "splitLine": {"show": False},
        },
        "yAxis": {"type": "value", "scale": True, "axisLabel": _TEXT, "splitLine": _GRID_LINE},
        "series": [
            {
                "type": "line", "name": name, "showSymbol": len(points) == 1, "data": [list(point) for point in points],
                "lineStyle": {"width": 1.5},
            }
            for name, points in curves.items()
        ],
    }  # fmt: skip


def _heat_options(members: Sequence[str], cells: Sequence[tuple[int, int, float]]) -> dict[str, Any]:
    return {
        "animation": False,
        "tooltip": {"confine": True},
        "grid": {"left": 8, "right": 16, "top": 8, "bottom": 64, "containLabel": True},
        "xAxis": {"type": "category", "data": list(members), "axisLabel": {"rotate": 45, **_TEXT}},
        "yAxis": {"type": "category", "data": list(members), "inverse": True, "axisLabel": _TEXT},
        "visualMap": {
            "min": 0, "max": 1, "calculable": False, "orient": "horizontal", "left": "center", "bottom": 0,
            "inRange": {"color": ["#d55e00", "#f2f2f2", "#0072b2"]}, "textStyle": _TEXT, "itemHeight": 90,
            "itemWidth": 12, "text": ["wins", "loses"],
        },
        "series": [
            {
                "type": "heatmap", "name": "win rate",
                "data": [[column, row, round(rate, 2)] for column, row, rate in cells],
                "label": {"show": len(members) <= _FEW, "color": "#222", "fontSize": 11},
            }
        ],
    }  # fmt: skip
