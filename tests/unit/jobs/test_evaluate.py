"""Gamecores that are played to their ends, the curve, and the words for a result."""

from __future__ import annotations

import io
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from brayx.errors import BrayxError, ConfigError, StartupError
from brayx.gamecore.auth import Keys
from brayx.gamecore.protocol import StepRequest
from brayx.jobs.evaluate import Evaluation, draw_curve, evaluate, play
from brayx.jobs.rating import rate
from brayx.ports import free_port
from tests.end_to_end.jobs import without_ray
from tests.unit.gamecore.echo_server import EchoApp, serving

ROOT = Path(__file__).parents[3]

UNREAD = """
import array, fcntl, itertools, pathlib, sys, termios, time
def unread():
    held = array.array("i", [0])
    fcntl.ioctl(1, termios.FIONREAD, held)
    return held[0]
"""
SLOW = f"""{UNREAD}
for game in range(5):
    pathlib.Path(sys.argv[1]).write_text(str(100 * game))
    print('{{"return": %d}}' % game, flush=True)
    while unread():
        time.sleep(0.001)
"""
"""Ends its games 100 s apart, by a clock that is a file."""


STUCK = f"""{UNREAD}
print('{{"return": 3}}', flush=True)
print('{{"return": 5}}', flush=True)
while unread():
    time.sleep(0.001)
for seconds in itertools.count(1):
    pathlib.Path(sys.argv[1]).write_text(str(seconds))
    time.sleep(0.001)
"""
"""Ends two games at once, and no other, by the same clock."""


def python(program: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", program, *arguments]


def test_games_may_take_as_long_as_they_like_together(tmp_path: Path) -> None:
    file = tmp_path / "clock"
    file.write_text("0")
    returns = play([python(SLOW, str(file))], timeout_s=180.0, clock=lambda: float(file.read_text() or 0))
    assert returns == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_games_of_several_processes_meet() -> None:
    program = "import sys; print('hello'); print('{\"return\": %s}' % sys.argv[1])"
    assert sorted(play([python(program, "1"), python(program, "2.5")], timeout_s=60.0)) == [1.0, 2.5]


@pytest.mark.parametrize("program", ["import time; time.sleep(60)", "import os, time; os.close(1); time.sleep(60)"])
def test_a_game_that_does_not_end_is_reported_and_stopped(program: str) -> None:
    with pytest.raises(StartupError, match=r"^no game .* 0\.3 s$"):
        play([python(program)], timeout_s=0.3)


def test_games_that_ended_count_even_if_the_others_never_end(tmp_path: Path) -> None:
    file = tmp_path / "clock"
    file.write_text("0")
    returns = play([python(STUCK, str(file))], timeout_s=0.5, clock=lambda: float(file.read_text() or 0))
    assert returns == [3.0, 5.0]
    cut = Evaluation([3.0, 5.0], 4)
    assert str(cut).endswith("; 4 more did not end and were given up")
    with pytest.raises(ConfigError, match="4 games did not end"):
        rate("pool", 1, "CartPole-v1", cut, "sqlite:///no.db")


def test_a_gamecore_that_fails_is_reported_while_others_play() -> None:
    fails = "import sys; print('first', file=sys.stderr); print('the door is shut', file=sys.stderr); sys.exit(3)"
    with pytest.raises(StartupError, match=r"status 3 .*: the door is shut"):
        play([python("import time; time.sleep(60)"), python(fails)], timeout_s=60.0)


@pytest.mark.parametrize("games", [1, 3], ids=["a game a process", "endless"])
def test_a_custom_gamecore_plays_its_share_however_many_games_a_process_plays(games: int, tmp_path: Path) -> None:
    program = tmp_path / "game.py"
    endless = "import itertools; each = itertools.count()" if games > 1 else "each = range(1)"
    program.write_text(
        f"import sys; from brayx import Client\n{endless}\n"
        "with Client(sys.argv[1]) as client:\n"
        "    for game in each:\n"
        "        client.start()\n"
        "        reply = client.tick(b'{}').decode()\n"
        "        client.stop()\n"
        "        print('played', reply)\n"
        "        print(7.5 if game % 2 else '{\"return\": 2.5}', flush=True)\n"
    )
    with serving(EchoApp(lambda body: body)) as address:
        result = evaluate(f"http://{address}", gamecore=f"python {program} {{http_url}}", games=6, at_once=2)
    assert sorted(result.returns) == ([2.5] * 6 if games == 1 else [2.5, 2.5, 2.5, 2.5, 7.5, 7.5])
    assert result.missing == 0


def test_a_gamecore_that_writes_no_return_is_named() -> None:
    with pytest.raises(StartupError, match="without the return of a game"):
        play([python("print('well played')")], [1], timeout_s=60.0)
    either = pytest.raises(ConfigError, match="either a Gymnasium id or the command")
    with serving(EchoApp(lambda body: body)) as address, either:
        evaluate(f"http://{address}")


def test_the_summary_of_an_evaluation() -> None:
    two = "450 ± 98 over 2 games (standard deviation 70.71, lowest 400, highest 500)"  # 1.96 x 70.71 / sqrt(2)
    assert str(Evaluation([500.0, 400.0])) == two
    assert str(Evaluation([0.04])) == "0.04 over 1 game (lowest 0.04, highest 0.04)"


def test_the_curve_is_a_picture_with_its_points() -> None:
    figure = draw_curve([(100, 20.0), (200, 40.0)], title="cartpole", target=475.0)
    (axes,) = figure.axes
    assert axes.lines[0].get_xydata().tolist() == [[100, 20.0], [200, 40.0]]
    assert axes.lines[1].get_ydata()[0] == 475.0
    png = io.BytesIO()
    figure.savefig(png)
    assert png.getvalue().startswith(b"\x89PNG")


def test_no_points_no_picture() -> None:
    with pytest.raises(BrayxError, match="no finished game"):
        draw_curve([], title="x")


@pytest.mark.parametrize("scheme", ["http", "ws"])
def test_a_url_without_a_service_is_reported_before_any_gamecore_starts(scheme: str) -> None:
    with pytest.raises(StartupError, match=r"nothing listens at \w+://127\.0\.0\.1"):
        evaluate(f"{scheme}://127.0.0.1:{free_port()}", "no such environment", games=1)
    with pytest.raises(ConfigError, match="cannot be used"):
        evaluate("http://127.0.0.1:port", "no such environment", games=1)


class Locked(EchoApp):
    """A service behind keys."""

    def step(self, request: StepRequest) -> bytes:
        Keys({"arena": b"sixteen or more of them"}).check(request, time.time())
        return super().step(request)


def test_the_environment_gets_its_arguments() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(StartupError, match="no_such"):
            evaluate(url, "CartPole-v1", env_options={"no_such": "two words"}, games=1)


def test_a_service_behind_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys.txt"
    file.write_text("other: also sixteen or more\narena: sixteen or more of them\n")
    file.chmod(0o600)
    with serving(Locked(lambda body: b'{"action":0}')) as address:
        url = f"http://{address}"
        result = evaluate(url, "CartPole-v1", games=2, at_once=2, keys_file=str(file), key="arena")
        assert len(result.returns) == 2
        reported: list[tuple[int, float]] = []
        words = {"keys_file": str(file), "key": "arena"}
        again = evaluate(url, "CartPole-v1", games=2, on_game=lambda *game: reported.append(game), **words)
        assert reported == list(enumerate(again.returns, 1))
        gamecore = "brayx gamecore gym CartPole-v1 --url {url} --games 1 --json"
        assert len(evaluate(url, gamecore=gamecore, games=1, **words).returns) == 1, "it has the key in its environment"
        with pytest.raises(StartupError, match="key"):
            evaluate(url, "CartPole-v1", games=1)
        with pytest.raises(ConfigError, match="there is no key 'nobody'"):
            evaluate(url, "CartPole-v1", games=1, keys_file=str(file), key="nobody")
        words = ["evaluate", "CartPole-v1", "--url", url, "--games", "1", "--keys-file", str(file), "--key", "arena"]
        command = [sys.executable, "-m", "brayx", *words]
        environment = {**os.environ, **without_ray(tmp_path)}
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT, env=environment
        )
        assert done.returncode == 0, done.stderr
        assert "over 1 game " in done.stdout
        imported = tmp_path / "imported.txt"
        assert not imported.exists(), imported.read_text()
