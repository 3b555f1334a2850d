"""Lays out rows of cells as a printed table. Knows nothing of what the cells mean."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def aligned(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """Pads cells so that columns line up, two spaces apart; returns the lines.

    A wide character counts as two columns of the terminal.

    Args:
        rows: one or more, including the heading, all with the same number of cells.
        left: indices of left-aligned columns; the others are right-aligned.
    """
    from rich.cells import cell_len  # not on a machine with a game only, where `brayx --help` works, too

    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]

    def padded(cell: str, column: int) -> str:
        space = " " * (widths[column] - cell_len(cell))
        return cell + space if column in left else space + cell

    return ["  ".join(padded(cell, column) for column, cell in enumerate(row)).rstrip() for row in rows]
