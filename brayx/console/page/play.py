"""The page for a human's game against a version. Knows nothing of any game: the job's board says how it looks."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable
from typing import Any

from nicegui import ui
from nicegui.events import KeyEventArguments

from brayx.console.documents import DoneDocument
from brayx.console.games import BoardDocument, BoardMoveDocument, CellDocument, GameDocument
from brayx.console.overview import JobDocument
from brayx.console.page.caller import ApiCaller, Connect
from brayx.console.page.frame import (
    MUTED,
    RESPONSE_S,
    Alert,
    empty,
    frame,
    heading,
    loading,
    number,
    sentence,
    since,
    who_plays,
)
from brayx.console.page.tick import ActionBars
from brayx.console.page.words import tr
from brayx.console.play import UNDRAWN, OpponentListDocument
from brayx.console.sessions import SessionDocument, TicksDocument
from brayx.errors import BrayxError

_ENDS = {"win": "You win.", "loss": "You lose.", "draw": "A draw.", "": "The game has ended."}
_MOVE = "#0072b238"
"""Background of a cell that is a legal move, in light and dark mode."""
_CHANGED, _DECIDES = "3px solid #56b4e9", "4px solid #009e73"
"""Frames of a cell that has changed since the board before, and of one that decides the game."""
_CELL_PX = 56
"""Maximum side of a cell. Cells are smaller on a phone, so that seven fit into 390 pixels."""


def add(connect: Connect) -> None:
    """Adds the page."""

    @ui.page("/play", response_timeout=RESPONSE_S)
    def play(opponent: str = "") -> None:
        with frame("Play", connect) as caller:
            _Play(caller, opponent)


class _Play:
    """One viewer's games, one after the other."""

    def __init__(self, caller: ApiCaller, opponent: str) -> None:
        self._caller, self._first_opponent = caller, opponent
        self._game: GameDocument | None = None
        self._labels: dict[Any, str] = {}
        """Labels of the moves that boards have shown, by the move's number."""
        self._busy, self._after = False, 0
        heading(tr("Play against a version"))
        self._none = empty("").classes("whitespace-pre-line break-all")
        self._none.set_visibility(False)
        self._loading = loading()
        with ui.column().classes("w-full items-stretch gap-3") as self._body:
            with ui.row().classes("w-full items-center gap-2"):
                self._opponent = ui.select({"": tr("the job decides")}, value="", label=tr("opponent")).classes("w-56")
                self._opponent.props("dense outlined")
                self._new = ui.button(tr("New game"), on_click=self._begin)
                self._leave = ui.button(tr("Give up"), on_click=self._give_up).props("outline color=negative")
            self._about = ui.label().classes(MUTED)
            self._state = ui.label().classes("text-lg font-semibold").props('role="status"')
            self._failure = Alert()
            with ui.row().classes("w-full items-start gap-6"):
                with ui.column().classes("grow min-w-0"):
                    self._board = BoardGrid(self._move)
                with ui.column().classes("w-72") as self._thought:
                    heading(tr("What the agent is thinking"))
                    self._bars = ActionBars("")
            self._thought.set_visibility(False)
            self._keys = ui.label().classes(f"text-xs {MUTED}")
        self._body.set_visibility(False)
        self._leave.set_visibility(False)
        ui.keyboard(self._key, repeating=False, ignore=["input", "textarea"])
        ui.timer(0.0, self._load, once=True)

    async def _load(self) -> None:
        doors: list[str] = []
        try:
            choice: OpponentListDocument = await self._caller.get(OpponentListDocument, "/api/opponents")
            if choice.why_not == UNDRAWN:
                job: JobDocument = await self._caller.get(JobDocument, "/api/job")
                doors = [f"{door} {url}" for door, url in job.doors.items()]
        except BrayxError as error:
            choice = OpponentListDocument(why_not=sentence(error.message))
        self._loading.clear()
        self._none.set_text("\n".join([tr(choice.why_not), *doors]))
        self._none.set_visibility(bool(choice.why_not))
        self._body.set_visibility(not choice.why_not)
        first = self._first_opponent if self._first_opponent in choice.opponents else ""
        self._requests = {"": None, **choice.opponents}
        self._opponent.set_options(
            {"": tr("the job decides"), **{name: name for name in choice.opponents}}, value=first
        )
        self._about.set_text(tr("You have {time} for a move; after that the game is lost.", time=since(choice.think_s)))

    async def _begin(self) -> None:
        self._state.set_text(tr("Starting the game …"))
        self._after = 0
        self._thought.set_visibility(False)
        self._board.forget()
        body = {"opponent": self._requests[self._opponent.value]}
        await self._play(self._caller.post(GameDocument, "/api/games", body))

    async def _move(self, move: BoardMoveDocument) -> None:
        game = self._game
        if game is None or game.over or self._busy:
            return
        self._state.set_text(tr("You play {move} …", move=move.label))
        await self._play(self._caller.post(GameDocument, f"/api/games/{game.game}/moves", {"move": move.move}))

    async def _give_up(self) -> None:
        game = self._game
        if game is None or game.over:
            return
        self._over(tr("Given up."))
        try:
            await self._caller.delete(DoneDocument, f"/api/games/{game.game}")
        except BrayxError as error:
            self._failure.say(error)

    async def _play(self, work: Awaitable[Any]) -> None:
        """Waits for the next board and shows it."""
        self._busy = True
        self._failure.set_visibility(False)
        self._new.disable()
        try:
            game: GameDocument = await work
        except BrayxError as error:
            self._over(tr("The game cannot go on."))
            self._failure.say(error)
            return
        finally:
            self._busy = False
            self._new.enable()
        self._game = game
        self._labels |= {move.move: move.label for move in game.board.moves if type(move.move) is int}
        against = _named(game.opponent) or await self._acting(game)
        self._about.set_text(
            " ".join(
                filter(None, [game.board.text, tr("Your opponent: {opponent}.", opponent=against) if against else ""])
            )
        )
        self._board.show(game.board)
        await self._think(game)
        if game.over:
            self._over(tr(_ENDS[game.board.result or ""]))
            return
        self._leave.set_visibility(True)
        self._new.set_visibility(False)
        self._state.set_text(tr("Your move."))
        keys = min(len(game.board.moves), 9)
        self._keys.set_text(tr("Keys 1 to {keys} play the first {keys} moves; Tab and Enter any.", keys=keys))

    async def _acting(self, game: GameDocument) -> str:
        """The player or versions of a game whose start names no opponent; empty: not known."""
        try:
            rows: list[SessionDocument] = await self._caller.get(list[SessionDocument], "/api/sessions")
        except BrayxError:
            return ""
        return next((who_plays(row) for row in rows if row.session in game.sessions), "")

    async def _think(self, game: GameDocument) -> None:
        """Shows the action probabilities of the agent's last move. Follows its session, from the first call on."""
        with contextlib.suppress(BrayxError):  # the session has ended
            for session in game.sessions:
                newest = await self._caller.get(
                    TicksDocument, "/api/sessions/ticks", session=session, after=self._after
                )
                self._after = newest.after
                if newest.ticks and (shares := newest.ticks[-1].probabilities):
                    labels = [self._labels.get(action, str(action)) for action in range(len(shares))]
                    self._bars.show(shares, newest.ticks[-1].action, labels)
                    self._thought.set_visibility(True)

    def _over(self, text: str) -> None:
        self._state.set_text(text)
        self._keys.set_text("")
        self._leave.set_visibility(False)
        self._new.set_text(tr("Play again"))
        self._new.set_visibility(True)
        if self._game is not None:
            self._game = self._game.model_copy(update={"over": True})
            self._board.show(self._game.board.model_copy(update={"moves": []}))

    async def _key(self, event: KeyEventArguments) -> None:
        digit = str(event.key.name)
        if self._game is None or not event.action.keydown or not (digit.isdecimal() and digit != "0"):
            return
        moves = self._game.board.moves
        if int(digit) <= len(moves):
            await self._move(moves[int(digit) - 1])


class BoardGrid:
    """A grid of cells, of which legal moves are buttons, and buttons below for moves without a cell.

    Args:
        on_move: called with a move; None: no game is played.
    """

    def __init__(self, on_move: Any = None) -> None:
        self._on_move = on_move
        self._grid = ui.element("div").classes("w-full").props('role="group" aria-label="board"')
        self._below = ui.row().classes("w-full gap-2")
        self._cells: list[list[_CellButton]] = []
        self._rows: list[list[CellDocument]] = []
        self._changed: set[tuple[int, int]] = set()

    def forget(self) -> None:
        """The next board is that of another game, so no cell has changed."""
        self._rows, self._changed = [], set()

    def show(self, board: BoardDocument) -> None:
        """Shows a board. Reuses the cells, so that the focus stays where it is."""
        shape = [len(row) for row in board.rows]
        if shape != [len(row) for row in self._cells]:
            columns = max(shape, default=1)
            self._grid.style(
                f"display: grid; gap: 3px; grid-template-columns: repeat({columns}, minmax(0, 1fr)); "
                f"max-width: {columns * _CELL_PX}px"
            )
            self._grid.clear()
            with self._grid:
                self._cells = [
                    [_CellButton(self._on_move, row, column) for column in range(count)]
                    for row, count in enumerate(shape)
                ]
        moves = {move.at: move for move in board.moves if move.at is not None}
        if board.rows != self._rows:
            before = self._rows if [len(row) for row in self._rows] == shape else []
            self._rows = board.rows
            places = [(row, column) for row, count in enumerate(shape) for column in range(count)]
            self._changed = {
                (row, column) for row, column in places if before and before[row][column] != board.rows[row][column]
            }
        for row, cells in enumerate(self._cells):
            for column, cell in enumerate(cells):
                place = row, column
                frame = _DECIDES if place in board.line else _CHANGED if place in self._changed else "none"
                cell.show(board.rows[row][column], moves.get(place), frame)
        self._below.clear()
        with self._below:
            for move in board.moves:
                if move.at is None:
                    ui.button(move.label, on_click=lambda move=move: self._on_move(move)).props("outline")


class _CellButton:
    """One cell, which is a button if it is a legal move."""

    def __init__(self, on_move: Any, row: int, column: int) -> None:
        self._where = f"row {row + 1}, column {column + 1}"
        self._move: BoardMoveDocument | None = None
        self._on_move = on_move
        self._shown: tuple[CellDocument, BoardMoveDocument | None, str] | None = None
        self._button = ui.element("button").classes(
            "rounded border border-gray-500/40 flex items-center justify-center"
        )
        self._button.style("aspect-ratio: 1; padding: 0; min-width: 0; opacity: 1 !important").on("click", self._press)
        with self._button:
            self._text = ui.label().classes("text-4xl leading-none")

    def show(self, cell: CellDocument, move: BoardMoveDocument | None, frame: str) -> None:
        """Shows a cell with a frame."""
        if self._shown == (cell, move, frame):
            return
        self._shown, self._move = (cell, move, frame), move
        self._button.style(f"outline: {frame}; outline-offset: -3px")
        self._text.set_text(cell.text)
        self._text.style(f"color: {cell.colour or 'inherit'}")
        description = ": ".join(filter(None, [self._where, cell.label or cell.text]))
        self._button.props["aria-label"] = f"{description}, play {move.label}" if move else description
        self._button.props["disabled"] = move is None
        self._button.style(f"background: {_MOVE if move else 'none'}; cursor: {'pointer' if move else 'default'}")
        self._button.update()

    async def _press(self) -> None:
        if self._move is not None:
            await self._on_move(self._move)


def _named(opponent: dict[str, Any] | None) -> str:
    """An opponent in words."""
    if not opponent:
        return ""
    player, version, points = (opponent.get(key) for key in ("player", "version", "points"))
    label = f"{player}:{version}" if player and version else version
    words = [tr("version {version}", version=label) if version else str(player or "")]
    words += [tr("level {name}", name=opponent["level"]) if opponent.get("level") else ""]
    words += [tr("{points} points", points=number(round(points))) if isinstance(points, int | float) else ""]
    return ", ".join(filter(None, words))
