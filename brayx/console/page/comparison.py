"""The part of a recording's page that compares the recording with registered versions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from nicegui import ui

from brayx.console.comparisons import ComparedTickDocument, ComparisonDocument
from brayx.console.documents import served_result
from brayx.console.league import LeagueDocument
from brayx.console.models import ModelDocument
from brayx.console.page.caller import ApiCaller
from brayx.console.page.charts import Lines
from brayx.console.page.frame import MUTED, Alert, number, reference_text, sentence
from brayx.console.page.promotion import in_words, judged, league_of, met, standings_of
from brayx.console.page.tick import ActionBars, action_text, fact
from brayx.console.page.words import tr
from brayx.console.ticks import TickDocument
from brayx.errors import BrayxError

_EVERY_S = 0.5
_OWN_SPACE = "(event) => { if (event.key === ' ') event.stopPropagation() }"
"""Keeps the space bar at a focused button: without it, the key would press the button and also play the recording."""
_TITLES = {"KL": "Difference of the probabilities (KL, 0: the same)", "value difference": "Difference of the values"}
"""Title of each curve."""
_COLOURS = {"reference": "positive", "version": "warning"}


class Compare:
    """Lets the viewer choose versions, shows the comparison's progress, and then its numbers, curves and ticks.

    Args:
        caller: the viewer's client.
        recording: id of the recording.
        beside: the place for the versions' action probabilities.
        go: jumps to a tick by its index.
        again: calls `show` again with the tick that is shown.
        window: number of ticks that are loaded at once.

    Attributes:
        action_labels: names of the actions.
    """

    def __init__(
        self,
        caller: ApiCaller,
        recording: str,
        beside: ui.column,
        go: Callable[[int], Awaitable[None]],
        again: Callable[[], Awaitable[None]],
        window: int,
    ) -> None:
        self._caller, self._path, self._go, self._window = caller, f"/api/recordings/{recording}/comparison", go, window
        self._beside, self._again = beside, again
        self.action_labels: list[str] = []
        self._query: dict[str, str] = {}
        self._first: int | None = None
        self._requested = 0
        self._windows: dict[int, dict[int, ComparedTickDocument]] = {}
        self._versions: dict[str, dict[str, str]] = {}
        self._results: dict[str, str] = {}
        self._labels: dict[str, str] = {}
        self._league: LeagueDocument | None = None
        self._none = ui.label(tr("There is no registered version to compare with yet.")).classes(MUTED)
        with ui.row().classes("w-full items-center gap-2") as self._choice:
            self._model = ui.select([], label=tr("model"), on_change=self._of_model).classes("w-56")
            self._model.props("dense outlined")
            self._version = ui.select({}, label=tr("version")).classes("w-56").props("dense outlined")
            self._reference = (
                ui.select({"": tr("the recording")}, value="", label=tr("against"))
                .classes("w-56")
                .props("dense outlined")
            )
            self._button = ui.button(tr("Compare"), on_click=self._press).props("outline")
            self._button.on("keydown", js_handler=_OWN_SPACE)
        self._none.set_visibility(False)
        self._choice.set_visibility(False)
        self._results_shown = ui.label().classes("whitespace-pre-line").mark("results")
        self._state = ui.label().classes(MUTED).props('role="status"')
        self._progress = ui.linear_progress(show_value=False, size="8px").props(
            'aria-label="progress of the comparison"'
        )
        self._failure = Alert()
        self._result = ui.column().classes("w-full gap-3")
        with self._result:
            with ui.row().classes("w-full items-start gap-x-6 gap-y-1"):
                with ui.column().classes("gap-0"):
                    ui.label(tr("First other action")).classes(f"text-xs {MUTED}")
                    self._jump = ui.button(on_click=self._to_first).props("flat padding=none")
                    self._jump.on("keydown", js_handler=_OWN_SPACE)
                names = ("Equal actions", "Mean difference (KL)", "Largest difference (KL)", "Value, difference")
                self._facts = {name: fact(name) for name in names}
            self._words = ui.label().classes("font-semibold").mark("comparison")
            self._sampled = ui.label(
                "⚠ "
                + tr(
                    "The recorded actions were sampled; the version's are its most likely ones. Some differ by chance."
                )
            )
            self._note = ui.label().classes(MUTED)
            self._charts = {name: Lines(tr("tick"), tr(title), height="h-40") for name, title in _TITLES.items()}
        for part in (self._progress, self._result):
            part.set_visibility(False)
        self._timer = ui.timer(_EVERY_S, self._ask, active=False)

    async def load(self, chosen: str = "", against: str = "") -> None:
        """Loads the versions to choose from.

        Args:
            chosen: the version that is compared at once, as ``models:/NAME/VERSION``; empty: the viewer chooses.
            against: the version that it is compared with; empty: the recording.

        Raises:
            BrayxError: the store cannot be read.
        """
        models: list[ModelDocument] = await self._caller.get(list[ModelDocument], "/api/models")
        self._versions = {model.name: _named(model) for model in models if model.versions}
        names = sorted(self._versions, key=lambda name: chosen not in self._versions[name])
        self._none.set_visibility(not names)
        self._choice.set_visibility(bool(names))
        self._model.set_visibility(len(names) > 1)
        self._model.set_options(names, value=next(iter(names), None))
        every = {reference: text for versions in self._versions.values() for reference, text in versions.items()}
        self._reference.set_options({"": tr("the recording"), **every}, value=against if against in every else "")
        self._league = await league_of(self._caller, models)
        standings = standings_of(self._league)
        for model in models:
            for version in model.versions:
                reference = f"models:/{model.name}/{version.version}"
                self._labels[reference] = version.label
                self._results[reference] = in_words(judged(version, standings), served_result(version.tags))
        if chosen in self._versions.get(self._model.value, {}):
            self._version.set_value(chosen)
            ui.run_javascript(f"getHtmlElement({self._choice.id}).scrollIntoView()")
            await self._press()

    def _of_model(self) -> None:
        versions = self._versions.get(self._model.value, {})
        self._version.set_options(versions, value=next(iter(versions), None))

    async def show(self, index: int, tick: TickDocument) -> None:
        """Shows what the versions would have done at a tick, once there is a comparison."""
        self._requested = tick.number
        if not self._result.visible:
            return
        window = index // self._window
        if window not in self._windows:
            query = dict(self._query)
            try:
                ticks: list[ComparedTickDocument] = await self._caller.get(
                    list[ComparedTickDocument],
                    f"{self._path}/ticks",
                    **query,
                    first=window * self._window,
                    count=self._window,
                )
            except BrayxError as error:
                self._fail(error)
                return
            if query != self._query or self._requested != tick.number:  # the viewer has moved on meanwhile
                return
            self._windows = {window: {compared.number: compared for compared in ticks}}
        self._show(self._windows[window].get(tick.number))

    async def _press(self) -> None:
        if self._timer.active:
            self._stop(tr("Stopped."))
            return
        if not self._version.value:
            return
        self._query = {"version": self._version.value}
        if self._reference.value:
            self._query["reference"] = self._reference.value
        lines = [self._results[version] for version in self._query.values()]
        if self._reference.value:
            lines.append(met(self._league, self._labels[self._version.value], self._labels[self._reference.value]))
        self._results_shown.set_text("\n".join(filter(None, lines)))
        self._windows = {}
        self._beside.clear()
        for part, shown in ((self._failure, False), (self._result, False), (self._progress, True)):
            part.set_visibility(shown)
        self._progress.set_value(0.0)
        self._state.set_text(tr("Starting …"))
        self._button.set_text(tr("Stop"))
        self._timer.activate()
        await self._ask()

    async def _ask(self) -> None:
        query = dict(self._query)
        try:
            comparison: ComparisonDocument = await self._caller.get(ComparisonDocument, self._path, **query)
        except BrayxError as error:
            if self._timer.active:
                self._fail(error)
            return
        if not self._timer.active or query != self._query:  # stopped meanwhile
            return
        self._progress.set_value(round(comparison.progress, 3))
        self._state.set_text(f"{sentence(tr(comparison.state))[:-1]} …")
        if comparison.done:
            self._stop("")
            self._put(comparison)
            await self._again()

    def _stop(self, text: str) -> None:
        self._timer.deactivate()
        self._button.set_text(tr("Compare"))
        self._progress.set_visibility(False)
        self._state.set_text(text)

    def _fail(self, error: BrayxError) -> None:
        self._stop("")
        self._failure.say(error)

    def _put(self, comparison: ComparisonDocument) -> None:
        against = reference_text(comparison.reference) if comparison.reference else tr("the recording")
        words = tr(
            "{version} against {other}, {ticks} ticks",
            version=reference_text(comparison.version),
            other=against,
            ticks=number(comparison.ticks),
        )
        if comparison.left_out:
            count = number(comparison.left_out)
            words += "; " + tr("{count} without their observation or action are left out", count=count)
        if not comparison.kl_exact and comparison.kl is not None:
            words += "; " + tr("the difference of the probabilities is estimated from those of the recorded actions")
        self._note.set_text(f"{words}.")
        share = 0.0 if comparison.agreement is None else 1.0 - comparison.agreement
        self._words.set_text(tr("It would have chosen differently in {share} of the ticks.", share=f"{share:.0%}"))
        self._sampled.set_visibility(comparison.sampled)
        self._first = comparison.first
        self._jump.set_text(
            tr("none") if comparison.first is None else tr("tick {number}", number=number(comparison.first))
        )
        self._jump.set_enabled(comparison.first is not None)
        texts = {
            "Equal actions": "-" if comparison.agreement is None else f"{comparison.agreement:.1%}",
            "Mean difference (KL)": number(comparison.kl),
            "Largest difference (KL)": number(comparison.kl_max),
            "Value, difference": number(comparison.value),
        }
        for name, text in texts.items():
            self._facts[name].set_text(text)
        ticks, curves = ([], {}) if comparison.curves is None else (comparison.curves.ticks, comparison.curves.curves)
        for name, chart in self._charts.items():
            chart.show({name: list(zip(ticks, curves[name], strict=True))} if name in curves else {})
        self._result.set_visibility(True)

    def _show(self, tick: ComparedTickDocument | None) -> None:
        self._beside.clear()
        with self._beside:
            if tick is None:
                ui.label(tr("This tick was left out of the comparison.")).classes(MUTED)
                return
            for name, chosen in tick.chosen.items():
                action = action_text(chosen.action, self.action_labels)
                text = tr("{version}: action {action}", version=reference_text(self._query[name]), action=action)
                text += "" if chosen.value is None else ", " + tr("value {value}", value=number(chosen.value))
                ui.label(text).classes("font-semibold").mark(f"compared-{name}")
                bars = ActionBars(tr("It has no `logits`, or too many to keep them for every tick."), _COLOURS[name])
                bars.show(chosen.probabilities, chosen.action, self.action_labels)
            verdict = tr("the same action") if tick.equal else tr("another action")
            difference = [] if tick.kl is None else [tr("difference (KL) {value}", value=number(tick.kl))]
            ui.label("; ".join([verdict, *difference])).classes(MUTED)

    async def _to_first(self) -> None:
        if self._first is not None:
            await self._go(self._first)


def _named(model: ModelDocument) -> dict[str, str]:
    """The names of a model's versions by their references."""
    names = {}
    for version in model.versions:
        marks = f" ({', '.join(version.aliases)})" if version.aliases else ""
        names[f"models:/{model.name}/{version.version}"] = f"{model.name} {version.version}{marks}"
    return names
