"""The button that stops the job's training."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from nicegui import ui

from brayx.console.documents import DoneDocument
from brayx.console.overview import JobDocument
from brayx.console.page.caller import ApiCaller
from brayx.console.page.frame import confirmed, control, number, result_text
from brayx.console.page.words import tr
from brayx.console.trials import BestDocument
from brayx.errors import BrayxError
from brayx.metrics.totals import BEHAVIOUR_RETURN

_STORE_S = 2.0
"""Time for what the question needs from MLflow: a slow store must not keep a training from being stopped."""


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
        if job.league:
            finish = tr("Finish: register last snapshots")
        chosen = await confirmed(f"{question}\n{registers}", tr("Stop it"), finish)
        if not chosen:
            return
        register = str(chosen == finish).lower()
        call = self._caller.post(DoneDocument, f"/api/trials/{job.run_id}/stop?register={register}")
        if await control(call, lambda _: ""):  # the page shows how it ends
            self.disable()
            self.set_text(tr("It is stopping …"))

    async def _registers(self, job: JobDocument) -> str:
        """Which version the training registers if it is finished; empty: that of several behaviours, or not known in
        time."""
        if job.league:
            return tr(
                "Finishing registers a last snapshot of each player and completes the training. No champion is made."
            )
        if any(name.startswith(BEHAVIOUR_RETURN) for name in job.numbers):
            return ""
        text = ""
        async with _in_time():
            best = await self._caller.get(BestDocument | None, f"/api/trials/{job.run_id}/best")
            text = tr("No checkpoint has a return of enough games yet: only the last one can be registered.")
            if best is not None:
                text = tr(
                    "The best version is that after {steps} env steps, with a {result}, unless the last one is better.",
                    steps=number(best.step),
                    result=result_text(best.result),
                )
        return text


@contextlib.asynccontextmanager
async def _in_time() -> AsyncIterator[None]:
    """Ends what is in it if a call fails, or after `_STORE_S`."""
    with contextlib.suppress(BrayxError, TimeoutError):
        async with asyncio.timeout(_STORE_S):
            yield
