"""Seats: who plays in a game, and which session gets which seat. Pure."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence

from brayx.errors import SessionError
from brayx.gamecore.protocol import agent_of
from brayx.league.config import LeagueConfig
from brayx.league.games import Game
from brayx.league.matchmaking import Matchmaker, choose
from brayx.league.member import Member


class Seats:
    """The seats of every game of a league.

    Attributes:
        teams: indices of each team's seats; without teams each seat is one.

    Args:
        config: the league's options.
        seed: makes the draws repeatable.
    """

    def __init__(self, config: LeagueConfig, seed: int) -> None:
        self._seed = seed
        self._shares = {name: config.players[name].share for name in config.learners}
        sizes = [len(team) for team in config.teams.values()] or [1] * config.seats
        seats = iter(range(config.seats))
        self.teams = [[next(seats) for _ in range(size)] for size in sizes]

    def rng(self, game: str) -> random.Random:
        """The random generator that draws a game: a function of the seed and the game's id."""
        digest = hashlib.blake2b(f"{self._seed}/{game}".encode(), digest_size=8).digest()
        return random.Random(int.from_bytes(digest, "big"))

    def draw(self, game: str, matchmaker: Matchmaker, rng: random.Random) -> Game:
        """Draws a game: its learner, the learner's team, and an opponent for each other team."""
        learner = choose(self._shares, rng.random())
        learning = int(rng.random() * len(self.teams))
        return self._seated(
            game,
            learner,
            [Member(learner) if team == learning else matchmaker.draw(learner, rng) for team in range(len(self.teams))],
        )

    def decide(self, game: str, player: Member, opponents: Sequence[Member], rng: random.Random) -> Game:
        """Draws a game for the gate.

        Args:
            game: its id.
            player: plays one team.
            opponents: one for each other team.
            rng: places them.
        """
        players = [player, *opponents]
        rng.shuffle(players)
        return self._seated(game, "", players)

    def retire(self, player: str) -> None:
        """Draws no further game for this learner."""
        self._shares.pop(player, None)

    def _seated(self, game: str, learner: str, players: Sequence[Member]) -> Game:
        return Game(game, learner, [player for player, seats in zip(players, self.teams, strict=True) for _ in seats])


def seat_of(names: Sequence[str], game: Game, session: str) -> int:
    """The seat of a session that is new to its game.

    Args:
        names: the seats' names; empty: sessions get seats in the order in which they come.
        game: the game.
        session: the session's id.

    Raises:
        SessionError: the game has no such seat, or it is taken.
    """
    if not names:
        if len(game.sessions) < len(game.members):
            return len(game.sessions)
        message = f"game {game.id!r} has {len(game.members)} seats, and {session!r} is one session more"
        raise SessionError(message, session=session)
    name = agent_of(session)
    if name not in names:
        expected = ", ".join(names)
        raise SessionError(f"seat is {name!r} in session {session!r}, expected one of {expected}", session=session)
    seat = names.index(name)
    if seat in game.sessions.values():
        raise SessionError(f"seat {name!r} of game {game.id!r} is taken by another session", session=session)
    return seat
