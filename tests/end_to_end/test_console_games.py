"""A human plays the league template's game in the console: by the API, and in a browser by the keyboard at 390 px."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser, Page, expect

from brayx.components import load
from brayx.console.games import HumanGame
from brayx.engines.base import save_weights
from brayx.engines.torch import module_weights
from brayx.errors import AgentError, ConfigError
from brayx.jobs.config import JobConfig
from brayx.jobs.shipped import TEMPLATES
from brayx.local.serving import Serving
from brayx.tracking import Trial
from brayx.tracking.registry import register_files
from tests.end_to_end.conftest import SHOWN_MS, overflow
from tests.end_to_end.console_jobs import WAIT_S, Console
from tests.waiting import until

FOLDER = TEMPLATES / "league"
LEVELS = """
model: PROJECT
levels:
  easy: {player: main, version: 1, temperature: 1.0, delay: 0, points: 700.0, low: 690.0, high: 710.0, games: 400}
  hard: {player: main, version: 2, temperature: 1.0, delay: 0, points: 900.0, low: 890.0, high: 910.0, games: 400}
"""
EMPTY = {"text": "", "colour": "", "label": ""}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Serving, Console]]:
    """The template's job with two untrained versions."""
    folder, lines = tmp_path_factory.mktemp("four"), list[str]()
    uri = f"sqlite:///{folder / 'mlflow.db'}"
    free = ["console_port=0", "actor.port=0", "actor.native_port=0", "actor.tcp_port=0"]
    recorded = ["recording.kind=recording", f"recording.folder={folder / 'recordings'}", "recording.flush_s=0.2"]
    job = JobConfig.load(FOLDER / "four.yaml", [*free, *recorded, f"league.levels={folder / 'levels.yaml'}"])
    (folder / "levels.yaml").write_text(LEVELS.replace("PROJECT", job.project))
    module, _ = load("four_model", "build_model", str(FOLDER))("model", job.as_dict())
    trial = Trial.open(job.project, "main", uri)
    for version in (1, 2):
        files = folder / f"version-{version}"
        files.mkdir()
        save_weights(files / "weights.npz", module_weights(module))
        register_files(trial, files, job.project, version, tags={})
    with Serving(job, uri) as serving, serving.console(lines.append):
        yield serving, Console(lines[-1].rpartition(" ")[2])


def marks(game: Any) -> int:
    return sum(cell != EMPTY for row in game["board"]["rows"] for cell in row)


def test_a_human_plays_a_requested_version_to_the_end(served: tuple[Serving, Console]) -> None:
    _, console = served
    opponents = console.get("/api/opponents")
    assert (opponents["why_not"], opponents["think_s"]) == ("", 60.0)
    assert [opponents["model"]] == [model["name"] for model in console.get("/api/models")]
    levels = {"level easy": {"level": "easy"}, "level hard": {"level": "hard"}}
    assert opponents["opponents"] == {**levels, "version 2": {"version": 2}, "version 1": {"version": 1}}
    game = console.post("/api/games", {"opponent": {"level": "easy"}})
    assert (game["opponent"]["level"], game["opponent"]["version"]) == ("easy", 1)
    console.http.delete(f"/api/games/{game['game']}")
    game = console.post("/api/games", {"opponent": {"version": 2}})
    assert (game["opponent"]["version"], game["over"]) == (2, False)
    assert marks(game) in (0, 1), "either may begin"
    assert [move["label"] for move in game["board"]["moves"]] == [f"column {column}" for column in range(1, 8)]
    path = f"/api/games/{game['game']}/moves"
    for wrong in (7, "1", None, [0], False):
        assert console.refusal("POST", path, json={"move": wrong}) == (400, "bad_request")
    (session,) = [row["session"] for row in console.get("/api/sessions")]
    assert session == f"{game['game']}-agent-red"
    assert game["sessions"] == [session]
    while not game["over"]:
        before = marks(game)
        game = console.post(path, {"move": game["board"]["moves"][0]["move"]})
        assert game["over"] or marks(game) == before + 2
    assert game["board"]["moves"] == []
    assert game["board"]["result"] in ("win", "draw", "loss")
    assert len(game["board"]["line"]) == (0 if game["board"]["result"] == "draw" else 4)
    assert console.get("/api/sessions") == [], "the game told its session how it ended"
    assert console.refusal("POST", path, json={"move": 0}) == (404, "session_unknown")


def test_games_are_given_up_and_lost_and_refused(served: tuple[Serving, Console]) -> None:
    _, console = served
    game = console.post("/api/games", {})
    assert console.http.delete(f"/api/games/{game['game']}").status_code == 200
    assert console.get("/api/sessions") == []
    game = console.post("/api/games", {})
    console.http.delete("/api/sessions", params={"session": f"{game['game']}-agent-red"})
    path = f"/api/games/{game['game']}/moves"
    assert console.refusal("POST", path, json={"move": 3}) == (410, "session_lost")
    assert console.refusal("POST", path, json={"move": 3}) == (404, "session_unknown")
    assert console.refusal("POST", "/api/games", json={"opponent": {"version": 9}}) == (404, "version_unknown")
    assert console.refusal("POST", "/api/games/other/moves", json={"move": 3}) == (404, "session_unknown")


def test_a_board_that_is_wrong_is_a_typed_error() -> None:
    def game(*steps: Any, error: type[BaseException] | None = None) -> HumanGame:
        def board(_: Any) -> Any:
            yield from steps
            if error is not None:
                raise error("as it does")

        return HumanGame(board, None, lambda: pytest.fail("nothing is started"))

    for steps, said in (
        ([("ask", "", {"rows": "none"})], "the board is not one: rows"),
        (
            [("ask", "", {"rows": [[{}]], "moves": [{"move": 1, "label": "a", "at": [1, 0]}]})],
            r"at \[1, 0\], where there is no cell",
        ),
        ([("tick", "red", {})], "asked for 'tick' of 'red'"),
        ([], "the board is not one"),
        ([("ask", "", {"rows": [], "moves": [{"move": np.int64(1), "label": "a"}]})], "the board is not JSON: .*int64"),
    ):
        with pytest.raises(ConfigError, match=said):
            game(*steps).begin()
    for error in (ValueError, SystemExit):
        with pytest.raises(AgentError, match="as it does"):
            game(error=error).begin()


def test_a_human_plays_in_the_page_by_keyboard_and_touch(served: tuple[Serving, Console], browser: Browser) -> None:
    _, console = served
    with browser.new_context(viewport={"width": 390, "height": 844}, color_scheme="dark") as context:
        page = context.new_page()
        page.set_default_timeout(SHOWN_MS)
        page.goto(f"{console.url}/play")
        page.get_by_role("combobox", name="opponent").click()
        page.get_by_role("option", name="version 1", exact=True).click()
        page.get_by_role("button", name="New game").click()
        expect(page.get_by_text("Your move.")).to_be_visible()
        expect(page.get_by_text("You play yellow. Your opponent: version 1.")).to_be_visible()
        expect(page.get_by_role("button", name="New game")).to_be_hidden()  # it would drop the game that runs
        assert overflow(page) == 0
        assert stones(page) <= 1
        page.keyboard.press("4")
        until(lambda: stones(page) >= 2, "the agent has answered", WAIT_S)
        expect(page.get_by_text("Your move.")).to_be_visible()
        page.get_by_role("button", name="play column 1").click()
        expect(page.get_by_text("What the agent is thinking")).to_be_visible()
        expect(page.get_by_text(re.compile(r"▸column [1-7] +\d+\.\d%"))).to_be_visible()
        until(lambda: stones(page) >= 4, "the agent has answered", WAIT_S)
        expect(page.get_by_text("Your move.")).to_be_visible()
        page.get_by_role("button", name="Give up").click()
        expect(page.get_by_text("Given up.")).to_be_visible()

        page.get_by_role("button", name="Play again").click()
        ends = page.get_by_text(re.compile(r"^(You win|You lose|A draw)\.$"))
        while not ends.is_visible():
            expect(page.get_by_text("Your move.").or_(ends)).to_be_visible()
            page.keyboard.press("1")  # the first column with room
        expect(page.get_by_role("button", name="Play again")).to_be_enabled()
        expect(page.get_by_role("button", name="play column")).to_have_count(0)

        def finished() -> list[str]:
            listed = console.get("/api/recordings", end="stop")["recordings"]
            return [recording["id"] for recording in listed if recording["result"] is not None]

        until(finished, "it is recorded", WAIT_S)
        page.goto(f"{console.url}/recordings/{finished()[0]}")
        expect(page.get_by_role("group", name="board")).to_be_visible()
        first = stones(page)
        page.keyboard.press("End")
        until(lambda: stones(page) > first, "the board of the stop is drawn", WAIT_S)
        expect(
            page.get_by_text(re.compile(r"^The agent plays red\. (The agent (wins|loses)|A draw)\.$"))
        ).to_be_visible()
        assert overflow(page) == 0


def stones(page: Page) -> int:
    return page.get_by_role("group", name="board").get_by_text("●").count()
