"""The page for a human's game against a version. Knows nothing of any game: the job's board says how it looks."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

from nicegui import ui
from nicegui.events import KeyEventArguments

from brayx.console.documents import DoneDocument
from brayx.console.games import BoardDocument, BoardMoveDocument, CellDocument, GameDocument
from brayx.console.page.caller import ApiCaller, Connect
from brayx.console.page.frame import MUTED, Alert, empty, frame, heading, loading, number, sentence, since
from brayx.console.play import OpponentListDocument
from brayx.errors import BrayxError

_ENDS = {"win": "You win.", "loss": "You lose.", "draw": "A draw."}
_MOVE = "#0072b238"
"""Background of a cell that is a legal move, in light and dark mode."""
_CELL_PX = 56
"""Maximum side of a cell. Cells are smaller on a phone, so that seven fit into 390 pixels."""


def add(connect: Connect) -> None:
    """Adds the page."""

    @ui.page("/play")
    def play() -> None:
        with frame("Play", connect) as caller:
            _Play(caller)


class _Play:
    """One viewer's games, one after the other."""

    def __init__(self, caller: ApiCaller) -> None:
        self._caller = caller
        self._game: GameDocument | None = None
        self._busy = False
        heading("Play against a version")
        self._none = empty("")
        self._none.set_visibility(False)
        self._loading = loading()
        with ui.column().classes("w-full items-stretch gap-3") as self._body:
            with ui.row().classes("w-full items-center gap-2"):
                self._opponent = ui.select({"": "as served"}, value="", label="opponent").classes("w-56")
                self._opponent.props("dense outlined")
                self._new = ui.button("New game", on_click=self._begin)
                self._leave = ui.button("Give up", on_click=self._give_up).props("outline color=negative")
            self._about = ui.label().classes(MUTED)
            self._state = ui.label().classes("text-lg font-semibold").props('role="status"')
            self._failure = Alert()
            self._board = _BoardGrid(self._move)
            self._keys = ui.label().classes(f"text-xs {MUTED}")
        self._body.set_visibility(False)
        self._leave.set_visibility(False)
        ui.keyboard(self._key, repeating=False, ignore=["input", "textarea"])
        ui.timer(0.0, self._load, once=True)

    async def _load(self) -> None:
        try:
            choice: OpponentListDocument = await self._caller.get(OpponentListDocument, "/api/opponents")
        except BrayxError as error:
            choice = OpponentListDocument(why_not=sentence(error.message))
        self._loading.clear()
        self._none.set_text(choice.why_not)
        self._none.set_visibility(bool(choice.why_not))
        self._body.set_visibility(not choice.why_not)
        self._requests = {"": None, **choice.opponents}
        self._opponent.set_options({"": "as served", **{name: name for name in choice.opponents}}, value="")
        self._about.set_text(f"You have {since(choice.think_s)} for a move; after that the game is lost.")

    async def _begin(self) -> None:
        if self._game is not None and not self._game.over:
            await self._give_up()
        self._state.set_text("Beginning …")
        body = {"opponent": self._requests[self._opponent.value]}
        await self._play(self._caller.post(GameDocument, "/api/games", body))

    async def _move(self, move: BoardMoveDocument) -> None:
        game = self._game
        if game is None or game.over or self._busy:
            return
        self._state.set_text(f"You play {move.label} …")
        await self._play(self._caller.post(GameDocument, f"/api/games/{game.game}/moves", {"move": move.move}))

    async def _give_up(self) -> None:
        game = self._game
        if game is None or game.over:
            return
        self._over("Given up.")
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
            self._over("The game cannot go on.")
            self._failure.say(error)
            return
        finally:
            self._busy = False
            self._new.enable()
        self._game = game
        against = _named(game.opponent)
        self._about.set_text(
            " ".join(filter(None, [game.board.text, f"Your opponent is {against}." if against else ""]))
        )
        self._board.show(game.board)
        if game.over:
            self._over(_ENDS.get(game.board.result or "", "The game has ended."))
            return
        self._leave.set_visibility(True)
        self._state.set_text("Your move.")
        keys = min(len(game.board.moves), 9)
        self._keys.set_text(f"Keys 1 to {keys} play the first {keys} moves; Tab and Enter any.")

    def _over(self, text: str) -> None:
        self._state.set_text(text)
        self._keys.set_text("")
        self._leave.set_visibility(False)
        self._new.set_text("Play again")
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


class _BoardGrid:
    """A grid of cells, of which legal moves are buttons, and buttons below for moves without a cell."""

    def __init__(self, on_move: Any) -> None:
        self._on_move = on_move
        self._grid = ui.element("div").classes("w-full").props('role="group" aria-label="board"')
        self._below = ui.row().classes("w-full gap-2")
        self._cells: list[list[_CellButton]] = []

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
        for row, cells in enumerate(self._cells):
            for column, cell in enumerate(cells):
                cell.show(board.rows[row][column], moves.get((row, column)))
        self._below.clear()
        with self._below:
            for move in board.moves:
                if move.at is None:
                    ui.button(move.label, on_click=lambda move=move: self._on_move(move)).props("outline no-caps")


class _CellButton:
    """One cell, which is a button if it is a legal move."""

    def __init__(self, on_move: Any, row: int, column: int) -> None:
        self._where = f"row {row + 1}, column {column + 1}"
        self._move: BoardMoveDocument | None = None
        self._on_move = on_move
        self._shown: tuple[CellDocument, BoardMoveDocument | None] | None = None
        self._button = ui.element("button").classes(
            "rounded border border-gray-500/40 flex items-center justify-center"
        )
        self._button.style("aspect-ratio: 1; padding: 0; min-width: 0; opacity: 1 !important").on("click", self._press)
        with self._button:
            self._text = ui.label().classes("text-4xl leading-none")

    def show(self, cell: CellDocument, move: BoardMoveDocument | None) -> None:
        """Shows a cell."""
        if self._shown == (cell, move):
            return
        self._shown, self._move = (cell, move), move
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
    words = [str(opponent.get("player") or ""), f"version {opponent['version']}" if opponent.get("version") else ""]
    points = opponent.get("points")
    words += [f"level {opponent['level']}" if opponent.get("level") else ""]
    words += [f"{number(round(points))} points" if isinstance(points, int | float) else ""]
    return ", ".join(filter(None, words))
