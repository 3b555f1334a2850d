"""The overview page: whether the job learns and serves, what it loses, and what it waits for."""

from __future__ import annotations

from collections.abc import Callable

from nicegui import ui

from brayx.console.overview import JobDocument
from brayx.console.page.caller import ApiCaller, Connect
from brayx.console.page.charts import Lines
from brayx.console.page.frame import MUTED, Panel, empty, frame, heading, number, since
from brayx.console.trials import CurvesDocument, TrialDocument
from brayx.metrics.charts import RETURN_CHART


def add(connect: Connect) -> None:
    """Adds the page."""

    @ui.page("/")
    def overview() -> None:
        with frame("Overview", connect) as caller:
            Panel(lambda: caller.get(JobDocument, "/api/job"), _job)
            Panel(lambda: _learning(caller), _curve, every_s=5.0)


async def _learning(caller: ApiCaller) -> CurvesDocument | None:
    """The return of the trial that the job trains, or else of the newest trial."""
    trials: list[TrialDocument] = await caller.get(list[TrialDocument], "/api/trials")
    chosen = sorted(trials, key=lambda trial: not trial.can_stop)[:1]
    return await caller.get(CurvesDocument, f"/api/trials/{chosen[0].run_id}", metric=RETURN_CHART) if chosen else None


def _curve(first: CurvesDocument | None) -> Callable[[CurvesDocument | None], None]:
    none = empty("No trial has a return yet.")
    chart = Lines("env steps", "Return of the last 100 games")

    def update(trial: CurvesDocument | None) -> None:
        points = [] if trial is None else trial.curves.get(RETURN_CHART, [])
        none.set_visibility(not points)
        chart.show({"mean return of the last 100 games": points})

    return update


def _job(first: JobDocument) -> Callable[[JobDocument], None]:
    title = ui.label().classes("text-xl font-bold")
    about = ui.label().classes(MUTED)
    progress = ui.linear_progress(show_value=False, size="8px").props('instant-feedback aria-label="progress"')
    with ui.grid().classes("w-full grid-cols-2 sm:grid-cols-4 gap-3"):
        numbers = {
            name: _number(name)
            for name in ("Return", "Ticks/s", "Env steps", "Weights' lag", "Sessions", "Games", "Refused", "Up")
        }
    heading("Losses and refusals")
    losses = ui.label().classes("whitespace-pre-wrap").mark("losses")
    heading("Doors")
    doors = ui.label().classes("mono whitespace-pre-wrap break-all")

    def update(job: JobDocument) -> None:
        metrics = job.numbers
        name = " / ".join(filter(None, (job.project, job.trial)))
        title.set_text(name if job.running else "No job is running here")
        words = {"train": "is being trained", "serve": "is being served"}.get(job.mode, "")
        acting = "; ".join(
            f"{model} acts with {' or '.join(v) or 'weights as built'}" for model, v in job.registered.items()
        )
        about.set_text(
            "; ".join(filter(None, (words, job.waits_for, acting)))
            if job.running
            else f"This console shows the tracking store {job.tracking}"
        )
        steps = metrics.get("env_steps")
        progress.set_visibility(bool(job.num_steps and steps is not None))
        progress.set_value(min((steps or 0.0) / job.num_steps, 1.0) if job.num_steps else 0.0)
        target = "" if job.target_return is None else f" of {number(job.target_return)}"
        mean = metrics.get("episode_return.last100", metrics.get("episode_return"))
        shown = {
            "Return": number(mean) + target,
            "Ticks/s": number(round(metrics.get("ticks_per_s", metrics.get("env_steps_per_s", 0.0)))),
            "Env steps": number(steps),
            "Weights' lag": "-" if "lag_versions" not in metrics else f"{metrics['lag_versions']:.1f} versions",
            "Sessions": number(job.sessions),
            "Games": number(metrics.get("games")),
            "Refused": number(sum(job.refusals.values())),
            "Up": since(job.up_s),
        }
        for key, text in shown.items():
            numbers[key].set_text(text)
        refused = [f"{number(count)} requests refused: {code}" for code, count in sorted(job.refusals.items())]
        losses.set_text("\n".join([*job.errors, *refused]) or "None.")
        doors.set_text("\n".join(f"{door:<5} {url}" for door, url in job.doors.items()) or "None.")

    return update


def _number(name: str) -> ui.label:
    with ui.card().classes("p-3 gap-0 shadow-none border border-gray-500/30"):
        ui.label(name).classes(f"text-xs {MUTED}")
        return ui.label("-").classes("text-xl font-semibold whitespace-nowrap").mark(name)
