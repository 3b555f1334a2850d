"""The list of a folder's recordings."""

from __future__ import annotations

from pathlib import Path

import httpx

from brayx.console.api import create_app
from brayx.console.page.recordings import listed
from brayx.console.recordings import RecordingsDocument
from brayx.console.source import Source
from brayx.recording.index import SessionPart
from brayx.recording.writer import Folder
from tests.recorded import Tick, columns_of


async def test_a_list_of_recordings_says_how_many_there_are(tmp_path: Path, tracking_db: str) -> None:
    folder = Folder(str(tmp_path), 10**9)
    for name, count in (("bot", 30), ("other", 20)):
        parts = [
            SessionPart(f"{name}-{number}", f"{name}-{number}", 0.0, 0, 1, player="main:3") for number in range(count)
        ]
        folder.write(parts, columns_of([Tick(0, 0.0, 0.0, b"", b"", {})] * count))
    transport = httpx.ASGITransport(create_app(Source(tracking_db, recordings=str(tmp_path))))
    for session, limit, text in (
        ("", 50, f"50 in {tmp_path}"),
        ("", 7, f"50 in {tmp_path}; the newest 7 are listed"),
        ("bot-*", 50, f"30 of 50 in {tmp_path}"),
        ("bot-*", 7, f"30 of 50 in {tmp_path}; the newest 7 are listed"),
    ):
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            reply = await client.get("/api/recordings", params={"limit": limit, "session": session})
        assert listed(RecordingsDocument.model_validate_json(reply.content)) == text
