"""`brayx promote --league`: a snapshot of a league becomes champion if the league's gate lets it.

A gate's ``check`` runs here, too; its module and the model's are searched in the current folder first.

Knows nothing of how games are played, or of a training that crowns its champions itself.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from brayx.engines.base import load_weights
from brayx.errors import ConfigError, LeagueError
from brayx.jobs.contracts import RIVALS_TAG, SELF_PLAY_TAG
from brayx.league import check as league_check
from brayx.league.champion import ALIAS, met, stays
from brayx.league.config import LeagueConfig, SelfPlayConfig
from brayx.league.files import PLAYER_TAG
from brayx.league.finding import books_of, league_of, newest_league
from brayx.league.league import League
from brayx.league.ledger import Ledger
from brayx.league.member import Member
from brayx.tracking import PoolEntry, Trial, aliases, files_of, find, promote
from brayx.tracking.owner import owner_is_gone


class Promotion(NamedTuple):
    """What a promotion did.

    Attributes:
        entry: the registered version that is champion now.
        before: the version that was; None: none was.
        reason: why the gate let it pass, with the number that decided it.
    """

    entry: PoolEntry
    before: int | None
    reason: str


def promote_in_league(reference: str, uri: str, *, project: str = "", trial: str = "") -> Promotion:
    """Makes a snapshot champion, in the registry and in its league's books, if the league's gate lets it.

    The league's champion itself only gets the alias, if that has moved to another version that the league knows.

    Args:
        reference: ``models:/NAME/VERSION`` or the like; or a member, ``main:7``, of the newest league.
        uri: tracking URI.
        project, trial: of a member: as for `newest_league`.

    Raises:
        ConfigError: there is no such league; a trial is given with a version, which has its own; or the modules of
            the gate's check or of the model are not there.
        LeagueError: it is no snapshot of a league, the league's books are not here, the gate refuses it (the message
            has the number that decided), or the alias is at a version that the league has not played; a training of the
            league is running, which writes its books; or the gate's check failed.
        ModelNotFound: no such version.
        BadWeights: its weights hold NaN or infinity, or cannot be read.
        TrackingError: the registry failed.
    """
    if reference.startswith("models:/"):
        if trial:
            raise ConfigError(f"trial is {trial!r}, but {reference} has its own trial: name a snapshot as NAME:VERSION")
        entry = find(reference, uri)
        if PLAYER_TAG not in entry.tags:
            raise LeagueError(f"version {entry.version} of model {entry.name!r} is not a snapshot of a league")
        member, league_trial = Member(entry.tags[PLAYER_TAG], entry.version), league_of(entry.run_id, uri)
        _, config, job = recorded_league(league_trial)
    else:
        member, league_trial = Member.parse(reference), newest_league(uri, project, trial)
        if not member.version:
            raise ConfigError(f"snapshot is {reference!r}, expected NAME:VERSION, or models:/NAME/VERSION")
        pool, config, job = recorded_league(league_trial)
        entry = find(f"models:/{pool}/{member.version}", uri)
    _refuse_if_running(league_trial)
    with contextlib.closing(Ledger(books_of(league_trial))) as ledger:
        league = League(config, ledger)
        holder = aliases(entry.name, uri).get(ALIAS)
        if holder is not None and holder not in (entry.version, *met(ledger)):
            raise LeagueError(f"{member.label} does not become champion: {stays(entry.name, holder)}", version=holder)
        if league.champion() == member:
            return Promotion(*_point(entry, uri), f"{member.label} was the league's champion already")
        verdict = league.judge(member)
        if not verdict.passed:
            raise LeagueError(f"{member.label} does not become champion: {verdict.reason}", member=member.label)
        reason = verdict.reason
        if config.gate.check is not None:
            checked = league_check.verdict(config.gate, _score(entry, uri, config, job))
            if not checked.passed:
                raise LeagueError(f"{member.label} does not become champion: {checked.reason}", member=member.label)
            reason = f"{reason}; {checked.reason}"
        promotion = Promotion(*_point(entry, uri), reason)
        # Last: if this fails, the command can be repeated. In the other order, the gate would refuse the champion.
        league.crown(member)
    return promotion


def _score(entry: PoolEntry, uri: str, config: LeagueConfig, job: Mapping[str, Any]) -> float:
    with files_of(f"models:/{entry.name}/{entry.version}", uri) as files:
        weights = load_weights(files / "weights.npz")
    return league_check.score(league_check.Checked(config.gate, os.getcwd(), config.model, job), weights)


def _point(entry: PoolEntry, uri: str) -> tuple[PoolEntry, int | None]:
    return promote(f"models:/{entry.name}/{entry.version}", uri)


def _refuse_if_running(trial: Trial) -> None:
    if trial.status == "RUNNING" and not owner_is_gone(trial.tags()):
        raise LeagueError(
            f"league {trial.name!r} (run {trial.run_id}) is in training, which crowns champions itself: stop it first",
            run_id=trial.run_id,
        )


def recorded_league(trial: Trial) -> tuple[str, LeagueConfig, dict[str, Any]]:
    """The name that a league's model has in the registry, and the options of the league and of the whole job, as its
    trial recorded them.

    Players' own trainer options are left out.

    Raises:
        LeagueError: the trial records no such options.
    """
    tags = trial.tags()
    if RIVALS_TAG in tags:
        raise LeagueError(
            f"league {trial.name!r} (run {trial.run_id}) is of behaviours that play different teams, a model each; "
            "its champions follow their points, and this needs a league of one model"
        )
    job, self_play = trial.options(), tags.get(SELF_PLAY_TAG)
    parts = [part for part in job.values() if isinstance(part, dict)]
    leagues = [part for part in parts if part.get("kind") == ("league" if self_play is None else "self_play")]
    models = [part for part in parts if part.get("kind") == "model"]
    if len(leagues) != 1:
        raise LeagueError(f"trial {trial.name!r} (run {trial.run_id}) has no league options recorded")
    league = leagues[0]
    try:
        if self_play is not None:
            (trainer,) = [part for part in parts if part.get("kind") == "trainer"]
            return self_play, SelfPlayConfig.model_validate(league).league(trainer["model"]), job
        players = {name: {**options, "trainer": {}} for name, options in league["players"].items()}
        config = LeagueConfig(model=league["model"], players=players, gate=league["gate"])
    except ValueError as error:
        raise LeagueError(f"the options that trial {trial.name!r} records cannot be read: {error}") from None
    return trial.project if len(models) == 1 else f"{trial.project}-{config.model}", config, job
