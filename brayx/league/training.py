"""The training of a league, on every host: snapshots, champions, learners that fail or restart, charts.

Knows nothing of sessions, or of where the league and its learners run: the host has both.
"""

from __future__ import annotations

import abc
import contextlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from brayx.engines.base import check_weights, layout_of, load_weights, save_weights
from brayx.engines.torch import module_weights
from brayx.errors import BadWeights, BrayxError, DeadlineExceeded, StartupError, TrackingError
from brayx.jobs.config import JobConfig, only, pool_name
from brayx.jobs.contracts import BEHAVIOUR_TAG, CONTRACT_TAG
from brayx.jobs.trainee import T, Trainees
from brayx.league.champion import registered_weights, set_champion
from brayx.league.charts import draw_league, keep_curves, keep_ratings
from brayx.league.check import Checked, GateCheck
from brayx.league.files import DIGEST_TAG, PLAYER_TAG, books_file
from brayx.league.gates import Verdict
from brayx.league.league import Standing
from brayx.league.member import Member
from brayx.metrics.totals import GAMES
from brayx.model.snapshots import SnapshotFiles, digest_of
from brayx.tables import aligned
from brayx.temporary import temporary_folder
from brayx.tracking import Trial, find
from brayx.tracking.registry import register_files

if TYPE_CHECKING:
    from torch import nn

    from brayx.tracking.clerk import Clerk
    from brayx.tracking.in_process import InProcessClerk
    from brayx.trainer.loop import LearnerNumbers

log = logging.getLogger(__name__)

_LAST_CHECKPOINT_S = 60.0
"""Deadline for a learner to save its last checkpoint."""
_FIRST_WEIGHTS_S = 180.0
"""Deadline for a new learner to publish its first weights."""
_REGISTRY_S = 10.0
"""Time between a failure of the registry and the next try."""
_REGISTRY_START_S, _LAST_REGISTRY_START_S = 3.0, 120.0
"""Deadline for a call of the registry to start, while the league watches its players and at its end."""
_NUMBERS_S, _CURVES_S, _PICTURES_S = 1.0, 5.0, 60.0
"""Time between two metrics of the league, two points of its curves, and two drawings of its pictures."""


class RunningLeague(abc.ABC):
    """The league that a training calls, perhaps in another thread or process: each host implements `call`.

    Attributes:
        rival: of rivals, which have a model each and their own champion, this training's player; empty: all players
            have one model.
        draws: whether this training draws the league's pictures: of rivals, one does.
    """

    rival = ""
    draws = True

    @abc.abstractmethod
    def call(self, method: str, *args: Any) -> Any:
        """Calls the method of the `League` with that name."""

    def champion(self) -> Member | None:
        champion: Member | None = self.call("champion_of", self.rival)
        return champion

    def due(self, player: str, env_steps: int) -> str:
        return str(self.call("due", player, env_steps))

    def has(self, digest: str) -> bool:
        return bool(self.call("has", digest))

    def freeze(self, player: str, version: int, digest: str, env_steps: int) -> Member:
        member: Member = self.call("freeze", player, version, digest, env_steps)
        return member

    def frozen_steps(self, player: str) -> int:
        return int(self.call("frozen_steps", player))

    def candidates(self) -> list[Member]:
        return list(self.call("candidates_of", self.rival) if self.rival else self.call("candidates"))

    def crown(self, candidate: Member) -> Verdict:
        verdict: Verdict = self.call("crown", candidate)
        return verdict

    def refuse(self, candidate: Member, reason: str) -> None:
        self.call("refuse", candidate, reason)

    def standings(self) -> list[Standing]:
        return list(self.call("standings"))

    def retire(self, player: str, reason: str) -> None:
        self.call("retire", player, reason)


class LeagueHost(Protocol[T]):
    """Makes and replaces the parts of the players, on the host of a league's training."""

    @property
    def league(self) -> RunningLeague:
        """The league."""

    @property
    def numbers(self) -> LearnerNumbers:
        """Recorder of the league's metrics, with their newest values."""

    def trainee(self, player: str) -> T:
        """Makes the parts of a player, with a learner that has not started."""

    def replace(self, player: str, before: T, now: T) -> None:
        """Gives sessions that start from now on the parts of a restarted player."""

    def drop(self, player: str, trainee: T) -> None:
        """Frees the parts of a player whose learner failed; it plays no new games."""


class LeagueTraining(Trainees[T]):
    """The players of a league in training.

    Args:
        job: the job.
        trial: the league's trial.
        clerk: runs functions where that trial is.
        host: the host.
        files: the snapshots' weights.
        say: prints a line above the display.
        recorded: the job as snapshots record it; None: ``job``.

    Attributes:
        trainees: the players that learn, by name; those that failed are left out.
        mains: names of the main players, or of all learners if there is none.
    """

    def __init__(
        self,
        job: JobConfig,
        trial: Trial,
        clerk: Clerk | InProcessClerk,
        host: LeagueHost[T],
        files: SnapshotFiles,
        say: Callable[[str], None],
        recorded: JobConfig | None = None,
    ) -> None:
        self._config = config = job.leagues[only("league", job.leagues)]
        self._trial, self._clerk, self._host, self._files, self._say = trial, clerk, host, files, say
        self._pool = pool_name(job, config.model)
        self._about: dict[str, Any] = {"job": (recorded or job).in_mode("train").as_dict(), "folder": job.folder}
        learners = config.learners
        self.trainees: dict[str, T] = {name: host.trainee(name) for name in learners}
        self.mains = [name for name in learners if config.players[name].role == "main"] or learners
        self._check: GateCheck | None = None
        if config.gate.check is not None:
            checked = Checked(config.gate, job.folder, config.model, self._about["job"])
            self._check = GateCheck(checked, files.read, lambda score: host.numbers.add("gate_check", score))
        self._complete: set[str] = set()
        self._unverified = {name for name in learners if config.players[name].restarts}
        """Players whose trials were perhaps killed during a restart: not checked yet."""
        self._alias_is_set = False
        self._registry_at = 0.0
        """Earliest time of the next try."""
        self._registry_start_s = _REGISTRY_START_S
        self._registry_error: TrackingError | None = None
        self._numbers_at = self._curves_at = self._pictures_at = time.monotonic()
        self._games_then: float | None = None

    def look(self) -> None:
        """Freezes the snapshots that are due, and retires players whose learners failed; call it repeatedly.

        Raises:
            BrayxError: the last main player's learner failed.
        """
        if not self._alias_is_set:  # the process may have been killed between the books and the registry
            self._set_alias(self._host.league.champion())
        for name, trainee in list(self.trainees.items()):
            if not trainee.learner.running:
                self._ended(name, trainee)
                continue
            restarts = self._was_killed_between(name)
            if not restarts:
                reason = self._host.league.due(name, self._env_steps(name))
                restarts = bool(reason) and self._freeze(name, reason) and self._config.players[name].restarts
            if restarts:
                try:
                    self._restart(name)
                except BrayxError as error:  # even an error of the registry ends this player only
                    self._out(name, self.trainees[name], error)
        for candidate in self._host.league.candidates():
            checked = Verdict(True, "") if self._check is None else self._check.verdict(candidate)
            if checked is None:
                continue  # it is not known yet
            if not checked.passed:
                self._host.league.refuse(candidate, checked.reason)
                self._say(f"{candidate.label} does not become champion: {checked.reason}")
                continue
            self._alias_is_set = False  # repeated until it succeeds: an answer may be lost
            before = self._host.league.champion()
            verdict = self._host.league.crown(candidate)
            if verdict.passed:
                reasons = "; ".join(reason for reason in (verdict.reason, checked.reason) if reason)
                self._say(f"{candidate.label} is champion: {reasons}")
                self._set_alias(candidate, before)
            else:
                self._alias_is_set = True
        self._report()

    def _set_alias(self, champion: Member | None, before: Member | None = None) -> None:
        if champion is not None:
            moved = champion.version, before and before.version, self._host.league.rival
            note = self._registry(self._clerk, set_champion, self._pool, *moved)
            if note is None:
                return
            if note:
                self._say(note)
        self._alias_is_set = True

    def _registry(self, clerk: Clerk | InProcessClerk, function: Callable[..., Any], *args: Any) -> Any:
        """Calls a function of the registry. Returns None if it fails or has just failed; a later `look` tries again."""
        now = time.monotonic()
        if now < self._registry_at:
            return None
        try:
            result = clerk.call(function, *args, start_s=self._registry_start_s)
        except TrackingError as error:
            if self._registry_error is None:
                self._say(f"the league continues, and retries every {_REGISTRY_S:g} s: {error.message}")
            self._registry_at, self._registry_error = now + _REGISTRY_S, error
            return None
        self._registry_error = None
        return result

    def _report(self) -> None:
        """Records the league's numbers; adds to its curves and draws its pictures, in MLflow's process."""
        now = time.monotonic()
        if now - self._numbers_at >= _NUMBERS_S:
            games = self._host.numbers.newest().get(GAMES, 0.0)
            if self._games_then is not None:
                self._host.numbers.add("league_games_per_s", (games - self._games_then) / (now - self._numbers_at))
            self._numbers_at, self._games_then = now, games
            standings, champion = self._host.league.standings(), self._host.league.champion()
            for row in standings:
                if not row.member.version and self._host.league.rival in ("", row.member.player):
                    self._host.numbers.add("league_points", row.points, label=row.member.player)
            snapshots = [row for row in standings if row.member.version and row.member.player in self._config.learners]
            self._host.numbers.add("league_pool", len(snapshots))
            if champion is not None:
                self._host.numbers.add("league_champion", champion.version)
        if now - self._pictures_at >= _PICTURES_S:
            self._pictures_at = self._curves_at = now
            if self._host.league.draws:
                self._clerk.in_background(draw_league, *self._charted(), self._shown())
            else:
                self._clerk.in_background(keep_ratings, *self._charted())
        elif now - self._curves_at >= _CURVES_S:
            self._curves_at = now
            self._clerk.in_background(keep_curves, *self._charted()[:2])

    def _charted(self) -> tuple[str, dict[str, int], str, str]:
        """Arguments of `keep_ratings`."""
        env_steps = {name: self._env_steps(name) for name in self.trainees}
        return str(books_file(self._trial)), env_steps, self._pool, self._host.league.rival

    def _shown(self) -> list[str]:
        """The members in the pictures."""
        return [row.member.label for row in self._host.league.standings()]

    def _env_steps(self, player: str) -> int:
        """Env steps of a player over all its restarts: each restart's trial counts from 0."""
        steps = int(self.trainees[player].numbers.newest().get("env_steps", 0))
        return steps + self._host.league.frozen_steps(player) if self._config.players[player].restarts else steps

    def _was_killed_between(self, player: str) -> bool:
        """Whether the process was killed between a snapshot of a player and its restart: the resumed trial is then that
        of the snapshot, whose steps are already in the books."""
        if player not in self._unverified:
            return False
        versions = [row.member.version for row in self._host.league.standings() if row.member.player == player]
        newest = max(versions, default=0)
        killed = newest > 0 and self.trainees[player].clerk.call(is_of_trial, self._pool, newest)
        self._unverified.discard(player)
        return bool(killed)

    def _freeze(self, player: str, reason: str) -> bool:
        """Registers a player's newest weights and adds them to the pool. False: they are already in the pool, the
        player has not learned, or the registry fails now.

        If the process is killed between the two, the resumed trial registers other weights, and a version in no pool is
        left over.
        """
        if time.monotonic() < self._registry_at:
            return False
        trainee, env_steps = self.trainees[player], self._env_steps(player)
        has_learned = trainee.numbers.newest().get("updates", 0) >= trainee.config.weights_publish_interval
        weights = trainee.newest_weights() if has_learned else None
        if weights is None:
            return False
        digest = digest_of(weights)
        if self._host.league.has(digest):
            return False
        with temporary_folder("snapshot") as temporary:
            save_weights(temporary / "weights.npz", weights)
            meta = {**self._about, "counters": {"env_steps": env_steps}}  # as a checkpoint's, so that it can be built
            (temporary / "meta.json").write_text(json.dumps(meta, indent=1, default=str))
            about = f"Snapshot of player {player!r} of league {self._trial.name!r}."
            tags = {PLAYER_TAG: player, DIGEST_TAG: digest, "env_steps": str(env_steps)}
            version = self._registry(trainee.clerk, register_snapshot, temporary, self._pool, env_steps, tags, about)
        if version is None:
            return False
        self._files.put(version, weights)
        member = self._host.league.freeze(player, version, digest, env_steps)
        self._say(f"{member.label} joins the pool: {reason}")
        return True

    def _restart(self, player: str) -> None:
        """Restarts a player: a new learner with its first weights, and a new trial of the same name."""
        before = self.trainees[player]
        before.learner.stop()
        if not before.learner.wait(_LAST_CHECKPOINT_S):
            raise StartupError(f"player {player!r} cannot restart: its learner has not ended")
        before.end("FINISHED")
        trainee = self.trainees[player] = self._host.trainee(player)
        if not trainee.start(_FIRST_WEIGHTS_S):
            raise StartupError(f"player {player!r} cannot restart: it has published no weights")
        self._host.replace(player, before, trainee)
        self._say(f"player {player!r} restarts from its first weights")

    def _ended(self, player: str, trainee: T) -> None:
        """Retires a player whose learner has ended; if it has all its steps, it first gets a last snapshot."""
        if player in self._complete:
            return
        try:
            trainee.learner.result(0.0)
        except BrayxError as error:
            self._out(player, trainee, error)
            return
        if not any(self.trainees[main].learner.running for main in self.mains if main in self.trainees):
            return  # the league ends
        self._freeze(player, "it has all its steps")
        self._host.league.retire(player, "it has all its steps")
        self._complete.add(player)  # last: repeated if the league does not answer

    def _out(self, player: str, trainee: T, error: BrayxError) -> None:
        """Retires a player that failed.

        Raises:
            BrayxError: the same, if it is the last main player.
        """
        if [name for name in self.mains if name in self.trainees] == [player]:
            raise error
        del self.trainees[player]
        if self.trainees.keys() <= self._complete:  # they are retired, and a league needs a player that is not
            self._say(f"player {player!r} is out, and the others have all their steps: {error.message}")
        else:
            self._say(f"player {player!r} is out, the league continues: {error.message}")
            self._host.league.retire(player, error.message)
        try:
            trainee.end("FAILED")
        except BrayxError as failed:  # the trial of a failed restart has ended
            log.warning("player %r is out, and its trial is not marked as failed: %s", player, failed.message)
        self._host.drop(player, trainee)

    def is_over(self, *, read: bool, games_play: bool) -> bool:
        """False: a league has no sources that could end, so it is over only when its learners have ended."""
        return False

    def register(self, say: Callable[[str], None]) -> tuple[int | None, str]:
        """Freezes a last snapshot of each player that has learned since its last one; returns the champion's version
        and the standings. Tries again while the league does not answer in time; its host limits that."""
        while True:
            with contextlib.suppress(DeadlineExceeded):
                return self._register(say)

    def _register(self, say: Callable[[str], None]) -> tuple[int | None, str]:
        self._registry_at, self._registry_start_s = 0.0, _LAST_REGISTRY_START_S
        for name in self.trainees:
            self._freeze(name, "the end of its training")
        if not self._alias_is_set:
            self._set_alias(self._host.league.champion())
        if self._registry_error is not None:
            raise self._registry_error
        try:
            self._clerk.call(draw_league, *self._charted(), self._shown())  # of each rival: the last one ends last
        except BrayxError as error:  # a failed picture must not end the training
            say(f"the league's pictures are not drawn: {error.message}")
        champion = self._host.league.champion()
        return None if champion is None else champion.version, self.standings()

    @property
    def pool(self) -> str:
        """See `Trainees.pool`."""
        return self._pool

    def standings(self) -> str:
        """The league's table as text."""
        return standings_text(self._host.league.standings(), self._host.league.champion())

    def close_check(self) -> None:
        """Ends the process of the gate's check."""
        if self._check is not None:
            self._check.close()

    def close(self, finished: bool) -> None:
        """Ends the players' trials."""
        self.close_check()
        for trainee in self.trainees.values():
            trainee.end("FINISHED" if finished else "KILLED")


def fetch_snapshots(
    job: JobConfig, pool: Sequence[Member], files: SnapshotFiles, clerk: Clerk | InProcessClerk, module: nn.Module
) -> None:
    """Fetches weights of ``past`` players, and of snapshots without a file, and checks that they fit the model.

    Args:
        job: the job.
        pool: the snapshots.
        files: where the weights are put.
        clerk: as for `LeagueTraining`.
        module: the model.

    Raises:
        BadWeights: weights do not fit the model; names the first leaf.
        ModelNotFound: the registry does not have them.
    """
    config = job.leagues[only("league", job.leagues)]
    layout, registered = layout_of(module_weights(module)), pool_name(job, config.model)
    past = [(name, player.version) for name, player in config.players.items() if player.version is not None]
    for player, version in [*past, *pool]:
        path = files.path(version)
        if not path.exists():
            files.put(version, clerk.call(registered_weights, registered, version))
        try:
            check_weights(layout, load_weights(path))
        except BadWeights as error:
            source = f"player {player!r}, version {version} of {registered}"
            raise BadWeights(f"{source}: {error.message}", **error.details) from None


def standings_text(standings: Sequence[Standing], champion: Member | None) -> str:
    """The table of a league, the strongest first, a line for each member."""
    rows = [("player", "points", "sigma", "games", "")]
    for row in standings:
        mark = "champion" if row.member == champion else ""
        rows.append((row.member.label, f"{row.points:.0f}", f"{row.sigma:.2f}", str(row.games), mark))
    return "\n".join(aligned(rows, left=(0, 4)))


def is_of_trial(trial: Trial, pool: str, version: int) -> bool:
    """Whether a registered version comes from a trial. Runs in the process that has the trial."""
    return find(f"models:/{pool}/{version}", trial.uri).run_id == trial.run_id


def register_snapshot(trial: Trial, folder: str, pool: str, step: int, tags: Mapping[str, str], about: str) -> int:
    """Registers a snapshot; returns its version. Runs in the process that has the trial."""
    contract = {name: value for name, value in trial.tags().items() if name in (CONTRACT_TAG, BEHAVIOUR_TAG)}
    tags = {**tags, **contract, "project": trial.project}
    return register_files(trial, Path(folder), pool, step, tags=tags, description=about).version
