"""The training of a league on the local host: a learner, buffers and an acting model for each player that learns.

Its trial has a child trial for each player. `LocalLeague` gives sessions their players. Sessions are on the event loop,
and snapshots are frozen by the job's thread, so a lock guards the league. Knows nothing of doors or progress.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from brayx.actor.players import LearningPlayer, SeatedPlayer, Seating
from brayx.errors import LeagueError
from brayx.gamecore.protocol import game_of
from brayx.jobs.code import scripts_of
from brayx.jobs.config import JobConfig, job_of, only
from brayx.league.champion import meet_champion
from brayx.league.files import books_file, league_folder
from brayx.league.games import Finished, Game
from brayx.league.in_progress import LOST, GamesInProgress
from brayx.league.league import League
from brayx.league.ledger import Ledger
from brayx.league.sides import Sides
from brayx.league.training import LeagueTraining, RunningLeague, fetch_snapshots
from brayx.local.trainee import LocalTrainee
from brayx.metrics import Recorder, without_shapes
from brayx.metrics.numbers import LocalNumbers
from brayx.model.acting import ActingModel
from brayx.model.build import build_model
from brayx.model.snapshots import SnapshotFiles, SnapshotModel
from brayx.replay.buffer import NullBuffer
from brayx.tracking.clerk import Clerk

if TYPE_CHECKING:
    from torch import nn

    from brayx.league.member import Member
    from brayx.model.local import LocalModel
    from brayx.replay.packing import Layout


class LocalLeagueTraining:
    """Trains a league in this process: a `brayx.league.training.LeagueHost` with the books and the players of sessions.

    Args:
        job: the job.
        layout: layout of the model's observations and actions.
        clerk: writes the league's trial.
        say: prints a line above the display.
        recorded: the job as snapshots record it; None: ``job``.
        league_clerk: writes the trial with the league's books; None: ``clerk``.

    Attributes:
        numbers: sums over all players.
        league: the league.
        training: the training of all players.

    Raises:
        ConfigError: a script cannot be loaded.
        BadWeights: weights of a ``past`` player or of a snapshot do not fit the model; names the first leaf.
        ModelNotFound: the registry does not have these weights.
    """

    def __init__(
        self,
        job: JobConfig,
        layout: Layout,
        clerk: Clerk,
        say: Callable[[str], None],
        recorded: JobConfig | None = None,
        league_clerk: Clerk | None = None,
    ) -> None:
        self._name = only("league", job.leagues)
        self._job, self._config, self._clerk, self._layout = job, job.leagues[self._name], clerk, layout
        self._scripts = scripts_of(self._config, job.folder)
        files = SnapshotFiles(league_folder(clerk.trial()) / "weights")
        self.numbers = self._recorder()
        self._dropped: list[ActingModel] = []
        books = league_clerk or clerk
        self.training: LeagueTraining[LocalTrainee] = LeagueTraining(
            job, books.trial(), books, self, files, say, recorded or job
        )
        model = job.models[self._config.model]
        module, example = build_model(job.folder, model.module, self._config.model, job.in_mode("train").as_dict())
        resident = model.model_copy(update={"max_versions": self._config.max_versions})
        self._snapshots = ActingModel(resident, module, example, self.numbers, fetch=files.get)
        self._ledger, pool = self._open(files, module, say)
        fetch_snapshots(job, pool, files, clerk, module)

    @property
    def opponents(self) -> list[ActingModel | LocalModel]:
        """The acting models other than those of the players that learn."""
        return [self._snapshots, *self._dropped, *self.league.replaced]

    def seats(self, others: Mapping[str, Any], longest_wait_s: float = 0.0) -> LocalLeague:
        """Gives sessions their players.

        Args:
            others: the job's other acting models by name.
            longest_wait_s: see `LocalTrainee.caught_up`.
        """
        self._longest_wait_s = longest_wait_s
        snapshots, trainees = self._snapshots.model, self.training.trainees
        nothing = {name: NullBuffer() for trainee in trainees.values() for name in trainee.buffers}

        def snapshot(version: int) -> SnapshotModel:
            return SnapshotModel(snapshots, version)

        seating = Seating(self._config.model, snapshot, others, self._scripts, self.numbers, nothing)
        for name, trainee in trainees.items():
            seating.learn(name, self._learning(trainee))
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
        learner_job = job_of(self._job, self._name, player)
        checkpoints_kept = learner_job.trainers[only("trainer", learner_job.trainers)].checkpoints_kept
        clerk = self._clerk.child(player, learner_job.options(player=player), kept=checkpoints_kept)
        trainee = LocalTrainee(learner_job, self._layout, clerk, acts=True)
        trainee.numbers.listen(lambda part: self.numbers.merge(without_shapes(part)))
        return trainee

    def replace(self, player: str, before: LocalTrainee, now: LocalTrainee) -> None:
        """See `LeagueHost.replace`."""
        assert before.acting is not None
        assert now.acting is not None
        self.league.replace(player, before.acting.model, self._learning(now))
        _build_quietly(now.acting)

    def drop(self, player: str, trainee: LocalTrainee) -> None:
        """See `LeagueHost.drop`. Games already drawn may still begin with it, so its model is closed at the end."""
        if trainee.acting is not None:
            self._dropped.append(trainee.acting)

    def _recorder(self) -> LocalNumbers:
        """The league's recorder."""
        numbers = LocalNumbers(self._clerk.totals(), self._job.trainers[only("trainer", self._job.trainers)].x_axis)
        numbers.listen(self._clerk.push)
        return numbers

    def _open(self, files: SnapshotFiles, module: nn.Module, say: Callable[[str], None]) -> tuple[Ledger, list[Member]]:
        """Sets `league`; returns its books, and the snapshots that are versions of this model."""
        ledger = Ledger(books_file(self._clerk.trial()))
        meet_champion(self._job, ledger, files, self._clerk, module, say)
        league = League(self._config, ledger, seed=self._job.seed)
        self.league = self._running(league)
        return ledger, league.pool

    def _running(self, league: League) -> LocalLeague:
        """The league's part that gives sessions their players."""
        return LocalLeague(league, GamesInProgress(self._config), self.numbers)

    def _learning(self, trainee: LocalTrainee) -> LearningPlayer:
        """The parts of a player in sessions that are learned from."""
        assert trainee.acting is not None
        wait = trainee.caught_up(self._longest_wait_s)
        return LearningPlayer(trainee.acting.model, trainee.buffers, trainee.numbers, wait)


class LocalLeague(RunningLeague):
    """Gives sessions their players: `brayx.actor.players.Players`.

    Args:
        league: draws the players, and keeps the books.
        games: the games in progress; in self-play their sides.
        numbers: the league's recorder.
    """

    _seating: Seating

    def __init__(self, league: League, games: GamesInProgress | Sides, numbers: Recorder) -> None:
        self._league, self._games = league, games
        self._numbers = numbers
        self._lock = threading.Lock()
        self._draw: Callable[..., Game] = league.draw
        self._acting: dict[str, Any] = {}
        self._replaced: list[LocalModel] = []
        self._closing: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self, seating: Seating) -> None:
        """Sets what each player acts with, before the first session."""
        self._seating = seating

    async def seat(self, session: str, start: Any = None) -> SeatedPlayer:
        """See `brayx.actor.players.Players.seat`."""
        self._loop = asyncio.get_running_loop()
        with self._lock:
            member = self._games.assign(game_of(session), session, self._draw)
            learns = self._games.learns(session, self._league.learners)
            player = self._seating.seated(
                member.player,
                member.version,
                learns=learns,
                report=functools.partial(self._report, session),
                leave=functools.partial(self._leave, session),
                release=functools.partial(self._release, session),
            )
            self._acting[session] = player.services.models.get(self._seating.model)
            return player

    def replace(self, name: str, before: LocalModel, player: LearningPlayer) -> None:
        """Gives a restarted player its parts: see `Seating.learn` and `League.void_games`.

        Args:
            name: the player.
            before: the model that it acted with; closed when the last session that acts with it has ended.
            player: its parts in sessions that start from now on.
        """
        with self._lock:
            self._seating.learn(name, player)
            self._league.void_games(name)
            self._replaced.append(before)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._close_unused)

    @property
    def replaced(self) -> list[LocalModel]:
        """The replaced models that are not closed yet."""
        with self._lock:
            return list(self._replaced)

    def call(self, method: str, *args: Any) -> Any:
        """See `RunningLeague.call`."""
        with self._lock:
            return getattr(self._league, method)(*args)

    def _release(self, session: str) -> None:
        with self._lock:
            self._acting.pop(session, None)
            any_replaced = bool(self._replaced)
        if any_replaced:
            self._close_unused()

    def _close_unused(self) -> None:
        """Closes the replaced models that no session acts with. Runs on the event loop."""
        with self._lock:
            used = set(map(id, self._acting.values()))
            unused = [model for model in self._replaced if id(model) not in used]
            self._replaced = [model for model in self._replaced if id(model) in used]
        for model in unused:
            closing = asyncio.create_task(model.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    def _report(self, session: str, value: Any) -> None:
        with self._lock:
            self._games.result(session, value)

    def _leave(self, session: str, reason: str) -> None:
        with self._lock:
            game = self._games.ended(session, reason)
            if game is not None:
                self._finish(game)

    def _finish(self, game: Game) -> None:
        finished, note = None, ""
        try:
            finished = self._league.finish(game)
        except LeagueError as error:  # the session has ended all the same
            note = error.message
        self._record(finished, note)

    def _record(self, finished: Finished | None, note: str) -> None:
        """Records a game that has ended; None: it could not be counted."""
        self._numbers.add("league_games", 1.0, label=LOST if finished is None else finished.outcome, note=note)


def _build_quietly(model: ActingModel) -> None:
    model.build(lambda line: None)
