"""Downloads from the console: how large a session may be, and how many files may be open."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import brayx.recording
from brayx.console import downloads as console_downloads
from brayx.console.api import create_app
from brayx.console.downloads import Downloads
from brayx.console.source import Source
from brayx.errors import BadRecording, ServiceFull
from brayx.recording.index import SessionPart
from brayx.recording.reader import Recording
from brayx.recording.writer import Folder
from tests.recorded import Tick, columns_of


@pytest.fixture
def episode(tmp_path: Path) -> Recording:
    ticks = [Tick(number, 0.0, 0.0, b"", b"", {"obs": np.zeros(1000, np.float32)}) for number in range(100)]
    Folder(str(tmp_path), 10**9).write([SessionPart("e", "s", 1e9, 0, 100)], columns_of(ticks))
    (recording,) = brayx.recording.open(str(tmp_path))
    return recording


def test_a_limited_number_of_files_is_open(episode: Recording) -> None:
    downloads = Downloads()
    files = [downloads.make(episode, "parquet").file for _ in range(4)]
    with pytest.raises(ServiceFull, match="4 files"):
        downloads.make(episode, "parquet")
    files.pop().close()
    files.append(downloads.make(episode, "parquet").file)
    del files[0]  # as if the viewer had gone before the first byte
    downloads.make(episode, "parquet").file.close()


async def test_a_viewer_who_goes_away_frees_the_file(
    episode: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console_downloads, "_MAX_OPEN", 1)
    app = create_app(Source(f"sqlite:///{tmp_path}/mlflow.db", recordings=str(tmp_path)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        request = client.build_request("GET", f"/api/recordings/{episode.id}/file")
        scope = {
            "type": "http", "method": "GET", "path": request.url.path, "query_string": b"",
            "headers": [(name.lower(), value) for name, value in request.headers.raw],
        }  # fmt: skip
        started, messages = asyncio.Event(), iter([{"type": "http.request", "body": b"", "more_body": False}])

        async def receive() -> Any:
            if message := next(messages, None):
                return message
            await started.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            started.set()
            await asyncio.Event().wait()  # a connection that takes no more bytes

        gc.disable()  # what it would free, an idle console keeps
        try:
            await app(scope, receive, send)
            assert (await client.send(request)).status_code == 200
        finally:
            gc.enable()


def test_a_session_that_is_too_large_is_left_to_the_command(
    episode: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console_downloads, "_MAX_BYTES", 410_000)
    Downloads().make(episode, "parquet").file.close()
    monkeypatch.setattr(console_downloads, "_MAX_BYTES", 390_000)
    with pytest.raises(BadRecording, match="brayx recordings export"):
        Downloads().make(episode, "parquet")
