"""The newest league of a tracking store."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Query

from brayx import tracking
from brayx.console.documents import Document
from brayx.console.source import Source
from brayx.errors import ConfigError, LeagueError
from brayx.league.files import PLAYER_TAG
from brayx.league.finding import books_of, league_of, newest_league
from brayx.league.ledger import Ledger
from brayx.league.levels import read_levels
from brayx.league.member import Member
from brayx.tracking import Trial

if TYPE_CHECKING:
    from brayx.league.report import Books


class StandingDocument(Document):
    """A member of a league."""

    member: str
    points: float
    """Of a version, fitted to all its games with versions (`brayx.league.report.Books.fitted`), if there are any; else
    its rating."""
    low: float
    high: float
    """``low`` and ``high`` are the ends of the 95 % interval of the points."""
    elo: float
    games: int
    champion: bool
    env_steps: int | None
    script: bool = False
    """Whether it is a program, which does not learn."""


class PlayerDocument(Document):
    """What a player of a league does, see `brayx.league.config.PlayerConfig`."""

    role: str
    of: str | None


class PairingDocument(Document):
    """Results of two members, from the view of ``a``."""

    a: str
    b: str
    wins: int
    draws: int
    losses: int
    win_rate: float | None


class LevelDocument(Document):
    """A level of difficulty."""

    level: str
    points: float
    low: float
    high: float


class GateDocument(Document):
    """Whether a snapshot passes its league's gate, see `brayx.league.league.League.judge`."""

    passed: bool
    reason: str
    """With the number that decides."""


class LeagueDocument(Document):
    """The newest league of the store."""

    project: str
    trial: str
    champion: str | None
    served: str | None = None
    """The registry's champion, which a service acts with: a member, or else its number; null: there is none."""
    counters: dict[str, int]
    players: dict[str, PlayerDocument] = {}
    """Empty: the league's trial does not record them."""
    standings: list[StandingDocument]
    payoff: list[PairingDocument]
    curves: dict[str, list[tuple[int, float]]]
    """``(env steps, points)`` of each player that learns."""
    intervals: dict[str, list[tuple[int, float, float]]] = {}
    """``(env steps, low, high)``: the 95 % interval of the points."""
    levels: list[LevelDocument] = []
    """The levels of difficulty, the easiest first; empty: none is calibrated yet."""


def routes(source: Source) -> APIRouter:
    """The API's calls about the league."""
    router = APIRouter(prefix="/api/league", tags=["league"])

    @router.get("")
    def league() -> LeagueDocument | None:
        """Standings, payoff and rating curves of the newest league; null: there is none."""
        found = _books(source)
        if found is None:
            return None
        from brayx.league.report import document

        trial, report = found[0], document(*found)
        players: dict[str, PlayerDocument] = {}
        version = None
        with contextlib.suppress(LeagueError):  # an older one does not record them
            pool, players = _players(source.uri, trial.run_id)
            version = tracking.aliases(pool, source.uri).get("champion")
        labels = {row["version"]: row["member"] for row in report["ratings"]}
        scripts = {name for name, player in players.items() if player.role == "script"}
        with contextlib.closing(Ledger(books_of(trial), read_only=True)) as ledger:
            curves = ledger.curves()
        return LeagueDocument(
            project=trial.project,
            trial=trial.name,
            champion=report["champion"],
            served=None if version is None else labels.get(version, str(version)),
            counters=report["counters"],
            players=players,
            standings=_standings(report["ratings"], scripts),
            payoff=report["payoff"],
            curves={m.label: [(point.env_steps, point.points) for point in curve] for m, curve in curves.items()},
            intervals={
                m.label: [(point.env_steps, point.low, point.high) for point in curve] for m, curve in curves.items()
            },
            levels=_levels(Path((source.board or {}).get("levels", ""))),
        )

    @router.get("/gate")
    def gate(version: Annotated[str, Query(description="models:/NAME/VERSION of a snapshot")]) -> GateDocument:
        """Whether a snapshot passes its league's gate; a gate's own check is not run."""
        from brayx.league.league import League
        from brayx.league.promote import recorded_league  # imports torch

        entry = tracking.find(version, source.uri)
        if PLAYER_TAG not in entry.tags:
            raise LeagueError(f"version {entry.version} of model {entry.name!r} is not a snapshot of a league")
        member, trial = Member(entry.tags[PLAYER_TAG], entry.version), league_of(entry.run_id, source.uri)
        _, config, _ = recorded_league(trial)
        with contextlib.closing(Ledger(books_of(trial), read_only=True)) as ledger:
            league = League(config, ledger)
            if league.champion() == member:
                return GateDocument(passed=True, reason=f"{member.label} is the league's champion")
            verdict = league.judge(member)
        return GateDocument(passed=verdict.passed, reason=verdict.reason)

    return router


def points_of(source: Source) -> dict[str, float]:
    """Points of the members of the newest league by their labels, such as ``main:7``; empty: there is no league.

    Raises:
        LeagueError: its books are not here, or cannot be read.
    """
    found = _books(source)
    return {} if found is None else {row.member.label: (row.fitted or row).points for row in found[1].standings()}


def _standings(rows: Sequence[Mapping[str, Any]], scripts: Collection[str]) -> list[StandingDocument]:
    """The members, the strongest first, from those of `brayx.league.report.document`."""
    standings = []
    for row in rows:
        fitted = {"points": row["fitted"], "low": row["fitted_low"], "high": row["fitted_high"]}
        shown = {**row, **(fitted if row["fitted"] is not None else {})}
        standings.append(StandingDocument(**shown, script=row["member"] in scripts))
    return sorted(standings, key=lambda standing: -standing.points)


def _books(source: Source) -> tuple[Trial, Books] | None:
    try:
        trial = newest_league(source.uri, source.project)
    except ConfigError:
        return None
    from brayx.league.report import Books  # only if there is a league, since it imports torch

    return trial, Books.read(trial)


@functools.lru_cache(16)
def _players(uri: str, run_id: str) -> tuple[str, dict[str, PlayerDocument]]:
    """The name of a league's model in the registry, and its players."""
    from brayx.league.promote import recorded_league  # imports torch

    pool, config, _ = recorded_league(Trial.attach(uri, run_id))
    return pool, {name: PlayerDocument(role=player.role, of=player.of) for name, player in config.players.items()}


def _levels(file: Path) -> list[LevelDocument]:
    calibrated = read_levels(file) if file.is_file() else None
    levels = {} if calibrated is None else calibrated.levels
    return [
        LevelDocument(level=name, points=level.points, low=level.low, high=level.high) for name, level in levels.items()
    ]
