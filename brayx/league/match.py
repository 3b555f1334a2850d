"""The games of matches: who sits where, and how often each of the two won. Knows nothing of models.

The two players swap seats from game to game, in blocks of four: ABBA or, at random, BAAB. So each plays every seat as
often as the other, and also each half of games whose first move alternates between the seats.

A match consists of the first N games that begin, and the next game replaces one that is broken off. With the first N
that end, short games would count more than long ones.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from brayx.gamecore.protocol import AGENT_MARK, game_of
from brayx.league.config import LeagueConfig, PlayerConfig
from brayx.league.games import Finished, Game
from brayx.league.gates import wilson
from brayx.league.in_progress import GamesInProgress
from brayx.league.member import Member
from brayx.league.seats import Seats

Pair = tuple[int, int]
"""Two players by their numbers."""
_SIDES = (Member("a"), Member("b"))
_BLOCK = (0, 1, 1, 0)


class Tally(NamedTuple):
    """Games of a player, as it sees them."""

    wins: int = 0
    draws: int = 0
    losses: int = 0

    @property
    def games(self) -> int:
        """All of them."""
        return sum(self)

    @property
    def win_rate(self) -> float | None:
        """Share of wins, a draw as half a win; None with no games."""
        return (self.wins + 0.5 * self.draws) / self.games if self.games else None

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the win rate, see `brayx.league.gates.wilson`."""
        return wilson(*self)


class MatchScore(NamedTuple):
    """The state of a match.

    Attributes:
        by_seat: games of the first player, by the seat or team that it had.
        begun: games that have begun, including those beyond the match.
        broken_off: games of the match that had no result.
        contradictory: those whose results contradicted each other.
        done: whether all games of the match have ended.
        reason: why the newest of these two kinds did not count; empty: all counted.
    """

    by_seat: dict[str, Tally]
    begun: int
    broken_off: int
    contradictory: int
    done: bool
    reason: str

    @property
    def all(self) -> Tally:
        """All games that counted."""
        return Tally(*(sum(counts) for counts in zip(*self.by_seat.values(), strict=True)))


@dataclass
class _Played:
    """A game of the match.

    Attributes:
        game: its seats and results.
        finished: its outcome; None: it goes on.
    """

    game: Game
    finished: Finished | None = None


class MatchGames:
    """Seats two players in the games of a match, and counts the results. May be used by several threads.

    Args:
        teams: names of a game's seats by team, as `LeagueConfig.teams`; empty: two seats, in the order of sessions.
        games: number of games.
        seed: makes the seats repeatable.

    Raises:
        ValueError: there are not two teams.
    """

    def __init__(self, teams: dict[str, list[str]], games: int, seed: int = 0) -> None:
        if len(teams) not in (0, 2):
            raise ValueError(f"a match is of two players, and games have {len(teams)} teams: {', '.join(teams)}")
        seats = sum(map(len, teams.values())) or 2
        config = LeagueConfig(model="any", seats=seats, teams=teams, players={"a": PlayerConfig(role="main")})
        self._teams = Seats(config, seed).teams
        self._games = GamesInProgress(config)
        self._names = list(teams)
        self._wanted = games
        self._rng = random.Random(seed)
        self._flipped: list[int] = []
        self._played: list[_Played] = []
        self._running: dict[str, _Played] = {}
        self._lock = threading.Lock()

    def assign(self, session: str) -> int:
        """The player of a session: 0 for the first, 1 for the second; errors as for `GamesInProgress.assign`."""
        new_games: list[_Played] = []

        def draw(name: str) -> Game:
            new_games.append(_Played(self._next(name)))
            return new_games[0].game

        with self._lock:
            side = self._games.assign(game_of(session), session, draw)
            self._played += new_games
            self._running.update((played.game.id, played) for played in new_games)
            return _SIDES.index(side)

    def result(self, session: str, value: object) -> None:
        """Takes the result of a session's seat; errors as for `GamesInProgress.result`."""
        with self._lock:
            self._games.result(session, value)

    def ended(self, session: str, reason: str) -> None:
        """Ends a session; the last one of a game ends the game. Later calls do nothing."""
        with self._lock:
            game = self._games.ended(session, reason)
            if game is not None:
                self._running.pop(game.id).finished = Finished.of(game, self._teams)

    def score(self) -> MatchScore:
        """The score so far."""
        with self._lock:
            return self._score()

    def _score(self) -> MatchScore:
        games = self._played
        names = self._names or _names_of(games)
        by_seat = dict.fromkeys(names, Tally())
        running = counted = broken_off = contradictory = 0
        reason = ""
        for played in games:
            if running + counted == self._wanted:
                break
            if played.finished is None:
                running += 1
            elif played.finished.outcome == "counted":
                counted += 1
                team = int(played.game.members[self._teams[1][0]] == _SIDES[0])
                tally_of_game = _seen(played.finished, team)
                by_seat[names[team]] = Tally(*map(sum, zip(by_seat[names[team]], tally_of_game, strict=True)))
            else:
                broken_off += played.finished.outcome == "broken_off"
                contradictory += played.finished.outcome == "contradictory"
                reason = played.finished.reason
        return MatchScore(by_seat, len(games), broken_off, contradictory, counted == self._wanted, reason)

    def _next(self, name: str) -> Game:
        block, place = divmod(len(self._played), len(_BLOCK))
        if block == len(self._flipped):
            self._flipped.append(self._rng.randrange(2))
        team = _BLOCK[place] ^ self._flipped[block]
        members = [_SIDES[1]] * sum(map(len, self._teams))
        for seat in self._teams[team]:
            members[seat] = _SIDES[0]
        return Game(name, "", members)


class Tournament:
    """Seats players in the games of many matches, and counts the results. May be used by several threads.

    A new game goes to the pair that has begun the smallest share of its games, so that all pairs end together.

    Args:
        teams: as for `MatchGames`.
        games: number of games of each pair.
        seed: makes the seats repeatable.

    Raises:
        ValueError: there are not two teams.
    """

    def __init__(self, teams: dict[str, list[str]], games: Mapping[Pair, int], seed: int = 0) -> None:
        self._wanted = dict(games)
        self._matches = {pair: MatchGames(teams, count, seed + i) for i, (pair, count) in enumerate(games.items())}
        self._begun = dict.fromkeys(games, 0)
        self._pairs: dict[str, Pair] = {}
        self._lock = threading.Lock()

    def assign(self, session: str) -> int:
        """The number of the player of a session that starts; see `MatchGames.assign`."""
        name = game_of(session) or session
        with self._lock:
            pair = self._pairs.get(name)
            if pair is None:
                pair = min(self._begun, key=lambda pairing: self._begun[pairing] / self._wanted[pairing])
            side = self._matches[pair].assign(session)
            if name not in self._pairs:
                self._pairs[name] = pair
                self._begun[pair] += 1
            return pair[side]

    def result(self, session: str, value: object) -> None:
        """See `MatchGames.result`."""
        self._of(session).result(session, value)

    def ended(self, session: str, reason: str) -> None:
        """See `MatchGames.ended`."""
        self._of(session).ended(session, reason)

    def score(self) -> MatchScore:
        """The score over all matches; a win is one of the pair's first player."""
        scores = [match.score() for match in self._matches.values()]
        tally = Tally(*map(sum, zip(*(score.all for score in scores), strict=True)))
        reason = next((score.reason for score in scores if score.reason), "")
        return MatchScore(
            {"all": tally},
            sum(score.begun for score in scores),
            sum(score.broken_off for score in scores),
            sum(score.contradictory for score in scores),
            all(score.done for score in scores),
            reason,
        )

    def results(self) -> dict[Pair, Tally]:
        """The counted games of each pair, as seen by its first player."""
        return {pair: match.score().all for pair, match in self._matches.items()}

    def _of(self, session: str) -> MatchGames:
        with self._lock:
            return self._matches[self._pairs[game_of(session) or session]]


def _seen(finished: Finished, team: int) -> Tally:
    """A counted game as the player of a team sees it."""
    rank, other_rank = finished.ranks[team], finished.ranks[1 - team]
    return Tally(int(rank < other_rank), int(rank == other_rank), int(rank > other_rank))


def _names_of(games: Sequence[_Played]) -> list[str]:
    """Names of two seats without teams: the AGENT of the session ids, if that is always the same."""
    names = []
    for seat in range(2):
        sessions = [session for played in games for session, place in played.game.sessions.items() if place == seat]
        agents = {session.rpartition(AGENT_MARK)[2] for session in sessions if AGENT_MARK in session}
        names.append(agents.pop() if len(agents) == 1 else f"seat {seat + 1}")
    return names if names[0] != names[1] else ["seat 1", "seat 2"]
