"""The live display of a training job: a panel on a terminal or in a notebook, a line every few seconds elsewhere.

Knows nothing of where the numbers come from.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from brayx import clock
from brayx.faults import AGENTS_LOGGER, fault_id
from brayx.logs import one_line
from brayx.metrics import significant
from brayx.metrics.totals import (
    BEHAVIOUR_POINTS,
    BEHAVIOUR_RETURN,
    FAILED_IN_WINDOW,
    FRAGMENTS_IN_WINDOW,
    GAMES,
    GAMES_IN_WINDOW,
    LOST_IN_WINDOW,
    OVERLOADED_IN_WINDOW,
    mean_return,
    points_of,
)

LINE_EVERY_S = 5.0
_MAX_LINES = 100
"""Lines of a traceback that are shown: the last ones."""
_COUNT = re.compile(r"\d[\d,.]*( \w+)?")
"""A count with the word that it counts, such as ``2 gamecores``."""
_COUNTED = ("errors", "fragments", "frames", "games", "gamecores", "ranks", "requests", "ticks")


def number(value: float | None, form: str = ",.0f") -> str:
    """A metric as text; a dash if it is missing or NaN."""
    return "-" if value is None or math.isnan(value) else format(value, form)


def _pace(numbers: Mapping[str, float]) -> tuple[str, str]:
    """Title and value of the rate: ticks through the door, or environment steps without a door."""
    what, name = ("ticks/s", "ticks_per_s") if numbers.get("ticks_per_s") else ("steps/s", "env_steps_per_s")
    return what, number(numbers.get(name))


def standing(numbers: Mapping[str, float]) -> str:
    """A league's leader among its players, its champion, pool and games; empty without a league."""
    points = points_of(numbers)
    if not points:
        return ""
    leader = max(points, key=lambda player: points[player])
    champion = numbers.get("league_champion")
    crowned = "no champion" if champion is None else f"champion version {champion:.0f}"
    pool, games = number(numbers.get("league_pool", 0.0)), number(numbers.get(GAMES, 0.0))
    return f"leader {leader} {points[leader]:.0f} points, {crowned}, pool {pool}, {games} games"


def results(numbers: Mapping[str, float]) -> dict[str, tuple[str, str]]:
    """``return`` or ``points``, and its value, of each of several behaviours; empty: the job trains one model."""
    shown: dict[str, tuple[str, str]] = {}
    for name, value in numbers.items():
        if name.startswith(BEHAVIOUR_RETURN):
            behaviour = name.removeprefix(BEHAVIOUR_RETURN)
            points = numbers.get(BEHAVIOUR_POINTS + behaviour)
            mean = "-" if math.isnan(value) else significant(value)
            shown[behaviour] = ("return", mean) if points is None else ("points", number(points))
    return shown


def milliseconds(value: float | None) -> str:
    """Formats a metric in seconds as milliseconds, with two digits: percentiles are no more accurate."""
    return "-" if value is None or math.isnan(value) else significant(value * 1e3, 2)


def _drops(numbers: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in numbers.items() if name.partition(".")[0] == "replay_dropped"}


def _dropped(numbers: Mapping[str, float]) -> str:
    """Dropped transitions, in total and by reason; those from before a resume have no reason."""
    dropped = _drops(numbers)
    reasons = [f"{name.partition('.')[2]} {number(value)}" for name, value in sorted(dropped.items()) if "." in name]
    return number(sum(dropped.values())) + (f" ({', '.join(reasons)})" if reasons else "")


def _not_written(numbers: Mapping[str, float]) -> str:
    """Failed writes to MLflow so far; empty if there are none."""
    kinds = {
        "hub_write_failures": "metrics",
        "hub_intervals_lost": "metrics for good",
        "checkpoints_failed": "checkpoints",
    }
    failed = [f"{numbers[name]:.0f} of {what}" for name, what in kinds.items() if numbers.get(name)]
    return f"failed writes to MLflow: {', '.join(failed)}; training continues" if failed else ""


_WHAT = {
    "agent_errors": "{errors} in {label}",
    "fragments_dropped": "{fragments} dropped ({label})",
    "games_failed": "{games} failed ({label})",
    "gamecores_failed": "{gamecores} failed",
    "ranks_failed": "{ranks} of the learner failed, and all start again",
    "recording_frames_lost": "{frames} not recorded ({label})",
    "recording_lost": "{ticks} not recorded ({label})",
    "requests_refused": "{requests} refused ({label})",
    "self_play_without_results": "self-play has no results",
}
"""Text of the count of each metric whose samples have notes."""


def error_lines(numbers: Mapping[str, float], notes: Mapping[str, str]) -> list[str]:
    """Losses by errors, one line for each cause: the count, and the newest error with its location; then the lost share
    of the newest games and fragments.

    Errors from before a resume are not shown, since they may be fixed by now. The shares are of this run.

    Args:
        numbers, notes: from `brayx.tracking.hub.Hub.snapshot` and `brayx.tracking.hub.Hub.notes`.
    """
    lines = []
    refused = [_cause(note) for name, note in notes.items() if name.startswith("requests_refused.")]
    for name, count in sorted(numbers.items()):
        metric, _, label = name.partition(".")
        if metric in _WHAT and name in notes:
            repeats = metric == "gamecores_failed" and any(cause in notes[name] for cause in refused)
            lines.append(_counted(metric, label, count) + ("" if repeats else f"; the newest: {notes[name]}"))
    shares = [
        f"{_whole(lost):.0f} of the last {total:.0f} {what} ({lost / total:.0%})"
        for what, lost, total in lost_of(numbers)
        if lost
    ]
    return [*lines, f"lost: {', '.join(shares)}"] if shares else lines


def _cause(line: str) -> str:
    """An error without its session."""
    return line.partition(" (session ")[0]


def dropped_line(numbers: Mapping[str, float]) -> str:
    """How many transitions the learner did not get, by reason; empty if it got all."""
    if not any(_drops(numbers).values()):
        return ""
    return f"transitions dropped before the learner took them: {_dropped(numbers)}"


def abandoned_line(numbers: Mapping[str, float]) -> str:
    """How many sessions were left without a stop; empty if none was."""
    count = numbers.get("sessions_ended.idle", 0.0)
    sessions = f"{count:,.0f} {'session' if count == 1 else 'sessions'}"
    return f"{sessions} ended without a stop, after a silence" if count else ""


def losses_of_recordings(numbers: Mapping[str, float]) -> list[str]:
    """What recordings lack, one line for each cause. Of a service, whose numbers come without notes."""
    losses = [(*name.partition(".")[::2], count) for name, count in sorted(numbers.items())]
    return [_counted(*loss) for loss in losses if loss[0].startswith("recording") and loss[0] in _WHAT and loss[1]]


def _counted(metric: str, label: str, count: float) -> str:
    count = _whole(count)
    counted = {word: f"{count:,.0f} {word[:-1] if round(count) == 1 else word}" for word in _COUNTED}
    return _WHAT[metric].format(**counted, label=label)


def _whole(count: float) -> float:
    """A count to print: a fraction, as of a fragment of several environments, is no 0."""
    return max(count, 1.0) if count > 0 else count


def lost_of(numbers: Mapping[str, float]) -> list[tuple[str, float, float]]:
    """Lost and total numbers of the newest games, and of the newest fragments.

    Games that failed because of load do not count as lost.
    """
    get = numbers.get
    failed = get(FAILED_IN_WINDOW, 0.0)
    return [
        ("games", failed - get(OVERLOADED_IN_WINDOW, 0.0), failed + get(GAMES_IN_WINDOW, 0.0)),
        ("fragments", get(LOST_IN_WINDOW, 0.0), get(FRAGMENTS_IN_WINDOW, 0.0)),
    ]


@contextlib.contextmanager
def tracebacks(say: Callable[[str], None]) -> Iterator[None]:
    """A context in which exceptions of this process's agents are shown instead of logged.

    The traceback of each fault (`brayx.faults.fault_id`) is shown once; `error_lines` says how often it came.

    Args:
        say: prints a text above the display, as `Progress.say`.
    """
    shown: set[str] = set()

    def show(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and (fault := fault_id(error)) not in shown:
            shown.add(fault)
            lines = "".join(traceback.format_exception(error)).splitlines()[-_MAX_LINES:]
            # A message may quote what a client sent, and no client controls this terminal.
            safe = [" " * (len(line) - len(line.lstrip())) + one_line(line) for line in lines]
            say("\n".join([one_line(record.getMessage()), *safe]))
        return False

    logger = logging.getLogger(AGENTS_LOGGER)
    logger.filters.insert(0, show)  # before `brayx.logs.limit`, which leaves one line of each traceback
    try:
        yield
    finally:
        logger.removeFilter(show)


class Progress:
    """Shows a job's progress, as a context.

    Args:
        title: first line of the panel; without one, the first line of all.
        num_steps: env steps that make the bar full.
        target: return that training aims at; None: none.
        log_interval: updates between two lines, where there is no terminal to draw on; None: 5 s.
        console: where to draw; default: standard error, so that standard output stays for results.
    """

    def __init__(
        self,
        title: str,
        *,
        num_steps: int,
        target: float | None = None,
        log_interval: int | None = None,
        console: Console | None = None,
    ) -> None:
        self._title = title
        self._num_steps = num_steps
        self._target = target
        self._console = console or Console(file=sys.stderr)
        self._live: Live | None = None
        self._show: Callable[[Padding], object] | None = None
        self._log_interval = log_interval
        self._last_line = 0.0
        self._last_interval = 0.0
        self._last_note = ""
        self._num_errors = 0
        self._said: set[str] = set()
        self._began = time.monotonic()
        self._drawing = threading.Lock()
        self._kept: deque[str] = deque(maxlen=_MAX_LINES)

    def __enter__(self) -> Progress:
        if self._console.is_jupyter:
            self._show = _notebook_cell()
        elif self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=4, transient=False)
            self._live.start()
            self._show = self._live.update
        else:
            self._console.print(self._title, markup=False, highlight=False, soft_wrap=True)
        return self

    def __exit__(self, *_: object) -> None:
        with self._drawing:
            self._print_kept()
            if self._live is not None:
                self._live.stop()

    def pause(self) -> None:
        """Leaves the terminal to a debugger's prompt while the clock is held."""
        with self._drawing:
            if self._live is not None:
                self._live.stop()

    def say(self, text: str) -> None:
        """Prints a text that stays, above the panel; while a debugger's prompt holds the clock, after the prompt."""
        with self._drawing:
            self._kept.append(f"[dim]{time.monotonic() - self._began:6.1f} s[/dim]  {escape(text)}")
            if not clock.is_held():
                self._print_kept()

    def _print_kept(self) -> None:
        while self._kept:
            self._console.print(self._kept.popleft(), highlight=False, soft_wrap=True)

    def update(
        self,
        numbers: Mapping[str, float],
        *,
        gamecores: int = 0,
        workers: int = 0,
        note: str = "",
        errors: Sequence[str] = (),
    ) -> None:
        """Shows the newest numbers.

        Args:
            numbers: from `brayx.tracking.hub.Hub.snapshot`.
            gamecores: running game processes.
            workers: running rollout workers.
            note: line at the bottom, after failed writes.
            errors: lines to show in red: `error_lines`.
        """
        with self._drawing:
            if clock.is_held():
                return
            if self._live is not None and not self._live.is_started:
                self._live.start()
            self._print_kept()
        # A game's own message only repeats the error.
        note = "; ".join(filter(None, [_not_written(numbers), "" if errors else note]))
        if self._show is not None:
            self._show(Padding(self._panel(numbers, gamecores, workers, note, errors), 0))
        elif self._line_is_due(numbers) or len(errors) > self._num_errors:
            self.say(self._line(numbers))
            self._num_errors = len(errors)
            for line in errors:
                if (words := _COUNT.sub("", _cause(line))) not in self._said:  # the job's result has the last counts
                    self._said.add(words)
                    self._console.print(f"          {line}", markup=False, highlight=False, style="red", soft_wrap=True)
            if note and note != self._last_note:
                self._last_note = note
                self._console.print(f"          {note}", markup=False, highlight=False, style="dim", soft_wrap=True)

    def _line_is_due(self, numbers: Mapping[str, float]) -> bool:
        if self._log_interval is not None:
            interval = numbers.get("updates", 0.0) // self._log_interval
            due, self._last_interval = interval > self._last_interval, interval
            return due
        due = time.monotonic() - self._last_line >= LINE_EVERY_S
        if due:
            self._last_line = time.monotonic()
        return due

    def _line(self, numbers: Mapping[str, float]) -> str:
        get = numbers.get
        (what, pace), dropped = _pace(numbers), _dropped(numbers)
        lag = f"  lag {number(get('lag_versions'), '.1f')} versions" if "lag_versions" in numbers else ""
        of_behaviours: dict[str, list[str]] = {}
        for name, (kind, value) in results(numbers).items():
            of_behaviours.setdefault(kind, []).append(f"{name} {value}")
        result = ", ".join(f"{kind} {', '.join(values)}" for kind, values in of_behaviours.items())
        result = result or standing(numbers) or f"return {mean_return(numbers)}"
        return (
            f"{number(get('env_steps', 0.0))} env steps  {result}  "
            f"{pace} {what}  version {number(get('policy_version'))}{lag}"
            + (f"  dropped {dropped}" if dropped != "0" else "")
        )

    def _panel(
        self, numbers: Mapping[str, float], gamecores: int, workers: int, note: str, errors: Sequence[str]
    ) -> Group:
        get = numbers.get
        steps = get("env_steps", 0.0)
        table = Table.grid(padding=(0, 2), expand=False)
        for _ in range(4):
            table.add_column(justify="right", style="dim")
            table.add_column(justify="left", min_width=8)
        sessions = f"{number(get('sessions_active'))} from {gamecores} gamecore{'s' * (gamecores != 1)}"
        players = ("workers", f"{workers}") if workers and not gamecores else ("sessions", sessions)
        target, points = f" / {self._target:g}" if self._target is not None else "", points_of(numbers)
        table.add_row(
            *(("points", f"[bold]{max(points.values()):.0f}[/bold]") if points
              else ("return", f"[bold]{mean_return(numbers)}[/bold]{target}")),
            "env steps", number(steps),
            *_pace(numbers),
            "tick p50/p99 ms", f"{milliseconds(get('tick_seconds.p50'))} / {milliseconds(get('tick_seconds.p99'))}",
        )  # fmt: skip
        table.add_row(
            "games", number(get(GAMES, 0.0)),
            "policy version", number(get("policy_version")),
            "lag (versions)", number(get("lag_versions"), ".1f"),
            *players,
        )  # fmt: skip
        table.add_row(
            "entropy", number(get("entropy"), ".3f"),
            "update ms", milliseconds(get("update_seconds.p50")),
            "learner waits", number(100 * get("learner_wait_fraction", math.nan), ".0f") + " %",
            "dropped", _dropped(numbers),
        )  # fmt: skip
        of_behaviours = results(numbers)
        num_steps = self._num_steps * max(len(of_behaviours), 1)  # each learns so many
        bar = ProgressBar(total=max(num_steps, 1), completed=min(steps, num_steps), width=72)
        heading = f"[bold]{self._title}[/bold]  {time.monotonic() - self._began:.0f} s"
        lines: list[RenderableType] = [Text.from_markup(heading), Padding(bar, 0), table]  # a bare bar ends no line
        if not of_behaviours and (league := standing(numbers)):
            lines.append(Text(league, style="bold"))
        for name, (what, value) in of_behaviours.items():
            lines.append(Text(f"{what} of {name}: {value}{target if what == 'return' else ''}", style="bold"))
        lines += [Text(line, style="red") for line in errors]
        if note:
            lines.append(Text(note[:160], style="yellow"))
        return Group(*lines)


def _notebook_cell() -> Callable[[Padding], object]:
    """Redraws its output in the current cell; `Live` would need ipywidgets for that."""
    from IPython.display import display

    handle: Any = display(Padding("", 0), display_id=True)  # type: ignore[no-untyped-call]
    update: Callable[[Padding], object] = handle.update
    return update
