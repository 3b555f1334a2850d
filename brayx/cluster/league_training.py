"""The training of a league on Ray: the league's actor, and a `RayTrainee` for each player that learns.

Its trial has a child trial for each player. Knows nothing of doors or progress.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from brayx.cluster.hub import create_hub, end_hub
from brayx.cluster.league import Learning, RemoteLeague, create_league
from brayx.cluster.league_seats import LeagueSpec
from brayx.cluster.learner import TrialNumbers
from brayx.cluster.named import end_actor
from brayx.cluster.scale import hub_name
from brayx.cluster.trainee import RayTrainee
from brayx.cluster.weight_store import KEPT_VERSIONS, create_weight_store, end_weight_store
from brayx.jobs.config import JobConfig, job_of, only
from brayx.league.champion import meet_champion
from brayx.league.files import books_file, league_folder
from brayx.league.ledger import Ledger
from brayx.league.training import LeagueTraining, fetch_snapshots
from brayx.model.build import build_model
from brayx.model.snapshots import SnapshotFiles
from brayx.tracking import Trial
from brayx.tracking.in_process import InProcessClerk

if TYPE_CHECKING:
    from brayx.replay.packing import Layout


class RayLeagueTraining:
    """Trains a league on Ray: a `brayx.league.training.LeagueHost` with the league's actor, and a learner a player.

    Args:
        job: the job; its league's model acts in the replicas, see `check_placement`.
        layout: layout of the model's observations and actions.
        trial: the league's trial.
        say: prints a line above the display.

    Attributes:
        trial: the league's trial.
        names: names of the league's Ray actors, by part.
        hub: the league's hub; it gets the samples of all players.
        numbers: its recorder in this process.
        league: the league.
        training: the training of all players.
        seats: what replicas need to give sessions their players.

    Raises:
        BadWeights: weights of a ``past`` player or of a snapshot do not fit the model; names the first leaf.
        ModelNotFound: the registry does not have these weights.
    """

    def __init__(self, job: JobConfig, layout: Layout, trial: Trial, say: Callable[[str], None]) -> None:
        self._name = only("league", job.leagues)
        self._job, self._layout, self.trial = job, layout, trial
        config = job.leagues[self._name]
        self.names = {
            "hub": hub_name(trial),
            "league": f"{trial.run_id}/league",
            "sessions": f"{trial.run_id}/sessions",
        }
        self._stores = {name: f"{trial.run_id}/{name}/weights" for name in config.learners}
        files, clerk = open_books(job, trial, say), InProcessClerk(trial)
        self._made: list[RayTrainee] = []
        with contextlib.ExitStack() as stack:
            self.hub = create_hub(self.names["hub"], trial, x_axis=job.trainers[only("trainer", job.trainers)].x_axis)
            stack.callback(end_actor, self.hub)
            self.numbers = TrialNumbers(self.hub)
            stack.callback(self.numbers.close)
            for store in self._stores.values():
                keep = max(KEPT_VERSIONS, job.models[config.model].max_versions)
                stack.callback(end_weight_store, create_weight_store(store, keep=keep))
            stack.callback(self._close_trainees)
            self.training: LeagueTraining[RayTrainee] = LeagueTraining(job, trial, clerk, self, files, say)
            learning = {name: _learning(trainee) for name, trainee in self.training.trainees.items()}
            actor = create_league(
                self.names["league"], config, league_folder(trial) / "weights", books_file(trial), job.seed, learning
            )
            stack.callback(end_actor, actor)
            self.league = RemoteLeague(actor, learning, say)
            buffers = {name for parts in learning.values() for name in parts.buffers}
            self.seats = LeagueSpec(self.names["league"], config, self._stores, buffers)
            self._stack = stack.pop_all()

    def trainee(self, player: str) -> RayTrainee:
        """See `LeagueHost.trainee`."""
        learner_job = job_of(self._job, self._name, player)
        trial = Trial.open(self._job.project, player, self.trial.uri, resume=True, parent=self.trial)
        trial.log_options(learner_job.options(player=player))
        made = RayTrainee(learner_job, self._layout, trial, store=self._stores[player], part_of=self.names["hub"])
        self._made.append(made)
        return made

    def replace(self, player: str, before: RayTrainee, now: RayTrainee) -> None:
        """See `LeagueHost.replace`."""
        self.league.learn(player, _learning(now))

    def drop(self, player: str, trainee: RayTrainee) -> None:
        """Does nothing: its actors have ended with its trial."""

    def settle(self, within: Callable[[float], float]) -> tuple[dict[str, float], dict[str, str]]:
        """As `RayTrainee.settle`, for the league's own metrics."""
        return end_hub(self.hub, self.numbers, within)

    def close(self) -> None:
        """Ends all actors; idempotent."""
        self._stack.close()

    def _close_trainees(self) -> None:
        for trainee in self._made:
            trainee.close()
            if not trainee.ended:
                trainee.trial.finish("KILLED")


def open_books(job: JobConfig, trial: Trial, say: Callable[[str], None]) -> SnapshotFiles:
    """Makes a league's books and the files of its snapshots, before its actor opens them; returns the files.

    Arguments and errors are those of `RayLeagueTraining`.
    """
    config = job.leagues[only("league", job.leagues)]
    files, clerk = SnapshotFiles(league_folder(trial) / "weights"), InProcessClerk(trial)
    module, _ = build_model(job.folder, job.models[config.model].module, config.model, job.in_mode("train").as_dict())
    with contextlib.closing(Ledger(books_file(trial))) as ledger:
        pool = [snapshot.member for snapshot in ledger.snapshots() if not snapshot.dropped]
        meet_champion(job, ledger, files, clerk, module, say)
    fetch_snapshots(job, pool, files, clerk, module)
    return files


def _learning(trainee: RayTrainee) -> Learning:
    return Learning(trainee.actors, trainee.names["hub"])
