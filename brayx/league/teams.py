"""Gives the sessions of teams their players in self-play, on any host. Until a league draws opponents, all of them
learn.

Knows nothing of where the league is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from brayx.actor.agent import Services
from brayx.actor.players import SeatedPlayer, Seating, no_league
from brayx.league.config import MAIN, SelfPlayConfig
from brayx.league.games import Finished, Game
from brayx.league.member import Member
from brayx.league.row_player import RowPlayer
from brayx.league.sides import Sides, Stretch
from brayx.metrics import Recorder

if TYPE_CHECKING:
    from brayx.gamecore.contract_ticks import Tick


class TeamLeague(Protocol):
    """Draws the opponents of teams, and counts their games."""

    async def seat(self, session: str) -> SeatedPlayer:
        """The player of a session whose team is named."""

    def stretch(self) -> Stretch:
        """The sides of games that begin now."""

    def services(self, stretch: Stretch, team: int) -> tuple[Services, bool]:
        """The services of a team's agents, and whether their steps are learned from."""

    def count(self, game: Game) -> None:
        """Counts a game that has ended."""


class TeamPlayers:
    """Gives the sessions of a behaviour their players: `brayx.actor.players.Players`.

    Args:
        config: the options.
        services: the models, buffers and recorder of a session that learns.

    Attributes:
        name: the behaviour as a player.
        sides: which team plays with which weights.
        services: as given.
        league: draws the opponents; None: there are none yet, and all sessions learn.
        teams: the teams that its games have named.
    """

    def __init__(self, config: SelfPlayConfig, services: Services) -> None:
        self.name, self.sides, self.services = MAIN, Sides(config), services
        self.league: TeamLeague | None = None
        self.teams = set[int]()

    async def seat(self, session: str, start: Any = None) -> SeatedPlayer:
        """See `brayx.actor.players.Players.seat`."""
        league, team = self.league, start["contract"].team  # first: a group's league comes after its sides
        self.sides.name_team(session, team, self.name)
        self.teams.add(team)

        def leave(reason: str) -> None:
            self.sides.ended(session, reason)

        if start.get("rows"):
            return RowPlayer(session, team, self).seated(leave)
        if league is None:
            return replace(no_league(self.services), leave=leave)
        player = await league.seat(session)
        services = replace(player.services, caught_up=self.services.caught_up)

        def sees(tick: Tick) -> None:
            """Counts a step. Reports the last reward of a game that gives no other result: its sign counts, as in
            ML-Agents."""
            if not (tick.terminated or tick.truncated):
                self.count_steps(1)
            elif player.report is not None and tick.result is None:
                player.report(float(tick.reward))

        return replace(player, services=services, sees=sees)

    def stretch(self) -> Stretch | None:
        """See `Stretches.stretch`."""
        return None if self.league is None else self.league.stretch()

    def services_of(self, stretch: Stretch | None, team: int) -> tuple[Services, bool]:
        """See `Stretches.services_of`."""
        return (self.services, True) if stretch is None or self.league is None else self.league.services(stretch, team)

    def count(self, game: Game) -> None:
        """See `Stretches.count`."""
        if self.league is not None:
            self.league.count(game)

    def count_episodes(self, session: str, agents: int, episodes: int) -> None:
        """See `Stretches.count_episodes`."""
        self.sides.count_episodes(session, agents, episodes)

    def count_steps(self, steps: int) -> None:
        """See `Stretches.count_steps`."""
        self.sides.steps += steps


class TeamGroup:
    """Behaviours that play against each other in one process, and their common sides.

    Args:
        config: options of the first.
    """

    def __init__(self, config: SelfPlayConfig) -> None:
        self._sides, self._players = Sides(config), list[TeamPlayers]()

    @property
    def teams(self) -> set[int]:
        """Their teams."""
        return self._sides.teams

    @property
    def names(self) -> list[str]:
        """Their names as players."""
        return [players.name for players in self._players]

    def take_in(self, players: TeamPlayers) -> None:
        """Gives a behaviour's sessions the sides of the group; repeating it changes nothing."""
        if players not in self._players:
            self._sides.take_in(players.name, players.sides)
            players.sides = self._sides
            self._players.append(players)


def services_of(seating: Seating, stretch: Stretch, team: int, player: str) -> tuple[Services, bool]:
    """The services of a team's agents of a player, and whether their steps are learned from."""
    member, learns = stretch.member(team, player), stretch.learned_from(team, player)
    seated = seating.seated(member.player, member.version, learns=learns, report=_nothing, leave=_nothing)
    return seated.services, learns


def record_warning(numbers: Recorder, sides: Sides) -> None:
    """Records once what is wrong with the options, so that the training says it."""
    if sides.warning:
        numbers.add("self_play_without_results", 1.0, note=sides.warning)
        sides.warning = None


def record_result(numbers: Recorder, finished: Finished | None, champion_of: Callable[[str], Member | None]) -> None:
    """Records the learner's result, by opponent, instead of the game, of which only its sessions count as finished.

    Args:
        numbers: the recorder.
        finished: the game; None: it could not be counted.
        champion_of: a player's champion.
    """
    if finished is None or not finished.learner:
        return
    place, other = finished.ranks
    for opponent in finished.teams[1]:
        is_champion = opponent == champion_of(opponent.player)
        kind = "latest" if not opponent.version else "champion" if is_champion else "past"
        numbers.add("league_win_rate", 0.5 if place == other else float(place < other), label=kind)


def _nothing(_: Any) -> None:
    """The results of a session of several agents come with its rows."""
