"""A game of the user's own, in a folder outside the package: trained, served and played, all by commands.

The folder is ``own_game/``: two agents that share a `State`, a model, protobuf bodies, and a script that plays.
"""

from __future__ import annotations

import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from brayx.ports import free_port
from tests.end_to_end.jobs import FREE_PORTS, brayx, serves, setting, trials, without_ray

OWN_GAME = Path(__file__).parent / "own_game"
ROUNDS = 10
BY_CHANCE = ROUNDS / 3

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The user's folder, far from the package."""
    return Path(shutil.copytree(OWN_GAME, tmp_path / "signals", ignore=shutil.ignore_patterns("__pycache__")))


@pytest.mark.cluster
def test_two_agents_learn_to_talk_and_are_served(folder: Path) -> None:
    with brayx(folder, "train", "game.yaml", *setting(*FREE_PORTS), environment=without_ray(folder)) as training:
        assert training.ended() == 0, training.err
        training.gone()
    (trial,) = trials(folder, "signals")["main"]
    returns = [value for _, value in trial.history("return/last_100_games")]
    assert max(returns) > 2 * BY_CHANCE, returns
    assert max(returns) > returns[0] + 1, returns
    assert "champion: signals version 1" in training.out

    port = free_port()
    with brayx(folder, "serve", "game.yaml", *setting(*FREE_PORTS, f"actor.port={port}")) as serving:
        serving.until(lambda: serves(f"http://127.0.0.1:{port}", "player"), "it served the champion")
        for door in ("http", "ws"):
            # A language with two words of three is worth 2 * BY_CHANCE; the mean of 20 games of it stays above this.
            points = _play(folder, f"{door}://127.0.0.1:{port}", games=20)
            assert statistics.fmean(points) > 1.5 * BY_CHANCE, points
        serving.control_c()
        assert serving.ended() == 0
        serving.gone()


def test_the_committed_messages_are_those_of_the_proto_file() -> None:
    script = "import signals_pb2 as m; print([(d.name, f.name, f.number) for d in m.DESCRIPTOR.message_types_by_name"
    script += ".values() for f in d.fields])"
    ran = subprocess.run([sys.executable, "-c", script], cwd=OWN_GAME, capture_output=True, text=True, check=True)
    written = []
    for name, body in re.findall(r"message (\w+) \{(.*?)\}", (OWN_GAME / "signals.proto").read_text(), re.DOTALL):
        written += [(name, field, int(number)) for field, number in re.findall(r"\w+ (\w+) = (\d+);", body)]
    assert ran.stdout.strip() == str(written)


def _play(folder: Path, url: str, games: int) -> list[float]:
    words = [sys.executable, "game.py", url, "--games", str(games)]
    ran = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    return [float(line) for line in ran.stdout.split()]
