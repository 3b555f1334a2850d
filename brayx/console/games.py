"""Games that humans play on the page, by a job's board at the job's own door. Knows nothing of pages or of any game.

A board is a generator that yields

    ("start" | "tick" | "stop", agent, body)   a request of the session GAME-agent-AGENT; it gets the reply as bytes
    ("ask", "", board)                         when it is the human's turn; it gets the move, or None: they give up

and returns the final board. A board is a `BoardDocument`, as plain dicts and lists.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError
from pydantic_core import from_json

from brayx.components import load
from brayx.console.documents import Document
from brayx.errors import AgentError, BrayxError, ConfigError, ProtocolError, ServiceFull, SessionUnknown
from brayx.gamecore.auth import credentials
from brayx.gamecore.client import Client
from brayx.gamecore.doors import DOORS
from brayx.league.levels import read_levels

_MAX_GAMES = 32
_ABANDONED_S = 600.0
"""A game without a move for this long is dropped."""
_TICK_S = 8.0
"""Time limit for one request, below the 10 s that the page waits for an answer."""
_DOORS = ("http", "ingress", *DOORS)
"""Doors in order of preference: over HTTP, a session needs no connection while the human thinks."""


class CellDocument(Document):
    """A cell of a board."""

    text: Annotated[str, Field(max_length=8)] = ""
    colour: Annotated[str, Field(pattern="^(#[0-9a-fA-F]{6})?$")] = ""
    """Colour of the text; empty: the page's."""
    label: Annotated[str, Field(max_length=80)] = ""
    """Description for screen readers."""


class BoardMoveDocument(Document):
    """A legal move."""

    move: Any
    """The value that the game gets: any JSON."""
    label: Annotated[str, Field(max_length=80)]
    at: tuple[int, int] | None = None
    """Row and column of the cell that is its button; null: its button is below the board."""


class BoardDocument(Document):
    """A game as a human sees it."""

    text: Annotated[str, Field(max_length=400)] = ""
    rows: Annotated[list[Annotated[list[CellDocument], Field(max_length=32)]], Field(max_length=32)]
    moves: Annotated[list[BoardMoveDocument], Field(max_length=1024)] = []
    """The human's legal moves; empty: the game has ended."""
    line: Annotated[list[tuple[int, int]], Field(max_length=1024)] = []
    """Row and column of each cell that decided the game, such as four in a row."""
    result: Literal["win", "draw", "loss"] | None = None
    """The human's result, in a recording the agent's; null: the game goes on, or was given up."""


class GameDocument(Document):
    """A game between a human and the job."""

    game: str
    board: BoardDocument
    sessions: list[str] = []
    """Ids of the game's sessions, one for each of the job's agents."""
    opponent: dict[str, Any] | None
    """The job's choice, with keys such as ``player``, ``version`` and ``points``; null: it did not say."""
    over: bool


class HumanGames:
    """The games that humans play with a job. Thread safe.

    Args:
        module, func, folder: the board, see `brayx.jobs.config.BoardConfig`.
        keys_file: keys of the job's doors; None: the key in the environment, if any.
        think_s: how long the job waits for a session's next request.
        model: the league's model in the registry, whose versions are opponents; empty: no opponent can be requested.
        levels: file of the league's levels; empty: there is none.

    Attributes:
        think_s, model: as the arguments.
    """

    def __init__(
        self, module: str, func: str, folder: str, keys_file: str | None, think_s: float, model: str, levels: str
    ) -> None:
        self._board, self._keys_file, self._levels = (module, func, folder), keys_file, levels
        self.think_s, self.model = think_s, model
        self._lock = threading.Lock()
        self._games: dict[str, HumanGame] = {}

    def opponents(self, versions: Sequence[int]) -> dict[str, dict[str, Any]]:
        """Requests for the opponents that a human can choose, by name.

        Args:
            versions: the model's registered versions, the newest first.

        Raises:
            ConfigError: the file of levels cannot be read.
        """
        levels = read_levels(Path(self._levels)) if self._levels else None
        by_level: dict[str, dict[str, Any]] = {
            f"level {name}": {"level": name} for name in (levels.levels if levels else ())
        }
        return by_level | {f"version {version}": {"version": version} for version in versions}

    def begin(self, doors: Mapping[str, str], opponent: dict[str, Any] | None) -> GameDocument:
        """Begins a game.

        Args:
            doors: URL of each of the job's doors, by name.
            opponent: the request for an opponent; None: the job chooses.

        Raises:
            ServiceFull: too many games are played.
            ConfigError: the board cannot be used, or the job has no door.
            BrayxError: the job refused a session.
        """
        door = next((doors[name] for name in _DOORS if name in doors), None)
        if door is None:
            raise ConfigError("the job has no door to play at")
        keys = credentials(self._keys_file, None)
        with self._lock:
            self._drop_ended()
            if len(self._games) >= _MAX_GAMES:
                raise ServiceFull(f"{len(self._games)} games are played here, which is the limit: try again later")
            game = HumanGame(load(*self._board), opponent, lambda: Client(door, timeout_s=_TICK_S, **keys))
            self._games[game.id] = game
        return game.begin()

    def find(self, game: str) -> HumanGame:
        """A game by its id.

        Raises:
            SessionUnknown: there is none.
        """
        with self._lock:
            if game not in self._games:
                raise SessionUnknown(f"there is no game {game[:80]!r}, or it was dropped: begin another")
            return self._games[game]

    def _drop_ended(self) -> None:
        """Drops games that have ended or were abandoned; the job ends their sessions by itself."""
        now = time.monotonic()
        for name, game in list(self._games.items()):
            if game.over or now - game.moved_at > _ABANDONED_S:
                del self._games[name]
                game.close()


class HumanGame:
    """One game that a human plays. Thread safe.

    Args:
        board: the function of the job's board.
        opponent: as for `HumanGames.begin`.
        connect: makes a client of the job's door, one for each agent.

    Attributes:
        id: id of the game; its sessions' ids begin with it.
        over: whether it has ended.
        moved_at: time of the last move.
    """

    def __init__(
        self,
        board: Callable[[dict[str, Any] | None], Generator[tuple[str, str, Any], Any, Any]],
        opponent: dict[str, Any] | None,
        connect: Callable[[], Client],
    ) -> None:
        self.id, self.over, self.moved_at = f"human-{uuid.uuid4().hex}", False, time.monotonic()
        self._connect = connect
        self._clients: dict[str, Client] = {}
        self._opponent: dict[str, Any] | None = None
        self._lock = threading.Lock()
        self._steps = _run(board, opponent)
        self._shown: BoardDocument | None = None

    def begin(self) -> GameDocument:
        """Plays until it is the human's turn; errors as for `HumanGames.begin`."""
        with self._lock:
            return self._play(None)

    def move(self, move: Any) -> GameDocument:
        """Plays the human's move, and then until it is the human's turn again.

        Raises:
            ProtocolError: the move is not legal; the game goes on.
            SessionUnknown: the game has ended.
            BrayxError: the job refused, for example since it ended a session that waited too long. The game has ended.
        """
        with self._lock:
            if self.over or self._shown is None:
                raise SessionUnknown("this game has ended: begin another")
            legal = {json.dumps(possible.move, sort_keys=True) for possible in self._shown.moves}
            if json.dumps(move, sort_keys=True) not in legal:  # in Python, False is 0
                raise ProtocolError(f"{str(move)[:80]!r} is not a legal move", field="move")
            return self._play(move)

    def give_up(self) -> None:
        """Ends the game."""
        with self._lock:
            if not self.over:
                with contextlib.suppress(BrayxError):
                    self._play(None)
                self.close()

    def close(self) -> None:
        """Closes the connections; the job's time limit ends sessions that still run. Idempotent."""
        self.over = True
        self._steps.close()
        for client in self._clients.values():
            client.close()

    def _play(self, answer: Any) -> GameDocument:
        self.moved_at = time.monotonic()
        try:
            while True:
                try:
                    kind, agent, body = _run(self._steps.send, answer)
                except StopIteration as end:
                    self._shown = checked_board(end.value)
                    break
                if kind == "ask":
                    self._shown = checked_board(body)
                    return self._document()
                answer = self._request(kind, agent, body)
        except BaseException:
            self.close()
            raise
        self.close()
        return self._document()

    def _request(self, kind: str, agent: str, body: Any) -> bytes:
        data = b"" if body is None else json.dumps(body, separators=(",", ":")).encode()
        if kind == "start":
            client = self._clients[agent] = self._connect()
            reply = client.start(data, self._session(agent))
            with contextlib.suppress(ValueError, AttributeError, TypeError):  # not every reply names an opponent
                self._opponent = dict(from_json(reply).get("opponent")) or self._opponent
            return reply
        if kind not in ("tick", "stop") or agent not in self._clients:
            raise ConfigError(f"the board asked for {kind!r} of {agent!r}, expected start, then tick or stop, or ask")
        client = self._clients[agent]
        return client.tick(data) if kind == "tick" else client.stop(data)

    def _document(self) -> GameDocument:
        assert self._shown is not None
        sessions = [self._session(agent) for agent in self._clients]
        return GameDocument(game=self.id, board=self._shown, sessions=sessions, opponent=self._opponent, over=self.over)

    def _session(self, agent: str) -> str:
        return f"{self.id}-agent-{agent}"


def _run(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls the user's code, and turns its errors into typed ones; even a `SystemExit` must not end the console."""
    try:
        return function(*arguments)
    except (BrayxError, StopIteration):
        raise
    except SystemExit as error:
        raise AgentError(str(error.code or "the game has ended")) from None
    except Exception as error:
        raise AgentError(f"the board failed: {type(error).__name__}: {error}") from error


def checked_board(board: Any) -> BoardDocument:
    """A board of the user's code, as a document.

    Raises:
        ConfigError: it is none.
    """
    try:
        checked = BoardDocument.model_validate_json(json.dumps(board))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"]))
        raise ConfigError(f"the board is not one: {field}: {first['msg']}") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"the board is not JSON: {error}") from None
    for move in checked.moves:
        if move.at is not None and not (
            0 <= move.at[0] < len(checked.rows) and 0 <= move.at[1] < len(checked.rows[move.at[0]])
        ):
            raise ConfigError(f"the board's move {move.label!r} is at {list(move.at)}, where there is no cell")
    return checked
