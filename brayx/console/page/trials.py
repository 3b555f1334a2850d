"""The pages of the store's trials: a table, and the curves of one trial, by group."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from nicegui import ui

from brayx.console.documents import Done
from brayx.console.page.caller import Caller, Connect
from brayx.console.page.charts import lines, put_lines
from brayx.console.page.frame import (
    MUTED,
    Panel,
    confirmed,
    control,
    empty,
    frame,
    heading,
    number,
    put_rows,
    sentence,
    table,
)
from brayx.console.trials import Curves, Trial
from brayx.metrics.charts import GROUPS, RETURN_CHART, grouped
from brayx.tracking.finding import NEWEST

_OPENED = ("return", "learner")
"""Groups of charts that are open at first."""

Loaded = tuple[Trial | None, dict[str, list[str]], dict[str, dict[str, list[tuple[int, float]]]]]


def add(connect: Connect) -> None:
    """Adds the pages."""

    @ui.page("/trials")
    def trials() -> None:
        with frame("Trials", connect) as caller:
            Panel(lambda: caller.get(list[Trial], "/api/trials"), _trials, every_s=5.0)

    @ui.page("/trials/{run_id}")
    def trial(run_id: str) -> None:
        with frame("Trials", connect) as caller:
            opened = {*_OPENED}
            panel = Panel(
                lambda: _load(caller, run_id, opened),
                lambda _: _trial(caller, run_id, opened, lambda: panel.refresh()),
                every_s=5.0,
            )


def _trials(first: list[Trial]) -> Callable[[list[Trial]], None]:
    heading("Trials")
    none = empty("There are no trials yet: `brayx train` makes one.")
    newest = ui.label().classes(MUTED)
    rows = table(
        {
            "name": "Trial", "project": "Project", "status": "Status", "steps": "Env steps", "mean": "Return",
            "champion": "Champion",
        },
        "run_id",
        on_row=lambda row: ui.navigate.to(f"/trials/{row['run_id']}"),
    )  # fmt: skip

    def update(found: list[Trial]) -> None:
        none.set_visibility(not found)
        rows.set_visibility(bool(found))
        newest.set_text(f"Only the newest {number(len(found))} are listed." if len(found) >= NEWEST else "")
        shown = [
            {
                "run_id": each.run_id,
                "name": f"↳ {each.name}" if each.is_child else each.name,
                "project": each.project,
                "status": each.status,
                "steps": number(each.env_steps),
                "mean": number(each.mean_return),
                "champion": each.champion or "-",
            }
            for each in found
        ]
        put_rows(rows, shown)

    return update


async def _load(caller: Caller, run_id: str, opened: set[str]) -> Loaded:
    """The trial, its charts by group, and the curves of the opened groups."""
    trials: list[Trial] = await caller.get(list[Trial], "/api/trials")
    path = f"/api/trials/{run_id}"
    head: Curves = await caller.get(Curves, path, metric=RETURN_CHART)
    groups, curves = grouped(head.numbers), {}
    for group in opened & groups.keys():
        of_group: Curves = await caller.get(Curves, path, metric=groups[group])
        curves[group] = of_group.curves
    return next((trial for trial in trials if trial.run_id == run_id), None), groups, curves


def _trial(
    caller: Caller, run_id: str, opened: set[str], refresh: Callable[[], Awaitable[None]]
) -> Callable[[Loaded], None]:
    async def stop() -> None:
        question = "Stop this training? It saves a last checkpoint, and the same command resumes it."
        if await confirmed(question, "Stop it"):
            await control(caller.post(Done, f"/api/trials/{run_id}/stop"), lambda done: sentence(done.done))

    async def toggle(group: str, is_open: bool) -> None:
        (opened.add if is_open else opened.discard)(group)
        if is_open:
            await refresh()

    with ui.row().classes("w-full items-center justify-between"):
        title = ui.label().classes("text-xl font-bold")
        button = ui.button("Stop training", icon="stop", on_click=stop).props("outline color=negative")
    none = empty("It has no metrics yet.")
    parts = ui.column().classes("w-full gap-2")
    grids: dict[str, ui.grid] = {}
    charts: dict[str, ui.echart] = {}

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
                        charts[name] = lines({}, "step", height="h-48")
                    put_lines(charts[name], {name: points}, "step", name)

    return update
