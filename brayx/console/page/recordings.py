"""The page of the recordings: filters and a table."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, TypeVar
from urllib.parse import urlencode

from fastapi import Query
from nicegui import ui

from brayx.console.page.caller import ApiCaller, Connect
from brayx.console.page.frame import (
    MUTED,
    RESPONSE_S,
    Panel,
    clock,
    empty,
    frame,
    heading,
    number,
)
from brayx.console.page.listing import Listing, counted
from brayx.console.page.words import tr
from brayx.console.recordings import RecordingDocument, RecordingsDocument, RecordingsQuery

Control = TypeVar("Control", ui.input, ui.number, ui.select)

NOT_RECORDED = "Nothing is recorded yet. A component `kind: recording` in the job records its sessions."
_PAGE = 25
"""Recordings on one page of the list."""
_ENDS = {
    "terminated": "terminated",
    "truncated": "truncated",
    "stop": "stopped by the game",
    "error": "error",
    "idle": "no more requests",
    "disconnect": "connection lost",
    "refused": "refused, so the game left",
    "ended": "ended by hand",
    "drained": "the job ended",
    "moved": "moved to another process",
    "lost": "taken over by another process",
}
"""Why sessions end, in words."""
_WHY = {"every": "a regular sample", "error": "it failed", "requested": "the game asked for it"}
"""Why sessions are recorded, in words; agents give reasons of their own."""


def add(connect: Connect) -> None:
    """Adds the page."""

    @ui.page("/recordings", response_timeout=RESPONSE_S)
    async def recordings(query: Annotated[RecordingsQuery, Query()], session: str = "", page: int = 1) -> None:
        with frame("Recordings", connect) as caller:
            await _Recordings(caller, query, session, page).panel.first()


class _Recordings:
    """The list of the recordings: filters, and a page of those that they select. Its address names them, so that the
    browser's way back leads there.

    Attributes:
        panel: loads and shows the page.
    """

    def __init__(self, caller: ApiCaller, query: RecordingsQuery, session: str, page: int) -> None:
        self._caller = caller
        self._weights = tr("weights {number}", number="").strip()
        heading(tr("Recordings"))
        with ui.row().classes("w-full items-center gap-2"):
            self._session = _filter(ui.input(tr("Session or game"), placeholder="4f1c*, bot-7", value=session), "w-48")
            self._played_by = _filter(
                ui.input(tr("Played by"), placeholder="champion 3, weights 57", value=query.played_by), "w-56"
            )
            ends = {end: tr(words) for end, words in _ENDS.items()}
            self._end = _filter(
                ui.select(ends, label=tr("End"), value=query.end if query.end in ends else None), "w-40"
            )
            self._least = _filter(ui.number(tr("Lowest return"), value=query.min_return), "w-40")
            self._most = _filter(ui.number(tr("Highest return"), value=query.max_return), "w-40")
            self._errors = ui.switch(tr("only with errors"), value=query.errors)
        page = max(page, 1)
        self._pages = ui.pagination(1, page, value=page, direction_links=True).props("max-pages=7")
        self.panel = Panel(self._load, self._build, every_s=5.0)
        for control in (self._session, self._played_by, self._end, self._least, self._most, self._errors):
            control.on_value_change(self._first_page)
        self._pages.on_value_change(self._show)

    def _query(self) -> dict[str, Any]:
        """What the filters select, as the API names it."""
        played_by = (self._played_by.value or "").replace(self._weights, "weights")
        query = {
            "session": self._session.value, "played_by": played_by, "end": self._end.value,
            "errors": self._errors.value or None, "min_return": self._least.value, "max_return": self._most.value,
        }  # fmt: skip
        return {name: value for name, value in query.items() if value not in ("", None)}

    async def _load(self) -> RecordingsDocument:
        first = (self._pages.value - 1) * _PAGE
        page: RecordingsDocument = await self._caller.get(
            RecordingsDocument, "/api/recordings", limit=_PAGE, first=first, **self._query()
        )
        return page

    async def _first_page(self) -> None:
        self._pages.set_value(1)
        await self._show()

    async def _show(self) -> None:
        ui.navigate.history.replace(f"/recordings?{urlencode(self._query() | {'page': self._pages.value})}")
        await self.panel.refresh()

    def _build(self, _: RecordingsDocument) -> Callable[[RecordingsDocument], None]:
        about = ui.label().classes(MUTED).mark("about")
        nothing = empty(tr(NOT_RECORDED))
        none = empty(tr("No recording matches. An id may contain *: 4f1c* finds those that begin with 4f1c."))
        rows = Listing[RecordingDocument](
            "id", recording_columns(), lead="Return", link=lambda recording: f"/recordings/{recording.id}"
        )

        def update(listing: RecordingsDocument) -> None:
            nothing.set_visibility(not listing.total and not listing.unreadable)
            none.set_visibility(bool(listing.total and not listing.recordings))
            about.set_text(listed(listing) if listing.folder else "")
            pages = max(1, math.ceil(listing.selected / _PAGE))
            if self._pages.props["max"] != pages:  # an assignment sends them again
                self._pages.props["max"] = pages
            self._pages.set_visibility(pages > 1)
            rows.show(listing.recordings, sortable=pages == 1)

        return update


def _filter(control: Control, width: str) -> Control:
    control.classes(width).props("dense outlined clearable stack-label debounce=300")
    return control


def recording_columns() -> dict[str, Callable[[RecordingDocument], Any]]:
    """What a table shows of a recording, by heading."""
    return {
        "Session": lambda recording: recording.session,
        "Began": lambda recording: clock(recording.began_s, seconds=True),
        "Ticks": lambda recording: recording.ticks,
        "End": lambda recording: end_in_words(recording.end),
        "Return": lambda recording: counted(recording.result),
        "Events": lambda recording: recording.events + recording.lost or "-",
        "Played by": lambda recording: player_of(recording) or "-",
        "Recorded because": lambda recording: tr(_WHY.get(recording.why, recording.why)),
    }


def end_in_words(end: str) -> str:
    """Why a session ended; empty: it runs."""
    return tr(_ENDS.get(end, end)) if end else tr("running")


def player_of(recording: RecordingDocument) -> str:
    """Who played a recorded session, such as ``champion 3``, ``main:7`` or ``main, weights 57``; empty: not known."""
    if recording.alias and recording.version:
        return f"{recording.alias} {recording.version}"
    weights = tr("weights {number}", number=recording.version) if recording.version else ""
    is_snapshot = ":" in recording.player
    return recording.player if is_snapshot else ", ".join(filter(None, (recording.player, weights)))


def listed(listing: RecordingsDocument) -> str:
    """Text above the list: the numbers of recordings and of selected ones, and the first unreadable file."""
    text = tr("{count} in {folder}", count=number(listing.total), folder=listing.folder)
    if listing.selected != listing.total:
        text = tr("{selected} of {all}", selected=number(listing.selected), all=text)
    if listing.unreadable:
        why = next(iter(listing.unreadable.values()))
        text += "; " + tr("{count} files cannot be read: {why}", count=len(listing.unreadable), why=why)
    return text
