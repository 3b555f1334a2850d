"""Finds the players that a command line names: a registered version, a league's member, a checkpoint, or a script.
Knows nothing of games.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from brayx.actor.agent import Agent
from brayx.actor.players import scripted
from brayx.components import is_named, load_named
from brayx.engines.base import LeafSpec, check_weights, load_weights
from brayx.errors import BadWeights, ConfigError, LeagueError
from brayx.jobs.code import scripts_of
from brayx.jobs.config import JobConfig, only, pool_name
from brayx.league.files import PLAYER_TAG
from brayx.league.finding import newest_league
from brayx.league.member import Member
from brayx.league.report import Books
from brayx.tracking import Trial, files_of, find
from brayx.types import Weights


@dataclass(frozen=True)
class Opponent:
    """A player of a match.

    Attributes:
        label: its name in results.
        weights: weights that the job's agents play with; None: a script.
        script: agent that plays instead of the job's; None: the job's agents play.
        member: its member in the league; None: it is not in that league.
        explores: whether the job's agents explore, as in the rated games.
        temperature: temperature of its policy.
        delay: number of ticks by which it sees its input late.
    """

    label: str
    weights: Weights | None = None
    script: type[Agent] | None = None
    member: Member | None = None
    explores: bool = False
    temperature: float = 1.0
    delay: int = 0


class Opponents:
    """Finds the players of a job by their names.

    Args:
        job: the job.
        uri: tracking URI.
        trial: members are those of this trial's league; empty: of the newest, see `brayx.league.finding`.

    Attributes:
        model: name of the job's model that players with weights use.
        league: the league's trial; None: there is none.
        books: its books; None: there are none.

    Raises:
        ConfigError: there is no league of this trial.
        LeagueError: its books cannot be read.
    """

    def __init__(self, job: JobConfig, uri: str, trial: str = "") -> None:
        self._job, self._uri = job, uri
        self._config = job.leagues[only("league", job.leagues)] if job.leagues else None
        self.model = self._config.model if self._config is not None else only("model", job.models)
        self._scripts = scripts_of(self._config, job.folder) if self._config is not None else {}
        self.league: Trial | None = None
        self.books: Books | None = None
        self._no_members = ""
        try:
            model = pool_name(job, self.model) if self._config is not None else ""
            self.league = newest_league(uri, job.project, trial, model=model)
            self.books = Books.read(self.league)
        except (ConfigError, LeagueError) as error:  # models, checkpoints and scripts can play without a league
            if trial:
                raise
            self._no_members = error.message

    def find(self, name: str) -> Opponent:
        """Finds a player by its name.

        Args:
            name: ``models:/NAME/VERSION`` or the like; ``PLAYER:VERSION`` of the league; the folder of a checkpoint; a
                scripted player of the job's league; or ``module.function``.

        Raises:
            ConfigError: it is none of these; names the nearest. Or a script cannot be loaded.
            ModelNotFound: the registry has no such version.
            BadWeights: weights cannot be read.
            TrackingError: the registry cannot be read.
        """
        if name.startswith("models:/"):
            return self._registered(name)
        if Path(name).is_dir():
            return Opponent(name, load_weights(Path(name, "weights.npz")))
        if name in self._scripts:
            return Opponent(name, script=self._scripts[name], member=Member(name))
        player = self._config.players.get(name) if self._config is not None else None
        if player is not None and player.version is not None:  # of role `past`
            return self._registered(f"models:/{pool_name(self._job, self.model)}/{player.version}", name)
        member = None
        with contextlib.suppress(LeagueError):
            member = Member.parse(name)
        if member is not None and member.version and self.books is not None and member in self.books.ratings.state():
            weights = self._weights(f"models:/{pool_name(self._job, self.model)}/{member.version}")
            return Opponent(name, weights, member=member)
        if is_named(name):
            return Opponent(name, script=scripted(load_named(name, self._job.folder)))
        raise self._unknown(name)

    def predicted(self, a: Opponent, b: Opponent) -> float | None:
        """The win rate of ``a`` against ``b`` that their ratings predict; None: one of them has none."""
        if self.books is None or a.member is None or b.member is None:
            return None
        rated = self.books.ratings.state()
        return self.books.ratings.predict(a.member, b.member) if a.member in rated and b.member in rated else None

    def _registered(self, reference: str, label: str = "") -> Opponent:
        entry = find(reference, self._uri)
        fixed = f"models:/{entry.name}/{entry.version}"  # an alias may move meanwhile
        member = Member(entry.tags.get(PLAYER_TAG, ""), entry.version)
        books = self.books if entry.name == pool_name(self._job, self.model) else None
        known = books is not None and books.snapshot(member)
        return Opponent(label or fixed, self._weights(fixed), member=member if known else None)

    def _weights(self, reference: str) -> Weights:
        with files_of(reference, self._uri) as folder:
            return load_weights(folder / "weights.npz")

    def _unknown(self, name: str) -> ConfigError:
        snapshots = [] if self.books is None else [snapshot.member.label for snapshot in self.books.snapshots]
        names = [*snapshots, *self._scripts]
        of_player = [label for label in snapshots if Member.parse(label).player == name]
        near = of_player[-1:] or difflib.get_close_matches(name, names, n=1, cutoff=0.4)
        advice = f"; nearest is {near[0]!r}" if near else ""
        league = "a league" if self.league is None else f"league {self.league.name!r} (--trial names another)"
        why = f". No snapshot can be named: {self._no_members}" if self._no_members and ":" in name else ""
        return ConfigError(
            f"no player is {name!r}{advice}; expected models:/NAME/VERSION, PLAYER:VERSION of {league}, the folder of "
            f"a checkpoint, a script of the job's league, or module.function{why}",
            player=name,
        )


def check_fits(opponent: Opponent, layout: Mapping[str, LeafSpec]) -> None:
    """Checks that a player's weights are of the job's model.

    Raises:
        BadWeights: they are not; names the first leaf that differs.
    """
    if opponent.weights is None:
        return
    try:
        check_weights(layout, opponent.weights)
    except BadWeights as error:
        raise BadWeights(f"player {opponent.label!r} has other weights than the job's model: {error.message}") from None
