"""Tables of measurements: percentiles, medians over rounds, ratios to a reference, markdown; and common options.

Pure functions, except `show`; knows nothing of the measurements.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from rich.console import Console
from rich.markdown import Markdown

Cell = float | int | str | None
Run = TypeVar("Run")


def each(runs: Sequence[Run | None], read: Callable[[Run], float | None]) -> list[float | None]:
    """The result of ``read`` for each run; None for a failed run."""
    return [None if run is None else read(run) for run in runs]


def percentile(samples: Sequence[float], q: float) -> float:
    """The ``q`` quantile (0 to 1) of samples in any order, linear between neighbours; NaN of none."""
    if not samples:
        return math.nan
    ordered = sorted(samples)
    position = q * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def median(samples: Sequence[float | None]) -> float | None:
    """The median; None if any sample is missing, because a median over the runs that succeeded would flatter."""
    present = [sample for sample in samples if sample is not None and not math.isnan(sample)]
    return statistics.median(present) if present and len(present) == len(samples) else None


def ratio(value: float | None, base: float | None) -> float | None:
    """``value / base``; None when one is missing or the base is 0."""
    return None if value is None or base is None or base == 0 else value / base


def median_ratio(values: Sequence[float | None], bases: Sequence[float | None]) -> float | None:
    """The median over rounds of each round's ratio: what slows a whole round down cancels."""
    return median([ratio(value, base) for value, base in zip(values, bases, strict=True)])


def figure(value: Cell) -> str:
    """A cell as text: three significant digits, thousands with commas, a dash for a missing value."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    if isinstance(value, str):
        return value
    if isinstance(value, int) or abs(value) >= 100:
        return f"{value:,.0f}"
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{digits}f}"


@dataclass
class Table:
    """A table of cells.

    Attributes:
        columns: headings; one that starts with ``>`` is aligned to the right.
        rows: cells, as many in each as there are columns.
    """

    columns: Sequence[str]
    rows: list[Sequence[Cell]] = field(default_factory=list)

    def add(self, *cells: Cell) -> None:
        """Appends a row.

        Raises:
            ValueError: it does not have one cell for each column.
        """
        if len(cells) != len(self.columns):
            raise ValueError(f"{len(cells)} cells for {len(self.columns)} columns")
        self.rows.append(cells)

    def markdown(self) -> str:
        """The table in GitHub's markdown, columns padded so that it reads well as plain text too."""
        right = [column.startswith(">") for column in self.columns]
        texts = [
            [column.lstrip(">") for column in self.columns],
            *([figure(cell) for cell in row] for row in self.rows),
        ]
        widths = [max(3, *(len(row[i]) for row in texts)) for i in range(len(self.columns))]
        lines = [
            "| "
            + " | ".join(f"{t:>{w}}" if r else f"{t:<{w}}" for t, w, r in zip(row, widths, right, strict=True))
            + " |"
            for row in texts
        ]
        rule = (
            "|"
            + "|".join("-" * (w + 1) + ":" if r else "-" * (w + 2) for w, r in zip(widths, right, strict=True))
            + "|"
        )
        return "\n".join([lines[0], rule, *lines[1:]])


def options(text: str | None, *, rounds: int | None = None, seconds: float | None = None) -> argparse.ArgumentParser:
    """A parser with the options that the benchmarks share; those with a default of None are left out."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds, help="of every measurement (default: %(default)s)")
    if seconds is not None:
        parser.add_argument("--seconds", type=float, default=seconds, help="of a measurement (default: %(default)s)")
    parser.add_argument("--markdown", action="store_true", help="print plain markdown")
    return parser


def machine() -> str:
    """The machine in a few words, as context of the figures."""
    import os
    import platform

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"
    return f"{cores} cores, {platform.machine()}, Python {platform.python_version()}, load {load} before the run"


def show(about: str, text: str, *, markdown: bool) -> None:
    """Prints ``about`` a run and its tables, ``text`` in markdown: unchanged if ``markdown``, else rendered."""
    if markdown:
        print(f"{about}\n\n{text}")
    else:
        Console().print(about, Markdown(text))
