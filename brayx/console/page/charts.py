"""Line charts and heat maps, by ECharts, readable in light and dark mode."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from nicegui import ui

from brayx.console.page.words import tr

COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c8c8c"]
"""Colours that colour-blind people can tell apart (Okabe and Ito 2008). The last one is grey instead of black, which
would be invisible in dark mode."""
_TEXT = {"color": "#888"}
_GRID_LINE = {"lineStyle": {"color": "#8884"}}
_TICK = """value => Math.abs(value) < 1e4 ? value.toLocaleString("en", {maximumSignificantDigits: 5})
  : Intl.NumberFormat("en", {notation: "compact", maximumSignificantDigits: 5}).format(value).replace("K", "k")"""
"""JavaScript that writes a number at an axis: 2,500 or 40k."""
_FEW = 12
"""Maximum members in a heat map with numbers in its cells."""

Points = Sequence[tuple[float, float]]
Bands = Sequence[tuple[float, float, float]]
"""``(x, low, high)``."""


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

    def show(
        self,
        curves: Mapping[str, Points],
        *,
        pale: Mapping[str, Points] | None = None,
        bands: Mapping[str, Bands] | None = None,
        target: tuple[str, float] | None = None,
    ) -> None:
        """Shows curves by name.

        Args:
            curves: the curves.
            pale: thin curves behind them, such as the values that a curve is a mean of.
            bands: intervals around curves, by the curve's name.
            target: name and value of a horizontal line.
        """
        self.set_visibility(any(curves.values()))
        options = _line_options({**curves, **(pale or {})}, self._axis, self._title)
        # Colours by name: ECharts would keep those of an earlier order of the curves.
        colours = {name: COLOURS[place % len(COLOURS)] for place, name in enumerate(sorted(curves))}
        series = options["series"] = [
            _line(name, points, width=2, colour=colours[name]) for name, points in curves.items()
        ]
        series += [_line(name, points, width=1, colour=COLOURS[-1]) for name, points in (pale or {}).items()]
        for name, band in (bands or {}).items():
            series += _band(name, band, colours.get(name, COLOURS[-1]))
        if target is not None and series:
            label, value = target
            series[0]["markLine"] = {
                "symbol": "none", "silent": True, "data": [{"yAxis": value}],
                "lineStyle": {"color": COLOURS[1], "type": "dashed"},
                "label": {"formatter": label, "position": "insideStartTop", "color": COLOURS[1]},
            }  # fmt: skip
            shown = [y for points in (*curves.values(), *(pale or {}).values()) for _, y in points if math.isfinite(y)]
            low, high = rounded(min([*shown, value]), max([*shown, value]))
            options["yAxis"] |= {"min": low, "max": high}
        _put(self, options)


class HeatMap(ui.echart):
    """The win rates of rows against columns."""

    def __init__(self) -> None:
        super().__init__(_heat_options([], []))
        self.classes("w-full")

    def show(self, members: Sequence[str], cells: Sequence[tuple[int, int, float]]) -> None:
        """Shows ``cells``, each ``(column, row, win rate)``."""
        self.style(f"height: {140 + 34 * len(members)}px")
        _put(self, _heat_options(members, cells))


def rounded(low: float, high: float) -> tuple[float, float]:
    """The ends of an axis that has room for these values: round numbers."""
    step = 10.0 ** math.floor(math.log10((high - low) / 2)) if high > low else 1.0
    return float(f"{math.floor(low / step) * step:.12g}"), float(f"{math.ceil(high / step) * step:.12g}")


def _put(chart: ui.echart, options: dict[str, Any]) -> None:
    """Replaces a chart's options if its data have changed."""
    if any(chart.options[part] != options[part] for part in ("series", "yAxis")):
        chart.options.clear()
        chart.options.update(options)
        chart.update()


def _line_options(curves: Mapping[str, Points], x: str, title: str) -> dict[str, Any]:
    bottom = {0: 24, 1: 24, 2: 68}.get(len(curves), 44)  # two names need two lines on a phone
    return {
        "animation": False,
        "color": COLOURS,
        "title": {"text": title, "textStyle": {"fontSize": 12, "color": "#888"}, "show": bool(title)},
        "tooltip": {"trigger": "axis", "confine": True},
        "legend": {"show": len(curves) > 1, "data": [*curves], "textStyle": _TEXT, "bottom": 0,
                   "type": "plain" if len(curves) == 2 else "scroll"},
        "grid": {"left": 8, "right": 28, "top": 28, "bottom": bottom, "containLabel": True},
        "xAxis": {
            "type": "value", "name": x, "nameLocation": "middle", "nameGap": 22, "scale": True,
            "max": "dataMax", "splitNumber": 3,
            "axisLabel": {**_TEXT, ":formatter": _TICK, "showMaxLabel": False, "hideOverlap": True},
            "nameTextStyle": _TEXT, "splitLine": {"show": False},
        },
        "yAxis": {"type": "value", "scale": True, "axisLabel": {**_TEXT, ":formatter": _TICK}, "splitLine": _GRID_LINE},
        "series": [],
    }  # fmt: skip


def _line(name: str, points: Points, *, width: float, colour: str) -> dict[str, Any]:
    return {
        "type": "line", "name": name, "showSymbol": len(points) == 1, "data": [list(point) for point in points],
        "lineStyle": {"width": width}, "color": colour,
    }  # fmt: skip


def _band(name: str, band: Bands, colour: str) -> list[dict[str, Any]]:
    """A filled area, as ECharts draws it: an invisible line, and the distance to the upper one stacked on it."""
    common = {
        "type": "line",
        "stack": name,
        "stackStrategy": "all",
        "silent": True,
        "showSymbol": False,
        "lineStyle": {"width": 0},
    }
    low = {
        **common, "name": f"{name} ", "data": [[x, low] for x, low, _ in band], "tooltip": {"show": False},
        "lineStyle": {"width": 0},
    }  # fmt: skip
    rest = {**low, "data": [[x, high - low] for x, low, high in band], "areaStyle": {"color": colour, "opacity": 0.18}}
    return [low, rest]


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
            "itemWidth": 12, "text": [tr("wins"), tr("loses")],
        },
        "series": [
            {
                "type": "heatmap", "name": tr("win rate"),
                "data": [[column, row, round(rate, 2)] for column, row, rate in cells],
                "label": {"show": len(members) <= _FEW, "color": "#222", "fontSize": 11},
            }
        ],
    }  # fmt: skip
