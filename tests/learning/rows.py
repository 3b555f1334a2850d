"""Prints the results of the learning tests as tables after each module; `docs/learning.md` keeps them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


class Rows:
    """Rows of one table, by title."""

    def __init__(self) -> None:
        self._tables: dict[str, tuple[str, list[str]]] = {}

    def add(self, title: str, **cells: object) -> None:
        """Adds a row; columns are named as the first row of that title names them."""
        header, rows = self._tables.setdefault(title, (f"| {' | '.join(cells)} |", []))
        rows.append(f"| {' | '.join(str(cell) for cell in cells.values())} |")
        assert header == f"| {' | '.join(cells)} |"

    def __str__(self) -> str:
        texts = []
        for title, (header, rows) in self._tables.items():
            rule = "|" + "---|" * (header.count("|") - 1)
            texts.append("\n".join([f"{title}", "", header, rule, *rows]))
        return "\n\n".join(texts)


def printed(request: pytest.FixtureRequest) -> Iterator[Rows]:
    """Rows that are printed in the end, captured or not; for a fixture of module scope."""
    rows = Rows()
    yield rows
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\n\n{rows}\n")
