"""The page of one recording, with a time line to scrub."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

from nicegui import ui
from nicegui.events import KeyEventArguments

from brayx.console.games import BoardDocument
from brayx.console.page.caller import ApiCaller, Connect
from brayx.console.page.charts import Lines
from brayx.console.page.comparison import Compare
from brayx.console.page.frame import (
    MUTED,
    RESPONSE_S,
    Alert,
    clock,
    frame,
    heading,
    loading,
    number,
    sentence,
    ticks_text,
)
from brayx.console.page.play import BoardGrid
from brayx.console.page.recordings import end_in_words, player_of
from brayx.console.page.tick import TickView, pretty
from brayx.console.page.words import tr
from brayx.console.recordings import RecordedTicksDocument
from brayx.console.ticks import RecordedCurvesDocument, TickDocument
from brayx.errors import AgentError, BrayxError

_WINDOW = 256
"""Number of ticks that are loaded at once."""
_MAX_WINDOWS = 16
_PLAY_EVERY_S = 1 / 15
_GROWN_EVERY_S = 3.0
_NO_SCROLLING = """<script>addEventListener("keydown", (event) => {
    const moves = ["PageUp", "PageDown", "Home", "End"].includes(event.key) && !event.target.closest("input, textarea");
    if (moves || (event.key === " " && event.target === document.body)) event.preventDefault();
});</script>"""
"""Keeps the page in place when a key moves in the time line."""
_FIRST_CURVES = ("reward", "value", "log_prob")
_RESULTS = {"win": "The agent wins.", "loss": "The agent loses.", "draw": "A draw.", "": ""}
"""Results of the recorded agent, in words."""


def add(connect: Connect) -> None:
    """Adds the page."""

    @ui.page("/recordings/{recording}", response_timeout=RESPONSE_S)
    async def recording(recording: str, compare: str = "", against: str = "") -> None:
        with frame("Recordings", connect) as caller:
            _Recorded(caller, recording, compare, against)


class _Recorded:
    """One recording. The arrow keys step, the Page keys, Home and End jump, and the space bar plays."""

    def __init__(self, caller: ApiCaller, recording: str, compare: str, against: str) -> None:
        self._caller, self._path, self._chosen = caller, f"/api/recordings/{recording}", (compare, against)
        self._windows: dict[int, list[TickDocument]] = {}
        self._has_frames = self._has_boards = self._loading_frame = False
        self._draws_frames = False
        self._at, self._shown = 0, -1
        self._last_tick = self._last = 0
        self._stop: Any = None
        self._failure = Alert()
        self._loading = loading()
        self._body = ui.column().classes("w-full items-stretch gap-3")
        with self._body:
            self._title = ui.label().classes("text-xl font-bold break-all")
            self._about = ui.label().classes(MUTED)
            self._cause = ui.label().classes("mono break-words text-red-700 dark:text-red-400").mark("cause")
            with ui.expansion(tr("Start and its reply")).props("dense").classes("w-full"):
                self._started = ui.label().classes("mono whitespace-pre-wrap break-all").mark("start")
            with ui.row().classes("items-center gap-3"):
                ui.label(tr("Download:")).classes(MUTED)
                self._formats = ui.row().classes("gap-3")
            with ui.row().classes("w-full items-center no-wrap gap-3"):
                self._play = ui.button(icon="play_arrow", on_click=self._toggle).props(
                    f'round dense aria-label="{tr("play")}"'
                )
                self._slider = ui.slider(min=0, max=1, step=1, value=0)
                self._slider.props(f'label aria-label="{tr("tick")}" instant-feedback').classes("grow")
                self._slider.on_value_change(lambda event: self._go(int(event.value)))
            ui.label(
                tr("← → move by a tick, with Shift by ten, Page keys by a hundred; Home, End; space plays.")
            ).classes(f"text-xs {MUTED}")
            self._no_picture = ui.label().classes(MUTED)
            self._tick = TickView()
            with self._tick.above:
                self._position = ui.label().classes("font-semibold").mark("position")
                self._board = BoardGrid()
            heading(tr("Curves"))
            self._choice = ui.select([], multiple=True, on_change=self._draw).props("dense outlined use-chips")
            self._choice.classes("w-full max-w-xl").props(f'aria-label="{tr("Curves")}"')
            self._chart = Lines(tr("tick"))
            heading(tr("Compare with another version"))
            self._compare = Compare(caller, recording, self._tick.beside, self._go, self._show_again, _WINDOW)
        self._body.set_visibility(False)
        self._curves: RecordedCurvesDocument | None = None
        self._player = ui.timer(_PLAY_EVERY_S, self._next, active=False)
        self._growth = ui.timer(_GROWN_EVERY_S, self._grow, active=False)
        ui.keyboard(self._key, ignore=["input", "textarea"])
        ui.add_body_html(_NO_SCROLLING)
        ui.timer(0.0, self._load, once=True)

    async def _load(self) -> None:
        try:
            recorded = await self._ticks(0, _WINDOW)
            self._windows[0] = recorded.ticks
            self._draws_frames, self._has_boards = recorded.draws_frames, recorded.draws_boards
            self._head(recorded)
            self._started.set_text(f"{pretty(recorded.start)}\n→ {pretty(recorded.start_reply)}")
            self._tick.labels, self._tick.action_labels = recorded.labels, recorded.action_labels
            self._compare.action_labels = recorded.action_labels
            self._at = self._last_tick if recorded.cause else 0  # what the viewer wants to see of a game that failed
            await self._show()
            await self._load_curves()
            await self._compare.load(*self._chosen)
        except BrayxError as error:
            self._fail(error)
            return
        if not recorded.recording.end:
            self._growth.activate()

    async def _ticks(self, first: int, count: int) -> RecordedTicksDocument:
        recorded: RecordedTicksDocument = await self._caller.get(
            RecordedTicksDocument, self._path, first=first, count=count
        )
        return recorded

    async def _grow(self) -> None:
        """Loads further ticks of a session that still runs."""
        try:
            recorded = await self._ticks(0, 1)
            recording = recorded.recording
            if recording.ticks - 1 != self._last_tick or recording.end:
                self._windows = {window: ticks for window, ticks in self._windows.items() if len(ticks) == _WINDOW}
                self._head(recorded)
                await self._load_curves()
        except BrayxError as error:
            self._growth.deactivate()
            self._fail(error)
            return
        if recording.end:
            self._growth.deactivate()

    async def _load_curves(self) -> None:
        curves: RecordedCurvesDocument = await self._caller.get(RecordedCurvesDocument, f"{self._path}/curves")
        self._curves = curves
        first = [name for name in _FIRST_CURVES if name in curves.curves]
        names = [*first, *sorted(set(curves.curves) - set(first))]
        self._choice.set_options(names, value=[name for name in self._choice.value or [] if name in names] or names[:1])
        self._draw()

    def _head(self, recorded: RecordedTicksDocument) -> None:
        recording, self._stop = recorded.recording, recorded.stop
        self._last_tick = max(recording.ticks - 1, 0)
        self._last = self._last_tick + (self._stop is not None)
        self._has_frames = recording.frames > 0 or self._draws_frames
        hint = tr("No pictures: set `frames` in the job's recording, or add a `kind: render` or `kind: board`.")
        self._no_picture.set_text("" if self._has_frames or self._has_boards else hint)
        self._formats.clear()  # a session that runs may get its first frame, and so another format
        with self._formats:
            for format in recording.formats:
                ui.link(format, f"{self._path}/file?format={format}")
        self._slider.props(f"max={max(self._last, 1)}")
        self._title.set_text(recording.session)
        self._cause.set_text(recorded.cause)
        self._cause.set_visibility(bool(recorded.cause))
        facts = [
            clock(recording.began_s, seconds=True),
            tr("{ticks}, end: {end}", ticks=ticks_text(recording.ticks), end=end_in_words(recording.end)),
        ]
        if recording.result is not None:
            facts.append(tr("return {value}", value=number(recording.result)))
        if recording.lost:
            facts.append(tr("{count} ticks lost", count=recording.lost))
        if player := player_of(recording):
            facts.append(tr("played by {player}", player=player))
        self._about.set_text(", ".join(facts))
        self._loading.clear()
        self._body.set_visibility(True)

    def _fail(self, error: BrayxError) -> None:
        self._player.deactivate()
        self._loading.clear()
        self._failure.say(error)

    async def _go(self, index: int) -> None:
        self._at = min(max(index, 0), self._last)
        await self._show()

    async def _show(self) -> None:
        index = self._at
        if index == self._shown:
            return
        tick = min(index, self._last_tick)
        window = tick // _WINDOW
        ticks = self._windows.get(window)
        if ticks is None:
            try:
                ticks = (await self._ticks(window * _WINDOW, _WINDOW)).ticks
            except BrayxError as error:
                self._fail(error)
                return
            self._windows[window] = ticks
            if len(self._windows) > _MAX_WINDOWS:
                del self._windows[next(iter(self._windows))]
            if index != self._at:  # the viewer has moved on
                return
        offset = tick - window * _WINDOW
        if offset < len(ticks):
            self._shown = index
            self._tick.show(ticks[offset], with_image=not self._has_frames)
            if index > tick:
                self._tick.show_end(self._stop)
            if self._slider.value != index:
                self._slider.set_value(index)
            await self._show_frame(index)
            await self._compare.show(tick, ticks[offset])

    async def _show_again(self) -> None:
        self._shown = -1
        await self._show()

    async def _show_frame(self, index: int) -> None:
        """Shows the picture at an index. If the viewer moves on while it loads, shows the newest index's next."""
        if not (self._has_frames or self._has_boards) or self._loading_frame:
            return
        self._loading_frame = True
        try:
            while True:
                if self._has_boards:
                    self._has_boards = await self._drawn(self._show_board(index))
                if self._has_frames:
                    self._has_frames = await self._drawn(self._show_image(min(index, self._last_tick)))
                if index == self._shown:
                    return
                index = self._shown
        except BrayxError as error:
            self._fail(error)
        finally:
            self._loading_frame = False

    async def _show_board(self, index: int) -> None:
        try:
            board = await self._caller.get(BoardDocument | None, f"{self._path}/boards/{index}")
        except AgentError:
            if index > self._last_tick:  # not every game's stop has a board
                await self._show_board(self._last_tick)
                return
            if index < self._last_tick or not self._cause.text:
                raise
            self._position.set_text(tr("No board: the game sent none."))  # in the tick that failed
            self._board.show(BoardDocument(rows=[]))
            return
        if board is not None:
            self._position.set_text(" ".join(filter(None, [board.text, tr(_RESULTS[board.result or ""])])))
            self._board.show(board.model_copy(update={"moves": []}))

    async def _show_image(self, tick: int) -> None:
        self._tick.show_image(await self._caller.image(f"{self._path}/frames/{tick}"))

    async def _drawn(self, work: Awaitable[None]) -> bool:
        """Whether the job's code could draw; if not, shows why. It would fail at other ticks, too."""
        try:
            await work
        except AgentError as error:
            self._no_picture.set_text(tr("The frame cannot be drawn: {why}", why=sentence(error.message)))
            return False
        return True

    async def _key(self, event: KeyEventArguments) -> None:
        if not event.action.keydown:
            return
        step = 10 if event.modifiers.shift else 1
        moves = {
            "ArrowLeft": -step, "ArrowRight": step, "PageUp": -100, "PageDown": 100, "Home": -self._last,
            "End": self._last,
        }  # fmt: skip
        name = str(event.key.name)
        if name in moves:
            await self._go(self._at + moves[name])
        elif name == " ":
            await self._toggle()

    async def _toggle(self) -> None:
        if self._player.active:
            self._player.deactivate()
        else:
            if self._at >= self._last:
                await self._go(0)
            self._player.activate()
        self._play.props(f"icon={'pause' if self._player.active else 'play_arrow'}")

    async def _next(self) -> None:
        if self._at >= self._last:
            await self._toggle()
        else:
            await self._go(self._at + 1)

    def _draw(self) -> None:
        if self._curves is None:
            return
        chosen = {
            name: list(zip(map(float, self._curves.ticks), self._curves.curves[name], strict=False))  # see the document
            for name in self._choice.value or []
        }
        self._chart.show(chosen)
