"""A table of documents, and its cards on a phone. Knows nothing of what it lists."""

from __future__ import annotations

import json
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
_ACTIONS = """
<q-btn v-for="action in props.row.actions" :key="action.name" outline dense no-caps class="brayx-action"
  :label="action.label" v-bind="action.href ? {href: action.href} : {}"
  @click="action.href || $parent.$emit('action', props.row.key, action.name)" />
"""
"""Buttons of a row: links, or events."""
_ROW = """
<q-tr :props="props">
  <q-td v-if="props.row.choice" auto-width><q-checkbox v-model="props.selected" dense class="brayx-action" /></q-td>
  <q-td v-for="(col, place) in props.cols.filter(col => col.name)" :key="col.name" :props="props"
    :title="props.row.full[col.name]">
    <a v-if="place === 0 && props.row.href" class="brayx-row" :href="props.row.href">{{ col.value }}</a>
    <template v-else>{{ col.value }}</template>
  </q-td>
  ACTIONS
</q-tr>
""".replace("ACTIONS", f'<q-td v-if="props.row.actions.length" class="brayx-actions">{_ACTIONS}</q-td>')
"""A row of a `Listing`; its first cell's link covers it."""
_CARD = """
<div class="brayx-card w-full">
  <div style="display: flex; justify-content: space-between; gap: 8px; font-weight: 600">
    <span>
      <q-checkbox v-if="props.row.choice" v-model="props.selected" dense class="brayx-action" />
      <a v-if="props.row.href" class="brayx-row" :href="props.row.href">{{ props.cols[0].value }}</a>
      <template v-else>{{ props.cols[0].value }}</template>
    </span>
    <span>{{ props.cols.filter(col => col.name === props.row.lead).map(col => col.value)[0] }}</span>
  </div>
  <div style="display: flex; flex-wrap: wrap; column-gap: 14px; font-size: 13px">
    <span v-for="col in props.cols.slice(1).filter(col => col.name && col.name !== props.row.lead)" :key="col.name">
      <span style="opacity: 0.65">{{ col.label }}</span> {{ col.value }}
    </span>
  </div>
  ACTIONS
</div>
""".replace("ACTIONS", _ACTIONS)
"""The same on a phone."""
_SORT = """(a, b, {by: {NAME: x}}, {by: {NAME: y}}) => x === y ? 0 : x === null || (y !== null && x < y) ? -1 : 1"""
"""The order of two rows by a column."""


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


class Listing(ui.table, Generic[T]):
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
        columns_shown: list[dict[str, Any]] = [
            {"name": name, "label": tr(name), "field": name, "align": "right" if place else "left", "sortable": True}
            | {":sort": _SORT.replace("NAME", json.dumps(name))}
            for place, name in enumerate(columns)
        ]
        if actions is not None:
            columns_shown.append({"name": "", "label": "", "field": ""})
        super().__init__(columns=columns_shown, rows=[], row_key="key", pagination=_ROWS)
        if on_select is not None:
            self.set_selection("multiple")
            self.on_select(on_select)
        self.classes("w-full").props('flat bordered dense :grid="Quasar.Screen.lt.sm"').set_visibility(False)
        self.add_slot("body", _ROW)
        self.add_slot("item", _CARD)
        if on_action is not None:
            self.on("action", lambda event: on_action(*event.args))

    def show(self, documents: Sequence[T]) -> None:
        """Replaces the rows."""
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
        self.props["visible-columns"] = [*known, ""]
        self.props["hide-pagination"] = len(rows) <= _ROWS
        if self.rows != rows:
            self.rows = rows
