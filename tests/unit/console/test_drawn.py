"""Recorded ticks are drawn after the fact, from what their recording keeps."""

from __future__ import annotations

import io
import json
from pathlib import Path

import httpx
import numpy as np
import pytest
from nicegui import Client, ui
from PIL import Image

from brayx.console import drawn
from brayx.console.api import create_app
from brayx.console.drawn import state_of
from brayx.console.page.caller import ApiCaller
from brayx.console.page.recording import _Recorded
from brayx.console.source import Source
from brayx.gamecore.contract import Contract
from brayx.recording import open as open_recordings
from brayx.recording.index import SessionPart
from brayx.recording.writer import Folder
from brayx.types import Step
from tests.processes import ours
from tests.recorded import Tick, columns_of
from tests.waiting import until

CODE = """
import numpy as np

def draw(states):
    return [np.full((8, 8, 3), int(state.step.obs["x"][0]) + state.input["y"], np.uint8) for state in states]

def board(state):
    return {"text": state.kind, "rows": [[{"text": str(state.input["y"])}]], "result": state.input.get("result")}
"""
CONTRACT = {
    "contract": 1,
    "observations": {"x": {"shape": [1]}},
    "actions": {"go": {"kind": "discrete", "size": 2}},
}


def write(folder: Path, bodies: list[bytes], start: str = "", stop: bytes = b"") -> None:
    steps = [Step({"x": np.array([10.0 * n], np.float32)}, np.asarray(n), -0.5, 7) for n in range(len(bodies))]
    ticks = [
        Tick(n, 0.0, 0.0, body, b"{}", {"step": step}, stop=stop if body is bodies[-1] else b"")
        for n, (body, step) in enumerate(zip(bodies, steps, strict=True))
    ]
    Folder(str(folder), 10**9).write([SessionPart("a", "a", 0.0, 0, len(ticks), start)], columns_of(ticks))


async def test_a_recording_without_frames_is_drawn_by_the_jobs_render_and_board(
    tmp_path: Path, tracking_db: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "drawn_code.py").write_text(CODE)
    write(tmp_path / "recordings", [b'{"y": 1}', b'{"y": 2}', b'{"other": 2}'])
    render, board = (("drawn_code", name, str(tmp_path)) for name in ("draw", "board"))
    source = Source(tracking_db, recordings=str(tmp_path / "recordings"), render=render, drawn_board=board)
    transport = httpx.ASGITransport(create_app(source))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        shown = (await client.get("/api/recordings/a", params={"count": 1})).json()
        assert (shown["draws_frames"], shown["draws_boards"], shown["recording"]["frames"]) == (True, True, 0)
        frame = await client.get("/api/recordings/a/frames/1", timeout=60.0)
        np.testing.assert_array_equal(Image.open(io.BytesIO(frame.content)), np.full((8, 8, 3), 12))
        rows = (await client.get("/api/recordings/a/boards/1")).json()["rows"]
        assert rows == [[{"text": "2", "colour": "", "label": ""}]]
        for what in ("frames", "boards"):
            refused = await client.get(f"/api/recordings/a/{what}/2", timeout=60.0)
            assert refused.json()["error"] == "agent_error"
            assert "KeyError: 'y'" in refused.json()["message"]
            assert (await client.get(f"/api/recordings/a/{what}/3")).json()["error"] == "bad_recording"
    assert ours("brayx.recording.live_frames")
    monkeypatch.setattr(drawn, "_IDLE_S", 0.0)
    until(lambda: not ours("brayx.recording.live_frames"), "its process ends when nobody looks")


async def test_a_job_that_draws_nothing_has_no_picture(tmp_path: Path, tracking_db: str) -> None:
    write(tmp_path, [b"{}"])
    transport = httpx.ASGITransport(create_app(Source(tracking_db, recordings=str(tmp_path))))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        shown = (await client.get("/api/recordings/a")).json()
        assert (shown["draws_frames"], shown["draws_boards"]) == (False, False)
        assert (await client.get("/api/recordings/a/frames/0")).status_code == 204
        assert (await client.get("/api/recordings/a/boards/0")).json() is None


def test_the_state_of_a_recorded_tick_has_its_step_and_its_body_by_contract(tmp_path: Path) -> None:
    start = Contract.parse(CONTRACT)
    body = b'{"obs": {"x": [3.5]}, "reward": 1}'
    for name, text, seen in (("plain", "", {"obs": {"x": [3.5]}, "reward": 1}), ("contract", _dumped(start), None)):
        write(tmp_path / name, [body], text)
        (episode,) = open_recordings(str(tmp_path / name))
        state = state_of(episode, 0)
        step = state.step
        assert (state.tick, state.session, int(step.action), float(step.log_prob), int(step.policy_version)) == (
            0, "a", 0, -0.5, 7,
        )  # fmt: skip
        assert step.obs["x"].tolist() == [0.0]
        if seen is None:
            assert state.input.obs["x"].tolist() == [3.5]
        else:
            assert state.input == seen


async def test_a_board_is_drawn_of_a_stop(tmp_path: Path, tracking_db: str) -> None:
    (tmp_path / "drawn_stop.py").write_text(CODE)
    write(tmp_path / "recordings", [b'{"y": 1}', b'{"y": 2}'], stop=b'{"y": 3, "result": "loss"}')
    drawn_board = "drawn_stop", "board", str(tmp_path)
    source = Source(tracking_db, recordings=str(tmp_path / "recordings"), drawn_board=drawn_board)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(create_app(source)), base_url="http://localhost"
    ) as client:
        boards = [(await client.get(f"/api/recordings/a/boards/{index}")).json() for index in range(3)]
        assert [(board["text"], board["rows"][0][0]["text"], board["result"]) for board in boards] == [
            ("tick", "1", None), ("tick", "2", None), ("stop", "3", "loss"),
        ]  # fmt: skip
        assert (await client.get("/api/recordings/a/boards/3")).json()["error"] == "bad_recording"


def _dumped(contract: Contract) -> str:
    return json.dumps(contract.as_dict())


async def test_a_board_that_a_failed_game_did_not_send_is_no_error_of_the_job(
    tmp_path: Path, tracking_db: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("brayx.console.page.words.is_chinese", lambda: False)
    (tmp_path / "drawn_later.py").write_text(CODE)
    folder = Folder(str(tmp_path / "recordings"), 10**9)
    for session, event in (("failed", "error: y is missing"), ("whole", "")):
        ticks = [Tick(0, 0.0, 0.0, b'{"y": 1}', b"{}", {}), Tick(1, 0.0, 0.0, b"{}", b"", {}, event)]
        folder.write([SessionPart(session, session, 0.0, 0, len(ticks), end="refused")], columns_of(ticks))
    board = ("drawn_later", "board", str(tmp_path))
    app = create_app(Source(tracking_db, recordings=str(tmp_path / "recordings"), drawn_board=board))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        with Client(ui.page(""), request=None) as page:
            failed, whole = (_Recorded(ApiCaller(client, page), session, "", "") for session in ("failed", "whole"))
            for shown in (failed, whole):
                await shown._load()
                await shown._go(1)
            assert failed._position.text == "No board: the game sent none."
            assert whole._no_picture.text == "The frame cannot be drawn: `board` failed: KeyError: 'y'."
            await failed._go(0)
            assert failed._position.text == "tick"
