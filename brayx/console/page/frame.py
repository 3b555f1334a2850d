"""What all pages share: the frame with the navigation, and panels that load, refresh, and show their errors."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, Generic, TypeVar

from nicegui import ui

from brayx.console.page.caller import ApiCaller, Connect
from brayx.errors import BrayxError

T = TypeVar("T")

PAGES = {
    "Overview": "/",
    "Sessions": "/sessions",
    "Recordings": "/recordings",
    "Models": "/models",
    "League": "/league",
    "Play": "/play",
    "Trials": "/trials",
}
MUTED = "text-gray-600 dark:text-gray-400"
_STYLE = """
<style>
  body { font-family: system-ui, sans-serif; }
  .mono { font-family: ui-monospace, SFMono-Regular, Menlo, monospace; font-size: 12.5px; }
  .q-table th { font-weight: 600; }
  @media (max-width: 640px) {
    .q-table td, .q-table th { padding: 4px 8px !important; }
    .q-table td:first-child { max-width: 8.5rem; overflow: hidden; text-overflow: ellipsis; }
  }
  .brayx-nav { scrollbar-width: none; }
  .body--dark .q-btn--outline, .body--dark .q-btn--flat { --q-primary: #56b4e9; --q-negative: #f97316; }
</style>
"""
_DARK = "localStorage.getItem('brayx-dark')"
_SHOW_PLACE = "document.querySelector('.brayx-nav [aria-current=page]')?.scrollIntoView({inline: 'center'})"
"""Scrolls the navigation, which is wider than a phone, to the page's own link."""


@contextmanager
def frame(title: str, connect: Connect) -> Iterator[ApiCaller]:
    """A page's frame; elements created in the context are the page's content.

    Args:
        title: the page's name, such as one of `PAGES`.
        connect: makes the viewer's client.
    """
    request = ui.context.client.request
    caller = ApiCaller(connect(request.headers.get("authorization", "")))
    ui.page_title(f"{title} - brayx console")
    ui.add_head_html(_STYLE)
    ui.colors(primary="#0072b2", positive="#00805f", negative="#c2410c", warning="#b45309")
    dark = ui.dark_mode(None)
    path = request.url.path
    with ui.header().classes("px-3 py-1 bg-primary items-center no-wrap gap-3"):
        ui.link("brayx", "/").classes("text-white text-lg font-bold no-underline")
        with ui.row().classes("brayx-nav no-wrap gap-1 overflow-x-auto grow").props('role="navigation"'):
            for name, target in PAGES.items():
                current = path == target or (target != "/" and path.startswith(target[:-1]))
                link = ui.link(name, target).classes("text-white no-underline px-2 py-1 rounded whitespace-nowrap")
                if current:
                    link.classes("bg-black/25 font-semibold").props('aria-current="page"')
        ui.button(icon="contrast", on_click=lambda: _toggle(dark)).props(
            'flat dense color=white aria-label="light or dark"'
        )
    ui.timer(0.1, lambda: _restore(dark), once=True)
    with ui.column().classes("w-full max-w-6xl mx-auto p-2 sm:p-4 gap-4 items-stretch"):
        yield caller


def missing(connect: Connect) -> Callable[[], None]:
    """Makes the function that draws the page for an address that no other page has."""

    def page() -> None:
        client = ui.context.client
        client.status_code = HTTPStatus.NOT_FOUND
        with frame("Page not found", connect):
            heading("There is no such page")
            ui.label(f"The console has no page {client.request.url.path[:200]}.").classes("break-all")
            ui.link("Go to the overview", "/").classes("text-primary")

    return page


async def _toggle(dark: ui.dark_mode) -> None:
    is_dark = await ui.run_javascript("document.body.classList.contains('body--dark')")
    dark.value = not is_dark
    ui.run_javascript(f"localStorage.setItem('brayx-dark', '{int(not is_dark)}')")


async def _restore(dark: ui.dark_mode) -> None:
    ui.run_javascript(_SHOW_PLACE)
    stored = await ui.run_javascript(_DARK)
    if stored in ("0", "1"):
        dark.value = stored == "1"


class Panel(Generic[T]):
    """A part of a page that shows a document and refreshes it. It also shows that it is loading, or why it cannot load.

    Args:
        load: gets the document.
        build: called once with the first document; makes the elements, and returns a function that updates them.
        every_s: time between two loads; 0: load only once.
    """

    def __init__(
        self, load: Callable[[], Awaitable[T]], build: Callable[[T], Callable[[T], None]], every_s: float = 2.0
    ) -> None:
        self._load, self._build = load, build
        self._update: Callable[[T], None] | None = None
        self._seen_at = ""
        with ui.column().classes("w-full items-stretch gap-3"):
            self._failure = Alert().classes("w-full p-3 rounded border border-orange-700")
            self._content = ui.column().classes("w-full items-stretch gap-4")
            with self._content:
                loading()
        self.timer = ui.timer(every_s or 1.0, self.refresh, once=not every_s)
        if every_s:
            ui.timer(0.0, self.refresh, once=True)

    async def refresh(self) -> None:
        """Loads the document and shows it."""
        try:
            document = await self._load()
        except BrayxError as error:
            self._failure.say(error, f" Below is its last answer, of {self._seen_at}." if self._seen_at else "")
            if self._update is None:
                self._content.clear()
            return
        self._failure.set_visibility(False)
        self._seen_at = time.strftime("%H:%M:%S")
        with self._content:
            if self._update is None:
                self._content.clear()
                self._update = self._build(document)
            self._update(document)


async def control(work: Awaitable[T], done: Callable[[T], str]) -> bool:
    """Runs a button's action and shows the outcome; returns whether it succeeded."""
    client = ui.context.client  # a refresh may delete the button before the answer comes
    try:
        result = await work
    except BrayxError as error:
        with client:
            ui.notify(sentence(error.message), type="negative", multi_line=True, close_button=True, timeout=0)
        return False
    with client:
        ui.notify(done(result), type="positive", multi_line=True)
    return True


async def confirmed(question: str, verb: str) -> bool:
    """Asks the viewer to confirm; False: cancelled."""
    # Outside the panel of the button: a refresh recreates the panel's elements, which would close the dialog.
    with ui.context.client.content, ui.dialog() as dialog, ui.card():
        ui.label(question)
        with ui.row().classes("w-full justify-end"):
            ui.button("Cancel", on_click=lambda: dialog.submit(False)).props("flat")
            ui.button(verb, on_click=lambda: dialog.submit(True)).props("color=negative")
    answer = bool(await dialog)
    dialog.delete()
    return answer


def empty(text: str) -> ui.label:
    """The text of a panel that has nothing to show."""
    return ui.label(text).classes(f"{MUTED} py-6 text-center w-full")


def loading() -> ui.row:
    """The text of a panel that is loading; the caller clears it."""
    with ui.row().classes("items-center") as row:
        ui.spinner(size="sm")
        ui.label("Loading …").classes(MUTED)
    return row


def heading(text: str) -> ui.label:
    """The heading of a section."""
    return ui.label(text).classes("text-lg font-semibold").props('role="heading" aria-level="2"')


def sentence(text: str) -> str:
    """A message as a sentence."""
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")


def number(value: float | None, digits: int = 4) -> str:
    """A number as readable text; a dash for None."""
    if value is None:
        return "-"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.{digits}g}"


def since(seconds: float) -> str:
    """A time span in its largest unit."""
    for unit, length in (("d", 86_400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{max(seconds, 0.0):.0f} s"


class Listing(ui.table, Generic[T]):
    """A table of documents, a row for each; hidden without rows. The first column is aligned left, as text, the others
    right, as numbers.

    Args:
        key: field of a document that identifies it.
        columns: what a column shows of a document, by heading.
        on_row: called with the key of the row that the viewer clicks.
    """

    def __init__(
        self, key: str, columns: Mapping[str, Callable[[T], Any]], *, on_row: Callable[[str], None] | None = None
    ) -> None:
        self._key, self._cells = key, columns
        super().__init__(
            columns=[
                {"name": name, "label": name, "field": name, "align": "right" if place else "left", "sortable": True}
                for place, name in enumerate(columns)
            ],
            rows=[],
            row_key="key",
            pagination=25,
        )
        self.classes("w-full").props("flat bordered dense").set_visibility(False)
        if on_row is not None:
            self.classes("cursor-pointer").on("rowClick", lambda event: on_row(event.args[1]["key"]))

    def show(self, documents: Sequence[T]) -> None:
        """Replaces the rows."""
        rows = [
            {"key": getattr(document, self._key), **{name: cell(document) for name, cell in self._cells.items()}}
            for document in documents
        ]
        self.set_visibility(bool(rows))
        if self.rows != rows:
            self.rows = rows


class Alert(ui.label):
    """Says why something failed; hidden until then."""

    def __init__(self) -> None:
        super().__init__()
        self.classes("text-orange-800 dark:text-orange-300").props('role="alert"').set_visibility(False)

    def say(self, error: BrayxError, more: str = "") -> None:
        """Shows an error, and further sentences."""
        self.set_text(f"{sentence(error.message)}{more}")
        self.set_visibility(True)
