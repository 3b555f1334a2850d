"""Self-play of one behaviour on the local host: a league of one player, whose opponents are its own past.

Books, snapshots and gate are those of a league (`brayx.local.league_training`), but teams have sides instead of seats
(`brayx.league.sides`). It begins when the behaviour's games have named two teams; until then all sessions learn. Knows
nothing of doors or progress.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from brayx.actor.agent import Services
from brayx.actor.players import LearningPlayer, SeatedPlayer, no_league
from brayx.errors import TrackingError
from brayx.jobs.champion import behaviour_pool
from brayx.jobs.config import JobConfig
from brayx.jobs.contracts import SELF_PLAY_TAG
from brayx.league.config import SelfPlayConfig
from brayx.league.files import books_file
from brayx.league.games import Finished, Game
from brayx.league.league import League
from brayx.league.sides import Sides, Stretch
from brayx.local.league_training import LocalLeague, LocalLeagueTraining
from brayx.local.row_player import RowPlayer
from brayx.local.trainee import LocalTrainee
from brayx.metrics.numbers import LocalNumbers
from brayx.replay.buffer import NullBuffer
from brayx.tracking import Trial

if TYPE_CHECKING:
    from brayx.gamecore.contract_ticks import Tick
    from brayx.league.training import LeagueTraining
    from brayx.model.acting import ActingModel
    from brayx.model.local import LocalModel
    from brayx.types import Columns, Fragment

_START_S, _RETRY_S = 3.0, 10.0
"""Deadline for the first call of MLflow to start, and time to the next try."""


class TeamPlayers:
    """Gives the sessions of a behaviour their players: `brayx.actor.players.Players`.

    Args:
        config: the options.
        services: the models, buffers and recorder of a session that learns.

    Attributes:
        sides: which team plays with which weights.
        services: as given.
        league: draws the opponents; None: there are none yet, and all sessions learn.
        is_resumed: the training was resumed, and had self-play before.
    """

    def __init__(self, config: SelfPlayConfig, services: Services) -> None:
        self.sides, self.services = Sides(config), services
        self.league: SidesLeague | None = None
        self.is_resumed = False

    async def seat(self, session: str, start: Any = None) -> SeatedPlayer:
        """See `brayx.actor.players.Players.seat`."""
        team = start["contract"].team
        self.sides.name_team(session, team)

        def leave(reason: str) -> None:
            self.sides.ended(session, reason)

        if start.get("rows"):
            return RowPlayer(session, team, self).seated(leave)
        if self.league is None:
            return replace(no_league(self.services), leave=leave)
        player = await self.league.seat(session)

        def report_sign(tick: Tick) -> None:
            """Reports the last reward of a game that gives no other result: its sign counts, as in ML-Agents."""
            if player.report is not None and tick.result is None and (tick.terminated or tick.truncated):
                player.report(float(tick.reward))

        return replace(player, sees=report_sign)

    def stretch(self) -> Stretch | None:
        """See `Stretches.stretch`."""
        return None if self.league is None else self.league.stretch()

    def services_of(self, stretch: Stretch | None, team: int) -> Services:
        """See `Stretches.services_of`."""
        return self.services if stretch is None or self.league is None else self.league.services(stretch, team)

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


class SelfPlay(LocalLeagueTraining):
    """Trains a behaviour against its own past.

    Args:
        job: the behaviour's job, which has ``self_play``.
        trainee: its learner, which runs already.
        players: give its sessions their players, from now on those of this league.
        say: prints a line above the display.

    Errors are those of `LocalLeagueTraining`.
    """

    league: SidesLeague

    def __init__(self, job: JobConfig, trainee: LocalTrainee, players: TeamPlayers, say: Callable[[str], None]) -> None:
        self._trainee, self._players = trainee, players
        self._say: Callable[[str], None] | None = say
        (options,) = job.self_plays.values()
        league = options.league(trainee.config.model)
        project = trainee.clerk.call(behaviour_pool, True, start_s=_START_S)  # others may be learning: do not wait long
        job_of_league = job.model_copy(update={"project": project, "leagues": {"league": league}})
        super().__init__(job_of_league, trainee.layout, trainee.clerk, say, recorded=job)
        trainee.clerk.later(Trial.set_tag, SELF_PLAY_TAG, project)
        self.build_engines(but=trainee.acting)
        models = players.services.models
        self.seats({name: model for name, model in models.items() if name != league.model})
        players.league = self.league

    def look(self) -> None:
        """See `LeagueTraining.look`."""
        if self._say is not None and self._players.sides.warning:
            self._say(self._players.sides.warning)
            self._say = None  # once
        self._players.sides.env_steps = int(self.numbers.newest().get("env_steps", 0))
        self.training.look()

    def trainee(self, player: str) -> LocalTrainee:
        """See `LeagueHost.trainee`."""
        return self._trainee

    def _recorder(self) -> LocalNumbers:
        return self._trainee.numbers

    def _running(self, league: League) -> SidesLeague:
        return SidesLeague(league, self._players.sides, self.numbers)

    def _learning(self, trainee: LocalTrainee) -> LearningPlayer:
        learning, buffers = super()._learning(trainee), self._players.services.buffers
        sides = self._players.sides
        counting = {name: CountingBuffer(sides, partial(operator.getitem, buffers, name)) for name in buffers}
        return replace(learning, buffers=counting)

    def _no_buffer(self) -> Any:
        return CountingBuffer(self._players.sides, NullBuffer)


class SidesLeague(LocalLeague):
    """Gives the sessions of teams their players; arguments are those of `LocalLeague`.

    Records the learner's results instead of its games, of which only its sessions count as finished.
    """

    _games: Sides

    def stretch(self) -> Stretch:
        """The sides of games that begin now."""
        with self._lock:
            return self._games.stretch(self._league.draw)

    def services(self, stretch: Stretch, team: int) -> Services:
        """The services of a team's agents."""
        player, version = stretch.member(team)
        learns = stretch.learned_from(team)
        return self._seating.seated(player, version, learns=learns, report=_nothing, leave=_nothing).services

    def count(self, game: Game) -> None:
        """Counts a game that has ended."""
        with self._lock:
            self._finish(game)

    def _record(self, finished: Finished | None, note: str) -> None:
        if finished is None or not finished.learner:
            return
        (opponent,) = finished.teams[1]
        kind = "latest" if not opponent.version else "champion" if opponent == self._league.champion() else "past"
        place, other = finished.ranks
        self._numbers.add("league_win_rate", 0.5 if place == other else float(place < other), label=kind)


def _nothing(_: Any) -> None:
    """The results of a session of several agents come with its rows."""


class CountingBuffer:
    """A buffer that counts the transitions which agents push to another one."""

    def __init__(self, sides: Sides, buffer: Callable[[], Any]) -> None:
        self._sides, self._buffer = sides, buffer

    def push(self, *replays: Fragment | Columns) -> None:
        self._sides.steps += sum(map(len, replays))
        self._buffer().push(*replays)


class SelfPlays:
    """The self-play of all behaviours of a job.

    Args:
        say: prints a line above the display.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._waiting: dict[str, tuple[JobConfig, LocalTrainee, TeamPlayers]] = {}
        """Behaviours that have not shown several teams yet."""
        self._playing: dict[str, SelfPlay] = {}
        self._try_at = 0.0

    def players(self, name: str, job: JobConfig, trainee: LocalTrainee, services: Services) -> TeamPlayers | None:
        """Gives the sessions of a behaviour their players; None: the job has no self-play.

        Args:
            name: the behaviour.
            job: its job.
            trainee: its learner.
            services: the models, buffers and recorder of its sessions.
        """
        for options in job.self_plays.values():
            players = TeamPlayers(options, services)
            players.is_resumed = trainee.clerk.may_resume and books_file(trainee.clerk.trial()).exists()
            self._waiting[name] = job, trainee, players
            return players
        return None

    def look(self) -> None:
        """Begins the self-play of behaviours that have several teams now; see also `LeagueTraining.look`."""
        for play in self._playing.values():
            play.look()
        for name, (job, trainee, players) in list(self._waiting.items()):
            has_teams = players.is_resumed or len(players.sides.teams) > 1
            if has_teams and time.monotonic() > self._try_at and trainee.clerk.opened():
                self._begin(name, job, trainee, players)

    def league(self, name: str) -> LeagueTraining[LocalTrainee] | None:
        """The league of a behaviour; None: it does not play itself."""
        return self._playing[name].training if name in self._playing else None

    def standings(self) -> str:
        """The tables of all."""
        return "\n".join(f"{name}:\n{play.training.standings()}" for name, play in self._playing.items())

    @property
    def opponents(self) -> list[ActingModel | LocalModel]:
        """The acting models of past versions."""
        return [model for play in self._playing.values() for model in play.opponents]

    def close_checks(self) -> None:
        """Ends the processes of the gates' checks."""
        for play in self._playing.values():
            play.training.close_check()

    def close_books(self) -> None:
        """Ends all books, when their sessions have ended."""
        for play in self._playing.values():
            play.close()

    def _begin(self, name: str, job: JobConfig, trainee: LocalTrainee, players: TeamPlayers) -> None:
        try:
            self._playing[name] = SelfPlay(job, trainee, players, lambda line: self._say(f"{name!r}: {line}"))
        except TrackingError as error:
            if not self._try_at:
                self._say(f"behaviour {name!r} plays against itself as it is, until MLflow answers: {error.message}")
            self._try_at = time.monotonic() + _RETRY_S
            return
        del self._waiting[name]
        if players.is_resumed:
            self._say(f"behaviour {name!r} goes on with its self-play")
            return
        teams = ", ".join(map(str, sorted(players.sides.teams)))
        self._say(f"behaviour {name!r} has teams {teams}: one learns, past versions of its model play the others")
