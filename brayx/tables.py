"""Lays out rows of cells as a printed table. Knows nothing of what the cells mean."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from unicodedata import combining, east_asian_width


def aligned(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """Pads cells so that columns line up, two spaces apart; returns the lines.

    A wide character counts as two columns of the terminal.

    Args:
        rows: one or more, including the heading, all with the same number of cells.
        left: indices of left-aligned columns; the others are right-aligned.
    """
    widths = [max(map(_width, column)) for column in zip(*rows, strict=True)]

    def padded(cell: str, column: int) -> str:
        space = " " * (widths[column] - _width(cell))
        return cell + space if column in left else space + cell

    return ["  ".join(padded(cell, column) for column, cell in enumerate(row)).rstrip() for row in rows]


def _width(text: str) -> int:
    """Columns of the terminal that a text takes."""
    return sum(1 + (east_asian_width(character) in "WF") for character in text if not combining(character))
