"""The pages of the store's trials: a table, the curves of one trial by group, and several trials in one chart."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from urllib.parse import quote

from nicegui import ui

from brayx.console.page.caller import ApiCaller, Connect
from brayx.console.page.charts import Lines, Points
from brayx.console.page.frame import (
    MUTED,
    RESPONSE_S,
    Panel,
    clock,
    empty,
    frame,
    heading,
    number,
    since,
    until_end,
)
from brayx.console.page.listing import Listing, TableCell, counted, returned
from brayx.console.page.stopping import StopButton
from brayx.console.page.words import tr
from brayx.console.trials import CurvesDocument, TrialDocument
from brayx.metrics.charts import CHARTS, GROUPS, RETURN_CHART, grouped
from brayx.tracking.finding import NEWEST

_KEY_CHARTS = 4
"""Charts that are shown first; the others are folded by group."""
_KEYS = {
    RETURN_CHART: "Return of the last 100 games",
    "eval/return": "Return in evaluation",
    CHARTS["episode_length.last100"]: "Length of a game (last 100 games)",
    CHARTS["entropy"]: "Entropy (high: it still tries out actions)",
    CHARTS["explained_variance"]: "Explained variance (1: it foresees the return)",
    CHARTS["loss"]: "Loss",
    CHARTS["ticks_per_s"]: "Ticks/s",
}
"""Titles of the most telling charts, the most telling first: the first few that a trial has are its key charts."""
_MOST_COMPARED = 6
"""Trials in one chart."""


class _Seen(NamedTuple):
    """What the page of a trial shows."""

    trial: TrialDocument | None
    children: list[TrialDocument]
    groups: Mapping[str, list[str]]
    curves: Mapping[str, Points]
    """The key charts, and those of opened groups."""
    players: Mapping[str, Points]
    """The return of each child."""


def add(connect: Connect) -> None:
    """Adds the pages."""

    @ui.page("/trials", response_timeout=RESPONSE_S)
    async def trials() -> None:
        with frame("Trials", connect) as caller:
            await _Trials(caller).panel.first()

    @ui.page("/trials/{run_id}", response_timeout=RESPONSE_S)
    async def trial(run_id: str) -> None:
        with frame("Trials", connect) as caller:
            await _Trial(caller, run_id).panel.first()

    @ui.page("/compare", response_timeout=RESPONSE_S)
    async def compare(trials: str = "") -> None:
        with frame("Trials", connect) as caller:
            chosen = trials.split(",")[:_MOST_COMPARED]
            await Panel(lambda: _load_compared(caller, chosen), _compared, every_s=10.0).first()


def trial_columns() -> dict[str, Callable[[TrialDocument], Any]]:
    """What a table shows of a trial, by heading."""
    return {
        "Trial": lambda trial: f"↳ {trial.name}" if trial.is_child else trial.name,
        "Project": lambda trial: trial.project,
        "Status": lambda trial: tr(trial.status),
        "Began": lambda trial: clock(trial.began_s),
        "Duration": lambda trial: "-" if (spent := _spent_s(trial)) is None else TableCell(since(spent), spent),
        "Env steps": lambda trial: counted(trial.env_steps),
        "Return": result_of,
        "Best return": lambda trial: counted(None if trial.points is not None else trial.best_return),
        "Champion": lambda trial: trial.champion or "-",
    }


def result_of(trial: TrialDocument) -> TableCell:
    """Its return, or in a league, where players play each other, its points."""
    if trial.points is not None:
        return TableCell(tr("{points} points", points=f"{trial.points:.0f}"), trial.points)
    return returned(trial.mean_return, trial.error)


def _spent_s(trial: TrialDocument) -> float | None:
    """How long it has trained, without interruptions; None: not known."""
    if trial.seconds is not None:
        return trial.seconds
    ended_s = time.time() if trial.status == "running" else trial.ended_s
    return None if ended_s is None else ended_s - trial.began_s


class _Trials:
    """The list of the trials: a search, and boxes to choose trials that are compared.

    Attributes:
        panel: loads and shows the trials.
    """

    def __init__(self, caller: ApiCaller) -> None:
        heading(tr("Trials"))
        self._trials: list[TrialDocument] = []
        with ui.row().classes("w-full items-center gap-3"):
            self._search = (
                ui.input(tr("Search"), on_change=self._show).classes("w-48").props("dense outlined clearable")
            )
            self._compare = ui.button(tr("Compare"), on_click=self._go).props("outline")
            ui.label(tr("Choose two to six trials to compare them.")).classes(f"text-sm {MUTED}")
        self.panel = Panel(lambda: caller.get(list[TrialDocument], "/api/trials"), self._build, every_s=5.0)

    def _build(self, _: list[TrialDocument]) -> Callable[[list[TrialDocument]], None]:
        self._none = empty(tr("There are no trials yet: `brayx train` starts one."))
        self._newest = ui.label().classes(MUTED)
        self._rows = Listing[TrialDocument](
            "run_id",
            trial_columns(),
            lead="Return",
            link=lambda trial: f"/trials/{trial.run_id}",
            on_select=self._chosen,
        )
        self._chosen()
        return self._update

    def _update(self, trials: list[TrialDocument]) -> None:
        self._trials = trials
        self._none.set_visibility(not trials)
        self._newest.set_text(
            tr("Only the newest {count} are listed.", count=number(len(trials))) if len(trials) >= NEWEST else ""
        )
        self._show()

    def _show(self) -> None:
        words = (self._search.value or "").lower().split()
        text = [
            (trial, f"{trial.project} {trial.name} {trial.status} {trial.champion}".lower()) for trial in self._trials
        ]
        self._rows.show([trial for trial, about in text if all(word in about for word in words)])

    def _chosen(self) -> None:
        self._compare.set_enabled(2 <= len(self._rows.selected) <= _MOST_COMPARED)

    def _go(self) -> None:
        ui.navigate.to(f"/compare?trials={quote(','.join(row['key'] for row in self._rows.selected))}")


class _Trial:
    """The page of a trial: its key charts, its settings, and all other charts by group.

    Attributes:
        panel: loads and shows the trial.
    """

    def __init__(self, caller: ApiCaller, run_id: str) -> None:
        self._caller, self._run_id = caller, run_id
        self._opened: set[str] = set()
        self._charts: dict[str, Lines] = {}
        self._grids: dict[str, ui.grid] = {}
        self._shown_keys: list[str] = []
        self.panel = Panel(self._load, self._build, every_s=5.0)

    async def _load(self) -> _Seen:
        trials: list[TrialDocument] = await self._caller.get(list[TrialDocument], "/api/trials")
        place = next((place for place, trial in enumerate(trials) if trial.run_id == self._run_id), None)
        head = await self._curves(self._run_id, [RETURN_CHART])
        groups = grouped(head.numbers)
        wanted = [*key_charts(head.numbers), *(name for group in self._opened for name in groups.get(group, ()))]
        curves = (await self._curves(self._run_id, wanted)).curves if wanted else {}
        children = [] if place is None else _children(trials, place)
        players = {}
        for child in children[:_MOST_COMPARED]:
            players[child.name] = (await self._curves(child.run_id, [RETURN_CHART])).curves.get(RETURN_CHART, [])
        return _Seen(None if place is None else trials[place], children, groups, curves, players)

    async def _curves(self, run_id: str, names: list[str]) -> CurvesDocument:
        curves: CurvesDocument = await self._caller.get(CurvesDocument, f"/api/trials/{run_id}", metric=names)
        return curves

    def _build(self, _: _Seen) -> Callable[[_Seen], None]:
        with ui.row().classes("w-full items-center justify-between"):
            with ui.column().classes("gap-0 min-w-0"):
                self._title = ui.label().classes("text-xl font-bold break-all")
                self._about = ui.label().classes(MUTED)
            self._button = StopButton(self._caller)
        with ui.row().classes("gap-4"):
            ui.link(tr("Models"), "/models")
            ui.link(tr("Recordings"), "/recordings")
            self._mlflow = ui.link(tr("MLflow (`mlflow ui` must run)"), "", new_tab=True)
            self._table = ui.link(tr("MLflow's table of the project"), "", new_tab=True)
        self._none = empty(tr("No metrics yet."))
        self._players = Lines(tr("env steps"), tr("Return by player"), height="h-64")
        self._keys = ui.grid().classes("w-full grid-cols-1 sm:grid-cols-2 gap-3")
        with ui.expansion(tr("Settings"), on_value_change=self._show_settings).classes("w-full") as self._settings:
            self._settings.props("dense header-class=font-semibold")
        self._parts = ui.column().classes("w-full gap-2")
        return self._show

    def _show(self, seen: _Seen) -> None:
        trial = seen.trial
        self._title.set_text(self._run_id if trial is None else f"{trial.project} / {trial.name}: {tr(trial.status)}")
        if trial is not None and trial.can_stop:
            until_end(self._title, f"{trial.project} / {trial.name}: {tr('ended')}")
        self._about.set_text("" if trial is None else trial.note or trial.champion)
        for link, page in ((self._mlflow, trial and trial.page), (self._table, trial and trial.project_page)):
            link.set_visibility(bool(page))
            link.props["href"] = page or ""
        self._button.set_visibility(trial is not None and trial.can_stop)
        self._none.set_visibility(not seen.groups)
        self._players.show(seen.players)
        with self._parts:
            for place, group in enumerate(seen.groups):
                if group not in self._grids:
                    self._add_group(group, place)
        keys = key_charts(seen.curves)
        if keys != self._shown_keys:  # the first games end later than the first updates
            self._shown_keys = keys
            self._keys.clear()
            for name in keys:
                if name in self._charts:  # in an opened group
                    self._charts[name].delete()
            self._charts = {name: chart for name, chart in self._charts.items() if not chart.is_deleted}
        for name, points in seen.curves.items():
            if name not in self._charts:
                group = next((group for group, names in seen.groups.items() if name in names), "")
                title = tr(_KEYS[name]) if name in keys else name
                with self._keys if name in keys else self._grids[group]:
                    self._charts[name] = Lines(tr("env steps"), title, height="h-48")
            self._charts[name].show({name: [] if is_straight(points) and name not in keys else points})

    def _add_group(self, group: str, place: int) -> None:
        async def toggle(is_open: bool) -> None:
            (self._opened.add if is_open else self._opened.discard)(group)
            if is_open:
                await self.panel.refresh()

        title = tr(GROUPS[group]) if group in GROUPS else group or tr("Without a group")
        part = ui.expansion(title, on_value_change=lambda event: toggle(event.value))
        part.move(target_index=place)
        with part.classes("w-full").props("dense header-class=font-semibold"):
            self._grids[group] = ui.grid().classes("w-full grid-cols-1 sm:grid-cols-2 gap-3")

    async def _show_settings(self) -> None:
        settings: dict[str, str] = await self._caller.get(dict[str, str], f"/api/trials/{self._run_id}/settings")
        self._settings.clear()
        with self._settings:
            text = "\n".join(f"{name}: {value}" for name, value in sorted(settings.items()))
            ui.label(text or tr("None.")).classes("mono whitespace-pre-wrap break-all")


def key_charts(names: Mapping[str, object]) -> list[str]:
    """The most telling ones of these charts, the most telling first."""
    return [name for name in _KEYS if name in names][:_KEY_CHARTS]


def is_straight(points: Points) -> bool:
    """Whether a curve has one value only, so that it shows nothing."""
    return len({value for _, value in points}) <= 1


def _children(trials: list[TrialDocument], place: int) -> list[TrialDocument]:
    """The children of a trial, which follow it."""
    children = []
    for trial in trials[place + 1 :]:
        if not trial.is_child or trials[place].is_child:
            break
        children.append(trial)
    return children


class _Compared(NamedTuple):
    """Trials that are compared."""

    curves: Mapping[str, Points]
    settings: Mapping[str, Mapping[str, str]]
    """Settings by the trial's name."""


class _Setting(NamedTuple):
    """A setting that differs, with its value in each trial."""

    name: str
    values: tuple[str, ...]


async def _load_compared(caller: ApiCaller, run_ids: list[str]) -> _Compared:
    trials: list[TrialDocument] = await caller.get(list[TrialDocument], "/api/trials")
    curves, settings = {}, {}
    for run_id in run_ids:
        name = next((f"{trial.project} / {trial.name}" for trial in trials if trial.run_id == run_id), run_id)
        name = f"{name} ({run_id[:6]})" if name in curves else name
        document: CurvesDocument = await caller.get(CurvesDocument, f"/api/trials/{run_id}", metric=RETURN_CHART)
        curves[name] = document.curves.get(RETURN_CHART, [])
        settings[name] = await caller.get(dict[str, str], f"/api/trials/{run_id}/settings")
    return _Compared(curves, settings)


def _compared(first: _Compared) -> Callable[[_Compared], None]:
    heading(tr("Return of the last 100 games"))
    chart = Lines(tr("env steps"), height="h-96")
    heading(tr("Settings that differ"))
    none = empty(tr("Their settings are the same."))
    columns: dict[str, Callable[[_Setting], Any]] = {"Setting": lambda setting: setting.name}
    columns |= {name: _value_at(place) for place, name in enumerate(first.settings)}
    rows = Listing[_Setting]("name", columns)

    def update(compared: _Compared) -> None:
        chart.show(compared.curves)
        settings = differing(compared.settings)
        rows.show(settings)
        none.set_visibility(not settings)

    return update


def _value_at(place: int) -> Callable[[_Setting], str]:
    return lambda setting: setting.values[place]


def differing(settings: Mapping[str, Mapping[str, str]]) -> list[_Setting]:
    """The settings that are not the same in all trials, by name; ports last."""
    names = {name for of_trial in settings.values() for name in of_trial}
    ordered = sorted(names, key=lambda name: (name.endswith("port"), name))  # ports differ always, and matter least
    rows = [_Setting(name, tuple(of_trial.get(name, "-") for of_trial in settings.values())) for name in ordered]
    return [row for row in rows if len(set(row.values)) > 1]
