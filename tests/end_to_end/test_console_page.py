"""The console's page in a real browser: what each page shows, what its controls do, and a server that is lost."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Locator, Page, expect

import brayx.recording
from brayx.console.page import frame
from brayx.console.page.chinese import CHINESE
from brayx.errors import BadBody, BrayxError
from brayx.gamecore.auth import Keys, new_key
from brayx.gamecore.client import Client
from brayx.jobs.kinds import RenderConfig
from brayx.local.serving import Serving
from brayx.recording.index import SessionPart
from brayx.recording.writer import Folder
from brayx.tracking import Trial, tag
from tests.end_to_end.conftest import SHOWN_MS, drawn_series, overflow
from tests.end_to_end.console_jobs import LABELLED, PROJECT, WAIT_S, Console, Job, playing, write_code
from tests.end_to_end.jobs import FREE_PORTS, job_folder, setting
from tests.end_to_end.jobs import brayx as command
from tests.processes import ours
from tests.recorded import Tick, columns_of
from tests.waiting import until

PAGES = ("", "sessions", "recordings", "models", "league", "play", "trials")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Job, Serving, Console]]:
    code, folder = write_code(tmp_path_factory.getbasetemp() / "watched-code"), tmp_path_factory.mktemp("page")
    job = Job(folder, f"sqlite:///{folder / 'mlflow.db'}", code)
    job.add(1, "champion")
    job.add(2, "candidate")
    job.trial.log_metrics({"return/last_100_games": 3.0, "learner/loss": 0.5, "session/games": 7.0}, 10)
    job.trial.log_metrics({"session/games": 9.0, "session/ended": 2.0}, 20)
    # Of an earlier job with the same folder, with a frame, so that they would make the better picture.
    parts = [SessionPart(f"old{n}", f"old{n}", 1.0, 0, 1, end="stop", frames=1) for n in range(26)]
    Folder(str(folder / "recordings"), 10**9).write(parts, columns_of([Tick(0, 0.0, 0.0, b"", b"", {})] * 26))
    with job.served() as (serving, console):
        assert console.get("/api/models"), "MLflow, which takes long to import on a busy machine, is imported by now"
        yield job, serving, console


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page that fails the test if it loads anything from elsewhere."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.set_default_timeout(SHOWN_MS)
    elsewhere: list[str] = []

    def note(url: str) -> None:
        if not re.match(r"(http|ws)://(127\.0\.0\.1|localhost)[:/]|data:|blob:", url):
            elsewhere.append(url)

    page.on("request", lambda request: note(request.url))
    yield page
    context.close()
    assert elsewhere == [], "it works offline"


def test_the_overview_says_what_runs_and_what_is_lost(served: tuple[Job, Serving, Console], page: Page) -> None:
    _, serving, console = served
    httpx.post(f"{serving.url}/step", content=b"no json", timeout=WAIT_S)
    page.goto(console.url)
    expect(page.get_by_text(re.compile(f"^{PROJECT}, serving for .*, model acts with watched 1"))).to_be_visible()
    expect(page.get_by_text(re.compile(r"\d+ requests? refused \(bad_body\); the newest: .+"))).to_be_visible()
    expect(page.get_by_text(serving.url)).to_be_visible()
    with playing(serving.url, "counted") as tick:
        players = page.get_by_text("Players now", exact=True).locator("xpath=..").get_by_text("1", exact=True)
        until(lambda: tick(1.0) is not None and players.is_visible(), "the player is counted", WAIT_S)
    picture = page.get_by_role("link", name="Newest recording")
    expect(picture).to_be_visible()
    expect(picture).not_to_have_attribute("href", re.compile("/recordings/old"))
    page.goto(serving.url)
    expect(page.get_by_text("This job accepts this session:")).to_be_visible()
    expect(page.get_by_text("""-d '{"x": """)).to_be_visible()
    page.get_by_role("link", name=console.url).click()
    expect(page.get_by_text(f"{PROJECT}, serving for")).to_be_visible()


def test_the_documentation_has_a_line_for_every_call(served: tuple[Job, Serving, Console], page: Page) -> None:
    _, _, console = served
    page.goto(f"{console.url}/docs")
    calls = sum(len(methods) for methods in console.get("/openapi.json")["paths"].values())
    lines = page.locator("summary span")
    expect(lines).to_have_count(calls)
    assert all(line.strip() for line in lines.all_inner_texts())


def test_a_session_is_followed_while_its_game_plays(served: tuple[Job, Serving, Console], page: Page) -> None:
    _, serving, console = served
    stop, played = threading.Event(), 0

    def play() -> None:
        nonlocal played
        with playing(serving.url, "watched/1", start=LABELLED) as tick:
            while not stop.wait(0.05):
                try:
                    tick(float(played % 3) - 1.0)
                except BrayxError:
                    return
                played += 1

    game = threading.Thread(target=play)
    game.start()
    try:
        page.goto(f"{console.url}/sessions")
        page.get_by_role("cell", name="watched/1").click()
        expect(page.get_by_text("Live", exact=True)).to_be_visible()
        number = page.get_by_text("Tick", exact=True).locator("xpath=following-sibling::*")
        first = int(number.inner_text())
        until(lambda: int(number.inner_text()) >= first + 10, "the page follows", WAIT_S)
        expect(page.get_by_text(re.compile(r'\{\s*"x": -?[01]\.0\s*\}'))).to_be_visible()
        expect(page.get_by_text(re.compile(r"▸(left|right) +(50|73|27)\.\d%"))).to_be_visible()
        expect(page.get_by_text(re.compile(r"obs: height -?[01], speed 0"))).to_be_visible()
        expect(page.get_by_text(re.compile(r"model/logits: \["))).to_be_visible()
        page.get_by_role("button", name="End session").click()
        page.get_by_role("button", name="End it").click()
        expect(page.get_by_text("The session has ended: ended by hand, return 7.")).to_be_visible()
        game.join(WAIT_S)
        assert not game.is_alive(), "the game was told"
    finally:
        stop.set()
        game.join(WAIT_S)
    page.goto(f"{console.url}/session?id=nobody")
    expect(page.get_by_text("Session 'nobody' is not running.")).to_be_visible()
    page.get_by_role("link", name="Watch its recording").click()
    expect(page.get_by_label("Session or game")).to_have_value("nobody")


def test_a_promotion_changes_what_the_next_session_acts_with(served: tuple[Job, Serving, Console], page: Page) -> None:
    job, serving, console = served

    def acts_with(**more: float) -> int:
        with playing(serving.url, os.urandom(8).hex(), **more) as tick:
            return int(tick(1.0)["version"])

    page.goto(f"{console.url}/models")
    expect(page.get_by_text("0% of new sessions get the candidate of watched")).to_be_visible()
    assert acts_with() == 1
    second = version_row(page, 2)
    expect(second.get_by_text("2 ★ candidate", exact=True)).to_be_visible()
    second.get_by_role("button", name="Promote").click()
    expect(page.get_by_role("dialog")).to_contain_text("It has no result yet.")
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    expect(page.get_by_role("dialog")).to_have_count(0)  # it fades out
    expect(second.get_by_role("button", name="Promote")).to_be_visible()
    second.get_by_role("button", name="Promote").click()
    page.get_by_role("dialog").get_by_role("button", name="Promote").click()
    expect(page.get_by_text("watched version 2 is champion now; before it was version 1.")).to_be_visible()
    until(lambda: acts_with() == 2, "the next session gets it", WAIT_S)

    expect(
        page.get_by_text("Version 2 of watched is candidate and champion, so all new sessions get it.")
    ).to_be_visible()
    expect(page.get_by_role("button", name="Promote the canary")).to_be_disabled()

    page.get_by_role("button", name="Roll back to 1").click()
    expect(page.get_by_role("dialog")).to_contain_text("Now it is version 2: -.")
    page.get_by_role("dialog").get_by_role("button", name="Roll back").click()
    expect(page.get_by_text("watched version 1 is champion now; before it was version 2.")).to_be_visible()
    until(lambda: acts_with() == 1, "the next session gets the old one", WAIT_S)

    box = page.get_by_role("slider").bounding_box()
    assert box is not None
    page.mouse.click(box["x"] + box["width"] - 1, box["y"] + box["height"] / 2)
    expect(page.get_by_text("100% of new sessions get the candidate")).to_be_visible()
    page.get_by_role("button", name="Set", exact=True).click()
    expect(page.get_by_text("100% of new sessions of model get the canary")).to_be_visible()
    until(lambda: acts_with() == 2, "every session gets the canary", WAIT_S)
    for arm in ("champion", "candidate"):
        expect(page.get_by_role("cell", name=re.compile(rf"^{arm} \d")).first).to_be_visible()
    expect(page.get_by_text("Which is better shows when each has finished 20 games.")).to_be_visible()
    page.get_by_role("button", name="Promote the canary").click()
    expect(page.get_by_role("dialog")).to_contain_text("It has no result yet.")
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    for _ in range(20):
        acts_with(returned=-1000.0)
    console.post("/api/canaries/model", {"share": 0.5})
    games = {1: 0, 2: 20}

    def champion_played() -> bool:
        games[acts_with(returned=0.0)] += 1
        return games[1] >= 20

    until(champion_played, "20 sessions get the champion", WAIT_S)
    worse = page.get_by_text(re.compile("^Version 2 is worse than version 1: its return is .* lower. End the canary"))
    expect(worse).to_have_class(re.compile("text-amber"))
    overview = page.context.new_page()
    overview.goto(console.url)
    expect(overview.get_by_text("The canary is worse than the champion")).to_be_visible()
    expect(overview.get_by_role("row", name=re.compile(r"^candidate 2 -\S+ ± \S+ \d\d "))).to_be_visible()
    page.get_by_role("button", name="End the canary").click()
    page.get_by_role("dialog").get_by_role("button", name="End the canary").click()
    expect(overview.get_by_text("The canary is worse than the champion")).to_be_hidden()
    overview.close()
    expect(page.get_by_text(re.compile(r"^Version 2 is worse than version 1: .* lower\.$"))).to_be_visible()
    expect(page.get_by_text("0% of new sessions of model get the canary.", exact=True)).to_be_visible()
    until(lambda: acts_with() == 1, "no session gets it any more", WAIT_S)

    for version, mean in ((1, "3.2"), (2, "3.5")):  # 0.3 is more than 1.96 √(0.1² + 0.1²), as no terminal counts
        tags = {"return": mean, "return_error": "0.1", "return_games": "100"}
        tag(PROJECT, version, tags, job.uri)
    expect(second).to_contain_text("+0.3, within chance")
    second.get_by_role("button", name="Promote", exact=True).click()
    expect(page.get_by_role("dialog")).to_contain_text("The difference is within chance.")
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    page.goto(console.url)
    expect(page.get_by_text("+0.3, within chance against the champion")).to_be_visible()


def version_row(page: Page, version: int) -> Locator:
    """The row of a registered version."""
    return page.get_by_role("row", name=re.compile(f"^{version} "))


def test_a_recording_is_scrubbed_by_the_keyboard(served: tuple[Job, Serving, Console], page: Page) -> None:
    _, serving, console = served
    stop = b'{"x": 300.0, "reward": -1, "terminated": true, "north": {"obs": {"obs": [1, 2]}, "won": true}}'
    with playing(serving.url, "recorded", stop, LABELLED) as tick:
        for x in range(300):  # more than the page loads at once
            tick(float(x))
    page.goto(f"{console.url}/recordings")
    row = page.get_by_role("cell", name="recorded", exact=True)
    expect(row).to_be_visible()
    sorts = page.get_by_role("columnheader", name="Return")
    expect(sorts).not_to_have_class(re.compile("sortable"))  # it would sort only this page of the list
    page.get_by_label("Session or game").fill("old*")
    expect(row).to_be_hidden()
    page.get_by_role("button", name="2", exact=True).click()
    oldest = page.get_by_role("row", name=re.compile("^old"))
    expect(oldest).to_have_count(1)  # of 26
    oldest.get_by_role("link").first.click()
    expect(page.get_by_text("1 tick, end: stopped by the game")).to_be_visible()
    page.go_back()
    expect(oldest).to_have_count(1)
    expect(page.get_by_label("Session or game")).to_have_value("old*")
    page.get_by_label("Session or game").fill("bot-*")
    expect(page.get_by_text(re.compile("^No recording matches"))).to_be_visible()
    expect(row).to_be_hidden()
    page.get_by_label("Session or game").fill("rec*")
    line = page.get_by_role("row", name=re.compile("^recorded "))
    expect(sorts).to_have_class(re.compile("sortable"))
    expect(line).to_have_text(re.compile(r"300\s*terminated\s*7\s*champion 1\s*a regular sample"))
    for version, is_shown in (("weights 1", False), ("champion 1", True)):
        page.get_by_label("Played by").fill(version)
        expect(row).to_be_visible(visible=is_shown)
    page.get_by_label("Session or game").fill("")
    line.get_by_role("link").focus()
    focused = line.get_by_role("link").element_handle()
    with playing(serving.url, "newer") as tick:
        tick(0.0)
    expect(page.get_by_role("cell", name="newer", exact=True)).to_be_visible()
    assert focused.evaluate("each => each === document.activeElement && each.innerText") == "recorded", "it stays"
    for end, is_shown in (("truncated", False), ("terminated", True)):
        page.get_by_role("combobox", name="End").click()
        page.get_by_role("option", name=end, exact=True).click()
        expect(row).to_be_visible(visible=is_shown)
    line.get_by_role("cell", name="a regular sample").click(force=True)  # its row's link covers it
    number = page.get_by_text("Tick", exact=True).locator("xpath=following-sibling::*")
    expect(number).to_have_text("0")
    expect(page.get_by_text("300 ticks, end: terminated, return 7")).to_be_visible()
    page.get_by_text("Start and its reply").click()
    expect(page.get_by_text("→ Game Started")).to_be_visible()
    expect(page.get_by_text(re.compile("^No pictures: set `frames`"))).to_be_visible()
    for key, shown, x in (
        ("ArrowRight", "1", 1),
        ("Shift+ArrowRight", "11", 11),
        ("PageDown", "111", 111),
        ("End", "End", 300),
        ("ArrowLeft", "299", 299),
    ):
        page.keyboard.press(key)
        expect(number).to_have_text(shown)
        expect(page.get_by_text(re.compile(rf'"x": {x}\.0'))).to_be_visible()
    assert page.evaluate("document.scrollingElement.scrollHeight > innerHeight && scrollY === 0"), "it did not scroll"
    page.keyboard.press("End")
    for value in ("terminated: true", "north/obs: height 1, speed 2", "north/won: true"):
        expect(page.get_by_text(value)).to_be_visible()
    with page.expect_download() as download:
        page.get_by_role("link", name="Parquet").click()
    (episode,) = brayx.recording.open(str(download.value.path()))
    assert (episode.session, len(episode)) == ("recorded", 300)
    assert download.value.suggested_filename == f"recorded-{episode.id[:8]}.parquet"
    expect(page.get_by_role("link", name="MP4")).to_be_hidden()
    page.keyboard.press("Home")
    expect(number).to_have_text("0")
    page.keyboard.press(" ")
    until(lambda: int(number.inner_text()) >= 5, "it plays", WAIT_S)
    page.go_back()
    expect(page.get_by_label("Played by")).to_have_value("champion 1")
    expect(page.get_by_role("combobox", name="End")).to_have_value("terminated")
    expect(page.get_by_role("cell", name="newer", exact=True)).to_be_hidden()
    expect(row).to_be_visible()
    page.goto(f"{console.url}/recordings/none")
    expect(page.get_by_text(re.compile("There is no recording 'none' in"))).to_be_visible()


def test_a_recording_of_a_refused_game_opens_at_its_end(served: tuple[Job, Serving, Console], page: Page) -> None:
    _, serving, console = served
    with Client(serving.urls["ws"], timeout_s=WAIT_S) as client:
        client.start(b"", session="refused")
        for body in (b'{"x": 1.0}', b'{"x": 2.0}'):
            client.tick(body)
        with pytest.raises(BadBody):
            client.tick(b"no json")
        client.close()  # without a stop, as a game that the error ends
    page.goto(f"{console.url}/recordings")
    row = page.get_by_role("row", name=re.compile("^refused "))
    expect(row).to_contain_text("refused, so the game left")
    row.get_by_role("link").click()
    expect(page.get_by_text("Tick", exact=True).locator("xpath=following-sibling::*")).to_have_text("2")
    expect(page.get_by_text("3 ticks, end: refused, so the game left")).to_be_visible()


def test_a_recordings_frames_are_scrubbed(served: tuple[Job, Serving, Console], page: Page) -> None:
    _, serving, console = served
    with playing(serving.url, "pictured", side=64) as tick:
        for x in range(20):
            tick(float(x))
    page.goto(f"{console.url}/recordings")
    page.get_by_role("cell", name="pictured", exact=True).click()
    for key, tick_at in ((None, 0), ("ArrowRight", 1), ("Shift+ArrowRight", 11), ("End", 19), ("Home", 0)):
        if key is not None:
            page.keyboard.press(key)
        until(
            lambda tick=tick_at: abs(grey(page) - 10 * tick) <= 3,
            "its frame is shown",
            WAIT_S,
        )


def grey(page: Page) -> int:
    """The brightness of the frame that is shown."""
    script = """(image) => {
        const canvas = document.createElement("canvas");
        canvas.getContext("2d").drawImage(image, 0, 0);
        return canvas.getContext("2d").getImageData(5, 5, 1, 1).data[0];
    }"""
    return page.locator("img.q-img__image").last.evaluate(script)


def test_a_render_draws_a_session_that_is_followed(
    tmp_path: Path, tracking_db: str, tmp_path_factory: pytest.TempPathFactory, page: Page
) -> None:
    job = Job(tmp_path, tracking_db, write_code(tmp_path_factory.getbasetemp() / "watched-code"))
    assert job.job.recording is not None
    recording = job.job.recording.model_copy(update={"frames": "picture"})
    renders = {"picture": RenderConfig(module="watched_agent", func="draw")}
    job.job = job.job.model_copy(update={"recordings": {"recording": recording}, "renders": renders})
    with job.served() as (serving, console), playing(serving.url, "drawn") as tick:
        tick(0.0)
        assert not ours("brayx.recording.live_frames"), "nobody watches"
        page.goto(f"{console.url}/session?id=drawn")
        expect(page.get_by_text("Waiting for its next tick …")).to_be_visible()
        until(lambda: console.get("/api/sessions")[0]["followed"], "it is followed", WAIT_S)
        page.set_viewport_size({"width": 390, "height": 844})
        for x in (1.0, 2.0):
            tick(x)
            until(lambda x=x: grey(page) == 10 * x, "its frame is shown", WAIT_S)
        assert overflow(page) == 0
        page.goto("about:blank")
        until(lambda: not ours("brayx.recording.live_frames"), "it ends when nobody watches", WAIT_S)


def test_a_recording_is_compared_with_another_version(served: tuple[Job, Serving, Console], page: Page) -> None:
    job, serving, console = served
    job.add(3, None, -1.0)  # acts otherwise wherever x is not 0
    name = job.add_of_two(4, 1.0)
    with playing(serving.url, "compared", start=LABELLED) as tick:
        for x in range(20):
            tick(float(x % 10))
    page.goto(f"{console.url}/recordings")
    page.get_by_role("cell", name="compared", exact=True).click()
    number = page.get_by_text("Tick", exact=True).locator("xpath=following-sibling::*")
    expect(number).to_have_text("0")
    page.get_by_role("combobox", name="Curves").click()
    page.get_by_role("option", name="height", exact=True).click()
    page.keyboard.press("Escape")
    until(lambda: "height" in {curve["name"] for curve in drawn_series(page, 0)}, "an observation is drawn", WAIT_S)
    page.get_by_role("combobox", name="model").click()
    page.get_by_role("option", name=name, exact=True).click()
    page.get_by_role("button", name="Compare").click()
    expect(page.get_by_text(f"{name} 1 against the recording, 20 ticks.")).to_be_visible()
    expect(page.get_by_text("Equal actions", exact=True).locator("xpath=following-sibling::*")).to_have_text("100.0%")
    page.get_by_role("combobox", name="model").click()
    page.get_by_role("option", name=PROJECT, exact=True).click()
    page.get_by_role("combobox", name="version").click()
    page.get_by_role("option", name="watched 3", exact=True).click()
    page.get_by_role("button", name="Compare").click()
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    expect(page.get_by_text("watched 3 against the recording, 20 ticks.")).to_be_visible()
    expect(page.get_by_text("It would have chosen differently in 90% of the ticks.")).to_be_visible()
    expect(page.get_by_text("The recorded actions were sampled")).to_be_hidden()
    expect(page.get_by_text("Equal actions", exact=True).locator("xpath=following-sibling::*")).to_have_text("10.0%")
    expect(page.get_by_text("watched 3: action left, value 0")).to_be_visible()
    expect(page.locator(".nicegui-echart canvas:visible")).to_have_count(3)
    page.get_by_role("button", name="tick 1", exact=True).click()
    expect(number).to_have_text("1")
    expect(page.get_by_text("watched 3: action right, value 1")).to_be_visible()
    expect(page.get_by_text(re.compile(r"another action; difference \(KL\) 0.46"))).to_be_visible()
    page.keyboard.press("End")
    expect(page.get_by_text("watched 3: action right, value 9")).to_be_visible()
    page.set_viewport_size({"width": 390, "height": 844})
    assert overflow(page) == 0
    expect(page.get_by_text(re.compile(r"▸right 100\.0%"))).to_be_visible()
    page.set_viewport_size({"width": 1280, "height": 844})
    tag(PROJECT, 3, {"rating": "9", "rating_games": "20"}, job.uri)
    page.goto(f"{console.url}/models")
    version_row(page, 3).get_by_role("link", name="Compare").click()
    expect(page.get_by_text(re.compile(r"^watched 3 against watched 1, \d+ ticks\.$"))).to_be_visible()
    expect(page.get_by_text("Version 3: return 9 of 20 games.")).to_contain_text("Version 1: ")


def test_trials_and_an_empty_league(served: tuple[Job, Serving, Console], page: Page) -> None:
    _, _, console = served
    page.goto(f"{console.url}/trials")
    page.get_by_label("Search").fill("nothing")
    expect(page.get_by_role("link", name="t", exact=True)).to_be_hidden()
    page.get_by_label("Search").fill(f"{PROJECT} running")
    expect(page.get_by_role("button", name="Compare")).to_be_disabled()
    page.get_by_role("link", name="t", exact=True).click()
    expect(page.get_by_text(f"{PROJECT} / t: running")).to_be_visible()
    charts = page.locator(".nicegui-echart canvas:visible")
    expect(charts).to_have_count(2)
    page.get_by_text("Games and sessions", exact=True).click()
    expect(charts).to_have_count(3)  # of the two in the group, one is a straight line
    page.get_by_text("Games and sessions", exact=True).click()
    expect(charts).to_have_count(2)
    page.get_by_text("Settings", exact=True).click()
    expect(page.get_by_text("None.", exact=True)).to_be_visible()
    expect(page.get_by_role("button", name="Stop training")).to_be_hidden()
    page.goto(f"{console.url}/league")
    expect(page.get_by_text("There is no league in this store.")).to_be_visible()


def test_trials_are_compared_in_one_chart(served: tuple[Job, Serving, Console], page: Page) -> None:
    job, _, console = served
    for name, rate in (("fast", 0.1), ("slow", 0.01)):
        trial = Trial.open("compared", name, job.uri)
        trial.log_params({"trainer": {"learning_rate": rate, "gamma": 0.9}})
        for step in (10, 20):
            trial.log_metrics({"return/last_100_games": rate * step}, step)
        trial.finish()
    page.goto(f"{console.url}/trials")
    for name in ("fast", "slow"):
        page.get_by_role("row", name=re.compile(f"^{name} ")).get_by_role("checkbox").click()
    page.get_by_role("button", name="Compare").click()
    expect(page.get_by_role("cell", name="trainer.learning_rate")).to_be_visible()
    for text in ("0.1", "0.01"):
        expect(page.get_by_role("cell", name=text, exact=True)).to_be_visible()
    expect(page.get_by_role("cell", name="trainer.gamma")).to_have_count(0)
    expect(page.locator(".nicegui-echart canvas:visible")).to_have_count(1)


def test_help_opens_the_guide_of_a_page(served: tuple[Job, Serving, Console], page: Page, browser: Browser) -> None:
    _, serving, console = served
    page.goto(f"{console.url}/play")
    expect(page.get_by_text("Play in the game itself")).to_contain_text(serving.url)
    page.get_by_role("link", name="Help").click()
    expect(page.get_by_role("heading", name="Play against a version")).to_be_in_viewport()
    page.get_by_role("link", name="recordings", exact=True).click()
    expect(page).to_have_url(re.compile(r"/help/guide-recordings\.md"))
    assert page.goto(f"{console.url}/help/cartpole.png").headers["content-type"] == "image/png"
    for path in ("none.md", "../README.md", "%2e%2e/pyproject.toml"):
        page.goto(f"{console.url}/help/{path}")
        expect(page).to_have_title("Page not found - brayx console")
    with browser.new_context(locale="zh-CN", viewport={"width": 390, "height": 844}) as context:
        chinese = context.new_page()
        chinese.goto(f"{console.url}/models")
        chinese.get_by_role("link", name="帮助").click()
        expect(chinese.get_by_role("heading", name="从冠军到玩家")).to_be_visible()
        assert overflow(chinese) == 0


def test_an_unknown_page_says_so(served: tuple[Job, Serving, Console], page: Page) -> None:
    _, _, console = served
    reply = page.goto(f"{console.url}/trails/<b>")
    assert reply is not None
    assert reply.status == 404
    expect(page).to_have_title("Page not found - brayx console")
    expect(page.get_by_text("The console has no page /trails/<b>.")).to_be_visible()
    page.get_by_role("link", name="Go to the overview").click()
    expect(page.get_by_text(re.compile(f"^{PROJECT}, serving for"))).to_be_visible()


def contrast(*colours: str) -> float:
    """Contrast ratio of two colours such as ``rgb(0, 114, 178)``, by WCAG 2; a transparent one counts as white."""
    luminances = []
    for colour in colours:
        *parts, alpha = [float(part) for part in re.findall(r"[\d.]+", colour)] + ([] if "rgba" in colour else [1.0])
        shares = [part / 255 if alpha else 1.0 for part in parts]
        linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
        luminances.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
    low, high = sorted(luminances)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize(("width", "scheme", "locale"), [(1280, "light", "en-US"), (390, "dark", "zh-CN")])
def test_pages_fit_the_screen_in_light_and_dark_and_in_each_language(
    served: tuple[Job, Serving, Console], browser: Browser, width: int, scheme: Any, locale: str
) -> None:
    _, _, console = served
    texts = CHINESE if locale == "zh-CN" else {text: text for text in CHINESE}
    context = browser.new_context(viewport={"width": width, "height": 844}, color_scheme=scheme, locale=locale)
    page = context.new_page()
    page.set_default_timeout(SHOWN_MS)
    for name in PAGES:
        page.goto(f"{console.url}/{name}")
        expect(page.get_by_text(texts["Loading …"])).to_have_count(0)
        expect(page.locator("html")).to_have_attribute("lang", locale)
        assert overflow(page) == 0, f"{name or 'overview'} is wider than {width} pixels"
        if not name:
            expect(page.get_by_text(re.compile(f"^{PROJECT}, "))).to_have_css("word-break", "normal")
        assert page.evaluate("document.body.classList.contains('body--dark')") == (scheme == "dark")
        if locale == "zh-CN":
            shown = page.locator("body").inner_text()
            assert [text for text in CHINESE if len(text) > 8 and text in shown] == []
        expect(page.locator("[aria-current=page]")).to_be_in_viewport(ratio=1.0)
        for other in frame.PAGES:
            expect(page.get_by_role("link", name=texts[other]).first).to_be_in_viewport(ratio=1.0)
        if name == "models":
            text = page.get_by_role("button", name=texts["Promote"]).first.evaluate(
                "each => getComputedStyle(each).color"
            )
            background = page.locator("body").evaluate("each => getComputedStyle(each).backgroundColor")
            assert contrast(text, background) > 4.5, f"{text} on {background}"
            page.get_by_role("button", name=texts["Promote"], exact=True).first.click()
            page.get_by_role("dialog").get_by_role("button", name=texts["Cancel"]).click()
            expect(page.get_by_role("dialog")).to_have_count(0)
    page.get_by_role("button", name=texts["light or dark"]).click()
    expect(page.locator("body")).to_have_class(re.compile("body--light" if scheme == "dark" else "body--dark"))
    page.reload()
    expect(page.locator("body")).to_have_class(re.compile("body--light" if scheme == "dark" else "body--dark"))
    context.close()


def test_a_reader_sees_and_cannot_control_and_a_lost_job_is_told(
    tmp_path: Path, tracking_db: str, tmp_path_factory: pytest.TempPathFactory, browser: Browser
) -> None:
    """Through `brayx console URL`, whose page goes on when the job is gone."""
    file = tmp_path / "keys.txt"
    key = new_key(file, "eve", "read")
    job = Job(tmp_path, tracking_db, write_code(tmp_path_factory.getbasetemp() / "watched-code"))
    job.add(1, "champion")
    job.add(2, None)
    job.job = job.job.model_copy(update={"console_keys_file": str(file)})
    secret = Keys.load(file).secret(key).decode()
    credentials: Any = {"username": key, "password": secret}
    with browser.new_context(http_credentials=credentials) as direct, job.served() as (serving, console):
        page = direct.new_page()
        page.set_default_timeout(SHOWN_MS)
        page.goto(f"{console.url}/models")
        version_row(page, 2).get_by_role("button", name="Promote").click()
        page.get_by_role("dialog").get_by_role("button", name="Promote").click()
        expect(page.get_by_text("This key may read only: control calls need a key of scope control.")).to_be_visible()
        (tmp_path / "recordings").mkdir()
        (tmp_path / "recordings" / "broken.parquet").write_bytes(b"no Parquet")
        page.goto(f"{console.url}/recordings")
        expect(page.get_by_text(re.compile(r"^0 in .*; 1 files cannot be read: .*broken\.parquet"))).to_be_visible()
        expect(page.get_by_text("Nothing is recorded yet.")).to_be_hidden()

        words = ["console", console.url, "--keys-file", str(file), "--key", key]
        with command(tmp_path, *words) as remote:
            remote.until(remote.says("is http://127.0.0.1:"), "it listens")
            url = re.findall(r"is (http://127\.0\.0\.1:\d+)", remote.err)[-1]
            page.goto(url)
            expect(page.get_by_text(re.compile(f"^{PROJECT}, serving for"))).to_be_visible()
            console.http.close()
            followed = direct.new_page()
            followed.goto(f"{url}/session?id=left")
            expect(followed.get_by_text("Session 'left' is not running.")).to_be_visible()
            with playing(serving.url, "left") as tick:
                followed.reload()
                expect(followed.get_by_text("Waiting for its next tick …")).to_be_visible()
                until(lambda: (tick(1.0), followed.get_by_text("Live", exact=True).count())[1], "it is live", WAIT_S)
                _lose(job, page, followed)
                until(lambda: (tick(1.0), followed.get_by_text("Live", exact=True).count())[1], "it goes on", WAIT_S)
            until(lambda: [*tmp_path.glob("recordings/[0-9]*.parquet")], "it is recorded", WAIT_S)
            (left,) = brayx.recording.open(str(tmp_path / "recordings"))
            file = httpx.get(f"{url}/api/recordings/{left.id}/file", timeout=WAIT_S)
            assert file.headers["content-disposition"].startswith('attachment; filename="left-')
            assert file.content.startswith(b"PAR1")
            refused = httpx.get(f"{url}/api/recordings/none/file", timeout=WAIT_S)
            assert (refused.status_code, refused.json()["error"]) == (404, "recording_unknown")
            remote.control_c(group=False)
            assert remote.ended() == 0
            expect(page.get_by_text(re.compile("^The job has ended, or its console cannot be reached"))).to_be_visible()
            assert "Traceback" not in remote.err


def _lose(job: Job, page: Page, followed: Page) -> None:
    """The console's process is stopped for a while, as when the job is gone."""
    (process,) = ours("brayx.console.serve", job.uri)
    process.suspend()
    try:
        alert = page.get_by_role("alert").first
        expect(alert).to_contain_text(re.compile(r"The job's console at http://\S+ does not answer"))
        expect(alert).to_contain_text("Below is its last answer, of")
        expect(followed.get_by_text(re.compile("does not answer: .* Below is its last answer"))).to_be_visible()
    finally:
        process.resume()


@pytest.mark.cluster
@pytest.mark.parametrize("finishes", [False, True])
def test_a_training_says_how_it_has_ended(tmp_path: Path, browser: Browser, finishes: bool) -> None:
    job_folder(tmp_path)
    endless = ("trainer.num_steps=1000000", "trainer.target_return=null", "trainer.target_games=1")
    options = setting(*FREE_PORTS, "console_port=0", *endless)
    with command(tmp_path, "train", "cartpole.yaml", *options) as training, browser.new_context() as context:
        training.until(training.says("plays at tcp://"), "games play")
        match = re.search(r"the console is (http://\S+)", training.err)
        assert match is not None
        console, page = Console(match[1]), context.new_page()
        page.set_default_timeout(SHOWN_MS)
        until(lambda: any(trial["can_stop"] for trial in console.get("/api/trials")), "MLflow has the trial", WAIT_S)
        trial = context.new_page()
        trial.set_default_timeout(SHOWN_MS)
        trial.goto(f"{console.url}/trials")
        trial.get_by_role("link", name="main", exact=True).click()
        expect(trial.get_by_role("button", name="Stop training")).to_be_visible()
        until(lambda: console.get("/api/job")["numbers"].get("updates", 0) > 1, "it learns", WAIT_S)
        page.goto(console.url)
        said = re.compile(r"The best version is that after [\d,]+ env steps, with a return|No checkpoint has a return")

        def says() -> bool:
            """Whether the dialog names the version; it opens without it if MLflow takes longer than the page waits."""
            page.get_by_role("button", name="Stop training").click()
            expect(page.get_by_role("button", name="Finish: register the best version")).to_be_visible()
            if said.search(page.get_by_role("dialog").inner_text()):
                return True
            page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
            expect(page.get_by_role("dialog")).to_have_count(0)
            return False

        until(says, "the dialog names the version", WAIT_S)
        verb = "Finish: register the best version" if finishes else "Stop it"
        page.get_by_role("dialog").get_by_role("button", name=verb).click()
        expect(page.locator("body")).to_have_class(re.compile("brayx-told"))
        words = "champion: cartpole version 1" if finishes else "interrupted, so no version is registered"
        expect(page.locator("#popup")).to_contain_text(words)
        if finishes:  # after Ctrl-C a slow MLflow may leave no time for the verdict
            verdict = page.get_by_role("status")
            expect(verdict.get_by_text("It has finished", exact=True)).to_be_visible()
            expect(verdict).to_contain_text(words)
            expect(verdict).to_contain_text("ended from the console: mean return")
            expect(verdict.get_by_role("progressbar")).to_have_attribute("aria-valuenow", "1")
            expect(verdict.get_by_role("button", name="Stop training")).to_be_hidden()
        expect(trial.get_by_text("cartpole / main: ended")).to_be_visible()
        expect(trial.locator("#popup")).to_contain_text(words)
        assert training.ended() == (0 if finishes else 130)
        assert words in training.out
