"""The training of a league on the local host: a learner, buffers and an acting model for each player that learns.

Its trial has a child trial for each player. Knows nothing of doors or progress.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from brayx.actor.players import LearningPlayer, Seating
from brayx.jobs.code import scripts_of
from brayx.jobs.config import JobConfig, job_of, only
from brayx.league.champion import meet_champion
from brayx.league.files import books_file, league_folder
from brayx.league.in_progress import GamesInProgress
from brayx.league.league import League
from brayx.league.ledger import Ledger
from brayx.league.training import LeagueTraining, fetch_snapshots
from brayx.local.league import LocalLeague
from brayx.local.trainee import LocalTrainee
from brayx.metrics import without_shapes
from brayx.metrics.numbers import LocalNumbers
from brayx.model.acting import ActingModel
from brayx.model.build import build_model
from brayx.model.snapshots import SnapshotFiles, SnapshotModel
from brayx.replay.buffer import NullBuffer
from brayx.tracking.clerk import Clerk

if TYPE_CHECKING:
    from brayx.model.local import LocalModel
    from brayx.replay.packing import Layout


class LocalLeagueTraining:
    """Trains a league in this process: a `brayx.league.training.LeagueHost` with the books and the players of sessions.

    Args:
        job: the job.
        layout: layout of the model's observations and actions.
        clerk: writes the league's trial.
        say: prints a line above the display.

    Attributes:
        numbers: sums over all players.
        league: the league.
        training: the training of all players.

    Raises:
        ConfigError: a script cannot be loaded.
        BadWeights: weights of a ``past`` player or of a snapshot do not fit the model; names the first leaf.
        ModelNotFound: the registry does not have these weights.
    """

    def __init__(self, job: JobConfig, layout: Layout, clerk: Clerk, say: Callable[[str], None]) -> None:
        self._name = only("league", job.leagues)
        self._job, self._config, self._clerk, self._layout = job, job.leagues[self._name], clerk, layout
        self._scripts = scripts_of(self._config, job.folder)
        trial = clerk.trial()
        files = SnapshotFiles(league_folder(trial) / "weights")
        self.numbers = LocalNumbers(clerk.totals(), job.trainers[only("trainer", job.trainers)].x_axis)
        self.numbers.listen(clerk.push)
        self._dropped: list[ActingModel] = []
        self.training: LeagueTraining[LocalTrainee] = LeagueTraining(job, trial, clerk, self, files, say)
        model = job.models[self._config.model]
        module, example = build_model(job.folder, model.module, self._config.model, job.in_mode("train").as_dict())
        resident = model.model_copy(update={"max_versions": self._config.max_versions})
        self._snapshots = ActingModel(resident, module, example, self.numbers, fetch=files.get)
        self._ledger = Ledger(books_file(trial))
        meet_champion(job, self._ledger, files, clerk, module, say)
        league = League(self._config, self._ledger, seed=job.seed)
        self.league = LocalLeague(league, GamesInProgress(self._config), self.numbers)
        fetch_snapshots(job, league.pool, files, clerk, module)

    @property
    def opponents(self) -> list[ActingModel | LocalModel]:
        """The acting models other than those of the players that learn."""
        return [self._snapshots, *self._dropped, *self.league.replaced]

    def seats(self, others: Mapping[str, Any]) -> LocalLeague:
        """Gives sessions their players; ``others`` are the job's other acting models by name."""
        snapshots, trainees = self._snapshots.model, self.training.trainees
        nothing = {name: NullBuffer() for trainee in trainees.values() for name in trainee.buffers}

        def snapshot(version: int) -> SnapshotModel:
            return SnapshotModel(snapshots, version)

        seating = Seating(self._config.model, snapshot, others, self._scripts, self.numbers, nothing)
        for name, trainee in trainees.items():
            seating.learn(name, _learning(trainee))
        self.league.open(seating)
        return self.league

    def build_engines(self, but: ActingModel | None) -> None:
        """Starts to build the engines of all models except ``but``, without messages; see `ActingModel.build`."""
        for trainee in self.training.trainees.values():
            if trainee.acting is not None and trainee.acting is not but:
                _build_quietly(trainee.acting)
        _build_quietly(self._snapshots)

    def close(self) -> None:
        """Ends the books."""
        self._ledger.close()

    def trainee(self, player: str) -> LocalTrainee:
        """See `LeagueHost.trainee`."""
        own = job_of(self._job, self._name, player)
        kept = own.trainers[only("trainer", own.trainers)].checkpoints_kept
        clerk = self._clerk.child(player, {"player": player, **own.as_dict()}, kept=kept)
        trainee = LocalTrainee(own, self._layout, clerk, acts=True)
        trainee.numbers.listen(lambda part: self.numbers.merge(without_shapes(part)))
        return trainee

    def replace(self, player: str, before: LocalTrainee, now: LocalTrainee) -> None:
        """See `LeagueHost.replace`."""
        assert before.acting is not None
        assert now.acting is not None
        self.league.replace(player, before.acting.model, _learning(now))
        _build_quietly(now.acting)

    def drop(self, player: str, trainee: LocalTrainee) -> None:
        """See `LeagueHost.drop`. Games already drawn may still begin with it, so its model is closed at the end."""
        if trainee.acting is not None:
            self._dropped.append(trainee.acting)


def _learning(trainee: LocalTrainee) -> LearningPlayer:
    assert trainee.acting is not None
    return LearningPlayer(trainee.acting.model, trainee.buffers, trainee.numbers)


def _build_quietly(model: ActingModel) -> None:
    model.build(lambda line: None)
