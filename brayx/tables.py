"""Rows of cells as the lines of a printed table. Knows nothing of what the cells mean."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rich.cells import cell_len


def aligned(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """Lines of equal columns, two spaces apart.

    Widths are those of a terminal, where wide characters take two places.

    Args:
        rows: one or more, the heading included, each with equally many cells.
        left: the columns that are at the left; the others are at the right.
    """
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]

    def padded(cell: str, column: int) -> str:
        space = " " * (widths[column] - cell_len(cell))
        return cell + space if column in left else space + cell

    return ["  ".join(padded(cell, column) for column, cell in enumerate(row)).rstrip() for row in rows]
