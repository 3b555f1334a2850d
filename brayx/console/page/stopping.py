"""The button that stops the job's training, and what its page says afterwards."""

from __future__ import annotations

import json

from nicegui import ui

from brayx.console.documents import DoneDocument
from brayx.console.overview import JobDocument, OverviewDocument
from brayx.console.page.caller import ApiCaller
from brayx.console.page.frame import BROWSER_S, confirmed, control, until_end
from brayx.console.page.words import tr


class StopButton(ui.button):
    """Stops the job's training once the viewer has confirmed it, or finishes it and registers its best version."""

    def __init__(self, caller: ApiCaller) -> None:
        super().__init__(tr("Stop training"), icon="stop", on_click=self._stop)
        self.props("outline color=negative")
        self._caller = caller

    async def _stop(self) -> None:
        question = tr("Stop this training? It saves a last checkpoint, and the same command resumes it.")
        finish = tr("Finish: register the best version")
        chosen = await confirmed(question, tr("Stop it"), finish)
        if not chosen:
            return
        until_end(self, tr("Stopped."))
        job: JobDocument = await self._caller.get(JobDocument, "/api/job")
        overview: OverviewDocument = await self._caller.get(OverviewDocument, "/api/job/overview")
        # The browser gets its last words first, since the console may end before anything else reaches it.
        last = json.dumps(_last_words(job, overview, finishes=chosen == finish))
        await ui.run_javascript(f"window.brayxEnd = {last}", timeout=BROWSER_S)
        register = str(chosen == finish).lower()
        call = self._caller.post(DoneDocument, f"/api/trials/{job.run_id}/stop?register={register}")
        if await control(call, lambda _: ""):  # the page's last words say it
            self.disable()
            self.set_text(tr("It is stopping …"))
        else:
            ui.run_javascript("window.brayxEnd = ''")


def _last_words(job: JobDocument, overview: OverviewDocument, *, finishes: bool = False) -> str:
    """What the page says once the training has stopped, or finished."""
    if finishes:
        return tr("Finished. Its best version is registered; `brayx console` shows it.")
    champion = overview.champion
    crowned = "" if job.league else tr("This training has registered no version.")  # a league registers as it trains
    if champion is not None:
        crowned += " " + tr("The champion is still version {version}.", version=champion.version)
    resume = tr("Resume with: {command}", command=job.command or tr("the same command"))
    return " ".join(filter(None, (tr("Stopped."), crowned.strip(), resume)))
