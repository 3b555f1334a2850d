"""The button that stops the job's training, and what its page says afterwards."""

from __future__ import annotations

import json

from nicegui import ui

from brayx.console.documents import DoneDocument
from brayx.console.overview import JobDocument, OverviewDocument
from brayx.console.page.caller import ApiCaller
from brayx.console.page.frame import BROWSER_S, confirmed, control, number, result_text, until_end
from brayx.console.page.words import tr
from brayx.console.trials import BestDocument
from brayx.metrics.totals import BEHAVIOUR_RETURN


class StopButton(ui.button):
    """Stops the job's training once the viewer has confirmed it, or finishes it and registers its best version."""

    def __init__(self, caller: ApiCaller) -> None:
        super().__init__(tr("Stop training"), icon="stop", on_click=self._stop)
        self.props("outline color=negative")
        self._caller = caller

    async def _stop(self) -> None:
        job: JobDocument = await self._caller.get(JobDocument, "/api/job")
        question = tr("Stop this training? It saves a last checkpoint, and the same command resumes it.")
        finish, registers = tr("Finish: register the best version"), await self._registers(job)
        chosen = await confirmed(f"{question}\n{registers}", tr("Stop it"), finish)
        if not chosen:
            return
        until_end(self, tr("Stopped."))
        overview: OverviewDocument = await self._caller.get(OverviewDocument, "/api/job/overview")
        # The browser gets its last words first, since the console may end before anything else reaches it.
        shown = tr("`brayx console` shows what it has registered.")
        finished = " ".join(filter(None, (tr("Finished."), registers, shown)))
        last = json.dumps(finished if chosen == finish else _last_words(job, overview))
        await ui.run_javascript(f"window.brayxEnd = {last}", timeout=BROWSER_S)
        register = str(chosen == finish).lower()
        call = self._caller.post(DoneDocument, f"/api/trials/{job.run_id}/stop?register={register}")
        if await control(call, lambda _: ""):  # the page's last words say it
            self.disable()
            self.set_text(tr("It is stopping …"))
        else:
            ui.run_javascript("window.brayxEnd = ''")

    async def _registers(self, job: JobDocument) -> str:
        """Which version the training registers if it is finished; empty: that of a league or of several behaviours."""
        if job.league or any(name.startswith(BEHAVIOUR_RETURN) for name in job.numbers):
            return ""
        best = await self._caller.get(BestDocument | None, f"/api/trials/{job.run_id}/best")
        if best is None:
            return tr("No checkpoint has a return of enough games yet: only the last one can be registered.")
        words = "The best version is that after {steps} env steps, with a {result}, unless the last one is better."
        return tr(words, steps=number(best.step), result=result_text(best.result))


def _last_words(job: JobDocument, overview: OverviewDocument) -> str:
    """What the page says once the training has stopped."""
    champion = overview.champion
    crowned = "" if job.league else tr("This training has registered no version.")  # a league registers as it trains
    if champion is not None:
        crowned += " " + tr("The champion is still version {version}.", version=champion.version)
    resume = tr("Resume with: {command}", command=job.command or tr("the same command"))
    return " ".join(filter(None, (tr("Stopped."), crowned.strip(), resume)))
