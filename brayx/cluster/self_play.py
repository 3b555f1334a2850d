"""Self-play on Ray: of one behaviour, a league of one player whose opponents are its own past.

It begins when games have named two teams, which their replicas say by a metric. Knows nothing of sessions:
`brayx.cluster.teams` gives them their players.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping

from brayx.cluster.league import Learning, RemoteLeague, create_league
from brayx.cluster.league_training import open_books
from brayx.cluster.named import end_actor
from brayx.cluster.trainee import RayTrainee
from brayx.jobs.champion import behaviour_pool
from brayx.jobs.config import JobConfig
from brayx.jobs.contracts import SELF_PLAY_TAG
from brayx.league.config import MAIN
from brayx.league.files import books_file, league_folder
from brayx.league.self_plays import SelfPlays
from brayx.league.training import LeagueTraining


class RaySelfPlay:
    """Trains a behaviour against its own past: a `brayx.league.training.LeagueHost`.

    Args:
        job: the behaviour's job, which has ``self_play``.
        trainee: its learner, which runs already.
        say: prints a line above the display.

    Attributes:
        numbers: the learner's recorder.
        league: the league.
        training: its training.

    Errors are those of `RayLeagueTraining`.
    """

    def __init__(self, job: JobConfig, trainee: RayTrainee, say: Callable[[str], None]) -> None:
        self._trainee, self.numbers = trainee, trainee.numbers
        (options,) = job.self_plays.values()
        trial, clerk = trainee.trial, trainee.clerk
        config, project = options.league(trainee.config.model), clerk.call(behaviour_pool, True)
        league_job = job.model_copy(update={"project": project, "leagues": {"league": config}})
        files = open_books(league_job, trial, say)
        trial.set_tag(SELF_PLAY_TAG, project)
        learning = {MAIN: Learning(trainee.actors, trainee.names["hub"])}
        folder = league_folder(trial) / "weights"
        with contextlib.ExitStack() as stack:
            self.training: LeagueTraining[RayTrainee] = LeagueTraining(league_job, trial, clerk, self, files, say, job)
            stack.callback(self.training.close_check)
            actor = create_league(trainee.names["league"], config, folder, books_file(trial), job.seed, learning)
            stack.callback(end_actor, actor)
            self.league = RemoteLeague(actor, learning, say)
            self._stack = stack.pop_all()

    def trainee(self, player: str) -> RayTrainee:
        """See `LeagueHost.trainee`."""
        return self._trainee

    def replace(self, player: str, before: RayTrainee, now: RayTrainee) -> None:
        """See `LeagueHost.replace`; its player never restarts."""

    def drop(self, player: str, trainee: RayTrainee) -> None:
        """See `LeagueHost.drop`; its only player is never dropped."""

    def close(self) -> None:
        """Ends the league's actor."""
        self._stack.close()


class RaySelfPlays(SelfPlays[RaySelfPlay]):
    """Begins the self-play of behaviours whose games name several teams; arguments are those of `SelfPlays`."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(say)
        self._said_rivals = False

    def look(self, jobs: Mapping[str, JobConfig], trainees: Mapping[str, RayTrainee]) -> None:
        """Begins the self-play of behaviours that have several teams now; see also `LeagueTraining.look`.

        Args:
            jobs, trainees: the job and the learner of each behaviour.
        """
        for play in self._playing.values():
            play.training.look()
        alone: dict[str, str] = {}
        for name, trainee in trainees.items():
            if name in self._playing or not jobs[name].self_plays:
                continue
            teams = sorted(metric.partition(".")[2] for metric in trainee.numbers.newest() if _is_team(metric))
            if len(teams) > 1 and trainee.learner.running:
                if self._begin(name, functools.partial(RaySelfPlay, jobs[name], trainee)):
                    self._say_teams(name, ", ".join(teams))
            elif len(teams) == 1:
                alone[name] = teams[0]
        if len({*alone.values()}) > 1 and not self._said_rivals:
            self._said_rivals = True
            self._say(
                f"behaviours {', '.join(alone)} play different teams: on a cluster they learn against each other as "
                "they are"
            )

    def close(self) -> None:
        """Ends the leagues' actors."""
        with contextlib.ExitStack() as stack:
            for play in self._playing.values():
                stack.callback(play.close)


def _is_team(metric: str) -> bool:
    return metric.startswith("self_play_teams.")
