"""The page of the registered models: versions, promotion, rollback, canaries."""

from __future__ import annotations

import time
from collections.abc import Callable

from nicegui import ui

from brayx.console.documents import DoneDocument
from brayx.console.models import ModelDocument, MoveDocument, VersionDocument
from brayx.console.overview import CanaryDocument, JobDocument
from brayx.console.page.caller import ApiCaller, Connect
from brayx.console.page.frame import MUTED, Panel, confirmed, control, empty, frame, heading, number, sentence

_SHOWN = 20
"""Number of versions that are shown of each model: the newest. Those with an alias are always shown."""
_HIDDEN = ("brayx.", "lineage")

Loaded = tuple[list[ModelDocument], JobDocument]


def add(connect: Connect) -> None:
    """Adds the page."""

    @ui.page("/models")
    def models() -> None:
        with frame("Models", connect) as caller:
            Panel(lambda: _load(caller), lambda first: _models(caller), every_s=2.0)


async def _load(caller: ApiCaller) -> Loaded:
    return await caller.get(list[ModelDocument], "/api/models"), await caller.get(JobDocument, "/api/job")


def _models(caller: ApiCaller) -> Callable[[Loaded], None]:
    above, below = (ui.column().classes("w-full items-stretch gap-6") for _ in range(2))
    shown: dict[str, object] = {}

    def update(loaded: Loaded) -> None:
        # Recreate only what has changed: the viewer may be using the slider or a button.
        models, job = loaded
        if shown.get("canaries") != job.canaries:
            shown["canaries"] = job.canaries
            above.clear()
            with above:
                for component, canary in job.canaries.items():
                    _canary(caller, component, canary)
        if shown.get("models") != models:
            shown["models"] = models
            below.clear()
            with below:
                for model in models:
                    _model(caller, model)
                if not models:
                    empty("No model is registered yet: a training registers its best checkpoint when it ends.")

    return update


def _canary(caller: ApiCaller, component: str, canary: CanaryDocument) -> None:
    heading(f"Canary of {component}")
    text = ui.label().classes(MUTED)

    def say(share: float) -> None:
        text.set_text(f"{share:.0%} of new sessions get the {canary.alias} of {canary.name}, the others its champion.")

    async def change() -> None:
        call = caller.post(DoneDocument, f"/api/canaries/{component}", {"share": slider.value})
        await control(call, lambda done: sentence(done.done))

    with ui.row().classes("w-full items-center no-wrap gap-4"):
        slider = ui.slider(min=0, max=1, step=0.01, value=canary.share, on_change=lambda event: say(event.value))
        slider.props('aria-label="share of the canary"').classes("max-w-md")
        ui.button("Set", on_click=change).props("outline")
    say(canary.share)


def _model(caller: ApiCaller, model: ModelDocument) -> None:
    async def roll_back() -> None:
        question = f"Make version {model.before} the champion of {model.name} again?"
        if await confirmed(question, "Roll back"):
            await control(caller.post(MoveDocument, f"/api/models/{model.name}/roll-back"), _moved)

    with ui.row().classes("w-full items-center justify-between"):
        heading(model.name)
        if model.before is not None:
            ui.button(f"Roll back to {model.before}", icon="undo", on_click=roll_back).props("outline")
    shown = [version for place, version in enumerate(model.versions) if place < _SHOWN or version.aliases]
    with ui.column().classes("w-full items-stretch gap-2"):
        for version in shown:
            _version(caller, model, version)
    if len(shown) < len(model.versions):
        ui.label(f"{len(model.versions) - len(shown)} older versions are not shown.").classes(MUTED)


def _version(caller: ApiCaller, model: ModelDocument, version: VersionDocument) -> None:
    async def promote(alias: str) -> None:
        was = model.aliases.get(alias)
        before = "there was none" if was is None else f"now it is version {was}"
        if await confirmed(
            f"Make version {version.version} the {alias} of {model.name}? {sentence(before)}", "Promote"
        ):
            body = {"version": version.version, "alias": alias}
            await control(caller.post(MoveDocument, f"/api/models/{model.name}/promote", body), _moved)

    with ui.card().classes("w-full p-3 shadow-none border border-gray-500/30").mark(f"version-{version.version}"):
        with ui.row().classes("w-full items-center justify-between gap-2"):
            with ui.row().classes("items-center gap-2"):
                ui.label(f"Version {version.version}").classes("font-semibold")
                for alias in version.aliases:
                    ui.badge(alias, color="positive" if alias == "champion" else "primary")
                created = time.strftime("%Y-%m-%d %H:%M", time.localtime(version.created_s))
                ui.label(f"{number(version.step)} env steps, {created}").classes(MUTED)
            with ui.row().classes("gap-2"):
                for alias, verb in (("champion", "Promote"), ("candidate", "Make candidate")):
                    if alias not in version.aliases:
                        ui.button(verb, on_click=lambda _, alias=alias: promote(alias)).props("outline dense no-caps")
        facts = {name: value for name, value in version.tags.items() if not name.startswith(_HIDDEN) and value}
        if facts:
            text = "   ".join(f"{name} {_rounded(value)}" for name, value in sorted(facts.items()))
            ui.label(text).classes("mono whitespace-pre-wrap break-all")


def _moved(move: MoveDocument) -> str:
    was = "" if move.before is None else f"; before it was version {move.before}"
    return f"{move.name} version {move.version} is {move.alias} now{was}."


def _rounded(text: str) -> str:
    try:
        return number(float(text))
    except (ValueError, OverflowError):
        return text if len(text) <= 60 else f"{text[:60]} …"
