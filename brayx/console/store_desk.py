"""The console's desk for a tracking store, a folder of recordings and, through a link, a running job.

Runs in the console's process. Knows nothing of HTTP.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

import brayx.recording
from brayx.actor.live_ticks import LiveFrame, LiveTicks
from brayx.console import documents as doc
from brayx.console.comparisons import Comparisons, Key
from brayx.console.desk import Download, FileFormat
from brayx.console.downloads import Downloads, formats_of
from brayx.console.games import Games, HumanGame
from brayx.console.link import Link
from brayx.console.ticks import body_of, data_url, tick_of
from brayx.errors import BadRecording, ConfigError, JobNotRunning, RecordingUnknown, SessionUnknown
from brayx.jobs.progress import dropped_line, losses_of_recordings
from brayx.metrics.charts import CHARTS
from brayx.recording.columns import texts
from brayx.recording.frames import png
from brayx.recording.reader import Episode, Recordings
from brayx.tracking import Trial, promote, registered_models, replaced, roll_back
from brayx.tracking.registry import STEP_TAG
from brayx.tracking.trials import trials

_LISTING_S = 2.0
"""How long a listing of recordings is cached."""


class StoreDesk:
    """Implements `brayx.console.desk.Desk`.

    Args:
        uri: tracking URI.
        project: the job's project; empty: there is no job, and all projects are shown.
        recordings: folder of recordings; empty: there is none.
        link: link to the job; None: there is no job.
        games: games that humans play; None: the job has no board.
        trust: which code may run to compare versions, see `brayx.jobs.stored_models.stored_model`.
    """

    def __init__(
        self,
        uri: str,
        *,
        project: str = "",
        recordings: str = "",
        link: Link | None = None,
        games: Games | None = None,
        trust: bool | str = False,
    ) -> None:
        self._uri, self._project, self._folder, self._link = uri, project, recordings, link
        self._comparisons, self._games, self._downloads = Comparisons(uri, trust), games, Downloads()
        self._opening = threading.Lock()
        self._opened: tuple[float, Recordings] | None = None

    def job(self) -> doc.Job:
        if self._link is None:
            return doc.Job(running=False, tracking=self._uri)
        facts = self._link.ask("job")
        numbers = {name: float(value) for name, value in facts.pop("numbers", {}).items() if np.isfinite(value)}
        refused = "requests_refused."
        refusals = {name.removeprefix(refused): n for name, n in numbers.items() if name.startswith(refused)}
        losses = losses_of_recordings(numbers) if facts["mode"] == "serve" else [dropped_line(numbers)]
        facts["errors"] = [*facts.get("errors", []), *filter(None, losses)]
        return doc.Job(**facts, numbers=numbers, refusals=refusals, tracking=self._uri)

    def sessions(self) -> list[doc.Session]:
        if self._link is None:
            return []
        return [doc.Session(**row) for row in self._link.ask("sessions")]

    def ticks(self, session: str, after: int) -> doc.Ticks:
        found: LiveTicks = self._ask("ticks", session, after)
        ticks = [
            tick_of(each.number, each.at_s, each.seconds, each.event, each.input, each.output, each.arrays)
            for each in found.ticks
        ]
        return doc.Ticks(
            session=session,
            ticks=ticks,
            after=found.after,
            end=found.end,
            result=found.result,
            frame=None if found.frame is None else _frame(found.frame),
        )

    def end_session(self, session: str) -> doc.Done:
        self._ask("end", session)
        return doc.Done(done=f"session {session} is ended")

    def models(self) -> list[doc.Model]:
        found = []
        for model in registered_models(self._uri):
            versions = []
            before = None
            for entry, created_s in model.versions:
                aliases = sorted(alias for alias, version in model.aliases.items() if version == entry.version)
                step = entry.tags.get(STEP_TAG, "")
                if "champion" in aliases:
                    before = replaced(entry)
                versions.append(
                    doc.Version(
                        version=entry.version,
                        aliases=aliases,
                        step=int(step) if step.isdigit() else None,
                        created_s=created_s,
                        trial=entry.run_id,
                        tags=dict(entry.tags),
                    )
                )
            found.append(doc.Model(name=model.name, aliases=dict(model.aliases), versions=versions, before=before))
        return sorted(found, key=lambda model: not model.name.startswith(self._project or "\0"))

    def promote(self, name: str, version: int, alias: str) -> doc.Move:
        entry, before = promote(f"models:/{name}/{version}", self._uri, to=alias)
        return doc.Move(name=name, alias=alias, version=entry.version, before=before)

    def roll_back(self, name: str) -> doc.Move:
        entry, before = roll_back(name, self._uri)
        return doc.Move(name=name, alias="champion", version=entry.version, before=before)

    def set_share(self, component: str, share: float) -> doc.Done:
        self._ask("set_share", component, share)
        return doc.Done(done=f"{share:.0%} of new sessions of {component} get the canary, until the service ends")

    def trials(self, project: str) -> list[doc.Trial]:
        try:
            rows = trials(self._uri, project)
        except ConfigError:  # there is no store yet, or no such project
            return []
        job = self._job()
        stoppable = job.get("run_id") if job.get("can_stop") else None
        return [doc.Trial(**asdict(row), can_stop=row.run_id == stoppable) for row in rows]

    def curves(self, run_id: str, metrics: Sequence[str] = ()) -> doc.Curves:
        trial = Trial.attach(self._uri, run_id)
        numbers = trial.metrics()
        known = dict.fromkeys((*CHARTS.values(), *sorted(numbers)))  # the most important first
        shown = [name for name in metrics or known if name in numbers]
        curves = {name: _thinned(trial.history(name)) for name in shown[:_MAX_CURVES]}
        finite = {name: value for name, value in numbers.items() if np.isfinite(value)}
        return doc.Curves(run_id=run_id, numbers=finite, curves=curves)

    def stop_trial(self, run_id: str) -> doc.Done:
        if run_id != self._job().get("run_id"):
            raise JobNotRunning(f"trial {run_id!r} is not the one that this console's job trains")
        self._ask("stop")
        return doc.Done(done="the trial is being stopped: it saves a last checkpoint, and the same command resumes it")

    def league(self) -> doc.League | None:
        # Imported only here, since these modules import torch.
        from brayx.league.finding import books_of, newest_league
        from brayx.league.ledger import Ledger
        from brayx.league.report import Books, document

        try:
            trial = newest_league(self._uri, self._project)
        except ConfigError:
            return None
        found = document(trial, Books.read(trial))
        ledger = Ledger(books_of(trial), read_only=True)
        try:
            curves = ledger.curves()
        finally:
            ledger.close()
        return doc.League(
            project=trial.project,
            trial=trial.name,
            champion=found["champion"],
            counters=found["counters"],
            standings=[doc.Standing(**_only(doc.Standing, row)) for row in found["ratings"]],
            payoff=[doc.Pairing(**_only(doc.Pairing, row)) for row in found["payoff"]],
            curves={m.label: [(point.env_steps, point.points) for point in curve] for m, curve in curves.items()},
        )

    def recordings(self, limit: int, session: str) -> doc.Recordings:
        found = self._recordings()
        if found is None:
            return doc.Recordings(folder=self._folder, total=0, selected=0, recordings=[], unreadable={})
        newest, selected = found.newest(limit, session)
        return doc.Recordings(
            folder=self._folder,
            total=len(found),
            selected=selected,
            recordings=[_recording(episode) for episode in newest],
            unreadable=found.unreadable,
        )

    def recorded_ticks(self, recording: str, first: int, count: int) -> doc.RecordedTicks:
        episode = self._episode(recording)
        columns = episode.read(first, count)
        inputs, outputs = texts(columns.input), texts(columns.output)
        ticks = [
            tick_of(
                int(columns.number[at]),
                columns.time_us[at] / 1e6,
                columns.duration_us[at] / 1e6,
                columns.event[at],
                inputs[at],
                outputs[at],
                {name: array[at] for name, array in columns.arrays.items()},
            )
            for at in range(len(columns.number))
        ]
        start, reply = (body_of(text.encode(errors="surrogateescape")) for text in (episode.start, episode.start_reply))
        return doc.RecordedTicks(
            recording=_recording(episode), start=start, start_reply=reply, first=first, ticks=ticks
        )

    def recorded_curves(self, recording: str) -> doc.RecordedCurves:
        episode = self._episode(recording)
        step = -(-len(episode) // doc.MAX_POINTS)
        curves: dict[str, list[float]] = {}
        if step <= _MAX_WHOLE_STEP:
            columns = episode.read()
            numbers, arrays = columns.number[::step], {n: array[::step] for n, array in columns.arrays.items()}
        else:  # of a long recording, read only the ticks that are drawn
            parts = [episode.read(first, 1) for first in range(0, len(episode), step)]
            numbers = np.concatenate([part.number for part in parts])
            arrays = {name: np.concatenate([part.arrays[name] for part in parts]) for name in parts[0].arrays}
        for name, array in arrays.items():
            if array.ndim == 1 and array.dtype.kind in "biuf" and np.isfinite(array).all():
                curves[name] = array.astype(float).tolist()
        return doc.RecordedCurves(ticks=numbers.tolist(), curves=curves)

    def frame(self, recording: str, tick: int) -> bytes | None:
        image = self._episode(recording).image(tick)
        return None if image is None else png(image)

    def recording_file(self, recording: str, format: FileFormat) -> Download:
        return self._downloads.make(self._episode(recording), format)

    def comparison(self, recording: str, version: str, reference: str) -> doc.Comparison:
        ticks = len(self._episode(recording))
        return self._comparisons.ask(Key(recording, version, reference), self._folder, ticks)

    def compared_ticks(
        self, recording: str, version: str, reference: str, first: int, count: int
    ) -> list[doc.ComparedTick]:
        episode = self._episode(recording)
        return self._comparisons.ticks(Key(recording, version, reference), episode, first, count)

    def opponents(self) -> doc.Opponents:
        if self._link is None:
            return doc.Opponents(why_not="There is no job behind this console.")
        if self._games is None:
            return doc.Opponents(why_not="This job has no component `kind: board`, which shows its game to a human.")
        if self._link.ask("job")["mode"] != "serve":
            return doc.Opponents(
                why_not="A training plays its own games. A served job plays with humans: `brayx serve`."
            )
        versions = next((m.versions for m in registered_models(self._uri) if m.name == self._games.model), [])
        return self._games.opponents([entry.version for entry, _ in versions])

    def new_game(self, opponent: dict[str, Any] | None) -> doc.Game:
        why_not = self.opponents().why_not
        if self._games is None or why_not:
            raise ConfigError(why_not)
        return self._games.begin(self._ask("job")["doors"], opponent)

    def move(self, game: str, move: Any) -> doc.Game:
        return self._game(game).move(move)

    def give_up(self, game: str) -> doc.Done:
        self._game(game).give_up()
        return doc.Done(done="the game is given up")

    def _game(self, game: str) -> HumanGame:
        if self._games is None:
            raise SessionUnknown(f"there is no game {game!r}: this job has no board")
        return self._games.find(game)

    def _ask(self, verb: str, *arguments: Any) -> Any:
        if self._link is None:
            raise JobNotRunning("there is no job behind this console: it shows a tracking store")
        return self._link.ask(verb, *arguments)

    def _job(self) -> dict[str, Any]:
        """What the job reports of itself; empty: there is no job."""
        found: dict[str, Any] = {} if self._link is None else self._link.ask("job")
        return found

    def _recordings(self) -> Recordings | None:
        if not self._folder:
            return None
        with self._opening:
            if self._opened is None or time.monotonic() - self._opened[0] > _LISTING_S:
                try:
                    self._opened = (time.monotonic(), brayx.recording.open(self._folder))
                except BadRecording:  # nothing has been recorded yet
                    return None
            return self._opened[1]

    def _episode(self, recording: str) -> Episode:
        recordings = self._recordings()
        found = None if recordings is None else recordings.find(recording)
        if found is None:
            raise RecordingUnknown(f"there is no recording {recording!r} in {self._folder or 'this job'}")
        return found


_MAX_CURVES = 20
_MAX_WHOLE_STEP = 40
"""Maximum distance between drawn ticks at which the whole recording is read."""


def _thinned(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    finite = [(step, value) for step, value in points if np.isfinite(value)]
    every = -(-len(finite) // doc.MAX_POINTS) or 1
    return finite[::-every][::-1]


def _only(model: type[doc.Document], row: Mapping[str, Any]) -> dict[str, Any]:
    """Those values of a row that the document has fields for."""
    return {name: value for name, value in row.items() if name in model.model_fields}


def _frame(frame: LiveFrame) -> doc.Frame:
    image = data_url(frame.png) if frame.png else None
    return doc.Frame(number=frame.number, image=image, failure=frame.failure)


def _recording(episode: Episode) -> doc.Recording:
    return doc.Recording(
        id=episode.id,
        session=episode.session,
        ticks=len(episode),
        began_s=episode.began,
        end=episode.end,
        result=episode.result,
        player=episode.player,
        why=episode.why,
        events=episode.events,
        lost=episode.lost,
        frames=episode.frames,
        formats=formats_of(episode),
    )
