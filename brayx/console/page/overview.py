"""The overview page: is it learning, is it serving well, who leads; and what goes wrong and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from nicegui import ui

from brayx.console.league import LeagueDocument, StandingDocument
from brayx.console.overview import JobDocument, OverviewDocument, RatedDocument
from brayx.console.page import guides, home
from brayx.console.page.caller import ApiCaller, Connect
from brayx.console.page.charts import Lines
from brayx.console.page.frame import (
    AMBER,
    MUTED,
    RESPONSE_S,
    Panel,
    frame,
    heading,
    lead_text,
    milliseconds,
    number,
    plus_minus,
    reference_text,
    result_text,
    shown_values,
    since,
    tile,
    until_end,
)
from brayx.console.page.league import member_columns, name_of, points_of
from brayx.console.page.listing import Listing
from brayx.console.page.models import arm_listing
from brayx.console.page.picture import Picture, PictureCard, newest_picture
from brayx.console.page.stopping import StopButton
from brayx.console.page.words import in_words, tr
from brayx.console.verdict import AHEAD, CLOSE, LAST, WAITS, State, VerdictDocument
from brayx.jobs.progress import lost_of
from brayx.metrics import significant
from brayx.metrics.totals import BEHAVIOUR_RETURN, RETURN_ERROR, SECONDS

_STATES: dict[State, tuple[str, str]] = {
    "none": ("No job is running here", "gray"),
    "starting": ("Just started", "blue"),
    "learning": ("It is learning", "green"),
    "unsure": ("Too early to say", "blue"),
    "plateau": ("No longer rising", "gray"),
    "stalled": ("No progress", "amber"),
    "losing": ("Some games are failing", "amber"),
    "failing": ("It is not working", "red"),
    "reached": ("It has reached its target", "green"),
    "leading": ("{leader} leads", "green"),
    "serving": ("Serving players", "green"),
    "idle": ("Ready for players", "blue"),
    "worse": ("The canary is worse than the champion", "amber"),
    "finished": ("It has finished", "green"),
    "interrupted": ("It has been interrupted", "gray"),
    "failed": ("It has failed", "red"),
}
"""Words and colour of each verdict."""
_TEXT = {
    "gray": "text-gray-600 dark:text-gray-400",
    "blue": "text-blue-700 dark:text-blue-300",
    "green": "text-green-800 dark:text-green-400",
    "amber": AMBER,
    "red": "text-red-700 dark:text-red-400",
}
_EDGES = {
    "gray": "border-l-gray-500",
    "blue": "border-l-blue-600",
    "green": "border-l-green-700",
    "amber": "border-l-amber-600",
    "red": "border-l-red-600",
}
_MOST_MEMBERS = 6
"""Members of a league that are shown: the strongest."""


class _Seen(NamedTuple):
    """What the page shows of a running job."""

    job: JobDocument
    overview: OverviewDocument
    league: LeagueDocument | None
    picture: Picture | None


class _Loader:
    """Loads what the page shows."""

    def __init__(self, caller: ApiCaller) -> None:
        self.caller = caller
        self._picture: Picture | None = None

    async def load(self) -> _Seen | home.Seen:
        job: JobDocument = await self.caller.get(JobDocument, "/api/job")
        if not job.running:
            return await home.load(self.caller, job.tracking)
        overview: OverviewDocument = await self.caller.get(OverviewDocument, "/api/job/overview")
        trains_league = job.league and job.mode == "train"
        league = await self.caller.get(LeagueDocument | None, "/api/league") if trains_league else None
        self._picture = await newest_picture(self.caller, job.began_s, self._picture)
        return _Seen(job, overview, league, self._picture)


def add(connect: Connect) -> None:
    """Adds the page."""

    @ui.page("/", response_timeout=RESPONSE_S)
    async def overview() -> None:
        with frame("Overview", connect) as caller:
            await Panel(_Loader(caller).load, lambda seen: _built(caller, seen)).first()


def _built(caller: ApiCaller, seen: Any) -> Callable[[Any], None]:
    return home.Home().show if isinstance(seen, home.Seen) else _Overview(caller, seen).show


class _Overview:
    """The page of a running job: the verdict, then what it is based on, then health, and the doors last."""

    def __init__(self, caller: ApiCaller, seen: _Seen) -> None:
        is_training = seen.job.mode == "train"
        self._verdict = _Verdict(caller)
        with ui.grid().classes("w-full grid-cols-1 lg:grid-cols-5 gap-3"):
            with ui.column().classes("w-full min-w-0 gap-3 lg:col-span-3"):
                results = None if is_training else _Tiles("grid-cols-2 sm:grid-cols-3")
                self._chart = Lines(tr("env steps"), height="h-80")
                self._members = Listing("member", member_columns(), lead="Points", link=lambda _: "/league")
            with ui.column().classes("w-full min-w-0 gap-3 lg:col-span-2"):
                self._results = results or _Tiles("grid-cols-2")
                self._picture = PictureCard()
        self._in_use = heading(tr("Versions in use"))
        self._arms = arm_listing(link="/models")
        heading(tr("Health"))
        self._health = _Tiles("grid-cols-2 sm:grid-cols-4 lg:grid-cols-6")
        self._losses = ui.label().classes("whitespace-pre-wrap break-words").mark("losses")
        heading(tr("Addresses for games (doors)"))
        self._doors = ui.label().classes("mono whitespace-pre-wrap break-all")

    def show(self, seen: _Seen) -> None:
        """Shows the newest answers."""
        job, overview, league = seen.job, seen.overview, seen.league
        if league is not None and len(league.standings) > 1:
            overview = overview.model_copy(update={"verdict": led(overview.verdict, league.standings)})
        self._verdict.show(job, overview)
        if league is not None:
            self._members.show(league.standings[:_MOST_MEMBERS])
            self._chart.show(league.curves, bands=league.intervals)
        elif job.mode == "train" and not job.league:
            target = None if job.target_return is None else (tr("target"), job.target_return)
            curves = {tr("return of the last 100 games"): overview.curve}
            self._chart.show(curves, pale={tr("return of the newest games"): overview.means}, target=target)
        self._in_use.set_visibility(bool(overview.arms))
        self._arms.show(overview.arms)
        results = _league(league) if league is not None else _results(job, overview)
        self._results.show(results)
        if job.mode == "train":
            is_open = overview.champion is None and not job.league
            ended = ("-", tr("`brayx console` shows it")) if is_open else results["Champion"]
            self._results.until_end("Champion", ended)
        self._picture.show(seen.picture)
        self._health.show(_health(job))
        refused = [
            tr("requests refused with {code}: {count}", count=number(count), code=code)
            for code, count in sorted(job.refusals.items())
            if not any(f"({code})" in line for line in job.errors)  # that line has the newest message, too
        ]
        self._losses.set_text("\n".join([*map(in_words, job.errors), *refused]))
        self._losses.set_visibility(bool(job.errors or refused))
        self._doors.set_text("\n".join(f"{door:<5} {url}" for door, url in job.doors.items()) or tr("None."))


class _Verdict:
    """The verdict in words, with the error that caused it and what to do about it."""

    def __init__(self, caller: ApiCaller) -> None:
        self._box = ui.column().classes("w-full gap-1 p-4 rounded-lg border border-gray-500/30 border-l-8")
        with self._box.props('role="status"'):
            self._about = ui.label().classes(f"text-sm break-words {MUTED}")
            self._state = ui.label().classes("text-2xl font-bold").mark("verdict")
            self._reason = ui.label().classes("whitespace-pre-wrap break-words max-w-full")
            self._cause = ui.label().classes("mono break-words max-w-full text-red-700 dark:text-red-400").mark("cause")
            self._advice = ui.label().classes("font-semibold").mark("advice")
            self._guide = ui.link(tr("Open this guide"), "")
            self._progress = ui.linear_progress(show_value=False, size="8px").classes("mt-2")
            self._progress.props(f'instant-feedback aria-label="{tr("progress")}"')
            self._done = ui.label().classes(f"text-sm {MUTED}")
            self._stop = StopButton(caller)
        self._colour = ""

    def show(self, job: JobDocument, overview: OverviewDocument) -> None:
        """Shows the verdict on a job."""
        verdict = overview.verdict
        words, colour = _STATES[verdict.state]
        if colour != self._colour:
            self._box.classes(add=_EDGES[colour], remove=_EDGES.get(self._colour, ""))
            self._state.classes(add=_TEXT[colour], remove=_TEXT.get(self._colour, ""))
            self._colour = colour
        name = " / ".join(filter(None, (job.project, job.trial)))
        waits = job.waits_for if verdict.state == "starting" else ""
        self._about.set_text(", ".join(filter(None, (name, _ran(job), waits, *_acting(job)))))
        values = shown_values(verdict)
        self._state.set_text(tr("No clear leader yet") if verdict.reason == CLOSE else tr(words, **values))
        self._reason.set_text(tr(verdict.reason, **values))
        for label, text in (
            (self._cause, in_words(verdict.cause)),
            (self._advice, verdict.advice and tr(verdict.advice, **values)),
        ):
            label.set_text(text)
            label.set_visibility(bool(text))
        self._stop.set_visibility(job.can_stop and bool(job.run_id))
        self._guide.props["href"] = guides.named_in(self._advice.text)
        self._guide.set_visibility(bool(self._guide.props["href"]))
        self._progress.set_visibility(verdict.share is not None)
        self._progress.set_value(verdict.share or 0.0)
        done = "" if verdict.share is None else tr("{share} done", share=f"{verdict.share:.0%}")
        self._done.set_text(", ".join(filter(None, (done, _left(job, verdict)))))
        self._box.classes(add="brayx-end" if job.end else "")
        ended = (tr("The job has ended"), tr(LAST), "", "")
        for label, text in zip((self._state, self._reason, self._advice, self._done), ended, strict=True):
            until_end(label, label.text if job.end else text)


class _Tiles:
    """Numbers in boxes: `show` gets the value, and a line below it, by name."""

    def __init__(self, columns: str) -> None:
        self._grid = ui.grid().classes(f"w-full gap-2 {columns}")
        self._tiles: dict[str, tuple[ui.label, ui.label]] = {}

    def show(self, numbers: Mapping[str, tuple[str, str]]) -> None:
        """Shows numbers by their English names."""
        if self._tiles.keys() != numbers.keys():
            self._grid.clear()
            with self._grid:
                self._tiles = {name: tile(tr(name), name) for name in numbers}
        for name, texts in numbers.items():
            for label, text in zip(self._tiles[name], texts, strict=True):
                label.set_text(text)
                label.set_visibility(bool(text))

    def until_end(self, name: str, texts: tuple[str, str]) -> None:
        """Replaces a number's texts by others once the job has ended."""
        for label, text in zip(self._tiles[name], texts, strict=True):
            until_end(label, text)


def _ran(job: JobDocument) -> str:
    """How long a job has run; a training by its own clock, which stands still if the games fail at once."""
    if job.mode != "train":
        return tr("serving for {time}", time=since(job.up_s))
    trained_s = job.numbers.get(SECONDS, 0.0)
    if trained_s < 1.0:
        return tr("started {time} ago", time=since(job.up_s))
    return tr("training for {time}", time=since(trained_s))


def _left(job: JobDocument, verdict: VerdictDocument) -> str:
    """How long the training still takes; empty: unknown."""
    if verdict.left_s is None:
        return ""
    time = since(verdict.left_s)
    if job.target_return is None:
        return tr("{time} left", time=time)
    target, value = number(job.target_return), number(job.numbers.get("episode_return.last100"))
    return tr(
        "at most {time} left; it stops earlier at a return of {target} (now {value})",
        time=time,
        target=target,
        value=value,
    )


def _acting(job: JobDocument) -> list[str]:
    """What each model acts with."""
    return [
        tr(
            "{model} acts with {versions}",
            model=model,
            versions=", ".join(map(reference_text, versions)) or tr("initial weights"),
        )
        for model, versions in job.registered.items()
    ]


def _results(job: JobDocument, overview: OverviewDocument) -> dict[str, tuple[str, str]]:
    """How good the versions are, by the names of the tiles."""
    numbers = job.numbers
    about = tr("mean of the last {games} games", games=number(numbers.get("games_in_window", 0.0)))
    mean = numbers.get("episode_return.last100", numbers.get("episode_return"))
    shown = plus_minus(mean, numbers.get(RETURN_ERROR))
    if job.target_return is not None:
        about = tr("target {target}", target=number(job.target_return)) + ", " + about
    returns = {name: value for name, value in numbers.items() if name.startswith(BEHAVIOUR_RETURN)}
    tiles = {"Return": (shown, ", ".join(f"{n.partition('.')[2]} {number(v)}" for n, v in returns.items()) or about)}
    if job.league:  # around 0, since its players play each other
        tiles = {}
    tiles["Champion"] = _rated(overview.champion)
    if overview.champion is None and job.mode == "train":
        tiles["Champion"] = tr("none yet"), tr("chosen when the training ends")
    if overview.newest is not None and overview.newest != overview.champion:
        tiles["Newest version"] = _rated(overview.newest)
    if job.mode == "serve":
        tiles = {
            "Players now": (
                number(job.sessions - job.silent),
                tr(WAITS, silent=number(job.silent)) if job.silent else "",
            ),
            "Ticks/s": (number(round(numbers.get("ticks_per_s", 0.0))), tr("answers to games")),
            "Answer, p50": (milliseconds(numbers.get("tick_seconds.p50")), ""),
            "Answer, p99": (milliseconds(numbers.get("tick_seconds.p99")), ""),
            **tiles,
        }
    return tiles


def _rated(rated: RatedDocument | None) -> tuple[str, str]:
    """A version, and its return; compared with the champion's, if it is another one."""
    if rated is None:
        return tr("none yet"), ""
    version = tr("version {version}", version=rated.member or rated.version)
    if rated.points is not None:
        return version, tr("{points} points", points=f"{rated.points:.0f}")
    about = "" if rated.result is None else result_text(rated.result)
    if rated.lead is not None:
        about += ", " + tr("{difference} against the champion", difference=lead_text(rated.lead))
    return version, about


def _league(league: LeagueDocument) -> dict[str, tuple[str, str]]:
    """The leader, the champion and the levels, by the names of the tiles."""
    points = {row.member: row for row in league.standings}
    tiles = {"Champion": (tr("none yet"), "")}
    if league.champion in points:
        row = points[league.champion]
        tiles["Champion"] = (
            tr("version {version}", version=league.champion),
            tr("{points} points ({low} to {high})", **points_of(row)),
        )
    games = sum(count for name, count in league.counters.items() if name == "counted")
    tiles["Games"] = number(games), ""
    for level in league.levels:
        name = tr("level {name}", name=level.level)
        tiles[name] = f"{level.points:.0f}", tr("{low} to {high}", **points_of(level))
    return tiles


def led(verdict: VerdictDocument, standings: Sequence[StandingDocument]) -> VerdictDocument:
    """The verdict on a league whose players have these points, the strongest first: who leads, and by how much. That is
    measured against other players, if there are any: a player is always ahead of its past."""
    if verdict.state != "leading":
        return verdict
    first, *rest = standings
    second = next((row for row in rest if _player(row) != _player(first)), rest[0])
    values = {"leader": name_of(first), "second": name_of(second), "lead": f"{first.points - second.points:.0f}"}
    reason = AHEAD if first.low > second.high else CLOSE
    return verdict.model_copy(update={"reason": reason, "values": values | points_of(first)})


def _player(row: StandingDocument) -> str:
    return row.member.partition(":")[0]


def _health(job: JobDocument) -> dict[str, tuple[str, str]]:
    """Rates and losses, by the names of the tiles."""
    numbers = job.numbers
    lost, total = next((lost, total) for what, lost, total in lost_of(numbers) if what == "games")
    failed = tr("{lost} of the last {total} failed", lost=number(lost), total=number(total))
    shown = {
        "Env steps": (number(numbers.get("env_steps")), ""),
        "Ticks/s": (number(round(numbers.get("ticks_per_s", numbers.get("env_steps_per_s", 0.0)))), ""),
        "Age of the weights": (
            tr("{count} versions", count=significant(numbers.get("lag_versions", 0.0), 2)),
            tr("1 to 3 is normal"),
        ),
        "Sessions": (number(job.sessions), ""),
        "Games": (number(numbers.get("games")), failed),
        "Requests refused": (number(sum(job.refusals.values())), tr("since the start")),
    }
    for name in () if job.mode == "train" else ("Env steps", "Age of the weights", "Ticks/s", "Sessions"):
        del shown[name]
    return shown
