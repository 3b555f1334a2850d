"""A tournament: matches of several pairs of players, all at the same time. Knows nothing of models or strength."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from brayx.gamecore.protocol import game_of
from brayx.league.match import MatchGames, Score, Tally

Pair = tuple[int, int]
"""Two players by their numbers."""


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
                pair = min(self._begun, key=lambda each: self._begun[each] / self._wanted[each])
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

    def score(self) -> Score:
        """The score over all matches; a win is one of the pair's first player."""
        scores = [match.score() for match in self._matches.values()]
        tally = Tally(*map(sum, zip(*(each.all for each in scores), strict=True)))
        reason = next((each.reason for each in scores if each.reason), "")
        return Score(
            {"all": tally},
            sum(each.begun for each in scores),
            sum(each.broken_off for each in scores),
            sum(each.contradictory for each in scores),
            all(each.done for each in scores),
            reason,
        )

    def results(self) -> dict[Pair, Tally]:
        """The counted games of each pair, as seen by its first player."""
        return {pair: match.score().all for pair, match in self._matches.items()}

    def _of(self, session: str) -> MatchGames:
        with self._lock:
            return self._matches[self._pairs[game_of(session) or session]]
