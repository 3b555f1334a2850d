"""The pages of the running sessions: a table, and one session followed tick by tick."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from urllib.parse import quote

from nicegui import ui

from brayx.console.documents import DoneDocument
from brayx.console.page.caller import ApiCaller, Connect
from brayx.console.page.charts import Lines
from brayx.console.page.frame import (
    MUTED,
    RESPONSE_S,
    Panel,
    confirmed,
    control,
    empty,
    frame,
    heading,
    number,
    sentence,
    since,
    who_plays,
)
from brayx.console.page.listing import Listing, TableCell, counted
from brayx.console.page.recordings import end_in_words
from brayx.console.page.tick import TickView
from brayx.console.page.words import tr
from brayx.console.sessions import SessionDocument, TicksDocument
from brayx.errors import BrayxError, DeadlineExceeded, TransportError

_TICKS_EVERY_S = 0.2
_CURVES_EVERY_S = 0.5
_MAX_POINTS = 300


def add(connect: Connect) -> None:
    """Adds the pages."""

    @ui.page("/sessions", response_timeout=RESPONSE_S)
    async def sessions() -> None:
        with frame("Sessions", connect) as caller:
            await Panel(lambda: caller.get(list[SessionDocument], "/api/sessions"), _sessions).first()

    @ui.page("/session", response_timeout=RESPONSE_S)
    def session(id: str) -> None:
        with frame("Sessions", connect) as caller:
            _Followed(caller, id)


def _sessions(first: list[SessionDocument]) -> Callable[[list[SessionDocument]], None]:
    heading(tr("Running sessions"))
    none = empty(tr("No session is running. One begins when a game connects to a door of the job."))
    rows = Listing[SessionDocument](
        "session",
        {
            "Session": lambda row: row.session,
            "Ticks": lambda row: row.ticks,
            "Idle": lambda row: TableCell(since(row.idle_s), row.idle_s),
            "Player or version": lambda row: who_plays(row) or "-",
            "Return": lambda row: counted(row.result),
        },
        lead="Return",
        link=lambda row: f"/session?id={quote(row.session, safe='')}",
    )

    def update(sessions: list[SessionDocument]) -> None:
        none.set_visibility(not sessions)
        rows.show(sessions)

    return update


class _Followed:
    """One session, followed until it ends."""

    def __init__(self, caller: ApiCaller, session: str) -> None:
        self._caller, self._session, self._after = caller, session, 0
        self._own_image: str | None = None
        self._values: deque[tuple[float, float]] = deque(maxlen=_MAX_POINTS)
        with ui.row().classes("w-full items-center justify-between"):
            with ui.column().classes("gap-0 min-w-0"):
                ui.label(session).classes("text-xl font-bold break-all")
                self._state = ui.label(tr("Waiting for its next tick …")).classes(MUTED).mark("state")
            with ui.row():
                self._pause = ui.switch(tr("Pause"))
                self._end = ui.button(tr("End session"), icon="stop", on_click=self._ask_end)
                self._end.props("outline color=negative")
        self._body = ui.column().classes("w-full items-stretch gap-4")
        with self._body:
            self._not_drawn = ui.label().classes(MUTED)
            self._tick = TickView()
            self._chart = Lines(tr("tick"), tr("Value"), height="h-40")
        self._body.set_visibility(False)
        with ui.row() as self._further:
            ui.link(tr("Watch its recording"), f"/recordings?session={quote(session)}")
            ui.link(tr("Running sessions"), "/sessions")
        self._further.set_visibility(False)
        self._timer = ui.timer(_TICKS_EVERY_S, self._look)
        ui.timer(_CURVES_EVERY_S, self._draw)

    async def _look(self) -> None:
        try:
            newest = await self._caller.get(
                TicksDocument, "/api/sessions/ticks", session=self._session, after=self._after
            )
        except (TransportError, DeadlineExceeded) as error:  # keeps asking, since the console may answer again
            self._state.set_text(f"{sentence(error.message)} {tr('Below is its last answer.')}")
            return
        except BrayxError as error:
            self._over(sentence(error.message))
            return
        self._after = newest.after
        for tick in newest.ticks:
            if tick.value is not None:
                self._values.append((tick.number, tick.value))
        if not self._pause.value:
            self._show(newest)
        self._state.set_text(tr("Live") if self._body.visible else tr("Waiting for its next tick …"))
        if newest.end:
            result = "" if newest.result is None else ", " + tr("return {value}", value=number(newest.result))
            self._over(tr("The session has ended: {end}.", end=end_in_words(newest.end) + result))

    def _show(self, newest: TicksDocument) -> None:
        if newest.ticks:
            self._body.set_visibility(True)
            self._tick.labels, self._tick.action_labels = newest.labels, newest.action_labels
            self._tick.show(newest.ticks[-1], with_image=False)
            self._own_image = newest.ticks[-1].image
        drawn, failure = (None, "") if newest.frame is None else (newest.frame.image, newest.frame.failure)
        self._tick.show_image(self._own_image or drawn)
        self._not_drawn.set_text(tr("The frame cannot be drawn: {why}", why=sentence(failure)) if failure else "")
        self._not_drawn.set_visibility(bool(failure))

    def _draw(self) -> None:
        self._chart.show({tr("Value"): list(self._values)})

    def _over(self, text: str) -> None:
        self._timer.deactivate()
        self._end.set_visibility(False)
        self._pause.set_visibility(False)
        self._further.set_visibility(True)
        self._state.set_text(text)

    async def _ask_end(self) -> None:
        if await confirmed(tr("End session {session}? Its game gets an error.", session=self._session), tr("End it")):
            await control(
                self._caller.delete(DoneDocument, "/api/sessions", session=self._session),
                lambda done: sentence(done.done),
            )
