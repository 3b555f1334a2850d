"""The home page of a console without a job: projects with their champions, newest trials and recordings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from nicegui import ui

from brayx.console.models import ModelDocument
from brayx.console.page.caller import ApiCaller
from brayx.console.page.frame import MUTED, empty, heading
from brayx.console.page.listing import Listing
from brayx.console.page.recordings import recording_columns
from brayx.console.page.trials import result_of, trial_columns
from brayx.console.page.words import tr
from brayx.console.recordings import RecordingDocument, RecordingsDocument
from brayx.console.trials import TrialDocument

_FEW = 5
"""Newest trials and recordings that are listed."""


class Seen(NamedTuple):
    """What the page shows."""

    tracking: str
    trials: list[TrialDocument]
    models: list[ModelDocument]
    recordings: list[RecordingDocument]


class _Project(NamedTuple):
    """A project of the store."""

    name: str
    trials: int
    newest: TrialDocument
    champions: str


async def load(caller: ApiCaller, tracking: str) -> Seen:
    """Loads what the page shows.

    Raises:
        BrayxError: it cannot be read.
    """
    trials: list[TrialDocument] = await caller.get(list[TrialDocument], "/api/trials")
    models: list[ModelDocument] = await caller.get(list[ModelDocument], "/api/models")
    listing: RecordingsDocument = await caller.get(RecordingsDocument, "/api/recordings", limit=_FEW)
    return Seen(tracking, trials, models, listing.recordings)


class Home:
    """The page."""

    def __init__(self) -> None:
        self._state = ui.label().classes("text-2xl font-bold").mark("verdict")
        self._about = ui.label().classes(f"break-words max-w-full {MUTED}")
        self._none = empty(tr("Nothing is here yet. Start with `brayx new NAME`, then `brayx train NAME.yaml`."))
        self._projects = self._section("Projects")
        with self._projects:
            self._project_rows = Listing[_Project](
                "name",
                {
                    "Project": lambda project: project.name,
                    "Champion": lambda project: project.champions or "-",
                    "Newest trial": lambda project: project.newest.name,
                    "Status": lambda project: tr(project.newest.status),
                    "Return": lambda project: result_of(project.newest),
                    "Trials": lambda project: project.trials,
                },
                lead="Return",
                link=lambda project: f"/trials/{project.newest.run_id}",
            )
        self._trials = self._section("Newest trials")
        with self._trials:
            columns = trial_columns()
            self._trial_rows = Listing[TrialDocument](
                "run_id", columns, lead="Return", link=lambda trial: f"/trials/{trial.run_id}"
            )
        self._recordings = self._section("Newest recordings")
        with self._recordings:
            self._recording_rows = Listing[RecordingDocument](
                "id", recording_columns(), lead="Return", link=lambda recording: f"/recordings/{recording.id}"
            )

    @staticmethod
    def _section(name: str) -> ui.column:
        with ui.column().classes("w-full gap-2") as section:
            heading(tr(name))
        return section

    def show(self, seen: Seen) -> None:
        """Shows the newest answers."""
        trained = running(seen.trials)
        self._state.set_text(
            tr("No job is running here. In training: {trials}", trials=trained)
            if trained
            else tr("No job is running here")
        )
        self._about.set_text(tr("This console shows the tracking store {uri}", uri=seen.tracking))
        self._project_rows.show(_projects(seen))
        self._trial_rows.show([trial for trial in seen.trials if not trial.is_child][:_FEW])
        self._recording_rows.show(seen.recordings)
        self._none.set_visibility(not seen.trials and not seen.recordings)
        self._projects.set_visibility(bool(seen.trials))
        self._trials.set_visibility(bool(seen.trials))
        self._recordings.set_visibility(bool(seen.recordings))


def running(trials: Sequence[TrialDocument]) -> str:
    """Names of the trials that train, in processes which this console does not reach; empty: none does."""
    return ", ".join(
        f"{trial.project} / {trial.name}" for trial in trials if trial.status == "running" and not trial.is_child
    )


def _projects(seen: Seen) -> list[_Project]:
    """The projects of the trials, that of the newest trial first."""
    by_project: dict[str, list[TrialDocument]] = {}
    for trial in seen.trials:
        if not trial.is_child:
            by_project.setdefault(trial.project, []).append(trial)
    projects = []
    for name, trials in by_project.items():
        crowned = [
            tr("version {version}", version=version.label)
            for model in seen.models
            if model.name == name or model.name.startswith(f"{name}-")
            for version in model.versions
            if "champion" in version.aliases
        ]
        projects.append(_Project(name, len(trials), trials[0], ", ".join(crowned)))
    return projects
