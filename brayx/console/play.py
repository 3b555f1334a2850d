"""Games of a human against the job, as the API's calls. `brayx.console.games` plays them."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from brayx.console.documents import Document, DoneDocument
from brayx.console.games import GameDocument, HumanGame, HumanGames
from brayx.console.source import Source
from brayx.errors import ConfigError, SessionUnknown
from brayx.tracking import registered_models

UNDRAWN = "This page cannot draw the game: its job has no `kind: board`. Play in the game itself, through a door:"


class OpponentListDocument(Document):
    """The opponents for a human."""

    why_not: str
    """Why a human cannot play here; empty: a human can."""
    think_s: float = 0.0
    """Time for a move, after which the game is lost with its session."""
    opponents: dict[str, dict[str, Any]] = {}
    """Requests for `NewGameDocument`, by name. Besides these, the job may choose the opponent."""
    model: str = ""
    """The registered model whose versions are opponents; empty: none is."""


class NewGameDocument(Document):
    """Body of a new game."""

    opponent: dict[str, Any] | None = None
    """A request such as ``{"level": "easy"}`` or ``{"version": 3}``; null: the job chooses."""


class HumanMoveDocument(Document):
    """Body of a human's move."""

    move: Any


def routes(source: Source) -> APIRouter:
    """The API's calls about games."""
    router = APIRouter(prefix="/api", tags=["games"])
    games = None if source.board is None else HumanGames(**source.board)

    @router.get("/opponents")
    def opponents() -> OpponentListDocument:
        """The opponents for a human, or why a human cannot play here."""
        why_not = _why_not(source)
        if games is None or why_not:
            return OpponentListDocument(why_not=why_not)
        versions = next((model.versions for model in registered_models(source.uri) if model.name == games.model), [])
        requests = games.opponents([entry.version for entry, _ in versions])
        return OpponentListDocument(why_not="", think_s=games.think_s, opponents=requests, model=games.model)

    @router.post("/games")
    def new_game(new: NewGameDocument) -> GameDocument:
        """Begins a game at the job's door, like any game, and plays until it is the human's turn."""
        why_not = _why_not(source)
        if games is None or why_not:
            raise ConfigError(why_not)
        return games.begin(source.job()["doors"], new.opponent)

    @router.post("/games/{game}/moves")
    def move(game: str, chosen: HumanMoveDocument) -> GameDocument:
        """Plays the human's move, and then on until it is the human's turn again, or the game ends."""
        return played(game).move(chosen.move)

    @router.delete("/games/{game}")
    def give_up(game: str) -> DoneDocument:
        """Gives up a game."""
        played(game).give_up()
        return DoneDocument(done="the game is given up")

    def played(game: str) -> HumanGame:
        if games is None:
            raise SessionUnknown(f"there is no game {game!r}: this job has no board")
        return games.find(game)

    return router


def _why_not(source: Source) -> str:
    """Why no human can play here; empty: a human can."""
    if source.channel is None:
        return "There is no job behind this console."
    if source.job()["mode"] != "serve":
        return "A training plays its own games. A served job plays with humans: `brayx serve`."
    return "" if source.board is not None else UNDRAWN
