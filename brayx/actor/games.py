"""Sessions of one game share their states: an attribute set at tick k is visible to the game's others at tick k.

A game's sessions have the ids ``GAME-agent-AGENT``. Each tick number has one board, which the states of all sessions
read and write. A board is kept while a session of the game may still reach its tick, and no game keeps more than
`MAX_BOARDS`. Pure asyncio, one event loop; knows nothing of routing.
"""

from __future__ import annotations

import asyncio
from typing import Any

from brayx.actor.agent import State, unset_error
from brayx.errors import DeadlineExceeded
from brayx.gamecore.protocol import game_of

MAX_BOARDS = 1024
"""Boards of a game: a session further behind than this misses the oldest ticks."""

_OWN = frozenset(State.__annotations__)


class _Board:
    """The attributes of one tick of a game, and the waits for further ones."""

    __slots__ = ("values", "waiters")

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.waiters: dict[str, set[asyncio.Future[None]]] = {}

    def put(self, name: str, value: Any) -> None:
        self.values[name] = value
        for waiter in self.waiters.pop(name, ()):
            if not waiter.done():
                waiter.set_result(None)


class SharedState(State):
    """A `State` whose further attributes the states of the same tick of all its game's sessions see.

    Attributes of this session's agents come first, so that agents of one class may each keep a value under the same
    name (``state.step``) for their episodes. Values for other agents need distinct names. Pickles as a plain `State`
    with everything visible at the time.
    """

    def __init__(self, seat: Seat, board: _Board, *, tick: int, input: Any, output: Any) -> None:
        super().__init__(seat.session, tick=tick, input=input, output=output)
        self.__dict__.update(_seat=seat, _board=board)

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__[name] = value
        if name not in _OWN:
            self._board.put(name, value)

    def __getattr__(self, name: str) -> Any:
        board: _Board | None = self.__dict__.get("_board")
        if board is None or name not in board.values:
            return super().__getattr__(name)
        return board.values[name]

    async def wait(self, name: str, timeout_s: float = 10.0) -> Any:
        """The attribute ``name``, as soon as an agent of any session of the game has set it at this tick.

        Raises:
            DeadlineExceeded: no agent set it within ``timeout_s``. At once, and with ``reason: alone`` in its details,
                when the game's other sessions have ended and this one has no other agent.
        """
        board, seat = self._board, self._seat
        if name not in self.__dict__ and name not in board.values and not seat.alone:
            waiter = asyncio.get_running_loop().create_future()
            waiters = board.waiters.setdefault(name, set())
            waiters.add(waiter)
            seat.waiters.add(waiter)
            try:
                async with asyncio.timeout(timeout_s):
                    await waiter
            except TimeoutError:
                raise unset_error(name, timeout_s, self.tick) from None
            finally:
                waiters.discard(waiter)
                seat.waiters.discard(waiter)
        try:
            return self.__dict__[name] if name in self.__dict__ else board.values[name]
        except KeyError:
            raise DeadlineExceeded(
                f"state.wait({name!r}): the other sessions of game {self.game!r} ended before one set it"
                f" at tick {self.tick}",
                attribute=name,
                reason="alone",
            ) from None

    def __getstate__(self) -> dict[str, Any]:
        attributes = {name: value for name, value in self.__dict__.items() if name not in ("_seat", "_board")}
        return {**self._board.values, **attributes}

    def __reduce__(self) -> tuple[Any, ...]:
        return _plain, (self.__getstate__(),)


def _plain(attributes: dict[str, Any]) -> State:
    state = State.__new__(State)
    state.__setstate__(attributes)
    return state


class _Game:
    """The running sessions of one game, each with its tick, and the boards from the slowest one's on."""

    __slots__ = ("boards", "left", "name", "seats")

    def __init__(self, name: str) -> None:
        self.name = name
        self.seats: dict[Seat, int] = {}
        self.boards: dict[int, _Board] = {}
        self.left = False

    def clear_before(self, tick: int) -> None:
        for past in [number for number in self.boards if number < tick]:
            del self.boards[past]


class Seat:
    """A running session's place in its game; `Games.join` makes it.

    Attributes:
        session: id of the session.
        waiters: the attributes that its agents wait for.
    """

    __slots__ = ("_agents", "_game", "_games", "session", "waiters")

    def __init__(self, games: Games, game: _Game, session: str, agents: int) -> None:
        self._games = games
        self._game = game
        self._agents = agents
        self.session = session
        self.waiters: set[asyncio.Future[None]] = set()

    @property
    def alone(self) -> bool:
        """Whether no other agent is left that could set what its agent waits for.

        True only if other sessions existed and have ended, since others may still start at first, and if the session
        has one agent, since several may wait for each other.
        """
        return self._agents == 1 and self._game.left and self._game.seats.keys() <= {self}

    def state(self, *, tick: int, input: Any, output: Any) -> SharedState:
        """The session's state for its next tick."""
        game = self._game
        boards = game.boards
        before, game.seats[self] = game.seats[self], tick
        board = boards.get(tick)
        if board is None:
            board = boards[tick] = _Board()
        for past in range(before, min(game.seats.values())):
            boards.pop(past, None)
        if len(boards) > self._games.most_boards:
            del boards[min(boards)]
        return SharedState(self, board, tick=tick, input=input, output=output)

    def leave(self, *, moved: bool = False) -> None:
        """Ends the session: drops boards that only it needs, and ends waits that only it could fulfil. Idempotent.

        With ``moved`` it continues elsewhere; sessions that wait for it may move too, once their wait ends.
        """
        game = self._game
        if game.seats.pop(self, None) is None:
            return
        game.left = game.left or not moved
        if not game.seats:
            game.boards.clear()  # states kept for pictures still refer to the game
            self._games.forget(game.name)
            return
        game.clear_before(min(game.seats.values()))
        for seat in game.seats:
            if seat.alone:
                for waiter in seat.waiters:
                    if not waiter.done():
                        waiter.set_result(None)


class Games:
    """The games of one replica, by name; as many as have running sessions here.

    Args:
        most_boards: ticks that a game keeps boards of; past it the oldest goes.
    """

    def __init__(self, most_boards: int = MAX_BOARDS) -> None:
        self.most_boards = most_boards
        self._games: dict[str, _Game] = {}

    def __len__(self) -> int:
        return len(self._games)

    def join(self, session: str, *, tick: int = 0, agents: int = 1) -> Seat | None:
        """The seat of a session that begins; None: its id names no game, so it shares nothing.

        Args:
            session: id of the session.
            tick: number of its first tick; not 0 when it began elsewhere.
            agents: number of agents that act in it.
        """
        name = game_of(session)
        if not name:
            return None
        game = self._games.get(name)
        if game is None:
            game = self._games[name] = _Game(name)
        seat = Seat(self, game, session, agents)
        game.seats[seat] = tick
        return seat

    def boards(self, name: str) -> list[int]:
        """The ticks of a game that have boards, in order."""
        game = self._games.get(name)
        return sorted(game.boards) if game is not None else []

    def forget(self, name: str) -> None:
        """Drops a game after its last session."""
        del self._games[name]
