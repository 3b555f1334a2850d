"""The page for an address that no other page has."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus

from nicegui import ui

from brayx.console.page.caller import Connect
from brayx.console.page.frame import frame, heading


def page(connect: Connect) -> Callable[[], None]:
    """Makes the function that draws the page."""

    def missing() -> None:
        client = ui.context.client
        client.status_code = HTTPStatus.NOT_FOUND
        with frame("Page not found", connect):
            heading("There is no such page")
            ui.label(f"The console has no page {client.request.url.path[:200]}.").classes("break-all")
            ui.link("Go to the overview", "/").classes("text-primary")

    return missing
