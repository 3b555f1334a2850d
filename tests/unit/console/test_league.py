"""What the console makes of a league: one number of points for each version, who beat whom, what can be played."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from nicegui import Client, ui

from brayx.console.league import LeagueDocument, PairingDocument, _standings
from brayx.console.page.caller import ApiCaller
from brayx.console.page.models import _load, _Model, _Seen
from brayx.console.page.promotion import judged, met
from brayx.league.files import PLAYER_TAG, POINTS_TAG
from brayx.league.member import Member
from brayx.league.payoff import Pair
from brayx.league.ratings import Rating, Ratings
from brayx.league.report import Books

MAIN = [Member("main", 1), Member("main", 2)]
NO_RESULT = {"result": None, "player": "", "version": 0, "why": "every", "lost": 0, "frames": 0, "began_s": 0.0}
RECORDINGS = [
    {"id": "runs", "session": "e", "end": "", "ticks": 9, "events": 0},
    {"id": "raised", "session": "a", "end": "error", "ticks": 1, "events": 1},
    {"id": "refused", "session": "b", "end": "stop", "ticks": 1, "events": 1},
    {"id": "whole", "session": "c", "end": "stop", "ticks": 9, "events": 0},
    {"id": "older", "session": "d", "end": "stop", "ticks": 9, "events": 0},
]


def league(**pair: Any) -> LeagueDocument:
    members = Ratings({member: Rating() for member in (*MAIN, Member("main"))})
    books = Books(members, {}, {(MAIN[0], MAIN[1]): Pair(wins=60, losses=140)}, (), None, {})
    rows = [row.as_dict() for row in books.standings()]
    head = {"project": "p", "trial": "t", "champion": None, "counters": {}, "curves": {}}
    return LeagueDocument(**head, standings=_standings(rows, ()), payoff=[PairingDocument(**pair)] if pair else [])


def test_versions_have_the_points_of_their_own_games() -> None:
    rows = league().standings
    assert [row.member for row in rows] == ["main:2", "main", "main:1"], "the strongest first"
    assert all(row.low < row.points < row.high for row in rows)
    assert rows[0].points - rows[2].points == pytest.approx(147.0, abs=2.0)  # 400 log10(0.7 / 0.3)


def test_two_members_that_have_met_are_compared_by_their_games(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("brayx.console.page.words.is_chinese", lambda: False)
    seen = league(a="main:1", b="main:2", wins=60, draws=0, losses=140, win_rate=0.3)
    words = "In the league, version {} scored {} in 200 games against version {}."
    assert met(seen, "main:2", "main:1") == words.format("main:2", "70%", "main:1")
    assert met(seen, "main:1", "main:2") == words.format("main:1", "30%", "main:2")
    assert met(seen, "main:1", "main:3") == met(None, "main:1", "main:2") == ""


async def loaded(recordings: list[dict[str, Any]]) -> _Seen:
    tags = {PLAYER_TAG: "main", POINTS_TAG: "1"}
    of_main = {"version": 2, "aliases": [], "step": 1, "created_s": 0.0, "trial": "t", "tags": tags}
    answers: dict[str, Any] = {
        "/api/models": [{"name": name, "aliases": {}, "versions": [of_main]} for name in ("mine", "other")],
        "/api/job": {"running": True, "mode": "serve"},
        "/api/league": league().model_dump(),
        "/api/recordings": {"folder": "f", "total": 5, "selected": 5, "recordings": recordings, "unreadable": {}},
        "/api/opponents": {"why_not": "", "opponents": {"version 2": {"version": 2}}, "model": "mine"},
    }
    app = FastAPI()
    app.get("/api/{path:path}")(lambda path: answers[f"/api/{path}"])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        return await _load(ApiCaller(client, Client(ui.page(""), request=None)))


@pytest.mark.parametrize(("first", "chosen"), [(0, "whole"), (1, "whole"), (5, "")])
async def test_the_newest_recording_without_an_error_is_compared(first: int, chosen: str) -> None:
    seen = await loaded([NO_RESULT | row for row in RECORDINGS[first:]])
    assert seen.recording == chosen
    failed = await loaded([NO_RESULT | row for row in RECORDINGS[:3]])
    assert failed.recording == "raised", "there is no other"


async def test_only_versions_of_the_served_model_can_be_played(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("brayx.console.page.words.is_chinese", lambda: False)
    seen = await loaded([])
    for model, played in zip(seen.models, (True, False), strict=True):
        with Client(ui.page(""), request=None):
            shown = _Model(ApiCaller(httpx.AsyncClient(), ui.context.client), model.name)
            shown.show(model, seen)
        row = judged(model.versions[0], seen.standings)
        assert row.value == seen.standings["main:2"].points != 1.0, "not the older number of its tag"
        assert ("Play" in shown._actions(row)) == played
