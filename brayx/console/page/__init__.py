"""The console's page, in NiceGUI. It calls the control API like any other client.

`add_page` adds it to an application. It works offline: all assets are in NiceGUI's wheel. Knows nothing of jobs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from brayx.console.page.caller import Connect

if TYPE_CHECKING:
    from fastapi import FastAPI

_RECONNECT_S = 10.0
"""A browser's page is dropped after this time without a connection."""


def add_page(app: FastAPI, connect: Connect) -> None:
    """Adds the page to an application; a process can do so once.

    Args:
        app: the application; its other routes must exist already.
        connect: makes a client of the control API for each viewer.
    """
    from nicegui import ui

    from brayx.console.page import help, league, models, overview, play, recording, recordings, sessions, trials
    from brayx.console.page.frame import missing

    ui.button.default_props("no-caps")
    for part in (overview, sessions, recordings, recording, models, league, play, trials, help):
        part.add(connect)
    ui.run_with(
        app,
        root=missing(connect),  # shown for any other path
        title="brayx console",
        dark=None,
        reconnect_timeout=_RECONNECT_S,
        show_welcome_message=False,
        storage_secret=None,
    )
