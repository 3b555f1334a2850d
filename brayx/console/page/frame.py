"""What all pages share: the frame with the navigation, and panels that load, refresh, and show their errors."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator
from http import HTTPStatus
from typing import Any, Generic, TypeVar

from nicegui import Client, background_tasks, ui

from brayx.console.documents import ResultDocument
from brayx.console.page import guides
from brayx.console.page.caller import ApiCaller, Connect
from brayx.console.page.words import is_chinese, set_language, tr
from brayx.console.sessions import SessionDocument
from brayx.console.verdict import VerdictDocument
from brayx.errors import BrayxError
from brayx.jobs import progress
from brayx.jobs.champion import is_chance
from brayx.metrics import significant

T = TypeVar("T")

PAGES = {
    "Overview": ("/", "speed", "guide-console.md#the-verdict"),
    "Sessions": ("/sessions", "sensors", "guide-console.md#what-a-followed-session-shows"),
    "Recordings": ("/recordings", "movie", "guide-recordings.md"),
    "Models": ("/models", "workspace_premium", "guide-players.md"),
    "League": ("/league", "emoji_events", "guide-league.md"),
    "Play": ("/play", "sports_esports", "guide-console.md#play-against-a-version"),
    "Trials": ("/trials", "show_chart", "guide-train.md"),
}
"""Address, icon and guide of each page by its name."""
MUTED = "text-gray-600 dark:text-gray-400"
AMBER = "text-amber-800 dark:text-amber-300"
_STYLE = """
<style>
  body { font-family: system-ui, sans-serif; }
  .mono { font-family: ui-monospace, SFMono-Regular, Menlo, monospace; font-size: 12.5px; }
  .q-table th { font-weight: 600; }
  .q-table tbody tr, .brayx-card { position: relative; }
  .q-table td:has(a.brayx-row) { position: static; }
  a.brayx-row { color: #0072b2; font-weight: 500; text-decoration: none; }
  .body--dark a.brayx-row { color: #56b4e9; }
  a.brayx-row::after { content: ""; position: absolute; inset: 0; z-index: 1; }
  tr:focus-within, tr:has(a.brayx-row):hover, .brayx-card:is(a, :has(a)):hover { background: #0072b214; }
  .brayx-card { display: block; color: inherit; text-decoration: none; border: 1px solid #8885; border-radius: 8px;
    padding: 8px 12px; margin-bottom: 8px; }
  .brayx-action { position: relative; z-index: 2; margin: 2px; }
  .q-table td.brayx-actions { text-align: right; white-space: normal; }
  .brayx-nav .q-icon { display: none; }
  @media (max-width: 640px) {
    .brayx-brand { display: none; }
    .brayx-nav { gap: 0; }
    .brayx-nav a { flex: 1 1 0; min-width: 0; padding: 4px 0; display: flex; flex-direction: column;
      align-items: center; font-size: 8px; letter-spacing: -0.4px; }
    .brayx-nav .q-icon { display: block; font-size: 20px; }
  }
  .brayx-guide { overflow-wrap: anywhere; }
  .brayx-guide pre, .brayx-guide table { display: block; max-width: 100%; overflow-x: auto; }
  .brayx-guide :is(h1, h2, h3) { font-weight: 600; margin: 1em 0 0.4em; line-height: 1.3; }
  .brayx-guide h1 { font-size: 1.6rem; } .brayx-guide h2 { font-size: 1.25rem; } .brayx-guide h3 { font-size: 1.1rem; }
  #esm-fallback { visibility: hidden; }
  .brayx-ended .q-layout { opacity: 0.45; filter: grayscale(1); pointer-events: none; }
  .brayx-told :is(a, button) { opacity: 0.45; pointer-events: none; }
  .brayx-told:has(.brayx-end) #popup { display: none; }
  .brayx-told #popup > span::before { content: none; }
  .body--dark .q-btn--outline, .body--dark .q-btn--flat { --q-primary: #56b4e9; --q-negative: #f97316; }
</style>
"""
_FIRST = """
<style>
  #brayx-first { position: fixed; inset: 0 0 auto 0; height: 44px; padding: 10px 16px; box-sizing: border-box;
    background: #0072b2; color: white; font: bold 18px system-ui, sans-serif; }
  body:has(#app > *) #brayx-first { display: none; }
</style>
<div id="brayx-first">brayx / TITLE</div>
"""
"""Shown until the browser has loaded the page's scripts, which takes long on a busy machine."""
_END = """
<script>
  addEventListener("load", () => {
    const popup = document.getElementById("popup");
    let failed = 0;
    setInterval(async () => {
      if (popup.ariaHidden !== "false") { failed = 0; return; }
      try { await fetch("/api/job"); failed = 0; } catch { failed += 1; }
      if (failed < 2) return;
      popup.firstElementChild.textContent = window.brayxEnd || TEXT;
      popup.lastElementChild.textContent = "";
      for (const live of document.querySelectorAll("[data-ended]")) live.textContent = live.dataset.ended;
      document.body.classList.add(window.brayxEnd ? "brayx-told" : "brayx-ended");
    }, 1000);
  });
</script>
"""
"""Once nothing answers any more, replaces NiceGUI's "Trying to reconnect" by what has happened, unless the page
itself says it, and the text of each element with a property ``data-ended`` by that property."""
_DARK = "localStorage.getItem('brayx-dark')"
BROWSER_S = 10.0
"""Time for an answer of the browser."""
RESPONSE_S = 60.0
"""Time for making a page, before the browser gets an error instead; NiceGUI's 3 s are too few on a busy machine."""
_HOW = {"training": "in training, actions sampled", "evaluation": "as evaluated", "service": "as served"}
"""Words for `ResultDocument.how`."""
_FIRST_S = 0.4
"""Time that a page's first document may take; after that, the page is shown without it."""


@contextlib.contextmanager
def frame(title: str, connect: Connect) -> Iterator[ApiCaller]:
    """A page's frame; elements created in the context are the page's content.

    Args:
        title: the page's name, such as one of `PAGES`.
        connect: makes the viewer's client.
    """
    set_language()
    request = ui.context.client.request
    caller = ApiCaller(connect(request.headers.get("authorization", "")), ui.context.client)
    ui.page_title(f"{tr(title)} - brayx console")
    ended = tr("The job has ended, or its console cannot be reached. `brayx console` shows what it has saved.")
    ui.add_head_html(_STYLE + _END.replace("TEXT", json.dumps(ended)))
    ui.add_body_html(_FIRST.replace("TITLE", tr(title)))
    ui.colors(primary="#0072b2", positive="#00805f", negative="#c2410c", warning="#b45309")
    dark = ui.dark_mode(None)
    path = request.url.path
    with ui.header().classes("px-2 sm:px-3 py-1 bg-primary items-center no-wrap gap-1 sm:gap-3"):
        ui.link("brayx", "/").classes("brayx-brand text-white text-lg font-bold no-underline")
        with ui.row().classes("brayx-nav no-wrap gap-1 grow min-w-0").props('role="navigation"'):
            for name, (target, icon, _) in PAGES.items():
                current = path == target or (target != "/" and path.startswith(target[:-1]))
                link = ui.link(target=target).classes("text-white no-underline px-2 py-1 rounded whitespace-nowrap")
                with link:
                    ui.icon(icon)
                    ui.label(tr(name))
                if current:
                    link.classes("bg-black/25 font-semibold").props('aria-current="page"')
        guide = guides.address(PAGES[title][2] if title in PAGES else "guide-console.md", is_chinese())
        ui.button(icon="help_outline").props(f'flat dense color=white href="{guide}" aria-label="{tr("Help")}"')
        ui.button(icon="contrast", on_click=lambda: _toggle(dark)).props(
            f'flat dense color=white aria-label="{tr("light or dark")}"'
        )
    ui.timer(0.1, lambda: _restore(dark), once=True)
    with ui.column().classes("w-full max-w-6xl mx-auto p-2 sm:p-4 gap-4 items-stretch"):
        yield caller


def until_end(element: ui.element, text: str) -> None:
    """Replaces an element's text by another one once the job has ended."""
    if element.props.get("data-ended") != text:  # an assignment sends the element again
        element.props["data-ended"] = text


def missing(connect: Connect) -> Callable[[], None]:
    """Makes the function that draws the page for an address that no other page has."""

    def page() -> None:
        client = ui.context.client
        client.status_code = HTTPStatus.NOT_FOUND
        with frame("Page not found", connect):
            heading(tr("There is no such page"))
            path = client.request.url.path[:200]
            ui.label(tr("The console has no page {path}.", path=path)).classes("break-all")
            ui.link(tr("Go to the overview"), "/").classes("text-primary")

    return page


async def _toggle(dark: ui.dark_mode) -> None:
    is_dark = await ui.run_javascript("document.body.classList.contains('body--dark')", timeout=BROWSER_S)
    dark.value = not is_dark
    ui.run_javascript(f"localStorage.setItem('brayx-dark', '{int(not is_dark)}')")


async def _restore(dark: ui.dark_mode) -> None:
    with contextlib.suppress(TimeoutError):  # the browser is busy, or gone
        stored = await ui.run_javascript(_DARK, timeout=BROWSER_S)
        if stored in ("0", "1"):
            dark.value = stored == "1"


class Panel(Generic[T]):
    """A part of a page that shows a document and refreshes it. It also shows that it is loading, or why it cannot load.

    Args:
        load: gets the document.
        build: called once with the first document; makes the elements, and returns a function that updates them.
        every_s: time between two loads.
    """

    def __init__(
        self, load: Callable[[], Awaitable[T]], build: Callable[[T], Callable[[T], None]], every_s: float = 2.0
    ) -> None:
        self._load, self._build = load, build
        self._update: Callable[[T], None] | None = None
        self._seen_at = ""
        self._one = asyncio.Lock()
        with ui.column().classes("w-full items-stretch gap-3"):
            self._failure = Alert().classes("w-full p-3 rounded border border-orange-700")
            self._content = ui.column().classes("w-full items-stretch gap-4")
            with self._content:
                loading()
        self.timer = ui.timer(every_s, self.refresh, immediate=False)
        _panels.add(self)

    async def first(self) -> None:
        """Waits for the first document, so that the page is sent with it; not for long."""
        await asyncio.wait([background_tasks.create(self.refresh())], timeout=_FIRST_S)

    async def refresh(self) -> None:
        """Loads the document and shows it."""
        async with self._one:  # otherwise an older document could be shown last
            await self._refresh()

    async def _refresh(self) -> None:
        try:
            document = await self._load()
        except BrayxError as error:
            with self._content:
                more = tr("Below is its last answer, of {time}.", time=self._seen_at) if self._seen_at else ""
                self._failure.say(error, more)
            if self._update is None:
                self._content.clear()
            return
        self._failure.set_visibility(False)
        self._seen_at = time.strftime("%H:%M:%S")
        with self._content:
            if self._update is None:
                self._content.clear()
                self._update = self._build(document)
            self._update(document)


_panels: weakref.WeakSet[Panel[Any]] = weakref.WeakSet()


async def show_end(text: str) -> None:
    """Shows on all open pages how the job has ended, and waits until their browsers have it."""

    async def show(client: Client) -> None:
        with client:
            code = f"window.brayxEnd = {json.dumps(text)}"
            await ui.run_javascript(code, timeout=BROWSER_S)  # first, since a document may take long
            for panel in [panel for panel in _panels if not panel.timer.is_deleted and panel.timer.client is client]:
                await panel.refresh()
            await ui.run_javascript(code, timeout=BROWSER_S)  # its answer comes when the browser has the documents

    pages = [client for client in Client.instances.values() if client.has_socket_connection]
    await asyncio.gather(*map(show, pages), return_exceptions=True)  # a page that is gone must not keep the others


async def control(work: Awaitable[T], done: Callable[[T], str]) -> bool:
    """Runs a button's action and shows the outcome, unless ``done`` has no words; returns whether it succeeded."""
    client = ui.context.client  # a refresh may delete the button before the answer comes
    try:
        result = await work
    except BrayxError as error:
        with client:
            ui.notify(sentence(error.message), type="negative", multi_line=True, close_button=True, timeout=0)
        return False
    if words := done(result):
        with client:
            ui.notify(words, type="positive", multi_line=True)
    return True


async def confirmed(question: str, *verbs: str, colour: str = "negative") -> str:
    """Asks the viewer to confirm, by a button for each verb; returns the chosen verb; empty: cancelled, or the page is
    gone."""
    # Outside the panel of the button: a refresh recreates the panel's elements, which would close the dialog.
    with ui.context.client.content, ui.dialog() as dialog, ui.card():
        ui.label(question).classes("whitespace-pre-wrap")
        with ui.row().classes("w-full justify-end"):
            ui.button(tr("Cancel"), on_click=lambda: dialog.submit("")).props("flat")
            for verb in verbs:
                ui.button(verb, on_click=lambda verb=verb: dialog.submit(verb)).props(f"color={colour}")
    answer = await dialog or ""
    if not dialog.is_deleted:
        dialog.delete()
    return answer


def empty(text: str) -> ui.label:
    """The text of a panel that has nothing to show."""
    return ui.label(text).classes(f"{MUTED} py-6 text-center w-full")


def loading() -> ui.row:
    """The text of a panel that is loading; the caller clears it."""
    with ui.row().classes("items-center") as row:
        ui.spinner(size="sm")
        ui.label(tr("Loading …")).classes(MUTED)
    return row


def heading(text: str) -> ui.label:
    """The heading of a section."""
    return ui.label(text).classes("text-lg font-semibold").props('role="heading" aria-level="2"')


def sentence(text: str) -> str:
    """A message as a sentence."""
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")


def number(value: float | None, digits: int = 4) -> str:
    """A number as readable text; a dash for None."""
    if value is None:
        return "-"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return significant(value, digits)


def shown_values(verdict: VerdictDocument) -> dict[str, str]:
    """The values of a verdict's texts."""
    return {name: number(value, 3) if isinstance(value, float) else value for name, value in verdict.values.items()}


def plus_minus(mean: float | None, error: float | None) -> str:
    """A mean and its 95 % interval, such as ``195.3 ± 4.1``."""
    return number(mean) if mean is None or error is None else f"{number(mean)} ± {significant(1.96 * error, 2)}"


def is_within_chance(lead: ResultDocument) -> bool:
    """Whether a version's lead over another one may be chance."""
    return lead.error is not None and is_chance(lead.mean, lead.error)


def lead_text(lead: ResultDocument) -> str:
    """A version's lead over another one, such as ``+5.2 ± 4.1`` or ``+0.3, within chance``."""
    sign = "+" if lead.mean > 0 else ""
    if is_within_chance(lead):
        return tr("{difference}, within chance", difference=f"{sign}{number(lead.mean)}")
    return f"{sign}{plus_minus(lead.mean, lead.error)}"


def result_text(result: ResultDocument | None, *, named: bool = True) -> str:
    """A return with its interval and its number of games; a dash for None. With ``named=False`` without its name."""
    if result is None:
        return "-"
    text = plus_minus(result.mean, result.error)
    if not named:
        return with_games(text, result.games)
    how = _HOW.get(result.how)
    return with_games(tr("return {value}", value=text), result.games) + (f", {tr(how)}" if how else "")


def with_games(text: str, games: float | None) -> str:
    """A result with its number of games; without it if that is not known or 0: points come without games, too."""
    if not games:
        return text
    return f"{text} {tr('of 1 game') if games == 1 else tr('of {games} games', games=number(games))}"


def milliseconds(seconds: float | None) -> str:
    """A time in milliseconds; a dash for None."""
    return "-" if seconds is None else f"{progress.milliseconds(seconds)} ms"


def reference_text(reference: str) -> str:
    """A registered version as ``NAME VERSION``, from ``models:/NAME/VERSION``."""
    return reference.removeprefix("models:/").replace("/", " ")


def ticks_text(ticks: int) -> str:
    """A number of ticks in words."""
    return tr("1 tick") if ticks == 1 else tr("{ticks} ticks", ticks=number(ticks))


def clock(at_s: float, *, seconds: bool = False) -> str:
    """A Unix time as date and time, to the minute or the second."""
    return time.strftime(f"%Y-%m-%d %H:%M{':%S' if seconds else ''}", time.localtime(at_s))


def since(seconds: float) -> str:
    """A time span in its largest unit."""
    for unit, length in (("{n} d", 86_400.0), ("{n} h", 3600.0), ("{n} min", 60.0)):
        if seconds >= length:
            return tr(unit, n=f"{seconds / length:.1f}")
    return tr("{n} s", n=f"{max(seconds, 0.0):.0f}")


def tile(name: str, mark: str = "") -> tuple[ui.label, ui.label]:
    """A number in a box: returns the labels of the number, and of the line below it.

    Args:
        name: what the number is, in the viewer's language.
        mark: the number's marker, see `ui.label.mark`.
    """
    with ui.column().classes("p-3 gap-0 rounded-lg border border-gray-500/30 min-w-0"):
        ui.label(name).classes(f"text-xs {MUTED}")
        value = ui.label("-").classes("text-xl font-semibold break-words max-w-full").mark(mark)
        return value, ui.label().classes(f"text-xs {MUTED}")


class Alert(ui.label):
    """Says why something failed; hidden until then."""

    def __init__(self) -> None:
        super().__init__()
        self.classes("text-orange-800 dark:text-orange-300").props('role="alert"').set_visibility(False)

    def say(self, error: BrayxError, more: str = "") -> None:
        """Shows an error, and further sentences."""
        self.set_text(f"{sentence(error.message)} {more}".strip())
        self.set_visibility(True)


def who_plays(session: SessionDocument) -> str:
    """The player or the versions of a session, such as ``champion 3``; empty: not known."""
    if session.player:
        return session.player
    arms = [arm.split("/") for arm in session.arms]
    shown = [f"{alias} {version}" if version != "0" else tr("untrained model") for _, alias, version in arms]
    return ", ".join(shown if len(arms) < 2 else [f"{arm[0]}: {text}" for arm, text in zip(arms, shown, strict=True)])
