"""The cost of the console: ticks/s of the local host without a console, with one that nobody visits, and with viewers.

    python -m benchmarks.console
    python -m benchmarks.console --paint            # instead: when a Chromium shows each page, with 2,000 recordings
    python -m benchmarks.console --pictures docs    # draws the console's page, by a Chromium, instead

CartPole's agent and its model answer behind the TCP door, in a process for each case. A viewer follows one session over
server-sent events, as the page does. Rounds interleave the cases. CPU is that of the serving process alone; the
console's own process has its own column.

The training of the pictures takes half a minute. The league's page shows the newest league of ``--league``, an
``mlflow.db``; without one it is not drawn.
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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks import tables
from benchmarks.servers import TEMPLATE, Cost, cost, cost_cells, load_generator, service, tell_and_wait
from benchmarks.tables import Table, machine, median, show
from brayx.errors import StartupError
from brayx.gamecore.client import Client
from brayx.recording.index import SessionPart
from brayx.recording.writer import Folder
from tests.recorded import Tick, columns_of

NONE = "no console"
CASES = {NONE: 0, "console, no viewer": 0, "3 viewers": 3}
_TIMEOUT_S = 60.0
_BEGIN_S = 120.0
_LEARN_S = 25.0
_WIDE, _NARROW = (1280, 800), (390, 844)
_SLOW = "slow-game"
_LOADED = "document.body.innerText && !/Loading|载入中/.test(document.body.innerText)"
_RECORDINGS = 2000
_JOB = """
recording: {kind: recording, every: 3, flush_s: 0.5}
"""


def serve(with_console: bool) -> None:
    """Serves until standard input ends; a console's URL is the last word of a line."""
    from brayx.jobs.config import JobConfig
    from brayx.local.serving import Serving

    job = JobConfig.load(
        str(TEMPLATE),
        ["actor.port=0", "actor.native_port=null", "actor.tcp_port=0", "console_port=0"],
    )
    with tempfile.TemporaryDirectory(prefix="brayx-console-") as folder:
        built, said = threading.Event(), list[str]()
        with Serving(job, f"sqlite:///{folder}/mlflow.db", say=lambda line: built.set()) as serving:
            built.wait(_TIMEOUT_S)
            with serving.console(said.append) if with_console else contextlib.nullcontext():
                tell_and_wait({"tcp": serving.urls["tcp"], "console": said[-1].rpartition(" ")[2] if said else ""})


@contextlib.contextmanager
def followed(console: str, viewers: int) -> Iterator[list[int]]:
    """Follows as many sessions, once there are that many; yields the number of ticks that each viewer has got."""
    got, ended = [0] * viewers, threading.Event()

    def follow(at: int) -> None:
        with contextlib.suppress(httpx.HTTPError), httpx.Client(base_url=console, timeout=_TIMEOUT_S) as client:
            while not ended.is_set():
                sessions = client.get("/api/sessions").json()
                if len(sessions) <= at:
                    continue
                query = {"session": sessions[at]["session"]}
                with client.stream("GET", "/api/sessions/follow", params=query) as stream:
                    for line in stream.iter_lines():
                        if line.startswith("data: "):
                            got[at] += len(json.loads(line.removeprefix("data: "))["ticks"])
                        if ended.is_set():
                            break

    threads = [threading.Thread(target=follow, args=(at,), daemon=True) for at in range(viewers)]
    for thread in threads:
        thread.start()
    yield got
    ended.set()
    for thread in threads:
        thread.join(_TIMEOUT_S)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    parser = tables.options(__doc__, rounds=9, seconds=3.0)
    parser.add_argument("--sessions", type=int, default=16, help="concurrent sessions (default: %(default)s)")
    parser.add_argument("--paint", action="store_true", help="time the first paint of each page")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="draw the documentation's pictures")
    parser.add_argument("--chromium", default=shutil.which("chromium"), help="for both (default: %(default)s)")
    parser.add_argument("--league", type=Path, help="for pictures: the mlflow.db of a league")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.serve is not None:
        serve(bool(options.serve))
        return 0
    if options.paint:
        paint(options.chromium, options.rounds, options.markdown)
        return 0
    if options.pictures is not None:
        draw(options.pictures, options.chromium, options.league)
        return 0
    costs: dict[str, list[Cost]] = {name: [] for name in CASES}
    shown: dict[str, list[float]] = {name: [] for name in CASES}
    with contextlib.ExitStack() as stack:
        load = stack.enter_context(load_generator())
        servers = {
            name: stack.enter_context(service("benchmarks.console", "--serve", str(int(name != NONE))))
            for name in CASES
        }
        for server, viewers in zip(servers.values(), CASES.values(), strict=True):
            if viewers:  # starts the console's process before the first round
                httpx.get(f"{server.urls['console']}/api/trials", timeout=_TIMEOUT_S).raise_for_status()
        for number in range(options.rounds):
            for name in [*CASES][:: 1 if number % 2 else -1]:
                urls, pid = servers[name]
                with followed(urls["console"], CASES[name]) as got:
                    spent = cost(load, pid, urls["tcp"], options.sessions, options.seconds, "cartpole")
                costs[name].append(spent)
                shown[name].append(sum(got) / spent.seconds)
    table = Table(
        ["", ">ticks/s", ">of none", ">CPU µs a tick", ">to none", ">ticks/s shown", ">CPU s a second of the console"]
    )
    for name, rounds in costs.items():
        page = median([done.others_cpu_s * done.ticks_per_s for done in rounds])
        table.add(name, *cost_cells(rounds, costs[NONE]), median(shown[name]), page)
    about = f"{machine()}; {options.sessions} sessions, {options.rounds} rounds of {options.seconds:g} s, medians"
    show(about, table.markdown(), markdown=options.markdown)
    return 0


def paint(chromium: str | None, rounds: int, markdown: bool) -> None:
    """Prints when a new browser has first painted each page of a served league, and when the page has its content."""
    from playwright.sync_api import sync_playwright

    table = Table(["", ">first paint s", ">content s"])
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        _record(f"{folder}/recordings")
        with _serving(Path(folder), "recording.kind=recording", f"recording.folder={folder}/recordings") as url:
            for name in ("", "sessions", "recordings", "models", "league", "play", "trials"):
                times = [_painted(browser, f"{url}/{name}") for _ in range(rounds)]
                table.add(f"/{name}", *(median(each) for each in zip(*times, strict=True)))
        browser.close()
    show(f"{machine()}; medians of {rounds}", table.markdown(), markdown=markdown)


def _record(folder: str) -> None:
    """Writes `_RECORDINGS` recordings of 50 ticks, in 20 files."""
    ticks = [Tick(number % 50, 0.0, 0.0, b"{}", b"{}", {}) for number in range(50 * _RECORDINGS // 20)]
    columns = columns_of(ticks)
    recorder = Folder(folder, 10**9)
    for file in range(20):
        names = [f"{file}-{number}" for number in range(_RECORDINGS // 20)]
        recorder.write([SessionPart(name, name, time.time(), 0, 50, end="stop") for name in names], columns)


def _painted(browser: Any, url: str) -> tuple[float, float]:
    with contextlib.closing(browser.new_context()) as context:
        page = context.new_page()
        page.set_default_timeout(120_000)
        page.goto(url)
        page.wait_for_function(f"document.querySelector('#app > *') && {_LOADED}")
        content, first = page.evaluate(
            "[performance.now(), performance.getEntriesByName('first-contentful-paint')[0].startTime]"
        )
    return first / 1e3, content / 1e3


def draw(out: Path, chromium: str | None, league: Path | None) -> None:
    """Draws docs/console-*.png: a training of CartPole, a human's game and, of a database, the newest league."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        with tempfile.TemporaryDirectory() as folder, _training(Path(folder)) as url:
            time.sleep(_LEARN_S)
            api = httpx.Client(base_url=url, timeout=240.0)
            api.get("/api/trials")
            door, over = api.get("/api/job").json()["doors"]["ws"], threading.Event()
            game = threading.Thread(target=_play_slowly, args=(door, over))
            game.start()
            recording = api.get("/api/recordings").json()["recordings"][0]["id"]
            for name, path, size, scheme, locale in (
                ("overview", "/", _WIDE, "light", "en-US"),
                ("overview-zh", "/", _NARROW, "dark", "zh-CN"),
                ("recording", f"/recordings/{recording}", _WIDE, "light", "en-US"),
                ("session", "", _NARROW, "dark", "en-US"),
            ):
                _draw(browser, f"{url}{path or f'/session?id={_SLOW}'}", out, name, size, scheme, locale)
            over.set()
            game.join()
        with tempfile.TemporaryDirectory() as folder, _serving(Path(folder)) as url:
            _draw(browser, f"{url}/play", out, "play", _NARROW, "light")
        if league is not None:
            words = ["console", "--tracking", str(league.absolute())]
            with _command(words, Path.cwd(), r"is (http://127\S+)") as url:
                _draw(browser, f"{url}/league", out, "league", _WIDE, "light")
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


def _draw(
    browser: Any, url: str, out: Path, name: str, size: tuple[int, int], scheme: str, locale: str = "en-US"
) -> None:
    viewport = {"width": size[0], "height": size[1]}
    context = browser.new_context(viewport=viewport, color_scheme=scheme, locale=locale)
    page = context.new_page()
    page.set_default_timeout(120_000)
    page.goto(url)
    page.wait_for_function(_LOADED)
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
def _serving(folder: Path, *options: str) -> Iterator[str]:
    """The league template's game, served untrained, with these options; gives the URL of its console."""
    for file in (Path(__file__).parents[1] / "pipelines" / "templates" / "league").iterdir():
        if file.is_file():
            shutil.copy(file, folder)
    options = ("actor.port=0", "actor.native_port=0", "actor.tcp_port=0", "console_port=0", *options)
    words = ["serve", "four.yaml", *(word for option in options for word in ("--set", option))]
    with _command(words, folder, r"the console is (http://127\S+)") as url:
        yield url


@contextlib.contextmanager
def _command(words: list[str], folder: Path, says: str) -> Iterator[str]:
    """A command of brayx, until the context's end; gives what the group of ``says`` matches in its output."""
    log = Path(tempfile.mkstemp(prefix="brayx-console-")[1])
    with log.open("wb") as err:
        process = subprocess.Popen([sys.executable, "-m", "brayx", *words], cwd=folder, stderr=err)
    try:
        deadline = time.monotonic() + _BEGIN_S
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
    sys.exit(main())
