"""Draws docs/console-*.png: a training of CartPole, a human's game, and a league, in the console's page, by a Chromium.

    python -m benchmarks.console_pictures [--chromium PATH] [--out docs] [--league DATABASE]

The training takes half a minute. The league's page shows the newest league of DATABASE, an ``mlflow.db``; without one
it is not drawn.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from brayx.errors import StartupError
from brayx.gamecore.client import Client

_START_S = 120.0
_LEARN_S = 25.0
_WIDE, _NARROW = (1280, 800), (390, 844)
_SLOW = "slow-game"
_JOB = """
recording: {kind: recording, every: 3, flush_s: 0.5}
"""


def main() -> None:
    """Draws the pictures."""
    parser = argparse.ArgumentParser(description="Screenshots of the console for the documentation.")
    parser.add_argument("--chromium", default=shutil.which("chromium"), help="the browser (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("docs"), help="folder of the pictures (default: %(default)s)")
    parser.add_argument("--league", type=Path, help="the mlflow.db of a league")
    arguments = parser.parse_args()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=arguments.chromium, args=["--no-sandbox"])
        with tempfile.TemporaryDirectory() as folder, _training(Path(folder)) as url:
            time.sleep(_LEARN_S)
            api = httpx.Client(base_url=url, timeout=240.0)
            api.get("/api/trials")
            door, over = api.get("/api/job").json()["doors"]["ws"], threading.Event()
            game = threading.Thread(target=_play_slowly, args=(door, over))
            game.start()
            recording = api.get("/api/recordings").json()["recordings"][0]["id"]
            for name, path, size, scheme in (
                ("overview", "/", _WIDE, "light"),
                ("recording", f"/recordings/{recording}", _WIDE, "light"),
                ("session", "", _NARROW, "dark"),
            ):
                _draw(browser, f"{url}{path or f'/session?id={_SLOW}'}", arguments.out, name, size, scheme)
            over.set()
            game.join()
        with tempfile.TemporaryDirectory() as folder, _serving(Path(folder)) as url:
            _draw(browser, f"{url}/play", arguments.out, "play", _NARROW, "light")
        if arguments.league is not None:
            words = ["console", "--tracking", str(arguments.league.absolute())]
            with _command(words, Path.cwd(), r"is (http://127\S+)") as url:
                _draw(browser, f"{url}/league", arguments.out, "league", _WIDE, "light")
        browser.close()


def _play_slowly(door: str, over: threading.Event) -> None:
    """Plays CartPole at ten ticks a second, which can be watched; each game is the session `_SLOW`."""
    import gymnasium

    env = gymnasium.make("CartPole-v1")
    with Client(door, timeout_s=60.0) as client:
        while not over.is_set():
            client.start(session=_SLOW)
            obs, _ = env.reset()
            reward, done = 0.0, False
            while not (done or over.wait(0.1)):
                reply = client.tick(json.dumps({"obs": obs.tolist(), "reward": reward}))
                obs, step_reward, terminated, truncated, _ = env.step(json.loads(reply)["action"])
                reward, done = float(step_reward), terminated or truncated
            client.stop(json.dumps({"obs": obs.tolist(), "reward": reward}))


def _draw(browser: Any, url: str, out: Path, name: str, size: tuple[int, int], scheme: str) -> None:
    context = browser.new_context(viewport={"width": size[0], "height": size[1]}, color_scheme=scheme)
    page = context.new_page()
    page.goto(url)
    page.wait_for_function("document.body.innerText && !document.body.innerText.includes('Loading')", timeout=120_000)
    page.wait_for_timeout(5000)
    if url.endswith("/play"):
        page.get_by_role("button", name="New game").click()
        for column in "4435":
            page.get_by_text("Your move.").wait_for()
            page.keyboard.press(column)
            page.wait_for_timeout(2000)
    if "recordings" in url:
        for _ in range(4):
            page.keyboard.press("Shift+ArrowRight")
        page.wait_for_timeout(2000)
    page.screenshot(path=out / f"console-{name}.png")
    context.close()
    print(out / f"console-{name}.png")


@contextlib.contextmanager
def _training(folder: Path) -> Iterator[str]:
    """A training of CartPole that records; gives the URL of its console."""
    templates = Path(__file__).parents[1] / "pipelines" / "templates"
    for file in (templates / "cartpole.yaml", *templates.glob("gym_*.py")):
        shutil.copy(file, folder)
    with (folder / "cartpole.yaml").open("a") as job:
        job.write(_JOB)
    free = [word for door in ("port", "native_port", "tcp_port") for word in ("--set", f"actor.{door}=0")]
    # The template's 120,000 steps end before the last picture where nothing else runs.
    endless = ["--set", "trainer.target_return=null", "--set", "trainer.num_steps=1000000"]
    words = ["train", "cartpole.yaml", *free, *endless, "--set", "console_port=0"]
    with _command(words, folder, r"the console is (http://127\S+)") as url:
        yield url


@contextlib.contextmanager
def _serving(folder: Path) -> Iterator[str]:
    """The league template's game, served untrained; gives the URL of its console."""
    for file in (Path(__file__).parents[1] / "pipelines" / "templates" / "league").iterdir():
        if file.is_file():
            shutil.copy(file, folder)
    free = [word for door in ("port", "native_port", "tcp_port") for word in ("--set", f"actor.{door}=0")]
    words = ["serve", "four.yaml", *free, "--set", "console_port=0"]
    with _command(words, folder, r"the console is (http://127\S+)") as url:
        yield url


@contextlib.contextmanager
def _command(words: list[str], folder: Path, says: str) -> Iterator[str]:
    """A command of brayx, until the context's end; gives what the group of ``says`` matches in its output."""
    log = Path(tempfile.mkstemp(prefix="brayx-console-")[1])
    with log.open("wb") as err:
        process = subprocess.Popen([sys.executable, "-m", "brayx", *words], cwd=folder, stderr=err)
    try:
        deadline = time.monotonic() + _START_S
        while (found := re.search(says, log.read_text())) is None:
            if time.monotonic() > deadline or process.poll() is not None:
                raise StartupError(f"brayx {words[0]} did not start: {log.read_text()[-2000:]}")
            time.sleep(0.2)
        yield found[1]
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60.0)
        log.unlink()


if __name__ == "__main__":
    main()
