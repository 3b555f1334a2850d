"""A table of documents, and its cards on a phone. Knows nothing of what it lists."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from nicegui import ui

from brayx.console.page.frame import number, plus_minus
from brayx.console.page.words import tr

T = TypeVar("T")

_MAX_CELL = 28
"""Maximum characters of a cell."""
_ROWS = 25
"""Rows of a page of the table."""


class TableCell(NamedTuple):
    """A text that stands for a number, by which it is sorted. None: it has none."""

    text: str
    by: float | None


def counted(value: float | None) -> TableCell:
    """A number as a cell."""
    return TableCell(number(value), value)


def returned(mean: float | None, error: float | None) -> TableCell:
    """A mean and its 95 % interval as a cell."""
    return TableCell(plus_minus(mean, error), mean)


def shortened(text: str, most: int = _MAX_CELL) -> str:
    """A text of at most that many characters, which lacks its middle if it is longer."""
    return text if len(text) <= most else f"{text[: most // 2]}…{text[-(most // 2 - 1) :]}"


class Listing(ui.table, Generic[T], component="listing.js"):
    """A table of documents, a row for each, which is a link if it has a page; cards on a phone. Hidden without rows.
    The first column is aligned left, as text, the others right, as numbers. Columns with dashes only are hidden.

    Args:
        key: field of a document that identifies it.
        columns: what a column shows of a document, by heading: a text, a number or a `TableCell`; a dash for nothing.
        lead: heading of the column that comes first on a phone's card, next to the first column.
        link: the address of a document's page.
        actions: buttons of a document by name: the address that each leads to; empty: `on_action` is called.
        on_action: called with the document's key and the button's name.
        on_select: called when the viewer has chosen other rows, see `selected`; None: rows cannot be chosen.
    """

    def __init__(
        self,
        key: str,
        columns: Mapping[str, Callable[[T], Any]],
        *,
        lead: str = "",
        link: Callable[[T], str] | None = None,
        actions: Callable[[T], Mapping[str, str]] | None = None,
        on_action: Callable[[Any, str], Any] | None = None,
        on_select: Callable[[], Any] | None = None,
    ) -> None:
        self._key, self._cells, self._lead, self._link, self._actions = key, columns, lead, link, actions
        self._choice = on_select is not None
        super().__init__(columns=self._columns(True), rows=[], row_key="key", pagination=_ROWS)
        if on_select is not None:
            self.set_selection("multiple")
            self.on_select(on_select)
        self.classes("w-full").props('flat bordered dense :grid="Quasar.Screen.lt.sm"').set_visibility(False)
        if on_action is not None:
            self.on("action", lambda event: on_action(*event.args))

    def _columns(self, sortable: bool) -> list[dict[str, Any]]:
        shown: list[dict[str, Any]] = [
            {"name": name, "label": tr(name), "field": name, "sortable": sortable, "align": "right"}
            for name in self._cells
        ]
        shown[0]["align"] = "left"
        return shown if self._actions is None else [*shown, {"name": "", "label": "", "field": ""}]

    def show(self, documents: Sequence[T], sortable: bool = True) -> None:
        """Replaces the rows. The viewer can sort them unless they are only a part of the list."""
        rows = []
        for document in documents:
            values = {name: cell(document) for name, cell in self._cells.items()}
            full = {name: value.text if isinstance(value, TableCell) else value for name, value in values.items()}
            by = {name: value.by if isinstance(value, TableCell) else value for name, value in values.items()}
            by |= {name: None for name, value in full.items() if value == "-"}
            cells = {name: shortened(value) if isinstance(value, str) else value for name, value in full.items()}
            href = self._link(document) if self._link else None
            buttons = self._actions(document) if self._actions else {}
            actions = [{"name": name, "label": tr(name), "href": place or None} for name, place in buttons.items()]
            row = {"key": getattr(document, self._key), "href": href, "lead": self._lead, "full": full, "by": by}
            rows.append(row | {"actions": actions, "choice": self._choice} | cells)
        self.set_visibility(bool(rows))
        known = [name for name in self._cells if any(row["full"][name] != "-" for row in rows)]
        shown = {"visible-columns": [*known, ""], "hide-pagination": len(rows) <= _ROWS, "rows": rows}
        shown["columns"] = self._columns(sortable)
        for name, value in shown.items():
            if self.props.get(name) != value:  # an assignment sends the table again
                self.props[name] = value
