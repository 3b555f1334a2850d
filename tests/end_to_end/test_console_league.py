"""The console's league page over a small league that was really played: it has the API's numbers."""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.end_to_end.conftest import SHOWN_MS, drawn_series, overflow
from tests.end_to_end.console_jobs import WAIT_S, Console
from tests.end_to_end.jobs import Command, brayx, setting, without_ray
from tests.league_games import Players
from tests.waiting import until

pytestmark = pytest.mark.cluster

PARTS = Path(__file__).parent / "own_league"


@pytest.fixture(scope="module")
def league(tmp_path_factory: pytest.TempPathFactory, browser: Browser) -> Iterator[Console]:
    """The console of a store with a league that was interrupted, so that its numbers stay. While it learned, the
    overview said who leads."""
    folder = tmp_path_factory.mktemp("league")
    for file in PARTS.iterdir():
        if file.is_file():
            shutil.copy(file, folder)
    options = setting("console_port=0", "trainer.num_steps=100000")
    with brayx(folder, "train", "league.yaml", *options, environment=without_ray(folder)) as training:
        training.until(training.says("the door is http://"), "the door is open")
        with Players(_found(r"the door is http(://127\.0\.0\.1:\d+)", training, "ws")):
            running = Console(_found(r"the console is (http://\S+)", training))
            until(lambda: _has_all(running.get("/api/league")), "the console shows the league while it learns", WAIT_S)
            with browser.new_context() as context:
                page = context.new_page()
                page.set_default_timeout(SHOWN_MS)
                page.goto(running.url)
                expect(page.get_by_text(re.compile(r"^(\S+ leads|No clear leader yet)$"))).to_be_visible()
                expect(
                    page.get_by_text(re.compile(r"^\S+ has \d+ points \(-?\d+ to \d+\), \d+ more than"))
                ).to_be_visible()
                expect(page.get_by_text("Return", exact=True)).to_have_count(0)
            training.process.send_signal(signal.SIGINT)
            training.until(lambda: training.process.poll() is not None, "its end")
    with brayx(folder, "console") as shown:
        shown.until(shown.says("is http://127.0.0.1:"), "it listens")
        yield Console(_found(r"is (http://127\.0\.0\.1:\d+)", shown))


def _has_all(league: Any) -> bool:
    return bool(league) and len(league["standings"]) >= 4 and bool(league["curves"].get("main"))


def _found(pattern: str, command: Command, before: str = "") -> str:
    match = re.search(pattern, command.err)
    assert match is not None, command.err
    return before + match[1]


@pytest.mark.parametrize("width", [1280, 390])
def test_the_league_page_shows_what_the_api_gives(league: Console, browser: Browser, width: int) -> None:
    state = league.get("/api/league")
    names = [row["member"] for row in state["standings"]]
    assert {"main:1", "zero"} <= set(names)
    assert any(pair["win_rate"] is not None for pair in state["payoff"])
    assert state["curves"]["main"]
    with browser.new_context(viewport={"width": width, "height": 844}) as context:
        page = context.new_page()
        page.set_default_timeout(SHOWN_MS)
        page.goto(f"{league.url}/league")
        expect(page.get_by_text(f"{state['project']} / {state['trial']}")).to_be_visible()
        expected = {
            row["member"] + (" (script)" if row["member"] == "zero" else ""): [
                str(round(row["points"])),
                f"{row['low']:.0f} to {row['high']:.0f}",
                f"{row['games']:,}",
                str(round(row["elo"])),
                "-" if row["env_steps"] is None else f"{row['env_steps']:,}",
            ]
            for row in state["standings"]
        }
        if width > 640:
            assert {cells[0].removesuffix(" ★"): cells[1:] for cells in _table(page)} == expected
        else:
            expect(page.locator(".brayx-card")).to_have_count(len(names))
            for card, (name, values) in zip(page.locator(".brayx-card").all(), expected.items(), strict=True):
                lines = card.inner_text().split("\n")
                assert all(any(line.endswith(value) for line in lines) for value in values), name
        for words in ("main learns to beat the whole league.", "exploiter learns to beat main,", "zero is a program;"):
            expect(page.get_by_text(words)).to_be_visible()
        expect(page.get_by_text(f"{state['champion']} ★", exact=True)).to_have_count(int(state["champion"] is not None))
        heat, ratings = (drawn_series(page, number) for number in range(2))
        (cells,) = heat
        rates = {(names[row], names[column]): rate for column, row, rate in cells["data"]}
        for pair in state["payoff"]:
            if pair["win_rate"] is not None:
                assert rates[pair["a"], pair["b"]] == pytest.approx(pair["win_rate"], abs=0.01)
                assert rates[pair["b"], pair["a"]] == pytest.approx(1.0 - pair["win_rate"], abs=0.01)
        drawn = {series["name"]: series["data"] for series in ratings if not series.get("stack")}
        assert drawn == {
            player: [[step, points] for step, points in curve] for player, curve in state["curves"].items()
        }
        lows = next(series["data"] for series in ratings if series.get("stack") == "main")
        assert lows == [[step, low] for step, low, _ in state["intervals"]["main"]]
        assert overflow(page) == 0


def test_a_snapshot_is_judged_by_its_leagues_gate(league: Console) -> None:
    """As a promotion in the page says it; the console's store has nothing but this league."""
    (model,) = league.get("/api/models")
    gate = league.get("/api/league/gate", version=f"models:/{model['name']}/1")
    assert gate["reason"]
    assert gate["passed"] or league.get("/api/league")["champion"] != "main:1"
    assert league.refusal("GET", "/api/league/gate", params={"version": f"models:/{model['name']}/999"})[0] == 404


def test_a_promoted_version_is_not_taken_for_the_leagues_champion(league: Console, browser: Browser) -> None:
    (model,) = league.get("/api/models")
    state = league.get("/api/league")
    labels = {row["member"] for row in state["standings"] if ":" in row["member"]} - {state["champion"]}
    chosen = min(labels)
    league.post(f"/api/models/{model['name']}/promote", {"version": int(chosen.partition(":")[2])})
    assert league.get("/api/league")["served"] == chosen
    with browser.new_context() as context:
        page = context.new_page()
        page.set_default_timeout(SHOWN_MS)
        page.goto(f"{league.url}/league")
        crowned = state["champion"] or "none yet"
        expect(page.get_by_text(f"in service: {chosen}; champion of the league: {crowned};")).to_be_visible()


def _table(page: Page) -> list[list[str]]:
    """The texts of the standings' cells."""
    expect(page.locator("tbody tr").first).to_be_visible()
    rows = page.locator("tbody tr").all()
    return [[cell.inner_text().strip() for cell in row.locator("td").all()] for row in rows]
