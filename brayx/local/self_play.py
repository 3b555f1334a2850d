"""Self-play on the local host: of one behaviour, a league of one player whose opponents are its own past; or of several
that play different teams, whose opponents are each other's past (`brayx.league.rivals`).

Books, snapshots and gate are those of a league (`brayx.local.league_training`), but teams have sides instead of seats
(`brayx.league.sides`). It begins when the games have named two teams; until then all sessions learn. Knows nothing of
doors or progress.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from brayx import clock
from brayx.actor.agent import Services
from brayx.actor.players import LearningPlayer
from brayx.jobs.champion import behaviour_pool
from brayx.jobs.config import JobConfig, pool_name
from brayx.jobs.contracts import RIVALS_TAG, SELF_PLAY_TAG
from brayx.league.champion import freeze_champion
from brayx.league.config import MAIN, LeagueConfig, SelfPlayConfig
from brayx.league.files import books_file
from brayx.league.games import Finished, Game
from brayx.league.league import League
from brayx.league.ledger import Ledger
from brayx.league.member import Member
from brayx.league.rivals import Rivals
from brayx.league.self_plays import SelfPlays, player_name, players_before
from brayx.league.sides import Sides, Stretch
from brayx.league.teams import TeamGroup, TeamPlayers, record_result, record_warning, services_of
from brayx.local.league_training import LocalLeague, LocalLeagueTraining
from brayx.local.trainee import LocalTrainee
from brayx.metrics import Recorder
from brayx.metrics.numbers import LocalNumbers
from brayx.model.snapshots import SnapshotFiles
from brayx.tracking import Trial

if TYPE_CHECKING:
    from torch import nn

    from brayx.model.acting import ActingModel
    from brayx.model.local import LocalModel
    from brayx.tracking.clerk import Clerk


_LATE_S = 10.0


class SelfPlay(LocalLeagueTraining):
    """Trains a behaviour against its own past, or against that of other behaviours.

    Args:
        job: the behaviour's job, which has ``self_play``.
        trainee: its learner, which runs already.
        players: give its sessions their players, from now on those of this league.
        say: prints a line above the display.
        project: the name under which its versions are registered.
        group: the behaviours that play against each other, and this one; None: it plays itself.

    Errors are those of `LocalLeagueTraining`.
    """

    league: SidesLeague
    _env_steps = 0

    def __init__(
        self,
        job: JobConfig,
        trainee: LocalTrainee,
        players: TeamPlayers,
        say: Callable[[str], None],
        project: str,
        group: RivalGroup | None = None,
    ) -> None:
        self._trainee, self._players, self._group = trainee, players, group
        (options,) = job.self_plays.values()
        if group is not None:
            group.take_in(players)
            trainee.clerk.later(Trial.set_tag, RIVALS_TAG, group.clerk.trial().run_id)
        league = options.league(trainee.config.model, players.name)
        job_of_league = job.model_copy(update={"project": project, "leagues": {"league": league}})
        books = None if group is None else group.clerk
        super().__init__(job_of_league, trainee.layout, trainee.clerk, say, recorded=job, league_clerk=books)
        trainee.clerk.later(Trial.set_tag, SELF_PLAY_TAG, project)
        self.build_engines(but=trainee.acting)
        models = players.services.models
        self.seats({name: model for name, model in models.items() if name != league.model})
        players.league = self.league

    def look(self) -> None:
        """See `LeagueTraining.look`."""
        env_steps, sides = int(self.numbers.newest().get("env_steps", 0)), self._players.sides
        record_warning(self.numbers, sides)
        sides.env_steps += env_steps - self._env_steps  # of all players
        self._env_steps = env_steps
        if not self._trainee.learner.running:
            sides.done.add(self._players.name)
        self.training.look()

    def trainee(self, player: str) -> LocalTrainee:
        """See `LeagueHost.trainee`."""
        return self._trainee

    def _recorder(self) -> LocalNumbers:
        return self._trainee.numbers

    def _open(self, files: SnapshotFiles, module: nn.Module, say: Callable[[str], None]) -> tuple[Ledger, list[Member]]:
        if self._group is None:
            return super()._open(files, module, say)
        name, pool = self._players.name, pool_name(self._job, self._config.model)
        rivals, ledger = self._group.join(name, self._config, self._job.seed)
        self.league = RivalsLeague(rivals, self._players.sides, self.numbers, name, self._group.lock)
        self.league.draws = self._group.names[0] == name
        with self._group.lock:
            versions = {snapshot.member.version for snapshot in rivals.snapshots if snapshot.member.player == name}
        freeze_champion(self.league, versions, files, self._clerk, pool, module, say)
        with self._group.lock:
            return ledger, [member for member in rivals.pool if member.player == name]

    def _running(self, league: League) -> SidesLeague:
        return SidesLeague(league, self._players.sides, self.numbers)

    def _learning(self, trainee: LocalTrainee) -> LearningPlayer:
        # The sessions' own, which take no more once the behaviour has all its steps.
        return replace(super()._learning(trainee), buffers=self._players.services.buffers)


class SidesLeague(LocalLeague):
    """Gives the sessions of teams their players; arguments are those of `LocalLeague`.

    Records the learner's results instead of its games, of which only its sessions count as finished.
    """

    _games: Sides

    def __init__(self, league: League, games: Sides, numbers: Recorder) -> None:
        super().__init__(league, games, numbers)
        self._draw = league.meet

    def stretch(self) -> Stretch:
        """The sides of games that begin now."""
        with self._lock:
            return self._games.stretch(self._draw)

    def services(self, stretch: Stretch, team: int) -> tuple[Services, bool]:
        """The services of a team's agents, and whether their steps are learned from."""
        return services_of(self._seating, stretch, team, self.rival or MAIN)

    def count(self, game: Game) -> None:
        """Counts a game that has ended."""
        with self._lock:
            self._finish(game)

    def _record(self, finished: Finished | None, note: str) -> None:
        record_result(self._numbers, finished, self._league.champion_of)


class RivalsLeague(SidesLeague):
    """A player's part of `Rivals`.

    Args:
        league, games, numbers: as for `LocalLeague`.
        player: the player.
        lock: guards the league.
    """

    def __init__(self, league: Rivals, games: Sides, numbers: Recorder, player: str, lock: threading.Lock) -> None:
        super().__init__(league, games, numbers)
        self.rival, self._lock = player, lock


class RivalGroup(TeamGroup):
    """The behaviours of a job that play against each other.

    Args:
        clerk: writes the trial with their books: that of one of them, since one that plays itself has books, too.
        config: options of the first.

    Attributes:
        clerk: as given.
        lock: guards their league and sides.
    """

    def __init__(self, clerk: Clerk, config: SelfPlayConfig) -> None:
        super().__init__(config)
        self.clerk, self.lock = clerk, threading.Lock()
        self._league: tuple[Rivals, Ledger] | None = None

    def join(self, player: str, config: LeagueConfig, seed: int) -> tuple[Rivals, Ledger]:
        """Adds a player to the league; returns the league and its books."""
        if self._league is None:
            ledger = Ledger(books_file(self.clerk.trial()))
            self._league = Rivals({player: config}, ledger, seed=seed), ledger
        else:
            with self.lock:
                self._league[0].join(player, config)
        return self._league


@dataclass
class _Waiting:
    """A behaviour whose self-play has not begun."""

    job: JobConfig
    trainee: LocalTrainee
    players: TeamPlayers
    is_resumed: bool = False
    """It played itself before the training was resumed."""
    project: Future[str] | None = None
    """The request for the name under which its versions are registered."""
    late_at: float | None = None
    """When to say that MLflow does not answer; infinite: it was said. None: it was not asked."""

    @property
    def plays_itself(self) -> bool:
        return self.is_resumed or (self.players.name == MAIN and len(self.players.teams) > 1)


class LocalSelfPlays(SelfPlays[SelfPlay]):
    """Begins the self-play of behaviours that play several teams or each other; arguments are those of `SelfPlays`."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(say)
        self._group: RivalGroup | None = None
        self._resumed: Clerk | None = None
        """Writes the trial with the books of rivals in a resumed training."""
        self._waiting: dict[str, _Waiting] = {}

    def players(self, name: str, job: JobConfig, trainee: LocalTrainee, services: Services) -> TeamPlayers | None:
        """Gives the sessions of a behaviour their players; None: the job has no self-play.

        Args:
            name: the behaviour.
            job: its job.
            trainee: its learner.
            services: the models, buffers and recorder of its sessions.
        """
        for options in job.self_plays.values():
            waiting = self._waiting[name] = _Waiting(job, trainee, TeamPlayers(options, services))
            if trainee.clerk.may_resume and (before := players_before(books_file(trainee.clerk.trial()))):
                waiting.is_resumed = MAIN in before
                self._resumed = self._resumed if waiting.is_resumed else trainee.clerk
            return waiting.players
        return None

    def look(self) -> None:
        """Begins the self-play of behaviours that have several teams now; see also `LeagueTraining.look`."""
        for play in self._playing.values():
            play.look()
        for name, waiting in list(self._waiting.items()):
            if waiting.plays_itself and self._has_opened({name: waiting}, waiting.trainee.clerk):
                self._play(name, waiting)
        self._look_for_rivals()

    def _look_for_rivals(self) -> None:
        """Begins the self-play of behaviours that play different teams."""
        rivals = {
            name: waiting
            for name, waiting in self._waiting.items()
            if waiting.players.teams and not waiting.plays_itself
        }
        teams = set[int]().union(*(waiting.players.teams for waiting in rivals.values()))
        if self._group is not None:
            teams |= self._group.teams
        clerks = [waiting.trainee.clerk for waiting in rivals.values()]
        if not rivals or len(teams) < 2 or not self._has_opened(rivals, *clerks, self._resumed):
            return
        if self._group is None:
            options = next(iter(rivals.values())).job.self_plays
            self._group = RivalGroup(self._resumed or clerks[0], *options.values())
        for name, waiting in rivals.items():
            if waiting.players.name == MAIN:
                waiting.players.name = player_name(name, self._group.names)
            self._play(name, waiting, self._group)

    def _has_opened(self, waiting: Mapping[str, _Waiting], *clerks: Clerk | None) -> bool:
        """Whether these trials are open, for which the behaviours wait."""
        opened = all(clerk.opened() for clerk in clerks if clerk is not None)
        if not opened:
            self._say_late(waiting)
        return opened

    def _say_late(self, waiting: Mapping[str, _Waiting]) -> None:
        """Says, once of each behaviour, that it has long waited for MLflow."""
        for name, one in waiting.items():
            if one.late_at is None:
                one.late_at = clock.now() + _LATE_S
            elif clock.now() >= one.late_at:
                one.late_at = math.inf
                self._say(f"behaviour {name!r} waits with its self-play until MLflow answers")

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

    def _play(self, name: str, waiting: _Waiting, group: RivalGroup | None = None) -> None:
        if time.monotonic() < self._try_at:
            return
        job, trainee, players = waiting.job, waiting.trainee, waiting.players
        # Others may be learning, so this does not wait; a request that was given up would go to the queue's end again.
        project = waiting.project = waiting.project or trainee.clerk.request(behaviour_pool, True)
        if not project.done():
            self._say_late({name: waiting})
            return
        if not self._begin(name, lambda say: SelfPlay(job, trainee, players, say, project.result(), group)):
            waiting.project = None
            return
        del self._waiting[name]
        teams = ", ".join(map(str, sorted(players.teams)))
        if waiting.is_resumed:
            self._say(f"behaviour {name!r} goes on with its self-play")
        elif group is None:
            self._say_teams(name, teams)
        else:
            self._say_rival(name, teams)
