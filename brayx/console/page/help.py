"""The pages of the guides, to which every other page links."""

from __future__ import annotations

from fastapi.responses import FileResponse, Response
from nicegui import ui

from brayx.console.page import guides
from brayx.console.page.caller import Connect
from brayx.console.page.frame import RESPONSE_S, frame, missing

_EXTRAS = ["fenced-code-blocks", "tables", "header-ids", "cuddled-lists"]
_TO_ANCHOR = "document.getElementById(decodeURIComponent(location.hash.slice(1)))?.scrollIntoView()"


def add(connect: Connect) -> None:
    """Adds the pages."""

    @ui.page("/help/{path:path}", response_timeout=RESPONSE_S)
    def guide(path: str) -> Response | None:
        file = guides.find(path)
        if file is None:
            missing(connect)()
            return None
        if file.suffix != ".md":
            return FileResponse(file)
        with frame("Help", connect):
            ui.markdown(guides.markdown(file), extras=_EXTRAS).classes("brayx-guide w-full max-w-3xl")
        ui.context.client.on_connect(lambda: ui.run_javascript(_TO_ANCHOR))
        return None
