"""The dialog before a version becomes the champion or the candidate: its numbers against those that it replaces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from brayx.console.documents import ResultDocument, lead_of_version, number_of, result_of
from brayx.console.league import GateDocument, LeagueDocument, StandingDocument
from brayx.console.models import ModelDocument, MoveDocument, VersionDocument
from brayx.console.overview import JobDocument
from brayx.console.page.caller import ApiCaller
from brayx.console.page.frame import (
    confirmed,
    control,
    is_within_chance,
    number,
    plus_minus,
    result_text,
    sentence,
    with_games,
)
from brayx.console.page.league import points_of
from brayx.console.page.words import tr
from brayx.errors import BrayxError
from brayx.league.files import PLAYER_TAG, POINTS_TAG


class Judged(NamedTuple):
    """A version, and the result that it is judged by."""

    version: VersionDocument
    key: int
    value: float | None
    """Its points, or else its return."""
    shown: str
    """The same with its interval."""
    games: float | None

    def lead_over(self, rival: VersionDocument) -> ResultDocument | None:
        """How much higher its return is than a rival's; None: not known, or a league rates it."""
        tags = self.version.tags
        return None if PLAYER_TAG in tags else lead_of_version(tags, rival.tags)


def judged(version: VersionDocument, standings: Mapping[str, StandingDocument]) -> Judged:
    """A version with its points if a league has rated it, or else with its return."""
    row = standings.get(version.label)
    points = number_of(version.tags, POINTS_TAG)
    if row is not None:
        interval = tr("{points} points ({low} to {high})", **points_of(row))
        return Judged(version, version.version, row.points, interval, row.games)
    if points is not None:
        return Judged(version, version.version, points, tr("{points} points", points=f"{points:.0f}"), None)
    result = result_of(version.tags)
    if result is None:
        return Judged(version, version.version, None, "-", None)
    shown = tr("return {value}", value=plus_minus(result.mean, result.error))
    return Judged(version, version.version, result.mean, shown, result.games)


def in_words(row: Judged, served: ResultDocument | None = None) -> str:
    """A version and its result, and that in service, as a sentence."""
    rated = with_games(row.shown, row.games) if row.value is not None or served is None else ""
    results = "; ".join(filter(None, [rated, result_text(served) if served else ""]))
    return tr("Version {version}: {result}.", version=row.version.label, result=results)


async def league_of(caller: ApiCaller, models: Sequence[ModelDocument]) -> LeagueDocument | None:
    """The newest league, if one of the versions is a player's."""
    if not any(PLAYER_TAG in version.tags for model in models for version in model.versions):
        return None
    league: LeagueDocument | None = await caller.get(LeagueDocument | None, "/api/league")
    return league


def standings_of(league: LeagueDocument | None) -> dict[str, StandingDocument]:
    """A league's members by their names, such as ``main:7``."""
    return {row.member: row for row in (league.standings if league else ())}


def met(league: LeagueDocument | None, version: str, other: str) -> str:
    """How a member of a league did against another, as a sentence; empty: they have not met."""
    for pair in league.payoff if league else ():
        if pair.win_rate is not None and {pair.a, pair.b} == {version, other}:
            share = pair.win_rate if pair.a == version else 1.0 - pair.win_rate
            words = "In the league, version {version} scored {share} in {games} games against version {other}."
            games = number(pair.wins + pair.draws + pair.losses)
            return tr(words, version=version, share=f"{share:.0%}", games=games, other=other)
    return ""


class AliasMoves:
    """Moves of a registered model's aliases; a question with the numbers comes before each.

    Args:
        caller: asks the API.
        model: the model.
        job: the job behind the console.
        standings: members of the newest league.
    """

    def __init__(
        self, caller: ApiCaller, model: ModelDocument, job: JobDocument, standings: Mapping[str, StandingDocument]
    ) -> None:
        self._caller, self._model, self._job = caller, model, job
        self._rows = {version.version: judged(version, standings) for version in model.versions}

    async def promote(self, version: int, alias: str, verb: str) -> None:
        """Points an alias at a version if the viewer confirms it by a button with this text."""
        body = {"version": version, "alias": alias}
        await self._move(version, alias, verb, "promote", body)

    async def roll_back(self) -> None:
        """Makes the champion's predecessor the champion again."""
        assert self._model.before is not None
        await self._move(self._model.before, "champion", tr("Roll back"), "roll-back", None)

    async def _move(self, version: int, alias: str, verb: str, call: str, body: Any) -> None:
        if await confirmed("\n".join(await self._lines(version, alias)), verb, colour="primary"):
            await control(self._caller.post(MoveDocument, f"/api/models/{self._model.name}/{call}", body), moved)

    async def _lines(self, version: int, alias: str) -> list[str]:
        name, row = self._model.name, self._rows.get(version)
        before = self._rows.get(self._model.aliases.get(alias, 0))
        lines = [tr("Make version {version} the {alias} of {name}?", version=version, alias=alias, name=name)]
        if row is None:  # a canary's version may be too old for the list
            return lines
        lines.append(in_words(row))
        if before is not None:
            now = with_games(before.shown, before.games)
            lines.append(tr("Now it is version {version}: {result}.", version=before.version.label, result=now))
        if before is not None and row.value is not None and before.value is not None:
            lead = row.lead_over(before.version)
            if lead is not None and is_within_chance(lead):
                lines.append(tr("The difference is within chance."))
            elif row.value < before.value:
                lines.append("⚠ " + tr("It is worse than the version that it replaces."))
        if row.value is None:
            lines.append("⚠ " + tr("It has no result yet."))
        if PLAYER_TAG in row.version.tags:
            lines.append(await self._gate(version))
        if alias == "candidate" and self._job.running and not self._job.canaries:
            lines.append("⚠ " + tr("The running job has no `canary`, so no session gets the candidate."))
        return lines

    async def _gate(self, version: int) -> str:
        """Whether a snapshot passes its league's gate, in words."""
        query = {"version": f"models:/{self._model.name}/{version}"}
        try:
            gate: GateDocument = await self._caller.get(GateDocument, "/api/league/gate", **query)
        except BrayxError as error:
            return "⚠ " + tr("Its league's gate cannot be checked: {why}", why=sentence(error.message))
        if gate.passed:
            return tr("It passes its league's gate: {reason}.", reason=gate.reason)
        return "⚠ " + tr("It fails its league's gate: {reason}.", reason=gate.reason)


def moved(move: MoveDocument) -> str:
    """What a promotion did, in words."""
    if move.before is None:
        return tr("{name} version {version} is {alias} now.", name=move.name, version=move.version, alias=move.alias)
    words = "{name} version {version} is {alias} now; before it was version {before}."
    return tr(words, name=move.name, version=move.version, alias=move.alias, before=move.before)
