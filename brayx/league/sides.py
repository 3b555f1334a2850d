"""Sides: which team of a game plays with which version, in self-play. Pure; knows nothing of weights or agents.

All games that begin in the same stretch have the same sides: one team learns, and one opponent plays all others. After
`SelfPlayConfig.swap_every` steps the next stretch begins with another opponent. So it does not matter which agents of a
scene play against each other. Sessions whose ids name their game have the sides of its first session. Sessions of
several agents change their player with the stretch, and only whole episodes count, so a stretch waits for these.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from brayx.errors import BadBody, BadResult
from brayx.gamecore.protocol import game_of
from brayx.league.config import MAIN, SelfPlayConfig
from brayx.league.games import Game, checked
from brayx.league.member import Member

MAX_TEAMS = 64
"""Maximum number of teams of a behaviour."""
MAX_SWAPS = 20
"""A stretch waits for episodes until it has lasted as many times `SelfPlayConfig.swap_every`."""

_OPPOSITE = {"win": "loss", "loss": "win", "draw": "draw"}


@dataclass(frozen=True)
class Stretch:
    """The sides of all games that begin in the same stretch.

    Attributes:
        learning: the team that learns.
        player: plays that team: the learner, or in a stretch of the gate the member that is judged.
        opponent: plays all other teams.
        learns: whether the games are learned from; false: they are for the gate.
    """

    learning: int
    player: Member
    opponent: Member
    learns: bool

    def member(self, team: int) -> Member:
        """Who plays a team."""
        return self.player if team == self.learning else self.opponent

    def learned_from(self, team: int) -> bool:
        """Whether a team's games are learned from."""
        return self.learns and self.member(team) == Member(MAIN)

    def game(self, result: Any) -> Game:
        """A game that has ended, for `League.finish`.

        Args:
            result: of the team that learns: a word, or a number, whose sign counts.

        Raises:
            BadResult: it is none of these.
        """
        word = _word(result)
        return Game(
            uuid.uuid4().hex,
            MAIN if self.learns else "",
            [self.player, self.opponent],
            sessions={"player": 0, "opponent": 1},
            results={0: word, 1: _OPPOSITE[word]},
            ended={0: "stop", 1: "stop"},
        )


@dataclass
class _Running:
    """A game that runs: its stretch, team by session, and the result of the team that learns."""

    stretch: Stretch
    sessions: dict[str, int] = field(default_factory=dict)
    result: str = ""

    def member(self, session: str) -> Member:
        """Who plays a session."""
        return self.stretch.member(self.sessions[session])


class Sides:
    """The sides of a behaviour's games: in self-play what `GamesInProgress` is in a league.

    Attributes:
        teams: the teams that games have named.
        steps: agents' steps so far; the caller counts them.
        env_steps: of the learner; the caller sets them.
        warning: what to say once about the options; empty: nothing.

    Args:
        config: the options.
    """

    def __init__(self, config: SelfPlayConfig) -> None:
        self._config = config
        self.teams: set[int] = set()
        self.steps = self.env_steps = 0
        self.warning = ""
        self._stretch: Stretch | None = None
        self._turn = self._began_at = 0
        self._episodes = 0
        """Episodes of the learning team's agents that have begun and ended in the stretch."""
        self._agents: dict[str, int] = {}
        """Agents of each session that has several."""
        self._teams: dict[str, int] = {}
        """Team of each session that runs."""
        self._seen: set[int] = set()
        """Teams that have had a session in the stretch."""
        self._running: dict[str, _Running] = {}

    @property
    def running_teams(self) -> set[int]:
        """Teams of the sessions that run."""
        return set(self._teams.values())

    def name_team(self, session: str, team: int) -> None:
        """Notes the team of a session that starts.

        Raises:
            BadBody: the behaviour would have more than `MAX_TEAMS` teams.
        """
        if team not in self.teams and len(self.teams) >= MAX_TEAMS:
            raise BadBody(
                f"team is {team}, and the behaviour has {MAX_TEAMS} teams, the most it can have", field="team"
            )
        self.teams.add(team)
        self._seen.add(team)
        self._teams[session] = team

    def assign(self, game: str, session: str, draw: Callable[[str], Game]) -> Member:
        """The member that plays a session whose team is named.

        Args:
            game: the game's id; empty: the session's id.
            session: the session's id.
            draw: as for `stretch`.
        """
        running = self._running.get(game or session) or _Running(self.stretch(draw))
        running.sessions[session] = self._teams[session]
        self._running[game or session] = running
        return running.member(session)

    def learns(self, session: str, learners: Collection[str]) -> bool:
        """Whether a session is learned from: the learner plays it, and not in a game of the gate."""
        running = self._of(session)
        return (
            running is not None
            and running.stretch.learns
            and running.member(session) == Member(MAIN)
            and MAIN in learners
        )

    def result(self, session: str, value: Any) -> None:
        """Sets the result of a session: a word, or a number by its sign. The first one of the learning team counts.

        Raises:
            BadResult: the value is none of these, or the session does not run.
        """
        running = self._of(session)
        if running is None:
            raise BadResult(f"result for session {session!r}, which is unknown or over", session=session)
        if running.sessions[session] == running.stretch.learning and not running.result:
            running.result = _word(value)

    def ended(self, session: str, reason: str) -> Game | None:
        """Ends a session. Returns its game, for `League.finish`, if that was the last one and there is a result."""
        self._teams.pop(session, None)
        self._agents.pop(session, None)
        running = self._of(session)
        if running is None:
            return None
        del running.sessions[session]
        if running.sessions:
            return None
        del self._running[game_of(session) or session]
        return running.stretch.game(running.result) if running.result else None

    def stretch(self, draw: Callable[[str], Game]) -> Stretch:
        """The sides of games that begin now.

        Args:
            draw: `League.draw` of a league of one player with two seats.
        """
        turn = self.env_steps // self._config.team_every
        if self._stretch is None or turn != self._turn or self._is_over(self._stretch):
            game = draw(f"{self.env_steps} {self.steps}")  # the draw is a function of it
            player, opponent = game.members
            if game.learner and player != Member(game.learner):
                player, opponent = opponent, player
            # A team without games must not be the one that learns, but one may be between two games now.
            teams = sorted(self._seen)
            self._stretch = Stretch(teams[turn % len(teams)], player, opponent, learns=bool(game.learner))
            self._turn, self._began_at, self._episodes = turn, self.steps, 0
            self._seen = self.running_teams
        return self._stretch

    def count_episodes(self, session: str, agents: int, episodes: int) -> None:
        """Counts episodes of a session of several agents: a stretch waits for as many as the learning team has agents.

        Args:
            session: the session's id.
            agents: its agents now.
            episodes: those of the learning team that have ended now, and began in the same stretch.
        """
        self._agents[session] = agents
        self._episodes += episodes

    def _is_over(self, stretch: Stretch) -> bool:
        lasted, swap_every = self.steps - self._began_at, self._config.swap_every
        if lasted < swap_every:
            return False
        agents = sum(count for session, count in self._agents.items() if self._teams.get(session) == stretch.learning)
        if self._episodes >= agents:
            return True
        if lasted < MAX_SWAPS * swap_every:
            return False
        if not self._episodes:
            self.warning = (
                f"in {lasted:,} steps of all agents no episode of team {stretch.learning}, which has {agents} agents, "
                f"began and ended, so no result counts: raise self_play.swap_every, which is {swap_every:,}"
            )
        return True

    def _of(self, session: str) -> _Running | None:
        running = self._running.get(game_of(session) or session)
        return running if running is not None and session in running.sessions else None


def _word(value: Any) -> str:
    result = checked(value)
    if isinstance(result, str):
        return result
    return "win" if result > 0 else "loss" if result < 0 else "draw"
