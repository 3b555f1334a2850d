"""The page of the registered models: versions with their results, promotion, rollback, canaries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from nicegui import ui

from brayx.console.documents import DoneDocument, served_result
from brayx.console.league import LeagueDocument, StandingDocument
from brayx.console.models import ModelDocument, VersionDocument
from brayx.console.overview import ArmDocument, CanaryDocument, JobDocument, judged_canary, with_results
from brayx.console.page.caller import ApiCaller, Connect
from brayx.console.page.frame import (
    AMBER,
    MUTED,
    RESPONSE_S,
    Panel,
    clock,
    confirmed,
    control,
    empty,
    frame,
    heading,
    lead_text,
    milliseconds,
    result_text,
    shown_values,
)
from brayx.console.page.listing import Listing, TableCell, counted, returned
from brayx.console.page.promotion import AliasMoves, Judged, in_words, judged, league_of, met, standings_of
from brayx.console.page.recordings import NOT_RECORDED
from brayx.console.page.words import tr
from brayx.console.play import OpponentListDocument
from brayx.console.recordings import RecordingsDocument
from brayx.league.files import PLAYER_TAG

_SHOWN = 50
"""Number of versions that are shown of each model: the newest. Those with an alias are always shown."""
_PROMOTE, _CANDIDATE, _PLAY, _COMPARE = "Promote", "Make candidate", "Play", "Compare"
_LOOKED_AT = 100
"""The newest recordings, of which one that has ended is compared."""
_NOT_ENDED = "None of the newest recorded sessions has ended yet."
_ALIASES = {_PROMOTE: "champion", _CANDIDATE: "candidate"}


class _Seen(NamedTuple):
    """What the page shows."""

    models: list[ModelDocument]
    job: JobDocument
    league: LeagueDocument | None
    standings: Mapping[str, StandingDocument]
    """Its members, such as ``main:7``."""
    recording: str
    """Id of the newest recorded session that has ended, if possible without an error; empty: there is none."""
    why_not: str
    """Why no recording has ended."""
    plays: str
    """The registered model whose versions a human can play against; empty: none."""


def add(connect: Connect) -> None:
    """Adds the page."""

    @ui.page("/models", response_timeout=RESPONSE_S)
    async def models() -> None:
        with frame("Models", connect) as caller:
            await Panel(lambda: _load(caller), lambda _: _Models(caller).show, every_s=2.0).first()


async def _load(caller: ApiCaller) -> _Seen:
    models: list[ModelDocument] = await caller.get(list[ModelDocument], "/api/models")
    job: JobDocument = await caller.get(JobDocument, "/api/job")
    league = await league_of(caller, models)
    listing: RecordingsDocument = await caller.get(RecordingsDocument, "/api/recordings", limit=_LOOKED_AT)
    opponents: OpponentListDocument = await caller.get(OpponentListDocument, "/api/opponents")
    ended = [recording for recording in listing.recordings if recording.end and recording.ticks]
    ended.sort(key=lambda recording: recording.end == "error" or bool(recording.events))  # the newest stays first
    newest, why_not = ended[0].id if ended else "", _NOT_ENDED if listing.total else NOT_RECORDED
    return _Seen(models, job, league, standings_of(league), newest, why_not, opponents.model)


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
            canary.show(config, model, [arm for arm in seen.job.arms if arm.model == name], seen)
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
        self._versions: list[VersionDocument] = []
        self._champion: VersionDocument | None = None
        with ui.row().classes("w-full items-center justify-between"):
            heading(name)
            self._back = ui.button(icon="undo", on_click=self._roll_back).props("outline")
        self._listing = Listing[Judged](
            "key",
            {
                "Version": _version,
                "Result": lambda row: TableCell(row.shown, row.value),
                "Games": lambda row: counted(row.games),
                "Against the champion": self._lead,
                "Env steps": lambda row: counted(row.version.step),
                "Registered": lambda row: clock(row.version.created_s),
                "Return in service": _served,
            },
            lead="Result",
            link=lambda row: f"/trials/{row.version.trial}" if row.version.trial else "",
            actions=self._actions,
            on_action=self._act,
        )
        self._older = ui.label().classes(MUTED)

    def show(self, model: ModelDocument, seen: _Seen) -> None:
        """Shows the model's versions."""
        self._versions = model.versions
        self._champion = next((version for version in model.versions if "champion" in version.aliases), None)
        self._seen, self._promotion = seen, AliasMoves(self._caller, model, seen.job, seen.standings)
        self._back.set_visibility(model.before is not None)
        self._back.set_text(tr("Roll back to {version}", version=model.before or ""))
        shown = [version for place, version in enumerate(model.versions) if place < _SHOWN or version.aliases]
        self._listing.show([judged(version, seen.standings) for version in shown])
        older = len(model.versions) - len(shown)
        self._older.set_text(tr("{count} older versions are not shown.", count=older))
        self._older.set_visibility(bool(older))

    def _lead(self, row: Judged) -> TableCell:
        champion = self._champion
        lead = None if champion is None or champion is row.version else row.lead_over(champion)
        return TableCell("-", None) if lead is None else TableCell(lead_text(lead), lead.mean)

    def _actions(self, row: Judged) -> dict[str, str]:
        actions = {name: "" for name, alias in _ALIASES.items() if alias not in row.version.aliases}
        if self._name == self._seen.plays:
            actions[_PLAY] = f"/play?opponent=version%20{row.key}"
        actions[_COMPARE] = ""
        if self._seen.recording:
            reference, rival = f"models:/{self._name}/", self._rival(row)
            against = f"&against={reference}{rival}" if rival else ""
            actions[_COMPARE] = f"/recordings/{self._seen.recording}?compare={reference}{row.key}{against}"
        return actions

    def _rival(self, row: Judged) -> int | None:
        """The version that one is compared with: the champion, which is compared with the newest other one."""
        first = [] if self._champion is None else [self._champion]
        return next((rival.version for rival in [*first, *self._versions] if rival.version != row.key), None)

    async def _act(self, version: int, action: str) -> None:
        if action == _COMPARE:
            ui.notify(tr(self._seen.why_not), type="warning", multi_line=True)
            return
        await self._promotion.promote(version, _ALIASES[action], tr(action))

    async def _roll_back(self) -> None:
        await self._promotion.roll_back()


class _Canary:
    """A canary and the champion, side by side, with its share; it is promoted or ended."""

    def __init__(self, caller: ApiCaller, component: str) -> None:
        self._caller, self._component = caller, component
        self._canary: CanaryDocument | None = None
        self._version: int | None = None
        self._is_champion = False
        heading(tr("Canary of {component}", component=component))
        self._text = ui.label().classes(MUTED)
        self._arms = arm_listing()
        self._compared = ui.label().mark("compared")
        with ui.row().classes("w-full items-center gap-4"):
            self._slider = ui.slider(min=0, max=1, step=0.01, on_change=lambda event: self._say(event.value))
            self._slider.props(f'aria-label="{tr("share of the canary")}"').classes("max-w-md grow")
            ui.button(tr("Set"), on_click=self._set).props("outline")
            self._promote_button = ui.button(tr("Promote the canary"), on_click=self._promote).props("outline")
            ui.button(tr("End the canary"), on_click=self._end).props("outline color=negative")

    def show(
        self, canary: CanaryDocument, model: ModelDocument | None, arms: Sequence[ArmDocument], seen: _Seen
    ) -> None:
        """Shows its share, both arms' results, and which is better."""
        has_moved = self._canary is None or self._canary.share != canary.share
        self._canary = canary
        if has_moved:
            self._slider.set_value(canary.share)
        model = model or ModelDocument(name=canary.name, aliases={}, versions=[])
        self._promotion = AliasMoves(self._caller, model, seen.job, seen.standings)
        champion, self._version = (model.aliases.get(alias) for alias in ("champion", canary.alias))
        self._is_champion = self._version is not None and self._version == champion
        self._promote_button.set_enabled(self._version is not None and not self._is_champion)
        self._say(self._slider.value)
        arms = with_results(arms, {version.version: version.tags for version in model.versions}, model.aliases)
        self._arms.show(arms)
        rated = [version for version in model.versions if PLAYER_TAG in version.tags and version.aliases]
        said = [in_words(judged(version, seen.standings)) for version in rated]
        members = {version.version: version.label for version in rated}
        is_league = self._version in members and champion in members
        if is_league:
            said.insert(0, met(seen.league, members[self._version or 0], members[champion or 0]))
        verdict = judged_canary(arms, model.aliases, canary.alias)
        if verdict is not None and not (is_league and verdict.state == "unsure"):  # the league's games say more
            advice = tr(verdict.advice) if canary.share else ""
            said = [tr(verdict.reason, **shown_values(verdict)), advice, *said]
        self._compared.set_text(" ".join(filter(None, said)))
        is_worse = bool(canary.share) and verdict is not None and verdict.state == "worse"
        self._compared.classes(add=AMBER if is_worse else "", remove="" if is_worse else AMBER)

    def _say(self, share: float) -> None:
        canary = self._canary
        assert canary is not None
        if self._is_champion:
            words = "Version {version} of {name} is {alias} and champion, so all new sessions get it."
            self._text.set_text(tr(words, version=self._version, name=canary.name, alias=canary.alias))
            return
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
        assert self._version is not None
        await self._promotion.promote(self._version, "champion", tr("Promote"))

    async def _end(self) -> None:
        if await confirmed(tr("Stop giving new sessions to the canary?"), tr("End the canary")):
            await self._share(0.0)


def arm_listing(link: str = "") -> Listing[ArmDocument]:
    """A table of the versions that serve, side by side.

    Args:
        link: page that its rows lead to; may be empty.
    """
    return Listing(
        "label",
        {
            "Version": _arm,
            "Return": lambda arm: "-" if arm.result is None else returned(arm.result.mean, arm.result.error),
            "Games": lambda arm: "-" if arm.result is None else counted(arm.result.games),
            "Answer, p50": lambda arm: TableCell(milliseconds(arm.p50_s), arm.p50_s),
            "Answer, p99": lambda arm: TableCell(milliseconds(arm.p99_s), arm.p99_s),
            "Sessions": lambda arm: counted(arm.sessions),
            "Ticks": lambda arm: counted(arm.ticks),
            "Errors": lambda arm: counted(arm.errors + arm.refusals),
        },
        lead="Return",
        link=(lambda _: link) if link else None,
    )


def _version(row: Judged) -> TableCell:
    return TableCell(" ".join([row.version.label, *(f"★ {alias}" for alias in row.version.aliases)]), row.key)


def _served(row: Judged) -> TableCell:
    result = served_result(row.version.tags)
    return TableCell(result_text(result, named=False), None if result is None else result.mean)


def _arm(arm: ArmDocument) -> str:
    name = f"{arm.alias} {arm.version}" if arm.version else tr("initial weights")
    return tr("{name} (before)", name=name) if arm.former else name
