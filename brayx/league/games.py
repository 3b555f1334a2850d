"""A game: its seats, and its outcome by the results of the seats. Pure."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from brayx.errors import BadResult
from brayx.league.member import Member

RESULTS = ("win", "draw", "loss")

Result = str | float
Outcome = Literal["counted", "broken_off", "contradictory", "repeated"]


class Finished(NamedTuple):
    """A game that has ended.

    Attributes:
        game: its id.
        outcome: ``counted``; ``broken_off``: a seat has no result; ``contradictory``: the results contradict each
            other; ``repeated``: the id was already in the books. Only the first changes payoff and ratings.
        learner: the player that the game was drawn for; empty: it was a game of the gate.
        teams: members of each team, one for each seat.
        ranks: place of each team, 0 is best and equal ones are a draw; empty unless counted.
        reason: why it was not counted; empty if it was.
    """

    game: str
    outcome: Outcome
    learner: str
    teams: tuple[tuple[Member, ...], ...]
    ranks: tuple[int, ...] = ()
    reason: str = ""

    @staticmethod
    def of(game: Game, teams: Sequence[Sequence[int]]) -> Finished:
        """Evaluates a game that has ended.

        Args:
            game: the game.
            teams: seats of each team.
        """
        members = tuple(tuple(game.members[seat] for seat in seats) for seats in teams)
        if game.missing:
            return Finished(game.id, "broken_off", game.learner, members, reason=game.missing)
        try:
            places = ranks([[game.results[seat] for seat in seats] for seats in teams])
        except BadResult as error:
            return Finished(game.id, "contradictory", game.learner, members, reason=error.message)
        return Finished(game.id, "counted", game.learner, members, places)

    def repeated(self) -> Finished:
        """This game with the outcome ``repeated``: its id was already in the books."""
        reason = "a game of this id has ended before"
        return Finished(self.game, "repeated", self.learner, self.teams, reason=reason)


@dataclass
class Game:
    """A game in progress.

    Attributes:
        id: the game's id.
        learner: the player that it was drawn for; empty: no player learns from it.
        members: who plays each seat.
        sessions: seat by session.
        results: result by seat.
        ended: by seat, the reason for which its session ended.
        refused: results refused before it ended, of any session.
        drawn_s: when it was drawn, by the machine's monotonic clock.
        teams: seats of each team; empty: those that the league's options say.
    """

    id: str
    learner: str
    members: list[Member]
    sessions: dict[str, int] = field(default_factory=dict)
    results: dict[int, Result] = field(default_factory=dict)
    ended: dict[int, str] = field(default_factory=dict)
    refused: int = 0
    drawn_s: float = field(default_factory=time.monotonic, compare=False)
    teams: Sequence[Sequence[int]] = ()

    def report(self, session: str, value: Any) -> None:
        """Sets the result of a session's seat. Repeating the same result changes nothing.

        Raises:
            BadResult: the value is not a result (see `checked`), or the seat has a different one.
        """
        result = checked(value)
        first = self.results.setdefault(self.sessions[session], result)
        if first != result:
            raise BadResult(f"result of {session!r} is {value!r}, and was {first!r} before", session=session)

    def is_over(self, session: str) -> bool:
        """Whether a session of the game has ended."""
        return self.sessions[session] in self.ended

    def end(self, session: str, reason: str) -> bool:
        """Ends a session; returns whether that ends the game."""
        self.ended[self.sessions[session]] = reason
        return len(self.ended) == len(self.sessions)

    @property
    def missing(self) -> str:
        """Why the game is broken off; empty: every seat has a result."""
        seats = len(self.members)
        if len(self.sessions) < seats:
            return f"{len(self.sessions)} of {seats} sessions started"
        without = [session for session, seat in self.sessions.items() if seat not in self.results]
        if not without:
            return ""
        why = self.ended.get(self.sessions[without[0]], "")
        return f"{len(without)} of {seats} sessions reported no result; {without[0]!r} ended with reason {why!r}"


def checked(value: Any) -> Result:
    """A checked result: ``win``, ``draw``, ``loss``, or a score as a float.

    Raises:
        BadResult: it is none of these.
    """
    if isinstance(value, str):
        if value in RESULTS:
            return value
    elif isinstance(value, int | float) and not isinstance(value, bool):
        try:
            score = float(value)
        except OverflowError:
            score = math.inf
        if math.isfinite(score):
            return score
    shown = repr(value)[:80]
    raise BadResult(f"result is {shown}, expected 'win', 'draw', 'loss' or a finite score", got=shown)


def ranks(teams: Sequence[Sequence[Result]]) -> tuple[int, ...]:
    """Places of teams by the results of their seats.

    Words: one team won and all others lost, or two or more drew and the others lost; the seats of a team agree. Scores:
    the mean over a team's seats, the highest is best.

    Args:
        teams: results of each team's seats, at least one.

    Returns:
        For each team the number of teams that are better.

    Raises:
        BadResult: the results contradict each other.
    """
    flat = [result for team in teams for result in team]
    if all(isinstance(result, float) for result in flat):
        scores = [math.fsum(float(result) / len(team) for result in team) for team in teams]
        return tuple(sum(other > score for other in scores) for score in scores)
    if not all(isinstance(result, str) for result in flat):
        raise BadResult(f"results are {flat}, expected either words or scores")
    if any(len(set(team)) > 1 for team in teams):
        raise BadResult(f"results by team are {[list(team) for team in teams]}, expected one in each team")
    words = [team[0] for team in teams]
    wins, draws = words.count("win"), words.count("draw")
    if (wins, draws) != (1, 0) and not (wins == 0 and draws >= 2):
        raise BadResult(f"results are {words}, expected one win, or two draws or more, and losses for the others")
    best = "win" if wins else "draw"
    return tuple(0 if word == best else max(wins, draws) for word in words)
