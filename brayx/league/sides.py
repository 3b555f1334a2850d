"""Sides: which team of a game plays with which version, in self-play. Pure; knows nothing of weights or agents.

All games that begin in the same stretch have the same sides: one team learns, and one opponent plays all others; of
teams of different behaviours, one of each behaviour. After `SelfPlayConfig.swap_every` steps the next stretch begins
with other opponents. So it does not matter which agents of a scene play against each other. Sessions whose ids name
their game have the sides of its first session. Sessions of several agents change their player with the stretch, and
only whole episodes count, so a stretch waits for these.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from brayx.errors import BadBody, BadResult
from brayx.gamecore.protocol import game_of
from brayx.league.config import MAIN, SelfPlayConfig
from brayx.league.games import Game, checked
from brayx.league.member import Member

MAX_TEAMS = 64
"""Maximum number of teams of a behaviour."""
MAX_SWAPS = 20
"""A stretch waits for episodes until it has lasted this many times `SelfPlayConfig.swap_every`."""

Draw = Callable[[str, Sequence[str], Sequence[str]], Game]
"""Draws a game, see `brayx.league.league.League.meet`."""

_OPPOSITE = {"win": "loss", "loss": "win", "draw": "draw"}


@dataclass(frozen=True)
class DrawRequest:
    """The draw that a stretch needs before it begins.

    Attributes:
        id: of the draw, which is a function of it.
        turn: whose turn it is to learn.
        learning: the team that learns.
        players: who plays it.
        opponents: who plays the other teams.
    """

    id: str
    turn: int
    learning: int
    players: Sequence[str]
    opponents: Sequence[str]


@dataclass(frozen=True)
class Stretch:
    """The sides of all games that begin in the same stretch.

    Attributes:
        learning: the team that learns.
        players: by player, who plays that team: the learner, or in a stretch of the gate the member that is judged.
        opponents: by player, who plays all other teams.
        learns: whether the games are learned from; false: they are for the gate.
    """

    learning: int
    players: Mapping[str, Member]
    opponents: Mapping[str, Member]
    learns: bool

    def member(self, team: int, player: str = MAIN) -> Member:
        """Who plays a player's sessions of a team; one whose first game begins in the stretch plays as it is."""
        return (self.players if team == self.learning else self.opponents).get(player, Member(player))

    def learned_from(self, team: int, player: str = MAIN) -> bool:
        """Whether a player's sessions of a team are learned from."""
        return self.learns and self.member(team, player) == Member(player)

    def game(self, result: Any) -> Game:
        """A game that has ended, for `League.finish`.

        Args:
            result: of the team that learns: a word, or a number, whose sign counts.

        Raises:
            BadResult: it is none of these.
        """
        word = _word(result)
        members = [*self.players.values(), *self.opponents.values()]
        seats, first = range(len(members)), len(self.players)
        return Game(
            uuid.uuid4().hex,
            next(iter(self.players)) if self.learns else "",
            members,
            sessions={str(seat): seat for seat in seats},
            results={seat: word if seat < first else _OPPOSITE[word] for seat in seats},
            ended=dict.fromkeys(seats, "stop"),
            teams=(seats[:first], seats[first:]),
        )


class _Playing(NamedTuple):
    """Whose session it is."""

    player: str
    team: int


@dataclass
class _Running:
    """A game that runs: its stretch, its sessions, and by player of the team that learns its first result, with the
    session that gave it."""

    stretch: Stretch
    sessions: dict[str, _Playing] = field(default_factory=dict)
    results: dict[str, tuple[str, str]] = field(default_factory=dict)


class Sides:
    """The sides of the games of a behaviour, or of several that play against each other: in self-play what
    `GamesInProgress` is in a league.

    Attributes:
        steps: agents' steps so far; the caller counts them.
        env_steps: of the learners; the caller sets them.
        done: players that learn no more; the caller adds them.
        warning: what to say about the options, which the caller then sets to None; empty: nothing yet.

    Args:
        config: the options.
    """

    def __init__(self, config: SelfPlayConfig) -> None:
        self._config = config
        self._named: dict[str, set[int]] = {}
        """The teams that each player's games have named."""
        self.steps = self.env_steps = 0
        self.done: set[str] = set()
        self.warning: str | None = ""
        self._stretch: Stretch | None = None
        self._turn = self._began_at = 0
        self._episodes = 0
        """Episodes of the learning team's agents that have begun and ended in the stretch."""
        self._agents: dict[str, int] = {}
        """Agents of each session that has several."""
        self._sessions: dict[str, _Playing] = {}
        """Those that run."""
        self._seen: set[int] = set()
        """Teams that have had a session in the stretch."""
        self._running: dict[str, _Running] = {}

    @property
    def teams(self) -> set[int]:
        """The teams that games have named."""
        return {team for teams in self._named.values() for team in teams}

    @property
    def running_teams(self) -> set[int]:
        """Teams of the sessions that run."""
        return {playing.team for playing in self._sessions.values()}

    def name_team(self, session: str, team: int, player: str = MAIN) -> None:
        """Notes the team of a session that starts, and whose session it is.

        Raises:
            BadBody: the behaviour would have more than `MAX_TEAMS` teams.
        """
        named = self._named.setdefault(player, set())
        if team not in named and len(named) >= MAX_TEAMS:
            raise BadBody(
                f"team is {team}, and the behaviour has {MAX_TEAMS} teams, the most it can have", field="team"
            )
        named.add(team)
        self._seen.add(team)
        self._sessions[session] = _Playing(player, team)

    def take_in(self, player: str, sides: Sides) -> None:
        """Takes in the games of another behaviour as those of a player; none of them is in a stretch yet."""
        config, other = self._config, sides._config
        longest = {name: max(getattr(config, name), getattr(other, name)) for name in ("swap_every", "team_every")}
        self._config = config.model_copy(update=longest)
        self._named[player] = sides.teams
        self._seen |= sides._seen
        self._sessions.update({session: _Playing(player, team) for session, (_, team) in sides._sessions.items()})
        self._agents.update(sides._agents)
        self.steps += sides.steps

    def assign(self, game: str, session: str, draw: Draw | None) -> Member:
        """The member that plays a session whose team is named.

        Args:
            game: the game's id; empty: the session's id.
            session: the session's id.
            draw: as for `stretch`.
        """
        running = self._running.get(game or session) or _Running(self.stretch(draw))
        playing = running.sessions[session] = self._sessions[session]
        self._running[game or session] = running
        return running.stretch.member(playing.team, playing.player)

    def learns(self, session: str, learners: Collection[str]) -> bool:
        """Whether a session is learned from: the learner plays it, and not in a game of the gate."""
        running = self._of(session)
        if running is None:
            return False
        player, team = running.sessions[session]
        return running.stretch.learned_from(team, player) and player in learners

    def result(self, session: str, value: Any) -> None:
        """Sets the result of a session: a word, or a number by its sign. The first one of each player of the learning
        team counts.

        Raises:
            BadResult: the value is none of these, or the session does not run.
        """
        running = self._of(session)
        if running is None:
            raise BadResult(f"result for session {session!r}, which is unknown or over", session=session)
        player, team = running.sessions[session]
        if team == running.stretch.learning and player not in running.results:
            running.results[player] = session, _word(value)

    def ended(self, session: str, reason: str) -> Game | None:
        """Ends a session. Returns its game, for `League.finish`, if it gave its player's result."""
        self._sessions.pop(session, None)
        self._agents.pop(session, None)
        running = self._of(session)
        if running is None:
            return None
        player, _ = running.sessions.pop(session)
        if not running.sessions:
            del self._running[game_of(session) or session]
        by, word = running.results.get(player, ("", ""))
        return running.stretch.game(word) if by == session else None

    def stretch(self, draw: Draw | None) -> Stretch:
        """The sides of games that begin now.

        Args:
            draw: draws their members; None: they stay, since the caller begins each stretch.
        """
        if draw is not None and (wanted := self.next_draw()) is not None:
            self.begin(wanted, draw(wanted.id, wanted.players, wanted.opponents))
        assert self._stretch is not None
        return self._stretch

    def next_draw(self) -> DrawRequest | None:
        """The draw of the next stretch, if it is to begin now."""
        turn = self.env_steps // self._config.team_every
        if self._stretch is not None and turn == self._turn and not self._is_over(self._stretch):
            return None
        # A team without games must not be the one that learns, but one may be between two games now.
        teams = sorted(self._seen)
        teams = [team for team in teams if not self._is_done(team)] or teams
        learning = teams[turn % len(teams)]
        others = [name for name, named in sorted(self._named.items()) if len(self._named) == 1 or named - {learning}]
        return DrawRequest(f"{self.env_steps} {self.steps}", turn, learning, self._players(learning), others)

    def begin(self, wanted: DrawRequest, game: Game) -> None:
        """Begins a stretch with the members of a drawn game."""
        count = len(wanted.players)
        self._stretch = Stretch(
            wanted.learning,
            dict(zip(wanted.players, game.members[:count], strict=True)),
            dict(zip(wanted.opponents, game.members[count:], strict=True)),
            learns=bool(game.learner),
        )
        self._turn, self._began_at, self._episodes = wanted.turn, self.steps, 0
        self._seen = self.running_teams

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
            return self._is_done(stretch.learning)
        learning = {session for session, (_, team) in self._sessions.items() if team == stretch.learning}
        agents = sum(count for session, count in self._agents.items() if session in learning)
        if self._episodes >= agents:
            return True
        if lasted < MAX_SWAPS * swap_every:
            return False
        if not self._episodes and self.warning is not None:
            self.warning = (
                f"in {lasted:,} steps of all agents no episode of team {stretch.learning}, which has {agents} agents, "
                f"began and ended, so no result counts: raise self_play.swap_every, which is {swap_every:,}"
            )
        return True

    def _players(self, team: int) -> list[str]:
        """The players whose games have named a team."""
        return sorted(player for player, teams in self._named.items() if team in teams)

    def _is_done(self, team: int) -> bool:
        """Whether no player of a team learns any more, but one of another team does."""
        return self.done.issuperset(self._players(team)) and not self.done.issuperset(self._named)

    def _of(self, session: str) -> _Running | None:
        running = self._running.get(game_of(session) or session)
        return running if running is not None and session in running.sessions else None


def _word(value: Any) -> str:
    result = checked(value)
    if isinstance(result, str):
        return result
    return "win" if result > 0 else "loss" if result < 0 else "draw"
