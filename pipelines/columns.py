"""Rows of cells as the lines of a printed table. Knows nothing of what the cells mean."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of equal columns, two spaces apart: the first column is at the left, the others at the right.

    Args:
        rows: one or more, the heading included, each with equally many cells.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows
    ]  # fmt: skip
