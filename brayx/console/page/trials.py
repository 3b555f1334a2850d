"""The pages of the store's trials: a table, and the curves of one trial."""

from __future__ import annotations

from collections.abc import Callable

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
from brayx.tracking.finding import NEWEST


def add(connect: Connect) -> None:
    """Adds the pages."""

    @ui.page("/trials")
    def trials() -> None:
        with frame("Trials", connect) as caller:
            Panel(lambda: caller.get(list[Trial], "/api/trials"), _trials, every_s=5.0)

    @ui.page("/trials/{run_id}")
    def trial(run_id: str) -> None:
        with frame("Trials", connect) as caller:
            Panel(lambda: _load(caller, run_id), lambda first: _trial(caller, first), every_s=5.0)


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


async def _load(caller: Caller, run_id: str) -> tuple[Trial | None, Curves]:
    found: list[Trial] = await caller.get(list[Trial], "/api/trials")
    curves: Curves = await caller.get(Curves, f"/api/trials/{run_id}")
    return next((each for each in found if each.run_id == run_id), None), curves


def _trial(caller: Caller, first: tuple[Trial | None, Curves]) -> Callable[[tuple[Trial | None, Curves]], None]:
    run_id = first[1].run_id

    async def stop() -> None:
        question = "Stop this training? It saves a last checkpoint, and the same command resumes it."
        if await confirmed(question, "Stop it"):
            await control(caller.post(Done, f"/api/trials/{run_id}/stop"), lambda done: sentence(done.done))

    with ui.row().classes("w-full items-center justify-between"):
        title = ui.label().classes("text-xl font-bold")
        button = ui.button("Stop training", icon="stop", on_click=stop).props("outline color=negative")
    none = empty("It has no metrics yet.")
    grid = ui.grid().classes("w-full grid-cols-1 sm:grid-cols-2 gap-3")
    charts: dict[str, ui.echart] = {}

    def update(found: tuple[Trial | None, Curves]) -> None:
        trial, curves = found
        title.set_text(run_id if trial is None else f"{trial.project} / {trial.name}: {trial.status}")
        button.set_visibility(trial is not None and trial.can_stop)
        none.set_visibility(not curves.curves)
        with grid:
            for name, points in curves.curves.items():
                if name not in charts:
                    charts[name] = lines({}, "step", height="h-48")
                put_lines(charts[name], {name: points}, "step", name)

    return update
