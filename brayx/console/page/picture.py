"""The newest recording's picture. Knows nothing of the rest of the page."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

from nicegui import ui

from brayx.console.page.caller import ApiCaller
from brayx.console.page.frame import MUTED, number, ticks_text
from brayx.console.page.recordings import end_in_words
from brayx.console.page.words import tr
from brayx.console.recordings import RecordingDocument, RecordingsDocument
from brayx.errors import AgentError

_LOOKED_AT = 20
"""The newest recordings, of which the first with frames is shown."""


class Picture(NamedTuple):
    """A recording, and the frame in its middle as a data URL; None: it has none, and the job draws none."""

    recording: RecordingDocument
    image: str | None


async def newest_picture(caller: ApiCaller, since_s: float, before: Picture | None) -> Picture | None:
    """The newest recording of a session that has ended, with frames if one has them; None: there is none.

    Args:
        caller: the viewer's client.
        since_s: Unix time before which no session of the job began: its folder may have those of other jobs.
        before: the picture that is shown, which is not loaded again.

    Raises:
        BrayxError: the recordings cannot be read.
    """
    listing: RecordingsDocument = await caller.get(RecordingsDocument, "/api/recordings", limit=_LOOKED_AT)
    ended = [recording for recording in listing.recordings if recording.end and recording.began_s >= since_s]
    newest = next((recording for recording in ended if recording.frames), next(iter(ended), None))
    if newest is None or (before is not None and before.recording == newest):
        return None if newest is None else before
    image = None
    with contextlib.suppress(AgentError):  # the job cannot draw it from what is recorded
        image = await caller.image(f"/api/recordings/{newest.id}/frames/{newest.ticks // 2}")
    return Picture(newest, image)


class PictureCard:
    """A recording's picture and its facts, as a link to it; hidden until `show` gets one."""

    def __init__(self) -> None:
        self._link = ui.link(target="").classes("brayx-card w-full")
        with self._link:
            ui.label(tr("Newest recording")).classes(f"text-xs {MUTED}")
            self._image = ui.image().props("no-transition no-spinner fit=contain").classes("w-full max-h-64")
            self._image.style("image-rendering: pixelated")
            self._about = ui.label().classes("text-sm")
        self._link.set_visibility(False)

    def show(self, picture: Picture | None) -> None:
        """Shows a recording."""
        self._link.set_visibility(picture is not None)
        if picture is None:
            return
        recording, image = picture
        self._link.props["href"] = f"/recordings/{recording.id}"
        self._link.update()
        self._image.set_visibility(image is not None)
        if image is not None and self._image.source != image:
            self._image.set_source(image)
        words = tr("{ticks}, end: {end}", ticks=ticks_text(recording.ticks), end=end_in_words(recording.end))
        if recording.result is not None:
            words += ", " + tr("return {value}", value=number(recording.result))
        self._about.set_text(words)
