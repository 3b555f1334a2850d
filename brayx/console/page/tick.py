"""One tick of a session as a page shows it, live or recorded."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from nicegui import ui

from brayx.console.page.frame import MUTED, heading, number
from brayx.console.page.words import tr
from brayx.console.ticks import TickDocument

_MAX_ACTIONS = 24
_MAX_CHARS = 6000


class TickView:
    """A tick's frame or JSON, action probabilities, value and arrays. `show` shows another tick.

    Attributes:
        above: the place above the image, for a board.
        beside: the place below the action probabilities, for those of other versions.
        labels: names of the values of arrays, by the array's name.
        action_labels: names of the actions.
    """

    def __init__(self) -> None:
        self.labels: dict[str, list[str]] = {}
        self.action_labels: list[str] = []
        with ui.row().classes("w-full gap-x-6 gap-y-1"):
            self._facts = {name: fact(name) for name in ("Tick", "Action", "Value", "Weights", "Time")}
        self._event = ui.badge(color="negative").props("multi-line").classes("break-all").mark("event")
        with ui.grid().classes("w-full grid-cols-1 sm:grid-cols-2 gap-4"):
            with ui.column().classes("w-full min-w-0"):
                self.above = ui.column().classes("w-full")
                self._image = ui.image().props("no-transition no-spinner").classes("w-full max-w-sm")
                self._image.style("image-rendering: pixelated")
                heading(tr("Input"))
                self._input = _text("input")
                heading(tr("Reply"))
                self._output = _text("reply")
            with ui.column().classes("w-full min-w-0"):
                with ui.column().classes("w-full") as self._chosen:
                    heading(tr("Action probabilities"))
                    self._bars = ActionBars(
                        tr("Not known: neither the model's outputs nor the agents' values have `logits`.")
                    )
                    self.beside = ui.column().classes("w-full gap-2")
                self._values = heading("")
                self._arrays = _text("arrays")

    def show(self, tick: TickDocument, *, with_image: bool = True) -> None:
        """Shows a tick. With ``with_image=False``, the previous image stays until `show_image`."""
        texts = {
            "Tick": number(tick.number),
            "Action": action_text(tick.action, self.action_labels),
            "Value": number(tick.value),
            "Weights": number(tick.policy_version),
            "Time": f"{tick.seconds * 1e3:.2f} ms" if tick.seconds else "-",
        }
        for name, text in texts.items():
            self._facts[name].set_text(text)
        self._event.set_text(tick.event)
        self._event.set_visibility(bool(tick.event))
        if with_image:
            self.show_image(tick.image)
        self._input.set_text(pretty(tick.input))
        self._output.set_text(pretty(tick.output))
        self._chosen.set_visibility(True)
        self._values.set_text(tr("Values set by the agents"))
        self._arrays.set_text("\n".join(self._named(*item) for item in sorted(tick.arrays.items())))
        self._bars.show(tick.probabilities, tick.action, self.action_labels)

    def show_end(self, stop: Any) -> None:
        """Shows the body of the session's stop, below the image of the last tick."""
        for name, label in self._facts.items():
            label.set_text(tr("End") if name == "Tick" else "-")
        self._event.set_visibility(False)
        self._input.set_text(pretty(stop))
        self._output.set_text(pretty(None))
        self._chosen.set_visibility(False)
        self._values.set_text(tr("How the game ended"))
        self._arrays.set_text("\n".join(self._named(*item) for item in _leaves(stop)))

    def _named(self, name: str, value: Any) -> str:
        """An array on one line, with the names of its values."""
        labels = self.labels.get(name.rpartition("/")[2], [])
        if isinstance(value, list) and len(labels) == len(value):
            return f"{name}: " + ", ".join(f"{label} {short(item)}" for label, item in zip(labels, value, strict=True))
        return f"{name}: {short(value)}"

    def show_image(self, image: str | None) -> None:
        """Shows another image, a data URL, instead of the tick's own."""
        self._image.set_visibility(image is not None)
        if image is not None:
            self._image.set_source(image)


class ActionBars:
    """The probabilities of actions as bars.

    Args:
        unknown: shown when there are none.
        colour: of the bars.
    """

    def __init__(self, unknown: str, colour: str = "primary") -> None:
        self._unknown, self._colour = unknown, colour
        self._none = ui.label().classes(MUTED)
        self._bars = ui.column().classes("w-full gap-1").mark("probabilities")
        self._made: list[tuple[ui.linear_progress, ui.label]] = []

    def show(self, shares: list[float] | None, action: Any, labels: Sequence[str] = ()) -> None:
        """Shows probabilities ``[A]``, with a mark at the action, by the actions' labels or else their numbers."""
        shown = (shares or [])[:_MAX_ACTIONS]
        self._none.set_visibility(not shown or len(shares or []) > len(shown))
        self._none.set_text(
            tr("The first {shown} of {count} actions.", shown=len(shown), count=len(shares or []))
            if shown
            else self._unknown
        )
        if len(self._made) != len(shown):
            self._bars.clear()
            self._made = []
            with self._bars:
                for _ in shown:
                    with ui.row().classes("w-full no-wrap items-center gap-2"):
                        label = ui.label().classes("mono min-w-24 shrink-0 whitespace-pre")
                        bar = ui.linear_progress(show_value=False, size="14px").props(
                            f"instant-feedback color={self._colour}"
                        )
                        self._made.append((bar, label))
        names = [labels[index] if index < len(labels) else f"{index:>3}" for index in range(len(shown))]
        width = max(map(len, names), default=0)
        for index, ((bar, label), share) in enumerate(zip(self._made, shown, strict=True)):
            label.set_text(f"{'▸' if index == action else ' '}{names[index]:<{width}} {share:6.1%}")
            bar.set_value(round(share, 3))


def action_text(action: Any, labels: Sequence[str]) -> str:
    """An action by its label, or else as a number."""
    return labels[action] if isinstance(action, int) and 0 <= action < len(labels) else short(action)


def fact(name: str) -> ui.label:
    """A value below its name."""
    with ui.column().classes("gap-0"):
        ui.label(tr(name)).classes(f"text-xs {MUTED}")
        return ui.label("-").classes("text-base font-semibold").mark(name)


def _leaves(body: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The values in a body's objects by their paths, such as ``north/reward``; that of an object of observations is
    left out."""
    for name, value in body.items() if isinstance(body, dict) else ():
        if isinstance(value, dict):
            yield from _leaves(value, path if name == "obs" else f"{path}{name}/")
        else:
            yield f"{path}{name}", value


def _text(name: str) -> ui.label:
    box = ui.label().classes("mono w-full whitespace-pre-wrap break-words max-h-64 overflow-auto p-2 rounded")
    return box.classes("bg-gray-500/10").mark(name).props('tabindex="0"')


def pretty(value: Any) -> str:
    """A body as text: JSON with a line for each field of the outermost object, and few digits."""
    if value is None:
        return tr("nothing")
    if isinstance(value, dict) and value:
        fields = (f"  {json.dumps(name, ensure_ascii=False)}: {_compact(field)}" for name, field in value.items())
        text = "{\n" + ",\n".join(fields) + "\n}"
    else:
        text = value if isinstance(value, str) else _compact(value)
    return text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]} … ({len(text):,})"


def _compact(value: Any) -> str:
    return json.dumps(_rounded(value), ensure_ascii=False)


def _rounded(value: Any) -> Any:
    """JSON whose numbers have five significant digits."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    return value


def short(value: Any) -> str:
    """A value on one line; a dash for None."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return number(value)
    if isinstance(value, list):
        return "[" + ", ".join(short(item) for item in value) + "]"
    return value if isinstance(value, str) else _compact(value)
