"""Self-play on Ray: of one behaviour, a league of one player whose opponents are its own past; or of several that play
different teams, whose opponents are each other's past (`brayx.league.rivals`).

It begins when games have named two teams, which their replicas say by a metric. Knows nothing of sessions:
`brayx.cluster.teams` gives them their players.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from brayx.cluster.league import Learning, RemoteLeague, RemoteRival, Rival, create_league, create_rivals
from brayx.cluster.league_training import open_books
from brayx.cluster.named import end_actor
from brayx.cluster.trainee import RayTrainee
from brayx.jobs.champion import behaviour_pool
from brayx.jobs.config import JobConfig
from brayx.jobs.contracts import RIVALS_TAG, SELF_PLAY_TAG, parse_contract
from brayx.league.champion import freeze_champion
from brayx.league.config import MAIN
from brayx.league.files import books_file, league_folder
from brayx.league.ledger import Ledger
from brayx.league.self_plays import SelfPlays, player_name, players_before
from brayx.league.training import LeagueTraining, fetch_snapshots
from brayx.model.snapshots import SnapshotFiles
from brayx.tracking import Trial
from brayx.tracking.in_process import InProcessClerk


class RaySelfPlay:
    """Trains a behaviour against its own past, or against that of other behaviours: a
    `brayx.league.training.LeagueHost`.

    Args:
        job: the behaviour's job, which has ``self_play``.
        trainee: its learner, which runs already.
        say: prints a line above the display.
        group: the behaviours that play against each other, and this one; None: it plays itself.

    Attributes:
        numbers: the learner's recorder.
        league: the league.
        training: its training.

    Errors are those of `RayLeagueTraining`.
    """

    league: RemoteLeague

    def __init__(
        self, job: JobConfig, trainee: RayTrainee, say: Callable[[str], None], group: RayRivalGroup | None = None
    ) -> None:
        self._job, self._trainee, self._say, self._group = job, trainee, say, group
        self.numbers = trainee.numbers
        (options,) = job.self_plays.values()
        trial, project = trainee.trial, trainee.clerk.call(behaviour_pool, True)
        self._player = MAIN if group is None else group.name_of(parse_contract(job.contract).behaviour)
        self._config = options.league(trainee.config.model, self._player)
        self._league_job = job.model_copy(update={"project": project, "leagues": {"league": self._config}})
        with contextlib.ExitStack() as stack:
            files = SnapshotFiles(league_folder(trial) / "weights")
            books = trial if group is None else group.trial
            parts = self._league_job, books, InProcessClerk(books), self, files, say, job
            self.training: LeagueTraining[RayTrainee] = LeagueTraining(*parts)
            stack.callback(self.training.close_check)
            if group is None:
                stack.callback(end_actor, self._begin())
            else:
                self._join(group, files)
            trial.set_tag(SELF_PLAY_TAG, project)
            self._stack = stack.pop_all()

    def _begin(self) -> Any:
        """Starts the league of the behaviour alone; returns Ray's handle."""
        trial, names = self._trainee.trial, self._trainee.names
        open_books(self._league_job, trial, self._say)
        learning = {MAIN: Learning(self._trainee.actors, names["hub"])}
        parts = self._config, league_folder(trial) / "weights", books_file(trial), self._job.seed, learning
        actor = create_league(names["league"], *parts)
        self.league = RemoteLeague(actor, learning, self._say)
        return actor

    def _join(self, group: RayRivalGroup, files: SnapshotFiles) -> None:
        """Joins the league of rivals; repeating it changes nothing."""
        job, trainee, player = self._league_job, self._trainee, self._player
        clerk, module = trainee.clerk, trainee.module()
        with contextlib.closing(Ledger(books_file(group.trial))) as ledger:
            known = [snapshot for snapshot in ledger.snapshots() if snapshot.member.player == player]
        fetch_snapshots(job, [snapshot.member for snapshot in known if not snapshot.dropped], files, clerk, module)
        group.learning[player] = Rival(
            trainee.actors,
            trainee.names["hub"],
            behaviour=parse_contract(job.contract).behaviour,
            config=self._config,
            weights=str((league_folder(trainee.trial) / "weights").absolute()),
        )
        self.league = RemoteRival(group.actor(job.seed), player, group.learning, self._say)
        self.league.draws = next(iter(group.learning)) == player
        self.league.due(player, 0)  # it joins
        versions = {snapshot.member.version for snapshot in known}
        freeze_champion(self.league, versions, files, clerk, job.project, module, self._say)
        trainee.trial.set_tag(RIVALS_TAG, group.trial.run_id)

    def look(self) -> None:
        """See `LeagueTraining.look`."""
        if self._group is not None and not self._trainee.learner.running:
            learning = self._group.learning
            learning[self._player] = replace(learning[self._player], done=True)
        self.training.look()

    def trainee(self, player: str) -> RayTrainee:
        """See `LeagueHost.trainee`."""
        return self._trainee

    def replace(self, player: str, before: RayTrainee, now: RayTrainee) -> None:
        """See `LeagueHost.replace`; its player never restarts."""

    def drop(self, player: str, trainee: RayTrainee) -> None:
        """See `LeagueHost.drop`; its only player is never dropped."""

    def close(self) -> None:
        """Ends its league's actor, and the gate's check."""
        self._stack.close()


class RayRivalGroup:
    """The behaviours of a job that play against each other.

    Args:
        name: name of their league's Ray actor.
        trial: the trial with their books: that of one of them, since one that plays itself has books, too.

    Attributes:
        trial: as given.
        learning: the players by name; grows.
    """

    def __init__(self, name: str, trial: Trial) -> None:
        self._name, self.trial = name, trial
        self.learning: dict[str, Rival] = {}
        self._actor: Any = None

    def name_of(self, behaviour: str) -> str:
        """A behaviour's name as a player."""
        names = {rival.behaviour: name for name, rival in self.learning.items()}
        return names.get(behaviour) or player_name(behaviour, names.values())

    def actor(self, seed: int) -> Any:
        """Ray's handle of their league; starts it with the first player."""
        if self._actor is None:
            self._actor = create_rivals(self._name, books_file(self.trial), seed, self.learning)
        return self._actor

    def close(self) -> None:
        """Ends their league's actor."""
        end_actor(self._actor)


class RaySelfPlays(SelfPlays[RaySelfPlay]):
    """Begins the self-play of behaviours that play several teams or each other.

    Args:
        say: as for `SelfPlays`.
        rivals: name of the Ray actor for the league of those that play each other.
    """

    def __init__(self, say: Callable[[str], None], rivals: str) -> None:
        super().__init__(say)
        self._rivals = rivals
        self._group: RayRivalGroup | None = None
        self._teams = set[str]()

    def look(self, jobs: Mapping[str, JobConfig], trainees: Mapping[str, RayTrainee]) -> None:
        """Begins the self-play of behaviours that have several teams now; see also `LeagueTraining.look`.

        Args:
            jobs, trainees: the job and the learner of each behaviour.
        """
        for play in self._playing.values():
            play.look()
        alone: dict[str, str] = {}
        for name, trainee in trainees.items():
            if name in self._playing or not jobs[name].self_plays or not trainee.learner.running:
                continue
            teams = sorted(metric.partition(".")[2] for metric in trainee.numbers.newest() if _is_team(metric))
            if len(teams) > 1:
                if self._begin(name, functools.partial(RaySelfPlay, jobs[name], trainee)):
                    self._say_teams(name, ", ".join(teams))
            elif teams:
                alone[name] = teams[0]
        if len(self._teams.union(alone.values())) > 1:
            self._begin_rivals(alone, jobs, trainees)

    def _begin_rivals(
        self, teams: Mapping[str, str], jobs: Mapping[str, JobConfig], trainees: Mapping[str, RayTrainee]
    ) -> None:
        """Begins the self-play of behaviours that play different teams.

        Args:
            teams: the team of each.
            jobs, trainees: as for `look`.
        """
        if self._group is None:
            trials = [trainee.trial for trainee in trainees.values()]
            resumed = (trial for trial in trials if players_before(books_file(trial)) - {MAIN})
            self._group = RayRivalGroup(self._rivals, next(resumed, trainees[next(iter(teams))].trial))
        for name, team in teams.items():
            if self._begin(name, functools.partial(RaySelfPlay, jobs[name], trainees[name], group=self._group)):
                self._teams.add(team)
                self._say_rival(name, team)

    def close(self) -> None:
        """Ends the leagues' actors."""
        with contextlib.ExitStack() as stack:
            if self._group is not None:
                stack.callback(self._group.close)
            for play in self._playing.values():
                stack.callback(play.close)


def _is_team(metric: str) -> bool:
    return metric.startswith("self_play_teams.")
