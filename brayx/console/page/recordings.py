"""The page of the recordings: filters and a table."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

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
from brayx.console.recordings import RecordingDocument, RecordingsDocument

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
    async def recordings(session: str = "") -> None:
        with frame("Recordings", connect) as caller:
            await _Recordings(caller, session).panel.first()


class _Recordings:
    """The list of the recordings: filters, and a page of those that they select.

    Attributes:
        panel: loads and shows the page.
    """

    def __init__(self, caller: ApiCaller, session: str) -> None:
        self._caller = caller
        self._weights = tr("weights {number}", number="").strip()
        heading(tr("Recordings"))
        with ui.row().classes("w-full items-center gap-2"):
            self._session = _filter(ui.input(tr("Session or game"), placeholder="4f1c*, bot-7", value=session), "w-48")
            self._played_by = _filter(ui.input(tr("Played by"), placeholder="champion 3, weights 57"), "w-56")
            self._end = _filter(ui.select({end: tr(words) for end, words in _ENDS.items()}, label=tr("End")), "w-40")
            self._least = _filter(ui.number(tr("Lowest return")), "w-40")
            self._most = _filter(ui.number(tr("Highest return")), "w-40")
            self._errors = ui.switch(tr("only with errors"))
        self._pages = ui.pagination(1, 1, direction_links=True).props("max-pages=7")
        self.panel = Panel(self._load, self._build, every_s=5.0)
        for control in (self._session, self._played_by, self._end, self._least, self._most, self._errors):
            control.on_value_change(self._first_page)
        self._pages.on_value_change(self.panel.refresh)

    async def _load(self) -> RecordingsDocument:
        played_by = (self._played_by.value or "").replace(self._weights, "weights")
        query = {
            "session": self._session.value, "played_by": played_by, "end": self._end.value,
            "errors": self._errors.value or None, "min_return": self._least.value, "max_return": self._most.value,
        }  # fmt: skip
        chosen = {name: value for name, value in query.items() if value not in ("", None)}
        first = (self._pages.value - 1) * _PAGE
        page: RecordingsDocument = await self._caller.get(
            RecordingsDocument, "/api/recordings", limit=_PAGE, first=first, **chosen
        )
        return page

    async def _first_page(self) -> None:
        self._pages.set_value(1)
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
            rows.show(listing.recordings)

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
