"""The page of the console: NiceGUI over the control API, which it calls like any other client.

`add_page` puts it on an application. Works offline: all assets are in NiceGUI's wheel. Knows nothing of jobs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from brayx.console.page.caller import Connect

if TYPE_CHECKING:
    from fastapi import FastAPI

_RECONNECT_S = 10.0
"""Time without a connection after which a browser's page is dropped."""


def add_page(app: FastAPI, connect: Connect) -> None:
    """Adds the page to an application; a process can do so once.

    Args:
        app: the application, whose other routes come first.
        connect: makes each viewer's client of the control API.
    """
    from nicegui import ui

    from brayx.console.page import league, models, overview, play, recordings, sessions, trials

    for part in (overview, sessions, recordings, models, league, play, trials):
        part.add(connect)
    ui.run_with(
        app,
        title="brayx console",
        dark=None,
        reconnect_timeout=_RECONNECT_S,
        show_welcome_message=False,
        storage_secret=None,
    )
