"""The page of the registered models: versions with their results, promotion, rollback, canaries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from nicegui import ui

from brayx.console.documents import DoneDocument, number_of, result_of, served_result
from brayx.console.league import GateDocument, LeagueDocument, StandingDocument
from brayx.console.models import ModelDocument, MoveDocument, VersionDocument
from brayx.console.overview import ArmDocument, CanaryDocument, JobDocument, with_results
from brayx.console.page.caller import ApiCaller, Connect
from brayx.console.page.frame import (
    MUTED,
    RESPONSE_S,
    Panel,
    clock,
    confirmed,
    control,
    empty,
    frame,
    heading,
    milliseconds,
    number,
    plus_minus,
    result_text,
    sentence,
    with_games,
)
from brayx.console.page.league import points_of
from brayx.console.page.listing import Listing
from brayx.console.page.words import tr
from brayx.console.play import OpponentListDocument
from brayx.console.recordings import RecordingsDocument
from brayx.errors import BrayxError
from brayx.league.files import PLAYER_TAG, POINTS_TAG

_SHOWN = 50
"""Number of versions that are shown of each model: the newest. Those with an alias are always shown."""
_PROMOTE, _CANDIDATE, _PLAY, _COMPARE = "Promote", "Make candidate", "Play", "Compare on the newest recording"
_ALIASES = {_PROMOTE: "champion", _CANDIDATE: "candidate"}


class _Seen(NamedTuple):
    """What the page shows."""

    models: list[ModelDocument]
    job: JobDocument
    standings: Mapping[str, StandingDocument]
    """Members of the newest league, such as ``main:7``."""
    recording: str
    """Id of the newest recording; empty: there is none."""
    can_play: bool


class _Row(NamedTuple):
    """A version, and the result that it is judged by."""

    version: VersionDocument
    key: int
    value: float | None
    """Its points, or else its return."""
    shown: str
    """The same with its interval."""
    games: float | None


def add(connect: Connect) -> None:
    """Adds the page."""

    @ui.page("/models", response_timeout=RESPONSE_S)
    async def models() -> None:
        with frame("Models", connect) as caller:
            await Panel(lambda: _load(caller), lambda _: _Models(caller).show, every_s=2.0).first()


async def _load(caller: ApiCaller) -> _Seen:
    models: list[ModelDocument] = await caller.get(list[ModelDocument], "/api/models")
    job: JobDocument = await caller.get(JobDocument, "/api/job")
    standings = {}
    if any(PLAYER_TAG in version.tags for model in models for version in model.versions):
        league: LeagueDocument | None = await caller.get(LeagueDocument | None, "/api/league")
        standings = {row.member: row for row in (league.standings if league else ())}
    listing: RecordingsDocument = await caller.get(RecordingsDocument, "/api/recordings", limit=1)
    opponents: OpponentListDocument = await caller.get(OpponentListDocument, "/api/opponents")
    newest = next((recording.id for recording in listing.recordings), "")
    return _Seen(models, job, standings, newest, not opponents.why_not)


class _Models:
    """The page's content."""

    def __init__(self, caller: ApiCaller) -> None:
        self._caller = caller
        self._above, self._below = (ui.column().classes("w-full items-stretch gap-6") for _ in range(2))
        self._none = empty(tr("No model is registered yet: a training registers its best checkpoint when it ends."))
        self._canaries: dict[str, _Canary] = {}
        self._models: dict[str, _Model] = {}

    def show(self, seen: _Seen) -> None:
        """Shows the newest answers. Keeps models and canaries, since the viewer may be using their controls."""
        self._none.set_visibility(not seen.models)
        if self._canaries.keys() != seen.job.canaries.keys():
            self._above.clear()
            with self._above:
                self._canaries = {name: _Canary(self._caller, name) for name in seen.job.canaries}
        for name, canary in self._canaries.items():
            config = seen.job.canaries[name]
            model = next((model for model in seen.models if model.name == config.name), None)
            canary.show(config, model, [arm for arm in seen.job.arms if arm.model == name])
        if self._models.keys() != {model.name for model in seen.models}:
            self._below.clear()
            with self._below:
                self._models = {model.name: _Model(self._caller, model.name) for model in seen.models}
        for model in seen.models:
            self._models[model.name].show(model, seen)


class _Model:
    """A registered model: its versions, and their promotion and rollback."""

    def __init__(self, caller: ApiCaller, name: str) -> None:
        self._caller, self._name = caller, name
        self._model = ModelDocument(name=name, aliases={}, versions=[])
        self._job = JobDocument(running=False)
        self._rows: dict[int, _Row] = {}
        with ui.row().classes("w-full items-center justify-between"):
            heading(name)
            self._back = ui.button(icon="undo", on_click=self._roll_back).props("outline")
        self._seen: _Seen | None = None
        self._listing = Listing[_Row](
            "key",
            {
                "Version": lambda row: " ".join([str(row.key), *(f"★ {alias}" for alias in row.version.aliases)]),
                "Result": lambda row: row.shown,
                "Games": lambda row: number(row.games),
                "Env steps": lambda row: number(row.version.step),
                "Registered": lambda row: clock(row.version.created_s),
                "Return in service": lambda row: result_text(served_result(row.version.tags), named=False),
            },
            lead="Result",
            link=lambda row: f"/trials/{row.version.trial}" if row.version.trial else "",
            actions=self._actions,
            on_action=self._promote,
        )
        self._older = ui.label().classes(MUTED)

    def show(self, model: ModelDocument, seen: _Seen) -> None:
        """Shows the model's versions."""
        self._model, self._job, self._seen = model, seen.job, seen
        self._back.set_visibility(model.before is not None)
        self._back.set_text(tr("Roll back to {version}", version=model.before or ""))
        shown = [version for place, version in enumerate(model.versions) if place < _SHOWN or version.aliases]
        self._rows = {version.version: _judged(version, seen.standings) for version in shown}
        self._listing.show([*self._rows.values()])
        older = len(model.versions) - len(shown)
        self._older.set_text(tr("{count} older versions are not shown.", count=older))
        self._older.set_visibility(bool(older))

    def _actions(self, row: _Row) -> dict[str, str]:
        assert self._seen is not None
        actions = {name: "" for name, alias in _ALIASES.items() if alias not in row.version.aliases}
        if self._seen.can_play:
            actions[_PLAY] = f"/play?opponent=version%20{row.key}"
        if self._seen.recording:
            actions[_COMPARE] = f"/recordings/{self._seen.recording}?compare=models:/{self._name}/{row.key}"
        return actions

    async def _promote(self, version: int, action: str) -> None:
        alias = _ALIASES[action]
        row, before = self._rows[version], self._rows.get(self._model.aliases.get(alias, 0))
        lines = [
            tr("Make version {version} the {alias} of {name}?", version=version, alias=alias, name=self._name),
            tr("Version {version}: {result}.", version=version, result=with_games(row.shown, row.games)),
        ]
        if before is not None:
            now = with_games(before.shown, before.games)
            lines.append(tr("Now it is version {version}: {result}.", version=before.key, result=now))
        if before is not None and row.value is not None and before.value is not None and row.value < before.value:
            lines.append("⚠ " + tr("It is worse than the version that it replaces."))
        if row.value is None:
            lines.append("⚠ " + tr("It has no result yet."))
        if PLAYER_TAG in row.version.tags:
            lines.append(await self._gate(version))
        if alias == "candidate" and self._job.running and not self._job.canaries:
            lines.append("⚠ " + tr("The running job has no `canary`, so no session gets the candidate."))
        if await confirmed("\n".join(lines), tr("Promote")):
            body = {"version": version, "alias": alias}
            await control(self._caller.post(MoveDocument, f"/api/models/{self._name}/promote", body), _moved)

    async def _gate(self, version: int) -> str:
        """Whether a snapshot passes its league's gate, in words."""
        query = {"version": f"models:/{self._name}/{version}"}
        try:
            gate: GateDocument = await self._caller.get(GateDocument, "/api/league/gate", **query)
        except BrayxError as error:
            return "⚠ " + tr("Its league's gate cannot be checked: {why}", why=sentence(error.message))
        if gate.passed:
            return tr("It passes its league's gate: {reason}.", reason=gate.reason)
        return "⚠ " + tr("It fails its league's gate: {reason}.", reason=gate.reason)

    async def _roll_back(self) -> None:
        model = self._model
        question = tr("Make version {version} the champion of {name} again?", version=model.before, name=model.name)
        if await confirmed(question, tr("Roll back")):
            await control(self._caller.post(MoveDocument, f"/api/models/{model.name}/roll-back"), _moved)


class _Canary:
    """A canary beside the champion, with its share; it is promoted or ended."""

    def __init__(self, caller: ApiCaller, component: str) -> None:
        self._caller, self._component = caller, component
        self._canary: CanaryDocument | None = None
        self._version: int | None = None
        heading(tr("Canary of {component}", component=component))
        self._text = ui.label().classes(MUTED)
        self._arms = arm_listing()
        with ui.row().classes("w-full items-center gap-4"):
            self._slider = ui.slider(min=0, max=1, step=0.01, on_change=lambda event: self._say(event.value))
            self._slider.props(f'aria-label="{tr("share of the canary")}"').classes("max-w-md grow")
            ui.button(tr("Set"), on_click=self._set).props("outline")
            self._promotion = ui.button(tr("Promote the canary"), on_click=self._promote).props("outline")
            ui.button(tr("End the canary"), on_click=self._end).props("outline color=negative")

    def show(self, canary: CanaryDocument, model: ModelDocument | None, arms: list[ArmDocument]) -> None:
        """Shows its share, and both arms' results."""
        has_moved = self._canary is None or self._canary.share != canary.share
        self._canary = canary
        if has_moved:
            self._slider.set_value(canary.share)
        self._version = None if model is None else model.aliases.get(canary.alias)
        self._promotion.set_enabled(self._version is not None)
        self._say(self._slider.value)
        tags = {} if model is None else {version.version: version.tags for version in model.versions}
        self._arms.show(with_results(arms, tags))

    def _say(self, share: float) -> None:
        canary = self._canary
        assert canary is not None
        words = "{share} of new sessions get the {alias} of {name}, the others its champion."
        self._text.set_text(tr(words, share=f"{share:.0%}", alias=canary.alias, name=canary.name))

    async def _set(self) -> None:
        await self._share(self._slider.value)

    async def _share(self, share: float) -> None:
        call = self._caller.post(DoneDocument, f"/api/canaries/{self._component}", {"share": share})
        done = tr("{share} of new sessions of {name} get the canary.", share=f"{share:.0%}", name=self._component)
        if await control(call, lambda _: done):
            self._slider.set_value(share)

    async def _promote(self) -> None:
        canary = self._canary
        assert canary is not None
        text = tr(
            "Make version {version} the {alias} of {name}?", version=self._version, alias="champion", name=canary.name
        )
        if await confirmed(text, tr("Promote")):
            body = {"version": self._version, "alias": "champion"}
            await control(self._caller.post(MoveDocument, f"/api/models/{canary.name}/promote", body), _moved)

    async def _end(self) -> None:
        if await confirmed(tr("Stop giving new sessions to the canary?"), tr("End the canary")):
            await self._share(0.0)


def _judged(version: VersionDocument, standings: Mapping[str, StandingDocument]) -> _Row:
    """A version with its points if a league has rated it, or else with its return."""
    row = standings.get(f"{version.tags.get(PLAYER_TAG, '')}:{version.version}")
    points = number_of(version.tags, POINTS_TAG)
    if row is not None:
        interval = tr("{points} points ({low} to {high})", **points_of(row))
        return _Row(version, version.version, row.points, interval, row.games)
    if points is not None:
        return _Row(version, version.version, points, tr("{points} points", points=f"{points:.0f}"), None)
    result = result_of(version.tags)
    if result is None:
        return _Row(version, version.version, None, "-", None)
    shown = tr("return {value}", value=plus_minus(result.mean, result.error))
    return _Row(version, version.version, result.mean, shown, result.games)


def arm_listing(link: str = "") -> Listing[ArmDocument]:
    """A table of the versions that serve, side by side.

    Args:
        link: page that its rows lead to; may be empty.
    """
    return Listing(
        "label",
        {
            "Version": lambda arm: f"{arm.alias} {arm.version}" if arm.version else tr("initial weights"),
            "Return": lambda arm: "-" if arm.result is None else plus_minus(arm.result.mean, arm.result.error),
            "Games": lambda arm: number(arm.result and arm.result.games),
            "Answer, p50": lambda arm: milliseconds(arm.p50_s),
            "Answer, p99": lambda arm: milliseconds(arm.p99_s),
            "Sessions": lambda arm: number(arm.sessions),
            "Ticks": lambda arm: number(arm.ticks),
            "Errors": lambda arm: number(arm.errors + arm.refusals),
        },
        lead="Return",
        link=(lambda _: link) if link else None,
    )


def _moved(move: MoveDocument) -> str:
    if move.before is None:
        return tr("{name} version {version} is {alias} now.", name=move.name, version=move.version, alias=move.alias)
    words = "{name} version {version} is {alias} now; before it was version {before}."
    return tr(words, name=move.name, version=move.version, alias=move.alias, before=move.before)
