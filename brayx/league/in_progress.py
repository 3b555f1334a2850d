"""Games in progress: which session plays which seat, and the results so far. Pure.

Knows nothing of drawing players or counting results: the league does both, perhaps in another process.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from brayx.errors import BadResult, ServiceFull, SessionError
from brayx.league.config import LeagueConfig
from brayx.league.games import Game
from brayx.league.member import Member
from brayx.league.seats import seat_of

MAX_GAMES = 10_000
"""Maximum games in progress; further ones are refused."""
LOST = "lost"
"""Outcome of a game that ended but could not be counted."""


class GamesInProgress:
    """The games whose sessions are in this process.

    Attributes:
        refused: number of results refused since the last game ended; the next game to end reports it.

    Args:
        config: the league's options.
    """

    def __init__(self, config: LeagueConfig) -> None:
        self._names = config.seat_names
        self._games: dict[str, Game] = {}
        self._sessions: dict[str, Game] = {}
        self.refused = 0

    def __contains__(self, game: str) -> bool:
        return game in self._games

    def __len__(self) -> int:
        return len(self._games)

    def assign(self, game: str, session: str, draw: Callable[[str], Game]) -> Member:
        """The member that plays a session; the same one until the session ends.

        Sessions get seats in the order of their starts, or with ``teams`` the seat that they name.

        Args:
            game: the game's id; empty: the session's id.
            session: the session's id.
            draw: draws the game with this id; called for a game's first session.

        Raises:
            SessionError: the game has no such seat, the seat is taken, or the session has ended.
            ServiceFull: too many games are in progress.
        """
        game = game or session
        running = self._games.get(game)
        if self._sessions.get(session, running) is not running:
            raise SessionError(f"session {session!r} plays in another game than {game!r}", session=session)
        if running is None:
            if len(self._games) >= MAX_GAMES:
                raise ServiceFull(f"{MAX_GAMES} games are in progress: no room for another", games=MAX_GAMES)
            running = draw(game)
        seat = running.sessions.get(session)
        if seat is None:
            seat = running.sessions[session] = seat_of(self._names, running, session)
            self._games[game] = self._sessions[session] = running
        elif seat in running.ended:
            raise SessionError(f"session {session!r} has ended, and its game goes on", session=session)
        return running.members[seat]

    def learns(self, session: str, learners: Collection[str]) -> bool:
        """Whether a session is learned from: its seat is played by the learner that its game was drawn for.

        Args:
            session: the session's id.
            learners: learners that have not retired.
        """
        game = self._sessions.get(session)
        if game is None or game.learner not in learners:
            return False
        return game.members[game.sessions[session]] == Member(game.learner)

    def result(self, session: str, value: Any) -> None:
        """Sets the result of a session's seat. Repeating the same result changes nothing.

        Args:
            session: a running session.
            value: ``win``, ``draw`` or ``loss``; or a finite score, where the highest wins.

        Raises:
            BadResult: the value is none of these, the seat has a different result, or the session is not running.
        """
        try:
            game = self._sessions.get(session)
            if game is None or game.is_over(session):
                raise BadResult(f"result for session {session!r}, which is unknown or over", session=session)
            game.report(session, value)
        except BadResult:
            self.refused += 1
            raise

    def ended(self, session: str, reason: str) -> Game | None:
        """Ends a session; does nothing if it is unknown or over.

        Args:
            session: the session's id.
            reason: why it ended.

        Returns:
            Its game, for `League.finish`, if this was the game's last session; else None.
        """
        game = self._sessions.get(session)
        if game is None or game.is_over(session) or not game.end(session, reason):
            return None
        del self._games[game.id]
        for seated in game.sessions:
            del self._sessions[seated]
        game.refused, self.refused = self.refused, 0
        return game
