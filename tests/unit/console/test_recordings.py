"""The list of a folder's recordings: pages of it, and what selects them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from brayx.console.api import create_app
from brayx.console.recordings import RecordingsDocument, labelled
from brayx.console.source import Source
from brayx.gamecore.contract import Contract
from brayx.gamecore.contract_bodies import ContractBodies
from brayx.recording.index import SessionPart
from brayx.recording.writer import Folder
from tests.recorded import Tick, columns_of


async def test_rewards_in_the_games_bodies_are_a_curve(tmp_path: Path, tracking_db: str) -> None:
    bodies: tuple[bytes, ...] = (
        b'{"obs": [1]}',
        b'{"reward": 1}',
        b"no json",
        b'{"reward": 0.5}',
        b'{"reward": "much"}',
    )
    bodies = (*bodies, b'{"reward": NaN}', b'{"reward": 1' + b"0" * 400 + b"}")
    ticks = [Tick(number, 0.0, 0.0, body, b"", {}) for number, body in enumerate(bodies)]
    Folder(str(tmp_path), 10**9).write([SessionPart("a", "a", 0.0, 0, len(ticks))], columns_of(ticks))
    transport = httpx.ASGITransport(create_app(Source(tracking_db, recordings=str(tmp_path))))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        curves = (await client.get("/api/recordings/a/curves")).json()
    assert curves == {"ticks": [*range(7)], "curves": {"reward": [0.0, 1.0, 0.0, 0.5, 0.0, 0.0, 0.0]}}


@pytest.mark.parametrize("encoding", ["packed", "msgpack"])
async def test_bodies_by_contract_are_shown_as_values(tmp_path: Path, tracking_db: str, encoding: str) -> None:
    contract = {
        "contract": 1,
        "observations": {"height": {"shape": [2], "labels": ["altitude", "speed"]}},
        "actions": {"thrust": {"kind": "discrete", "size": 2}, "side": {"kind": "continuous", "size": 1}},
        "encoding": encoding,
    }
    bodies = ContractBodies(Contract.parse(contract))
    reply = bodies.encode({"thrust": 1, "side": [0.5]})
    stop = bodies.encode_tick([0.0, -3.0], -2.0, terminated=True, extras={"info": {"why": "crash"}})
    ticks = [
        Tick(0, 0.0, 0.0, bodies.encode_tick([5.0, 0.0]), reply, {"obs/height": np.array([5.0, 0.0])}),
        Tick(
            1, 0.0, 0.0, bodies.encode_tick([2.5, -1.0], 0.25), reply, {"obs/height": np.array([2.5, -1.0])}, stop=stop
        ),
    ]
    part = SessionPart("a", "a", 0.0, 0, 2, start=json.dumps(contract), end="terminated")
    Folder(str(tmp_path), 10**9).write([part], columns_of(ticks))
    transport = httpx.ASGITransport(create_app(Source(tracking_db, recordings=str(tmp_path))))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        shown = (await client.get("/api/recordings/a")).json()
        curves = (await client.get("/api/recordings/a/curves")).json()
    assert [tick["input"] for tick in shown["ticks"]] == [
        {"obs": {"height": [5.0, 0.0]}, "reward": 0.0},
        {"obs": {"height": [2.5, -1.0]}, "reward": 0.25},
    ]
    assert shown["ticks"][0]["output"] == {"thrust": 1, "side": [0.5]}
    crash = {"obs": {"height": [0.0, -3.0]}, "reward": -2.0, "terminated": True, "info": {"why": "crash"}}
    assert shown["stop"] == crash
    labelled = {"altitude": [5.0, 2.5], "speed": [0.0, -1.0]}
    assert curves == {"ticks": [0, 1, 2], "curves": {**labelled, "reward": [0.0, 0.25, -2.0]}}


def test_values_with_the_same_label_are_curves_of_their_observations() -> None:
    arrays = {"obs/basket": np.array([[1.0, 4.0]]), "obs/apple": np.array([[2.0]]), "reward": np.array([3.0])}
    labels = {"basket": ["place", "speed"], "apple": ["place"]}
    curves = {name: array.tolist() for name, array in labelled(arrays, labels).items()}
    assert curves == {"obs/basket place": [1.0], "obs/apple place": [2.0], "speed": [4.0]}


async def test_the_stop_is_the_end_of_a_recording(tmp_path: Path, tracking_db: str) -> None:
    stop = {"obs": {"x": [2.0]}, "reward": -1, "terminated": True, "info": {"why": "crash"}}
    last = Tick(1, 0.0, 0.0, b"{}", b"", {}, stop=json.dumps(stop).encode(), event="forwarded")
    ticks = [Tick(0, 0.0, 0.0, b"{}", b"", {}), last]
    folder = Folder(str(tmp_path), 10**9)
    folder.write([SessionPart("a", "a", 0.0, 0, 2, end="stop")], columns_of(ticks))
    folder.write([SessionPart("b", "b", 0.0, 0, 1)], columns_of(ticks[:1]))
    failed = [*ticks[:1], Tick(1, 0.0, 0.0, b"{}", b"", {}, event="error: KeyError: 'x' (a.py:3)")]
    folder.write([SessionPart("c", "c", 0.0, 0, 2, end="error")], columns_of(failed))
    refused = [Tick(0, 0.0, 0.0, b"{}", b"", {}, event="stop refused: reward is nan")]
    folder.write([SessionPart("d", "d", 0.0, 0, 1, end="disconnect")], columns_of(refused))
    transport = httpx.ASGITransport(create_app(Source(tracking_db, recordings=str(tmp_path))))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        whole = (await client.get("/api/recordings/a", params={"count": 1})).json()
        assert (whole["stop"], whole["cause"]) == (stop, "")
        curves = (await client.get("/api/recordings/a/curves")).json()
        assert curves == {"ticks": [0, 1, 2], "curves": {"reward": [0.0, 0.0, -1.0]}}
        assert (await client.get("/api/recordings/b")).json()["stop"] is None
        assert (await client.get("/api/recordings/c")).json()["cause"] == "error: KeyError: 'x' (a.py:3)"
        assert (await client.get("/api/recordings/b/curves")).json() == {"ticks": [0], "curves": {}}
        assert (await client.get("/api/recordings/d")).json()["cause"] == "stop refused: reward is nan"


async def test_recordings_are_listed_by_pages_and_selected(tmp_path: Path, tracking_db: str) -> None:
    folder = Folder(str(tmp_path), 10**9)
    for name, count in (("bot", 30), ("other", 20)):
        parts = [
            SessionPart(
                f"{name}-{number}",
                f"{name}-{number}",
                0.0,
                0,
                1,
                player=f"main:{number % 2}",
                version=number // 10,
                alias="champion" if name == "other" else "",
                end="stop" if number else "idle",
                result=float(number) if number else None,
                events=int(number == 7),
            )
            for number in range(count)
        ]
        folder.write(parts, columns_of([Tick(0, 0.0, 0.0, b"", b"", {})] * count))
    transport = httpx.ASGITransport(create_app(Source(tracking_db, recordings=str(tmp_path))))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:

        async def listed(**query: Any) -> tuple[int, list[str]]:
            reply = await client.get("/api/recordings", params=query)
            document = RecordingsDocument.model_validate_json(reply.content)
            assert document.total == 50
            return document.selected, [recording.session for recording in document.recordings]

        selected, newest = await listed()
        assert (selected, len(newest), newest[:2], newest[-1]) == (50, 50, ["other-19", "other-18"], "bot-0")
        assert await listed(first=48, limit=7) == (50, newest[48:])
        assert await listed(first=10, limit=3) == (50, newest[10:13])
        assert (await listed(session="bot-*", limit=7))[0] == 30
        assert await listed(end="idle") == (2, ["other-0", "bot-0"])
        assert await listed(errors=True, session="bot-*") == (2, ["bot-7", "bot-0"]), "bot-0 was left without a stop"
        assert (await listed(played_by="main"))[0] == 50
        assert (await listed(played_by="main:1"))[0] == 25
        assert await listed(played_by="weights 1", limit=2) == (10, ["bot-19", "bot-18"])
        assert await listed(played_by="champion 1", limit=2) == (10, ["other-19", "other-18"]), "not weights 1"
        assert (await listed(played_by="main:1, champion 1"))[0] == 5
        assert await listed(min_return=18, max_return=19, limit=2) == (4, ["other-19", "other-18"])
        assert (await listed(min_return=-100))[0] == 48, "two have no return"
        assert (await client.get("/api/recordings", params={"min_return": "many"})).json()["error"] == "bad_request"
