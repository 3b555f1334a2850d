"""The pages of the store's trials: a table, and the curves of one trial, by group."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

from nicegui import ui

from brayx.console.documents import DoneDocument
from brayx.console.overview import JobDocument, OverviewDocument
from brayx.console.page.caller import ApiCaller, Connect
from brayx.console.page.charts import Lines
from brayx.console.page.frame import (
    MUTED,
    Panel,
    confirmed,
    control,
    empty,
    frame,
    heading,
    number,
)
from brayx.console.page.listing import Listing
from brayx.console.page.words import tr
from brayx.console.trials import CurvesDocument, TrialDocument
from brayx.metrics.charts import GROUPS, RETURN_CHART, grouped
from brayx.tracking.finding import NEWEST

_OPENED = ("return", "learner")
"""Groups of charts that are open at first."""

Loaded = tuple[TrialDocument | None, dict[str, list[str]], dict[str, dict[str, list[tuple[int, float]]]]]


def add(connect: Connect) -> None:
    """Adds the pages."""

    @ui.page("/trials")
    async def trials() -> None:
        with frame("Trials", connect) as caller:
            await Panel(lambda: caller.get(list[TrialDocument], "/api/trials"), _trials, every_s=5.0).first()

    @ui.page("/trials/{run_id}")
    async def trial(run_id: str) -> None:
        with frame("Trials", connect) as caller:
            opened = {*_OPENED}
            panel = Panel(
                lambda: _load(caller, run_id, opened),
                lambda _: _trial(caller, run_id, opened, lambda: panel.refresh()),
                every_s=5.0,
            )
            await panel.first()


def _trials(first: list[TrialDocument]) -> Callable[[list[TrialDocument]], None]:
    heading("Trials")
    none = empty("There are no trials yet: `brayx train` makes one.")
    newest = ui.label().classes(MUTED)
    rows = Listing[TrialDocument](
        "run_id", trial_columns(), lead="Return", link=lambda trial: f"/trials/{trial.run_id}"
    )

    def update(trials: list[TrialDocument]) -> None:
        none.set_visibility(not trials)
        newest.set_text(f"Only the newest {number(len(trials))} are listed." if len(trials) >= NEWEST else "")
        rows.show(trials)

    return update


def trial_columns() -> dict[str, Callable[[TrialDocument], Any]]:
    """What a table shows of a trial, by heading."""
    return {
        "Trial": lambda trial: f"↳ {trial.name}" if trial.is_child else trial.name,
        "Project": lambda trial: trial.project,
        "Status": lambda trial: tr(trial.status),
        "Env steps": lambda trial: number(trial.env_steps),
        "Return": lambda trial: number(trial.mean_return),
        "Champion": lambda trial: trial.champion or "-",
    }


async def _load(caller: ApiCaller, run_id: str, opened: set[str]) -> Loaded:
    """The trial, its charts by group, and the curves of the opened groups."""
    trials: list[TrialDocument] = await caller.get(list[TrialDocument], "/api/trials")
    path = f"/api/trials/{run_id}"
    head: CurvesDocument = await caller.get(CurvesDocument, path, metric=RETURN_CHART)
    groups, curves = grouped(head.numbers), {}
    for group in opened & groups.keys():
        of_group: CurvesDocument = await caller.get(CurvesDocument, path, metric=groups[group])
        curves[group] = of_group.curves
    return next((trial for trial in trials if trial.run_id == run_id), None), groups, curves


async def _ended(caller: ApiCaller) -> str:
    """What the page says once the training has stopped."""
    overview: OverviewDocument = await caller.get(OverviewDocument, "/api/job/overview")
    job: JobDocument = await caller.get(JobDocument, "/api/job")
    champion = overview.champion
    crowned = "" if champion is None else tr("Champion: version {version}.", version=champion.version)
    return " ".join(
        filter(
            None, (tr("Stopped."), crowned, tr("Resume with: {command}", command=job.command or tr("the same command")))
        )
    )


def _trial(
    caller: ApiCaller, run_id: str, opened: set[str], refresh: Callable[[], Awaitable[None]]
) -> Callable[[Loaded], None]:
    async def stop() -> None:
        question = tr("Stop this training? It saves a last checkpoint, and the same command resumes it.")
        if not await confirmed(question, tr("Stop it")):
            return
        ended = await _ended(caller)
        if await control(caller.post(DoneDocument, f"/api/trials/{run_id}/stop"), lambda _: tr("It is stopping …")):
            button.disable()
            button.set_text(tr("It is stopping …"))
            ui.run_javascript(f"window.brayxEnd = {json.dumps(ended)}")

    async def toggle(group: str, is_open: bool) -> None:
        (opened.add if is_open else opened.discard)(group)
        if is_open:
            await refresh()

    with ui.row().classes("w-full items-center justify-between"):
        title = ui.label().classes("text-xl font-bold")
        button = ui.button(tr("Stop training"), icon="stop", on_click=stop).props("outline color=negative")
    none = empty("It has no metrics yet.")
    parts = ui.column().classes("w-full gap-2")
    grids: dict[str, ui.grid] = {}
    charts: dict[str, Lines] = {}

    def add_group(group: str, place: int) -> None:
        part = ui.expansion(
            GROUPS.get(group, group or "Without a group"),
            value=group in opened,
            on_value_change=lambda event: toggle(group, event.value),
        )
        part.move(target_index=place)
        with part.classes("w-full").props("dense header-class=font-semibold"):
            grids[group] = ui.grid().classes("w-full grid-cols-1 sm:grid-cols-2 gap-3")

    def update(loaded: Loaded) -> None:
        trial, groups, curves = loaded
        title.set_text(run_id if trial is None else f"{trial.project} / {trial.name}: {trial.status}")
        button.set_visibility(trial is not None and trial.can_stop)
        none.set_visibility(not groups)
        with parts:
            for place, group in enumerate(groups):
                if group not in grids:
                    add_group(group, place)
        for group, of_group in curves.items():
            with grids[group]:
                for name, points in of_group.items():
                    if name not in charts:
                        charts[name] = Lines("step", name, height="h-48")
                    charts[name].show({name: points})

    return update
